"""Several ranks with whole weights each: the leader has the optimizer, followers add to its sum of gradients.

Nothing is communicated while a micro-step is computed, so ranks may take different ways through theirs. Sums meet on
the leader when they are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from gyre.contracts.microstep import MicroStep
from gyre.policy.model import PolicyModel
from gyre.runtime.config import OptimizerConfig
from gyre.trainer.backends.torch import TorchBackend
from gyre.trainer.loss import LossConfig


class ReplicatedBackend:
    """`gyre.trainer.backends.ranks.RankBackend` of which each rank is a `TorchBackend`."""

    def __init__(
        self, decoder: PolicyModel, loss: LossConfig, optimizer: OptimizerConfig | None, device: str = "cpu",
        reference: PolicyModel | None = None, memory_bytes: float = math.inf,
    ) -> None:  # fmt: skip
        self._leads = dist.get_rank() == 0
        self._one = TorchBackend(decoder, loss, optimizer if self._leads else None, device, reference, memory_bytes)

    def wake(self) -> None:
        self._one.wake()

    def sleep(self) -> None:
        self._one.sleep()

    def zero_gradients(self) -> None:
        self._one.zero_gradients()

    def accumulate(self, part: MicroStep | None) -> dict[str, float]:
        return {} if part is None else self._one.accumulate(part)

    def gradient_shapes(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        return self._one.gradient_shapes()

    def export_gradients(self, into: Mapping[str, np.ndarray] | None) -> None:
        self._meet()
        if into is not None:
            self._one.export_gradients(into)

    def add_gradients(self, arrays: Mapping[str, np.ndarray] | None) -> None:
        if arrays is not None:
            self._one.add_gradients(arrays)

    def update(self, scale: float, learning_rate: float, max_grad_norm: float) -> float:
        self._meet()
        norm = self._one.update(scale, learning_rate, max_grad_norm) if self._leads else 0.0
        self._spread()
        return norm

    def weights(self) -> dict[str, torch.Tensor]:
        return self._one.weights() if self._leads else {}

    def load_weights(self, state: Mapping[str, torch.Tensor] | None) -> None:
        if state is not None:
            self._one.load_weights(state)
        self._spread()

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        return self._one.optimizer_state() if self._leads else {}

    def load_optimizer_state(self, state: Mapping[str, torch.Tensor] | None) -> None:
        if state is not None:
            self._one.load_optimizer_state(state)
        self._spread()

    def _meet(self) -> None:
        """All sums into the leader's; the followers' begin anew, so that meeting again adds nothing."""
        for total in self._one.sums():
            dist.reduce(total, dst=0)
        if not self._leads:
            self._one.zero_gradients()

    def _spread(self) -> None:
        for parameter in self._one.decoder.parameters():
            dist.broadcast(parameter.detach(), src=0)
