"""One micro-step's gradient, in whichever way fits into memory. All ways give the same gradient.

    whole          one pass over all trees; everything is held for backward
    checkpointed   one pass that holds the input of each layer; backward makes the layers again
    depth_first    one path at a time (`depth_first.py`), for what fits in neither way

What a token costs is measured on the model itself, once: a few tokens are passed through it and what autograd holds is
counted. Ranks that cut the weights between them take these ways together (`backends/ways.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from gyre.contracts.microstep import MicroStep
from gyre.policy.attention import CausalAttention
from gyre.policy.model import PolicyModel
from gyre.trainer.depth_first import DepthFirst
from gyre.trainer.loss import LossConfig, LossOutput, Targets, loss_gradient, policy_loss
from gyre.trainer.metrics import sampling_versions
from gyre.trainer.tree_forward import choose_attention, score_targets

Way = Literal["whole", "checkpointed", "depth_first"]
Sink = Callable[[Sequence[torch.Tensor | None]], None]

PROBE_TOKENS = 64
MIN_BLOCK_TOKENS, MAX_BLOCK_TOKENS = 64, 4096


@dataclass(frozen=True)
class HeldBytes:
    """What backward needs, per token, in a whole and in a checkpointed pass."""

    whole: float
    checkpointed: float

    def way(self, num_tokens: int, num_layers: int, budget: float) -> Way:
        """The fastest way that holds at most `budget` bytes for `num_tokens` tokens."""
        if num_tokens * self.whole <= budget:
            return "whole"
        one_layer = self.whole / num_layers  # backward makes one layer at a time
        return "checkpointed" if num_tokens * (self.checkpointed + one_layer) <= budget else "depth_first"

    def block_tokens(self, budget: float) -> int:
        """Tokens of a block whose graph takes at most half of `budget`; the path needs room too."""
        return int(min(max(budget / 2 / self.whole, MIN_BLOCK_TOKENS), MAX_BLOCK_TOKENS))


class TreeTraining:
    """Gradients of micro-steps for one model. `budget` in bytes; `reference`: the policy that a KL is taken to."""

    def __init__(self, model: PolicyModel, loss: LossConfig, budget: float, reference: PolicyModel | None = None) -> None:
        self._model, self._loss, self._budget, self._reference = model, loss, budget, reference

    @cached_property
    def held(self) -> HeldBytes:
        """Measured at first use."""
        return held_bytes(self._model)

    def way(self, micro_step: MicroStep) -> Way:
        return self.held.way(micro_step.num_tokens, self._model.config.num_layers, self._budget)

    def accumulate(self, micro_step: MicroStep, add: Sink) -> dict[str, float]:
        """Give `add` the gradients in the order of the model's parameters, in one or more pieces; returns metric sums."""
        way = self.way(micro_step)
        if way == "depth_first":
            block_tokens = self.held.block_tokens(self._budget)
            output = walked_loss(self._model, micro_step, self._loss, block_tokens, add, self._reference)
        else:
            output = tree_loss(self._model, micro_step, self._loss, self._reference, layer_checkpoints=way == "checkpointed")
            add(torch.autograd.grad(output.loss, list(self._model.parameters()), allow_unused=True))
        return counted(output.sums, way)


def counted(sums: dict[str, float], way: Way) -> dict[str, float]:
    """The sums of a micro-step, and that it did not fit whole."""
    return sums if way == "whole" else sums | {way: 1.0}


def tree_loss(model: PolicyModel, micro_step: MicroStep, loss: LossConfig, reference: PolicyModel | None = None,
              layer_checkpoints: bool = False) -> LossOutput:
    """Forward over the packed trees in one pass, then the policy loss, with everything a micro-step adds to metrics."""
    attention = choose_attention(micro_step, next(iter(model.parameters())).device)
    scores = score_targets(model, micro_step, attention, loss.temperature, entropy_gradient=loss.entropy_coefficient != 0,
                           layer_checkpoints=layer_checkpoints)
    reference_K = None
    if reference is not None:
        with torch.no_grad():
            reference_K = score_targets(reference, micro_step, attention, loss.temperature).logprob_K
    targets = targets_of(micro_step, scores.logprob_K, scores.entropy_K, reference_K)
    return _with_counts(micro_step, policy_loss(targets, loss))


def walked_loss(model: PolicyModel, micro_step: MicroStep, loss: LossConfig, block_tokens: int, add: Sink,
                reference: PolicyModel | None = None) -> LossOutput:
    """The same one path at a time; `add` is given the gradients in pieces, in the order of the model's parameters."""
    engine = DepthFirst(model, micro_step, loss.temperature, block_tokens)
    scores, reference_K = engine.scores(), None
    if reference is not None:
        reference_K = DepthFirst(reference, micro_step, loss.temperature, block_tokens).scores().logprob_K
    targets = targets_of(micro_step, scores.logprob_K, scores.entropy_K, reference_K)
    output, dlogprob_K, dentropy_K = loss_gradient(targets, loss)
    engine.gradients(dlogprob_K, list(model.parameters()), add, dentropy_K)
    return _with_counts(micro_step, output)


def _with_counts(micro_step: MicroStep, output: LossOutput) -> LossOutput:
    counts = sampling_versions(micro_step.version) | {"num_tokens": float(micro_step.num_tokens)}
    return LossOutput(output.loss, output.sums | counts)


def held_bytes(model: PolicyModel) -> HeldBytes:
    """Measured on the model where it lies, with whole weights."""
    return HeldBytes(*(_held_per_token(model, checkpoints) for checkpoints in (False, True)))


def _held_per_token(model: PolicyModel, layer_checkpoints: bool) -> float:
    """Bytes that a forward pass leaves for backward, per token, parameters aside."""
    parameters = list(model.parameters())
    own = {p.untyped_storage().data_ptr() for p in parameters}
    sizes: dict[int, int] = {}
    kept: list[torch.Tensor] = []  # alive to the end, so that no storage is counted under another's address

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    ids = torch.zeros(PROBE_TOKENS, dtype=torch.int64, device=parameters[0].device)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        positions, attention = torch.arange(PROBE_TOKENS, device=ids.device), CausalAttention([PROBE_TOKENS], ids.device)
        model(ids, positions, attention, layer_checkpoints)
    return sum(sizes.values()) / PROBE_TOKENS


def targets_of(
    micro_step: MicroStep, logprob_K: torch.Tensor, entropy_K: torch.Tensor | None = None,
    reference_K: torch.Tensor | None = None,
) -> Targets:  # fmt: skip
    """The loss record of a micro-step, constants in the log-probs' dtype and place."""

    def constant(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(values)).to(logprob_K)

    path_K = torch.from_numpy(micro_step.path.astype(np.int64)).to(logprob_K.device)
    advantage = micro_step.advantage[micro_step.tree[micro_step.target]]
    return Targets(
        logprob_K, constant(micro_step.logprob), constant(advantage), constant(micro_step.weight), path_K,
        int(micro_step.path.max(initial=-1)) + 1, entropy_K, reference_K,
    )  # fmt: skip


def sink_into(sums: Mapping[str, torch.Tensor]) -> Sink:
    """Adds gradients, in the order of `sums`, to float32 (or wider) tensors."""

    def add(grads: Sequence[torch.Tensor | None]) -> None:
        for total, grad in zip(sums.values(), grads, strict=True):
            if grad is not None:
                total.add_(grad)

    return add
