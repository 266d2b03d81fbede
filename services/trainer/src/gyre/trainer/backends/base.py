"""The seam to whatever holds weights and gradients: one process, or the leader of several ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from gyre.contracts.microstep import MicroStep
from gyre.policy.model import PolicyModel
from gyre.trainer.loss import LossConfig


class Backend(Protocol):
    """Weights at one version and the sum of gradients at them. Only the core's can `update`.

    Not thread-safe: one caller at a time.
    """

    def wake(self) -> None:
        """Bring weights (and optimizer state) onto the devices."""
        ...

    def sleep(self) -> None:
        """Free the devices; nothing is lost."""
        ...

    def zero_gradients(self) -> None: ...

    def accumulate(self, micro_step: MicroStep) -> dict[str, float]:
        """Add the micro-step's gradient; all or nothing. Returns sums for `gyre.trainer.metrics`."""
        ...

    def gradient_shapes(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of every gradient, in a fixed order."""
        ...

    def export_gradients(self, into: Mapping[str, np.ndarray]) -> None:
        """Copy the sum so far into registered memory."""
        ...

    def add_gradients(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Add another worker's sum."""
        ...

    def update(self, scale: float, learning_rate: float, max_grad_norm: float) -> float:
        """Scale the sum once, clip, update, zero; returns the norm before clipping (0 or not finite: nothing was done)."""
        ...

    def weights(self) -> dict[str, torch.Tensor]:
        """Every parameter by name, on the CPU, in the compute dtype. Read only."""
        ...

    def load_weights(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights; raises ValueError naming a missing or misshapen parameter."""
        ...

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Master weights and moments, as they have to be restored."""
        ...

    def load_optimizer_state(self, state: Mapping[str, torch.Tensor]) -> None: ...


def check_tensors(state: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError naming the first parameter that is missing or has another shape."""
    for name, shape in shapes.items():
        if name not in state:
            raise ValueError(f"weights: {name} is missing; it must be there with shape {list(shape)}")
        if tuple(state[name].shape) != shape:
            raise ValueError(f"weights: {name} has shape {list(state[name].shape)}, must be {list(shape)}")


def reference_policy(model: PolicyModel, loss: LossConfig, reference: PolicyModel | None) -> PolicyModel | None:
    """The policy that a KL is taken to, without gradients: `reference`, else a copy of `model` as it is now; None if
    the loss has no such term."""
    if not loss.has_reference_policy:
        return None
    kept = reference or copy.deepcopy(model)
    for parameter in kept.parameters():
        parameter.requires_grad_(False)
    return kept
