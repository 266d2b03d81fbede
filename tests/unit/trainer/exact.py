"""Everything that computes the gradient of a micro-step, under one signature, and what it has to equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from gyre.contracts.microstep import MicroStep
from gyre.policy.attention import Attention
from gyre.policy.decoder import Decoder
from gyre.trainer.depth_first import DepthFirst
from gyre.trainer.flash_trees import FlashTrees
from gyre.trainer.loss import LossConfig, policy_loss
from gyre.trainer.runs import Run, runs_of
from gyre.trainer.tree_forward import DenseTrees, SegmentTrees, score_targets
from gyre.trainer.tree_training import TreeTraining, sink_into
from trees import expanded_loss, gradients, relative_error, targets_of

#: A loss in which no clip silences a target, so that a gradient that is missing is seen.
UNCLIPPED = LossConfig(kind="reinforce")


@dataclass(frozen=True)
class Result:
    """A loss and every parameter's gradient."""

    loss: float
    grads: dict[str, torch.Tensor]


Computes = Callable[[Decoder, MicroStep, LossConfig], Result]
ATTENTIONS: dict[str, Callable[[MicroStep], Attention]] = {
    "dense": DenseTrees,
    "segment": lambda micro_step: SegmentTrees(runs_of(micro_step.parent)),
    "flash": lambda micro_step: FlashTrees(runs_of(micro_step.parent)),
}


def expanded(decoder: Decoder, micro_step: MicroStep, config: LossConfig) -> Result:
    """Each path by itself."""
    loss = expanded_loss(decoder, micro_step, config)
    return Result(loss.item(), gradients(decoder, loss))


def by_attention(make: Callable[[MicroStep], Attention], layer_checkpoints: bool = False) -> Computes:
    def computes(decoder: Decoder, micro_step: MicroStep, config: LossConfig) -> Result:
        scores = score_targets(decoder, micro_step, make(micro_step), config.temperature, layer_checkpoints=layer_checkpoints)
        loss = policy_loss(targets_of(micro_step, scores.logprob_K), config).loss
        return Result(loss.item(), gradients(decoder, loss))

    return computes


def by_walking(block_tokens: int, cuts: Sequence[int] = ()) -> Computes:
    def computes(decoder: Decoder, micro_step: MicroStep, config: LossConfig) -> Result:
        engine = DepthFirst(decoder, micro_step, config.temperature, block_tokens, cuts)
        logprob_K = engine.scores().logprob_K.requires_grad_()
        loss = policy_loss(targets_of(micro_step, logprob_K), config).loss
        sums = zeros(decoder)
        engine.gradients(torch.autograd.grad(loss, [logprob_K])[0], list(decoder.parameters()), sink_into(sums))
        return Result(loss.item(), sums)

    return computes


def by_training(way: str) -> Computes:
    """As a worker does it, with a budget that leads to `way`; its loss is the sum that metrics are made of."""

    def computes(decoder: Decoder, micro_step: MicroStep, config: LossConfig) -> Result:
        held = TreeTraining(decoder, config, math.inf).held
        checkpointed = micro_step.num_tokens * (held.checkpointed + held.whole / decoder.config.num_layers)
        budgets = {"whole": math.inf, "checkpointed": checkpointed, "depth_first": 1.0}
        training = TreeTraining(decoder, config, budgets[way])
        assert training.way(micro_step) == way
        sums = zeros(decoder)
        return Result(training.accumulate(micro_step, sink_into(sums))["loss"], sums)

    return computes


WAYS: dict[str, Computes] = {
    **{name: by_attention(make) for name, make in ATTENTIONS.items()},
    **{f"{name}-checkpointed": by_attention(make, True) for name, make in ATTENTIONS.items()},
    **{f"walked-{size}": by_walking(size) for size in (1, 5, 1000)},
    **{f"trained-{way}": by_training(way) for way in ("whole", "checkpointed", "depth_first")},
}


def zeros(decoder: Decoder) -> dict[str, torch.Tensor]:
    wide = torch.promote_types(next(iter(decoder.parameters())).dtype, torch.float32)
    return {name: torch.zeros_like(p, dtype=wide) for name, p in decoder.named_parameters()}


def check_equal(got: Result, want: Result, tolerance: float) -> None:
    """Raises AssertionError unless the loss and every parameter's gradient agree, or if there is nothing to compare."""
    assert want.loss and all(bool(g.any()) for g in want.grads.values()), "a comparison of nothing with nothing"
    assert got.grads.keys() == want.grads.keys()
    assert abs(got.loss - want.loss) <= tolerance * abs(want.loss), f"loss {got.loss}, wanted {want.loss}"
    error = relative_error(got.grads, want.grads)
    assert error <= tolerance, f"gradients are {error:.1e} apart"


def cut_runs(runs: Sequence[Run], cuts: Sequence[int]) -> list[Run]:
    """The same runs, cut before the tokens `cuts`."""
    found = []
    for run in runs:
        edges = [run.start, *sorted(c for c in cuts if run.start < c < run.end), run.end]
        for start, end in zip(edges, edges[1:], strict=False):
            found.append(Run(start, end, (*run.ancestors, (run.start, start)) if start > run.start else run.ancestors))
    return found
