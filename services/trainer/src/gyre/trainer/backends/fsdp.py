"""FSDP2 inside one cell: weights, gradients and optimizer state are cut between its ranks.

The sharded parameters are the masters (float32, or float64 for a float64 policy); a layer is gathered in the compute
dtype when it is reached, forward and backward, and its gradient is summed over the ranks straight into float32 shards.
FSDP would average: every group's divisor is set to 1. All ranks pass through all layers in the same way, so a rank
without a part passes with two tokens that count for nothing. What fits in no such way goes through no cut layer at all
(`backends/ways.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch
import torch.distributed as dist
from gyre.contracts.microstep import MicroStep
from gyre.policy.model import PolicyModel
from gyre.runtime.config import OptimizerConfig
from gyre.trainer.backends.base import reference_policy
from gyre.trainer.backends.passes import stand_by
from gyre.trainer.backends.shards import gather, gather_everywhere, scatter
from gyre.trainer.backends.torch import MOMENTS, adamw
from gyre.trainer.backends.ways import SharedWays
from gyre.trainer.loss import LossConfig
from gyre.trainer.tree_training import counted, tree_loss
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


class FsdpBackend:
    """`gyre.trainer.backends.ranks.RankBackend` over `fully_shard`. The default process group is the cell.

    zero_stage 3 frees a layer's whole weights after its forward pass, 2 keeps them until its backward pass. Starts
    asleep, in host memory.
    """

    def __init__(
        self, model: PolicyModel, loss: LossConfig, optimizer: OptimizerConfig | None, device: str = "cpu",
        zero_stage: int = 3, reference: PolicyModel | None = None, memory_bytes: float = math.inf,
    ) -> None:  # fmt: skip
        """`optimizer` is given to the core only. `reference` as for `TorchBackend`; every rank has it whole.
        `memory_bytes`: what a rank may hold for backward of its part of one micro-step."""
        self._device = torch.device(device)
        self._loss = loss
        self._dtype = next(iter(model.parameters())).dtype
        self._sum_dtype = torch.promote_types(self._dtype, torch.float32)
        self._shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        self._reference = reference_policy(model, loss, reference)
        self._ways = SharedWays(model, loss, self._reference, memory_bytes)
        self.model = _shard(model, self._dtype, self._sum_dtype, self._device.type, zero_stage)
        self._optimizer = None
        if optimizer is not None:
            self._optimizer = adamw([p for _, p in self._masters()], optimizer)
        self.sleep()

    def _masters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self.model.named_parameters())

    def wake(self) -> None:
        self._move(self._device)

    def sleep(self) -> None:
        self._move(torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _move(self, device: torch.device) -> None:
        """Shards, their gradients and moments; the groups stay as they are."""
        if next(iter(self.model.parameters())).device.type == device.type:
            return
        self.model.to(device)
        if isinstance(self._reference, nn.Module):
            self._reference.to(device)
        for state in {} if self._optimizer is None else self._optimizer.state.values():
            for key in MOMENTS[:2]:
                state[key] = state[key].to(device)

    def zero_gradients(self) -> None:
        for _, master in self._masters():
            master.grad = None

    def accumulate(self, part: MicroStep | None) -> dict[str, float]:
        way = self._ways.choose(part)
        if way == "depth_first":
            return self._depth_first(part)
        layer_checkpoints = way == "checkpointed"
        if part is None:
            stand_by(self.model, layer_checkpoints).backward()
            return {}
        output = tree_loss(self.model, part, self._loss, self._reference, layer_checkpoints)
        output.loss.backward()
        return counted(output.sums, way)

    def _depth_first(self, part: MicroStep | None) -> dict[str, float]:
        masters = dict(self._masters())

        def whole(name: str) -> torch.Tensor:
            return gather_everywhere(_piece(masters[name]).to(self._dtype), self._shapes[name])

        return self._ways.depth_first(part, whole, {n: _gradient(m) for n, m in masters.items()})

    def gradient_shapes(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        dtype = torch.empty(0, dtype=self._sum_dtype).numpy().dtype
        return {n: (shape, dtype) for n, shape in self._shapes.items()}

    def export_gradients(self, into: Mapping[str, np.ndarray] | None) -> None:
        for name, master in self._masters():
            whole = gather(_gradient(master), self._shapes[name])
            if into is not None and whole is not None:
                np.copyto(into[name], whole.cpu().numpy())

    def add_gradients(self, arrays: Mapping[str, np.ndarray] | None) -> None:
        for name, master in self._masters():
            added = torch.empty_like(_piece(master))
            scatter(None if arrays is None else torch.from_numpy(arrays[name]), added, self._shapes[name])
            _gradient(master).add_(added)

    def update(self, scale: float, learning_rate: float, max_grad_norm: float) -> float:
        if self._optimizer is None:
            raise RuntimeError("only the core cell's backend has an optimizer")
        gradients = [_gradient(master).mul_(scale) for _, master in self._masters()]
        squared = torch.stack([g.double().square().sum() for g in gradients]).sum()
        dist.all_reduce(squared)
        norm = math.sqrt(float(squared)) if torch.isfinite(squared) else math.nan
        if math.isfinite(norm) and norm > 0:
            factor = min(1.0, max_grad_norm / norm) if max_grad_norm > 0 else 1.0
            for gradient in gradients:
                gradient.mul_(factor)
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
        self.zero_gradients()
        return norm

    def weights(self) -> dict[str, torch.Tensor]:
        return self._gathered({n: _piece(m).to(self._dtype) for n, m in self._masters()})

    def load_weights(self, state: Mapping[str, torch.Tensor] | None) -> None:
        for name, master in self._masters():
            scatter(None if state is None else state[name], _piece(master), self._shapes[name])

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """As `TorchBackend` names it, so that a checkpoint fits every backend and any number of ranks."""
        assert self._optimizer is not None
        state = {f"master.{n}": t for n, t in self._gathered({n: _piece(m) for n, m in self._masters()}).items()}
        for name, master in self._masters():
            moments = self._optimizer.state.get(master, {})
            for key in MOMENTS[:2]:
                if key in moments:
                    state |= {f"{key}.{n}": t for n, t in self._gathered({name: moments[key].to_local()}).items()}
            if "step" in moments and dist.get_rank() == 0:
                state[f"step.{name}"] = moments["step"].cpu().clone()
        return state

    def load_optimizer_state(self, state: Mapping[str, torch.Tensor] | None) -> None:
        assert self._optimizer is not None
        for name, master in self._masters():
            scatter(None if state is None else state[f"master.{name}"], _piece(master), self._shapes[name])
            step = torch.tensor(-1.0 if state is None else float(state.get(f"step.{name}", -1.0)), dtype=torch.float32)
            dist.broadcast(step, 0)
            if step < 0:
                self._optimizer.state.pop(master, None)
                continue
            moments = self._optimizer.state[master]
            moments["step"] = step
            for key in MOMENTS[:2]:
                moments[key] = torch.zeros_like(master)
                scatter(None if state is None else state[f"{key}.{name}"], moments[key].to_local(), self._shapes[name])

    def _gathered(self, pieces: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        wholes = {n: gather(piece, self._shapes[n]) for n, piece in pieces.items()}
        return {n: whole.cpu() for n, whole in wholes.items() if whole is not None}


def _shard(model: PolicyModel, dtype: torch.dtype, sum_dtype: torch.dtype, device: str, zero_stage: int) -> nn.Module:
    """In place: the layers one by one, then what is left as the root, which stays whole between forward and backward."""
    assert isinstance(model, nn.Module)
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == sum_dtype else dtype, reduce_dtype=sum_dtype)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model.to(sum_dtype)
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=zero_stage == 3)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of a policy: its longest list of modules."""
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=len, default=[])


def _piece(master: nn.Parameter) -> torch.Tensor:
    """This rank's rows."""
    assert isinstance(master, DTensor)
    return master.detach().to_local()


def _gradient(master: nn.Parameter) -> torch.Tensor:
    """This rank's rows of the sum so far, zeros before the first micro-step."""
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    return master.grad.to_local()
