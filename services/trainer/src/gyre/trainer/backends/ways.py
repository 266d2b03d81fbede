"""The ways through a micro-step (`gyre.trainer.tree_training`) for ranks that cut the weights between them.

All ranks take the same way, the slowest that any of their parts needs: a whole and a checkpointed pass are collective,
layer by layer, and a rank without a part goes along.

    whole, checkpointed   through the cut model, which gathers a layer when it is reached, and once more in backward
    depth_first           nothing may be communicated inside, because ranks walk different numbers of blocks. So each
                          rank with a part gathers the weights into a plain policy, walks its part alone, and the
                          gradients are summed over the ranks, one parameter at a time, into the rows that each keeps

For the time of such a micro-step a rank holds whole weights in the compute dtype and a whole gradient in float32 beside
what it has cut (6 bytes per parameter for bfloat16), which is not counted against the budget. Keeping them cut would mean
to gather every layer four times per block, in step over all ranks; weights that do not fit whole beside the shards need a
budget within which micro-steps fit checkpointed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from gyre.contracts.microstep import MicroStep
from gyre.policy.model import PolicyModel
from gyre.trainer.backends.shards import sum_rows
from gyre.trainer.loss import LossConfig
from gyre.trainer.tree_training import Way, counted, held_bytes, sink_into, walked_loss
from torch import nn

ORDER: tuple[Way, ...] = ("whole", "checkpointed", "depth_first")


class SharedWays:
    """Which way the ranks of a cell take, and the one that needs no cut model. Made before the model is cut."""

    def __init__(self, model: PolicyModel, loss: LossConfig, reference: PolicyModel | None, memory_bytes: float) -> None:
        """`memory_bytes`: what a rank may hold for backward of its part, the same on all ranks."""
        self._loss, self._reference, self._budget = loss, reference, memory_bytes
        self._held = None if math.isinf(memory_bytes) else held_bytes(model)
        self._shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        self._plain = PlainPolicy(model)

    def choose(self, part: MicroStep | None) -> Way:
        """Collective: the slowest way that any rank's part needs."""
        if self._held is None:
            return "whole"
        own = "whole" if part is None else self._held.way(part.num_tokens, self._plain.model.config.num_layers, self._budget)
        slowest = torch.tensor(ORDER.index(own))
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return ORDER[int(slowest)]

    def depth_first(self, part: MicroStep | None, whole: Callable[[str], torch.Tensor],
                    into: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Collective: `whole` gives a parameter's weights on every rank; `into` are this rank's rows of the sums."""
        weights: dict[str, torch.Tensor] = {}
        for name in self._shapes:
            gathered = whole(name)
            if part is not None:
                weights[name] = gathered
        totals = {n: into[n].new_zeros(w.shape) for n, w in weights.items()}
        metrics = {} if part is None else self._walk(part, weights, totals)
        weights.clear()
        for name, shape in self._shapes.items():
            total = totals.pop(name) if totals else into[name].new_zeros(shape)
            into[name].add_(sum_rows(total))
        return metrics

    def _walk(self, part: MicroStep, weights: Mapping[str, torch.Tensor],
              totals: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Locally: the gradient of `part` into `totals`."""
        assert self._held is not None
        self._plain.fill(weights)
        block_tokens = self._held.block_tokens(self._budget)
        output = walked_loss(self._plain.model, part, self._loss, block_tokens, sink_into(totals), self._reference)
        self._plain.empty()
        return counted(output.sums, "depth_first")


class PlainPolicy:
    """A policy like `like` that nobody cuts, with weights only while it is used."""

    def __init__(self, like: PolicyModel) -> None:
        hollow = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in like.parameters()}
        module = copy.deepcopy(like, dict(hollow))
        assert isinstance(module, nn.Module)
        self.model: PolicyModel = module
        self._hollow, self._buffers = dict(module.named_parameters()), list(module.buffers())
        names = {id(p): n for n, p in self._hollow.items()}
        # A tied parameter has several places under one name.
        self._places = [(part, attribute, names[id(p)]) for part in module.modules()
                        for attribute, p in part._parameters.items() if p is not None]

    def fill(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Make these tensors, by name, its weights; they are not copied."""
        self._put({n: nn.Parameter(w, self._hollow[n].requires_grad) for n, w in weights.items()})
        for buffer in self._buffers:
            buffer.data = buffer.to(next(iter(weights.values())).device)

    def empty(self) -> None:
        """Let go of them."""
        self._put(self._hollow)

    def _put(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for module, attribute, name in self._places:
            setattr(module, attribute, parameters[name])
