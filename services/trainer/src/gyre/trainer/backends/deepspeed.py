"""DeepSpeed ZeRO-1, 2 or 3 inside one cell, made to sum exactly.

DeepSpeed averages over its ranks and wants to know how many backward passes make an update; here neither holds, and
other cells' sums have to be added before the update. So:

    every backward pass ends an accumulation of one  the loss is multiplied by the number of ranks, which the average
                                                     divides away; what DeepSpeed reduced is added to our own float32
                                                     sums (each rank keeps its rows) and cleared
    update                                           our sums, scaled and clipped by us, are written into its gradient
                                                     partitions (`safe_set_full_grad`); its optimizer steps on them

Only its public `safe_*` functions touch its partitions. They are collective, one parameter at a time, so that no rank
ever holds all gradients; the price is one more gather of the gradients per micro-step, inside the cell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed
import deepspeed.ops
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from gyre.contracts.microstep import MicroStep
from gyre.policy.model import PolicyModel
from gyre.runtime.config import OptimizerConfig
from gyre.trainer.backends.base import reference_policy
from gyre.trainer.backends.passes import stand_by
from gyre.trainer.backends.shards import gather, rows_of, scatter
from gyre.trainer.backends.torch import MOMENTS, adamw
from gyre.trainer.backends.ways import SharedWays
from gyre.trainer.loss import LossConfig
from gyre.trainer.tree_training import Way, counted, tree_loss
from torch import nn

# It would be compiled on first use, for minutes; gloo does.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class _Pass(nn.Module):
    """A whole micro-step as one forward pass, because DeepSpeed's hooks begin and end with that of its module."""

    def __init__(self, policy: nn.Module, loss: LossConfig, reference: PolicyModel | None, num_ranks: int) -> None:
        super().__init__()
        self.policy, self._loss, self._num_ranks = policy, loss, num_ranks
        self._reference = (reference,)  # in a tuple it is no part of this module, so that nobody cuts it
        self.sums: dict[str, float] = {}

    def forward(self, part: MicroStep | None, way: Way = "whole") -> torch.Tensor:
        """The loss times the number of ranks; `sums` are the metrics."""
        layer_checkpoints = way == "checkpointed"
        if part is None:
            self.sums = {}
            return stand_by(self.policy, layer_checkpoints)
        output = tree_loss(self.policy, part, self._loss, self._reference[0], layer_checkpoints)
        self.sums = counted(output.sums, way)
        return output.loss * self._num_ranks


class DeepSpeedBackend:
    """`gyre.trainer.backends.ranks.RankBackend`. The default process group is the cell.

    For policies in float32, or in bfloat16 with zero_stage 2 or 3: under ZeRO-1 DeepSpeed has another optimizer for
    bfloat16, whose gradients cannot be set from outside (`gyre.runtime.training` refuses it).
    """

    def __init__(
        self, model: PolicyModel, loss: LossConfig, optimizer: OptimizerConfig | None, device: str = "cpu",
        zero_stage: int = 1, reference: PolicyModel | None = None, memory_bytes: float = math.inf,
    ) -> None:  # fmt: skip
        """`optimizer` is given to the core only. `reference` as for `TorchBackend`; every rank has it whole.
        `memory_bytes`: what a rank may hold for backward of its part of one micro-step."""
        assert isinstance(model, nn.Module)
        self._device, self._rank, self._num_ranks = torch.device(device), dist.get_rank(), dist.get_world_size()
        self._parameters = dict(model.named_parameters())
        self._shapes = {n: tuple(p.shape) for n, p in self._parameters.items()}
        self._dtype = next(iter(self._parameters.values())).dtype
        self._trains = optimizer is not None
        masters = list(self._parameters.values())
        inner = adamw(masters, optimizer) if optimizer is not None else torch.optim.SGD(masters, lr=0.0)
        self._reference = reference_policy(model, loss, reference)
        self._ways = SharedWays(model, loss, self._reference, memory_bytes)
        self._pass = _Pass(model, loss, self._reference, self._num_ranks)
        self._engine = deepspeed.initialize(
            model=self._pass, optimizer=inner, config=zero_config(zero_stage, self._dtype)
        )[0]
        self._sums = {n: torch.zeros(self._rows(n), device=self._device) for n in self._shapes}
        self._asleep = False
        self._begin()
        self.sleep()

    def _rows(self, name: str) -> tuple[int, ...]:
        shape = self._shapes[name]
        rows = rows_of(shape[0], self._rank, self._num_ranks)
        return (rows.stop - rows.start, *shape[1:])

    def _begin(self) -> None:
        """A step at rate 0 makes the optimizer's state, which is then as before any step.

        ZeRO-1 and 2 link the state to the parameters when the first of the parameter groups has stepped, and then only
        what there is: so the others' has to be there before.
        """
        inner = self._engine.optimizer.optimizer
        for partition in (p for group in inner.param_groups for p in group["params"]) if self._trains else ():
            inner.state[partition] = {"step": torch.tensor(0.0)} | {k: torch.zeros_like(partition) for k in MOMENTS[:2]}
        self._write_gradients(0.0)
        self._step(0.0)
        self._reset_moments()

    def _reset_moments(self) -> None:
        for state in self._states():
            for value in state.values():
                value.zero_()

    def _states(self) -> list[dict[str, Any]]:
        """Of the flat partitions that this rank updates."""
        return [state for state in self._engine.optimizer.optimizer.state.values() if "step" in state]

    def wake(self) -> None:
        if self._asleep:
            self._engine.reload_states()
            self._move_own(self._device)
        self._asleep = False

    def sleep(self) -> None:
        """Off the device into host memory; groups and communicators stay. On a CPU it is the same memory."""
        if self._device.type == "cuda" and not self._asleep:
            self._engine.offload_states()
            self._move_own(torch.device("cpu"))
            torch.cuda.empty_cache()
            self._asleep = True

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Weights and optimizer state are also read and loaded while the worker sleeps; DeepSpeed does so on the device."""
        slept = self._asleep
        self.wake()
        yield
        if slept:
            self.sleep()

    def _move_own(self, device: torch.device) -> None:
        if isinstance(self._reference, nn.Module):
            self._reference.to(device)
        self._sums = {n: total.to(device) for n, total in self._sums.items()}

    def zero_gradients(self) -> None:
        for total in self._sums.values():
            total.zero_()

    def accumulate(self, part: MicroStep | None) -> dict[str, float]:
        way = self._ways.choose(part)
        if way == "depth_first":
            return self._ways.depth_first(part, self._whole, self._sums)
        self._engine.backward(self._engine(part, way))
        for name, parameter in self._parameters.items():
            gradient = safe_get_full_grad(parameter)
            self._sums[name].add_(gradient[rows_of(len(gradient), self._rank, self._num_ranks)])
            safe_set_full_grad(parameter, torch.zeros_like(gradient))
        self._engine.optimizer.zero_grad()
        return dict(self._pass.sums)

    def _whole(self, name: str) -> torch.Tensor:
        """One parameter in the compute dtype, on every rank; below ZeRO-3 it is there, and not copied."""
        parameter = self._parameters[name]
        if not hasattr(parameter, "ds_id"):
            return parameter.detach()
        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def gradient_shapes(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        return {n: (shape, np.dtype(np.float32)) for n, shape in self._shapes.items()}

    def export_gradients(self, into: Mapping[str, np.ndarray] | None) -> None:
        for name, total in self._sums.items():
            whole = gather(total, self._shapes[name])
            if into is not None and whole is not None:
                np.copyto(into[name], whole.cpu().numpy())

    def add_gradients(self, arrays: Mapping[str, np.ndarray] | None) -> None:
        for name, total in self._sums.items():
            added = torch.empty_like(total)
            scatter(None if arrays is None else torch.from_numpy(arrays[name]), added, self._shapes[name])
            total.add_(added)

    def update(self, scale: float, learning_rate: float, max_grad_norm: float) -> float:
        if not self._trains:
            raise RuntimeError("only the core cell's backend has an optimizer")
        squared = torch.stack([total.mul_(scale).double().square().sum() for total in self._sums.values()]).sum()
        dist.all_reduce(squared)
        norm = math.sqrt(float(squared)) if torch.isfinite(squared) else math.nan
        if math.isfinite(norm) and norm > 0:
            self._write_gradients(min(1.0, max_grad_norm / norm) if max_grad_norm > 0 else 1.0)
            self._step(learning_rate)
        self.zero_gradients()
        return norm

    def _write_gradients(self, factor: float) -> None:
        """Our sums times `factor` into DeepSpeed's partitions, which an empty backward pass opens."""
        self._engine.backward(self._engine(None))
        for name, parameter in self._parameters.items():
            whole = gather(self._sums[name] * factor, self._shapes[name])
            whole = torch.empty(self._shapes[name], device=self._device) if whole is None else whole
            dist.broadcast(whole, 0)
            safe_set_full_grad(parameter, whole)

    def _step(self, learning_rate: float) -> None:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self._engine.step()

    def weights(self) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = {}
        with self._awake():
            for name, parameter in self._parameters.items():
                weights |= self._kept({name: safe_get_full_fp32_param(parameter).to(self._dtype)})
        return weights

    def _kept(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n: t.detach().cpu().clone() for n, t in state.items()} if self._rank == 0 else {}

    def load_weights(self, state: Mapping[str, torch.Tensor] | None) -> None:
        with self._awake():
            for name, parameter in self._parameters.items():
                self._set_master(parameter, self._spread(None if state is None else state[name], self._shapes[name]))

    def _spread(self, whole: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
        """The leader's tensor on every rank, in float32."""
        filled = torch.empty(shape, device=self._device) if whole is None else whole.to(self._device, torch.float32)
        filled = filled.contiguous().clone()
        dist.broadcast(filled, 0)
        return filled

    def _set_master(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        safe_set_full_fp32_param(parameter, value)
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            parameter.copy_(value)

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """As `TorchBackend` names it, so that a checkpoint fits every backend and any number of ranks."""
        state: dict[str, torch.Tensor] = {}
        with self._awake():
            step = self._states()[0]["step"]
            for name, parameter in self._parameters.items():
                state |= self._kept({f"master.{name}": safe_get_full_fp32_param(parameter)})
                if step > 0:
                    state |= self._kept({f"step.{name}": step})
                    for key in MOMENTS[:2]:
                        state |= self._kept({f"{key}.{name}": safe_get_full_optimizer_state(parameter, key)})
        return state

    def load_optimizer_state(self, state: Mapping[str, torch.Tensor] | None) -> None:
        steps = [0.0] if state is None else [float(t) for n, t in state.items() if n.startswith("step.")]
        step = self._spread(torch.tensor([max(steps, default=0.0)]), (1,))
        with self._awake():
            self._reset_moments()
            for name, parameter in self._parameters.items():
                master = None if state is None else state[f"master.{name}"]
                self._set_master(parameter, self._spread(master, self._shapes[name]))
                for key in MOMENTS[:2] if step > 0 else ():
                    moment = None if state is None else state[f"{key}.{name}"]
                    safe_set_full_optimizer_state(parameter, self._spread(moment, self._shapes[name]), key)
            for moments in self._states():
                moments["step"].fill_(float(step))


def zero_config(zero_stage: int, dtype: torch.dtype) -> dict[str, Any]:
    """Reduced and summed in float32; nothing is clipped, scaled or offloaded by DeepSpeed."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": {"stage": zero_stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
