"""How a decoder layer attends, as a seam: the trainer's tree, the engine's cache and plain sequences fit one module.

Axes: T packed tokens, H query heads, K key/value heads, D head size, B sequences, L longest sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F


class Attention(Protocol):
    """What the decoder calls once per layer, after rotary positions are applied to q and k."""

    def __call__(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        """Returns out_THD, the attended values of the T packed tokens of this forward pass."""
        ...


class CausalAttention:
    """Independent causal sequences, packed one after another.

    One padded call serves all of them: padding sits to the right, where a causal query never looks, so no mask is
    needed. Keep sequences of one pass of similar length; the padded area is B * L.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        """``lengths``: tokens of each packed sequence, each at least 1; their sum is the T of the forward pass."""
        if not lengths or min(lengths) < 1:
            raise ValueError(f"lengths: {list(lengths)!r} must hold at least one sequence, each of at least one token")
        self._num_tokens = sum(lengths)
        self._shape = (len(lengths), max(lengths))
        self._slots_T: torch.Tensor | None = None
        if min(lengths) != max(lengths):
            rows = [torch.arange(n) + index * max(lengths) for index, n in enumerate(lengths)]
            self._slots_T = torch.cat(rows).to(device)

    def __call__(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        if q_THD.shape[0] != self._num_tokens:
            raise ValueError(f"attention: {q_THD.shape[0]} tokens were packed, lengths say {self._num_tokens}")
        gqa = q_THD.shape[1] != k_TKD.shape[1]
        out_BHLD = F.scaled_dot_product_attention(
            self._pad(q_THD), self._pad(k_TKD), self._pad(v_TKD), is_causal=True, enable_gqa=gqa
        )
        out_SHD = out_BHLD.transpose(1, 2).flatten(0, 1)
        return out_SHD if self._slots_T is None else out_SHD.index_select(0, self._slots_T)

    def _pad(self, x_TND: torch.Tensor) -> torch.Tensor:
        """[T, N, D] -> [B, N, L, D]."""
        num_sequences, longest = self._shape
        if self._slots_T is not None:
            padded_SND = x_TND.new_zeros(num_sequences * longest, *x_TND.shape[1:])
            x_TND = padded_SND.index_copy(0, self._slots_T, x_TND)
        return x_TND.view(num_sequences, longest, *x_TND.shape[1:]).transpose(1, 2)
