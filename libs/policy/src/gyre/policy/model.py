"""What a policy network is to whoever trains it: packed tokens in, hidden states out, attention as an argument."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from gyre.policy.attention import Attention
from torch import nn


class ModelShape(Protocol):
    """The numbers that a key/value cache needs."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


class PolicyModel(Protocol):
    """`gyre.policy.decoder.Decoder`, or a model of transformers (`gyre.policy.hf.TransformersModel`)."""

    @property
    def config(self) -> ModelShape: ...

    def __call__(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor, attention: Attention, layer_checkpoints: bool = False
    ) -> torch.Tensor:
        """hidden_TE after the final norm, for T packed tokens; with `layer_checkpoints` backward makes each layer again."""
        ...

    def logits(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """logits_TV of hidden states that the forward pass returned."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...
