"""Whole, with checkpointed layers, or one path at a time: what fits is chosen, and the gradient is the same."""

import math

import numpy as np
import pytest
import torch
from gyre.trainer.loss import LossConfig
from gyre.trainer.tree_training import HeldBytes, TreeTraining, sink_into
from trees import random_micro_step, relative_error, tiny_decoder


def test_the_fastest_way_that_fits_is_taken() -> None:
    held = HeldBytes(whole=1000.0, checkpointed=100.0)
    ways = [held.way(1000, 10, budget) for budget in (1e6, 1e6 - 1, 2e5, 2e5 - 1)]
    assert ways == ["whole", "checkpointed", "checkpointed", "depth_first"]
    assert held.way(10**9, 10, math.inf) == "whole"


def test_blocks_shrink_with_the_budget_within_reason() -> None:
    held = HeldBytes(1000.0, 100.0)
    assert [held.block_tokens(budget) for budget in (1.0, 1e6, 1e12)] == [64, 500, 4096]


def test_what_a_token_holds_is_measured_on_the_model() -> None:
    """2 layers, 16 wide, float64: a checkpointed layer holds its input, a whole one many times that."""
    held = TreeTraining(tiny_decoder(), LossConfig(), math.inf).held
    assert 2 * 16 * 8 <= held.checkpointed < held.whole / 4
    assert held == TreeTraining(tiny_decoder(1), LossConfig(), math.inf).held


@pytest.mark.parametrize("loss", [
    LossConfig(), LossConfig(kind="dapo"), LossConfig(kl_coefficient=0.1, entropy_coefficient=0.05),
], ids=["gspo", "dapo", "kl"])
def test_all_ways_give_one_gradient_and_the_same_sums(loss: LossConfig) -> None:
    micro_step, reference = random_micro_step(7, num_trees=4), tiny_decoder(9)
    found = {}
    for way, budget in (("whole", math.inf), ("checkpointed", 0.0), ("depth_first", 1.0)):
        decoder = tiny_decoder(2)
        training = TreeTraining(decoder, loss, budget, reference if loss.kl_coefficient else None)
        if way == "checkpointed":
            held = training.held
            training = TreeTraining(decoder, loss, micro_step.num_tokens * (held.checkpointed + held.whole / 2), reference
                                    if loss.kl_coefficient else None)
        assert training.way(micro_step) == way
        sums = {name: torch.zeros_like(p) for name, p in decoder.named_parameters()}
        metrics = training.accumulate(micro_step, sink_into(sums))
        assert metrics.pop(way, 1.0) == 1.0
        found[way] = sums, metrics
    whole_sums, whole_metrics = found["whole"]
    for sums, metrics in found.values():
        assert relative_error(sums, whole_sums) < 1e-12
        assert metrics.keys() == whole_metrics.keys()
        np.testing.assert_allclose(list(metrics.values()), list(whole_metrics.values()), rtol=1e-10, atol=1e-12)


def test_bfloat16_pieces_add_up_in_float32() -> None:
    """Forty pieces of a gradient, added in bfloat16, would lose most of their digits."""
    micro_step = random_micro_step(8, num_trees=6, tree_tokens=80)
    exact, decoder = tiny_decoder(3), tiny_decoder(3).to(torch.bfloat16)
    want = {n: torch.zeros_like(p) for n, p in exact.named_parameters()}
    TreeTraining(exact, LossConfig(kind="dapo"), math.inf).accumulate(micro_step, sink_into(want))
    errors = []
    for budget in (math.inf, 1.0):
        sums = {n: torch.zeros_like(p, dtype=torch.float32) for n, p in decoder.named_parameters()}
        TreeTraining(decoder, LossConfig(kind="dapo"), budget).accumulate(micro_step, sink_into(sums))
        apart = torch.stack([(sums[n].double() - want[n]).norm() for n in want]).norm()
        errors.append(float(apart / torch.stack([want[n].norm() for n in want]).norm()))
    assert errors[1] <= 1.5 * errors[0]
