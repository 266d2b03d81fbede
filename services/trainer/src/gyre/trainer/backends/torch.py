"""One process, plain torch: a policy's whole weights, gradients summed apart, AdamW on master weights in the core."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from gyre.contracts.microstep import MicroStep
from gyre.policy.model import PolicyModel
from gyre.runtime.config import OptimizerConfig
from gyre.trainer.backends.base import check_tensors, reference_policy
from gyre.trainer.loss import LossConfig
from gyre.trainer.tree_training import TreeTraining, sink_into

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class TorchBackend:
    """Gradients add up in float32 (float64 for a float64 model), whatever dtype the forward pass has.

    Starts asleep, in host memory. Awake, everything lies on `device`; for a CPU that is the same memory.
    """

    def __init__(
        self, decoder: PolicyModel, loss: LossConfig, optimizer: OptimizerConfig | None, device: str = "cpu",
        reference: PolicyModel | None = None, memory_bytes: float = math.inf,
    ) -> None:  # fmt: skip
        """`optimizer` is given to the core only; a satellite has none. `reference`: the policy that a KL is taken to;
        without one it is `decoder` as it is given here. `memory_bytes`: what one micro-step may hold for backward."""
        self._device = torch.device(device)
        self.decoder = decoder
        self._loss = loss
        self._parameters = dict(decoder.named_parameters())
        dtype = next(iter(self._parameters.values())).dtype
        self._sum_dtype = torch.promote_types(dtype, torch.float32)
        self._sums = {n: torch.zeros_like(p, dtype=self._sum_dtype) for n, p in self._parameters.items()}
        self._reference = reference_policy(decoder, loss, reference)
        self._training = TreeTraining(decoder, loss, memory_bytes, self._reference)
        self._optimizer = None if optimizer is None else self._make_optimizer(optimizer)

    def wake(self) -> None:
        self._move(self._device)

    def sleep(self) -> None:
        self._move(torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _move(self, device: torch.device) -> None:
        """In place, so that the optimizer and the masters go on naming the same tensors."""
        if next(iter(self._parameters.values())).device.type == device.type:
            return
        moments = [] if self._optimizer is None else [s[k] for s in self._optimizer.state.values() for k in MOMENTS[:2]]
        masters = [] if self._optimizer is None else list(self._masters.values())
        beside = [] if self._reference is None else list(self._reference.parameters())
        moved = (*self._parameters.values(), *masters, *self._sums.values(), *moments, *beside)
        for tensor in {id(t): t for t in moved}.values():
            tensor.data = tensor.data.to(device)

    def zero_gradients(self) -> None:
        for total in self._sums.values():
            total.zero_()

    def accumulate(self, micro_step: MicroStep) -> dict[str, float]:
        return self._training.accumulate(micro_step, sink_into(self._sums))

    def sums(self) -> list[torch.Tensor]:
        """The gradient sums themselves, in the order of the parameters."""
        return list(self._sums.values())

    def gradient_shapes(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        return {n: (tuple(t.shape), t[:0].cpu().numpy().dtype) for n, t in self._sums.items()}

    def export_gradients(self, into: Mapping[str, np.ndarray]) -> None:
        for name, total in self._sums.items():
            np.copyto(into[name], total.cpu().numpy())

    def add_gradients(self, arrays: Mapping[str, np.ndarray]) -> None:
        for name, total in self._sums.items():
            total.add_(torch.from_numpy(arrays[name]).to(total.device))

    def update(self, scale: float, learning_rate: float, max_grad_norm: float) -> float:
        if self._optimizer is None:
            raise RuntimeError("only the core cell's backend has an optimizer")
        norm = torch.stack([total.mul_(scale).norm() for total in self._sums.values()]).norm()
        if torch.isfinite(norm) and norm > 0:  # a gradient of 0 has nothing to say; AdamW would move all the same
            self._apply(learning_rate, min(1.0, max_grad_norm / float(norm)) if max_grad_norm > 0 else 1.0)
        self.zero_gradients()
        return float(norm)

    def _apply(self, learning_rate: float, factor: float) -> None:
        assert self._optimizer is not None
        for name, master in self._masters.items():
            master.grad = self._sums[name].mul_(factor)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._spread_masters()

    def weights(self) -> dict[str, torch.Tensor]:
        return {n: p.detach().cpu() for n, p in self._parameters.items()}

    def load_weights(self, state: Mapping[str, torch.Tensor]) -> None:
        check_tensors(state, {n: tuple(p.shape) for n, p in self._parameters.items()})
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(state[name])
                if self._optimizer is not None and self._masters[name] is not parameter:
                    self._masters[name].copy_(state[name])

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        assert self._optimizer is not None
        tensors = {f"master.{n}": m.detach().cpu().clone() for n, m in self._masters.items()}
        for name, master in self._masters.items():
            for key in MOMENTS:
                value = self._optimizer.state[master].get(key)
                if value is not None:
                    tensors[f"{key}.{name}"] = value.detach().cpu().clone()
        return tensors

    def load_optimizer_state(self, state: Mapping[str, torch.Tensor]) -> None:
        assert self._optimizer is not None
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(state[f"master.{name}"])
                moments = {k: state[f"{k}.{name}"].clone() for k in MOMENTS if f"{k}.{name}" in state}
                if moments:
                    self._optimizer.state[master] = {k: _beside(v, k, master) for k, v in moments.items()}
                else:
                    self._optimizer.state.pop(master, None)
        self._spread_masters()

    def _make_optimizer(self, config: OptimizerConfig) -> torch.optim.AdamW:
        """Master weights are the parameters themselves where the dtypes agree, else copies; only matrices decay."""
        self._masters = {
            n: p if p.dtype == self._sum_dtype else p.detach().to(self._sum_dtype) for n, p in self._parameters.items()
        }
        return adamw(list(self._masters.values()), config)

    def _spread_masters(self) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if self._masters[name] is not parameter:
                    parameter.copy_(self._masters[name])


def _beside(moment: torch.Tensor, key: str, master: torch.Tensor) -> torch.Tensor:
    """AdamW counts steps on the host and keeps moments beside the weights."""
    return moment if key == "step" else moment.to(master.device)


def adamw(masters: list[torch.Tensor], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW in which only matrices decay."""
    groups = [
        {"params": [m for m in masters if m.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [m for m in masters if m.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.epsilon
    )
