"""Two ranks of one cell do exactly what one process does, however weights and gradients are cut between them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from cell_of_ranks import Ranks
from rank_cases import KINDS, TOLERANCE, WIDEST, alone, apart, exported, fits, wide
from trees import random_micro_step


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind, stage, dtype", [(*k, d) for k in KINDS for d in TOLERANCE if fits(*k, d)])
def test_two_ranks_are_one(two_ranks: Ranks, kind: str, stage: int, dtype: str, tied: bool) -> None:
    """Metrics, sums, norms and weights over three updates; some micro-steps have one tree, some more than there are ranks."""
    tolerance, one = TOLERANCE[dtype], alone(dtype, tied)
    with two_ranks.lead(kind, dtype, stage, tied=tied) as two:
        for step in range(3):
            for seed in range(3):
                micro_step = random_micro_step(10 * step + seed, num_trees=1 + seed, tree_tokens=40)
                want, got = one.accumulate(micro_step), two.accumulate(micro_step)
                assert got.keys() == want.keys()
                assert all(math.isclose(got[n], want[n], rel_tol=10 * tolerance, abs_tol=10 * tolerance) for n in want)
            assert apart(exported(two), exported(one)) < tolerance
            assert two.update(0.125, 0.01, 0.5) == pytest.approx(one.update(0.125, 0.01, 0.5), rel=tolerance)
        assert apart(wide(two.weights()), wide(one.weights())) < tolerance
        assert {t.dtype for t in two.weights().values()} == {getattr(torch, dtype)}


def train(backend: Any, *steps: int) -> None:
    for step in steps:
        backend.accumulate(random_micro_step(step, num_trees=2))
        backend.update(0.25, 0.01, 1.0)


@pytest.mark.parametrize("kind, stage, dtype", WIDEST)
def test_another_cells_sum_is_added_whole(two_ranks: Ranks, kind: str, stage: int, dtype: str) -> None:
    one, other, micro_steps = alone(dtype), alone(dtype), [random_micro_step(seed) for seed in range(3)]
    for micro_step in micro_steps:
        one.accumulate(micro_step)
    other.accumulate(micro_steps[0])
    with two_ranks.lead(kind, dtype, stage) as two:
        two.add_gradients(exported(other))
        for micro_step in micro_steps[1:]:
            two.accumulate(micro_step)
        assert apart(exported(two), exported(one)) < TOLERANCE[dtype]
        two.zero_gradients()
        assert not any(array.any() for array in exported(two).values())
        two.add_gradients(exported(one))  # a core that computed nothing itself
        assert two.update(0.25, 0.01, 1.0) == pytest.approx(one.update(0.25, 0.01, 1.0), rel=TOLERANCE[dtype])
        assert apart(wide(two.weights()), wide(one.weights())) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind, stage, dtype", WIDEST)
def test_a_checkpoint_fits_every_backend_and_number_of_ranks(two_ranks: Ranks, kind: str, stage: int, dtype: str) -> None:
    """One process, then two ranks, then one again: the same as one process all along."""
    straight, first, last = alone(dtype), alone(dtype), alone(dtype)
    train(straight, 0, 1, 2, 3, 4, 5)
    train(first, 0, 1)
    with two_ranks.lead(kind, dtype, stage) as two:
        train(two, 7)  # what it held before has to go
        two.load_weights(first.weights())
        two.load_optimizer_state(first.optimizer_state())
        train(two, 2, 3)
        weights, optimizer = two.weights(), two.optimizer_state()
    assert optimizer.keys() == straight.optimizer_state().keys()
    last.load_weights(weights)
    last.load_optimizer_state(optimizer)
    train(last, 4, 5)
    assert apart(wide(last.weights()), wide(straight.weights())) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind, stage, dtype", WIDEST)
def test_a_state_before_any_update_has_no_moments_and_forgets_those_there_were(
    two_ranks: Ranks, kind: str, stage: int, dtype: str
) -> None:
    one, fresh = alone(dtype), alone(dtype)
    with two_ranks.lead(kind, dtype, stage) as two:
        assert two.optimizer_state().keys() == fresh.optimizer_state().keys()
        train(two, 7, 8)
        two.load_weights(fresh.weights())
        two.load_optimizer_state(fresh.optimizer_state())
        train(one, 0, 1)
        train(two, 0, 1)
        assert apart(wide(two.weights()), wide(one.weights())) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind, stage, dtype", WIDEST)
def test_a_gradient_that_is_not_finite_changes_no_weight(two_ranks: Ranks, kind: str, stage: int, dtype: str) -> None:
    with two_ranks.lead(kind, dtype, stage) as two:
        before = {n: t.clone() for n, t in two.weights().items()}
        arrays = exported(two)
        next(iter(arrays.values())).flat[-1] = np.inf
        two.add_gradients(arrays)
        assert not math.isfinite(two.update(1.0, 0.01, 1.0))
        assert apart(wide(two.weights()), wide(before)) == 0.0
        train(two, 0)
        assert 0.0 < apart(wide(two.weights()), wide(before)) < 1.0


@pytest.mark.parametrize("kind, stage, dtype", WIDEST)
def test_ranks_sleep_and_wake_without_new_groups(two_ranks: Ranks, kind: str, stage: int, dtype: str) -> None:
    one = alone(dtype)
    with two_ranks.lead(kind, dtype, stage) as two:
        train(one, 0, 1, 2)
        train(two, 0)
        groups = dict(torch.distributed.distributed_c10d._world.pg_map)
        for step in (1, 2):
            two.sleep()
            two.wake()
            train(two, step)
        assert dict(torch.distributed.distributed_c10d._world.pg_map).keys() == groups.keys()
        assert apart(wide(two.weights()), wide(one.weights())) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind, stage, dtype", WIDEST)
def test_a_satellite_of_two_ranks_computes_and_exports_but_does_not_update(
    two_ranks: Ranks, kind: str, stage: int, dtype: str
) -> None:
    core, moved = alone(dtype), alone(dtype)
    train(moved, 5)
    with two_ranks.lead(kind, dtype, stage, core=False) as two:
        two.load_weights(moved.weights())
        core.load_weights(moved.weights())
        core.accumulate(random_micro_step(1))
        two.accumulate(random_micro_step(1))
        assert apart(exported(two), exported(core)) < TOLERANCE[dtype]
        assert apart(wide(two.weights()), wide(moved.weights())) == 0.0
        with pytest.raises(ValueError, match="norm.weight has shape"):
            two.load_weights({**moved.weights(), "model.norm.weight": torch.zeros(3)})


@pytest.mark.parametrize("kind, stage, dtype", WIDEST)
def test_a_reference_policy_and_an_entropy_bonus_are_the_same_on_two_ranks(
    two_ranks: Ranks, kind: str, stage: int, dtype: str
) -> None:
    loss = {"kl_coefficient": 0.1, "entropy_coefficient": 0.05}
    one = alone(dtype, loss=loss)
    with two_ranks.lead(kind, dtype, stage, loss=loss) as two:
        for step in range(2):  # in the second the policy is no longer its reference
            micro_step = random_micro_step(step, num_trees=3)
            want, got = one.accumulate(micro_step), two.accumulate(micro_step)
            assert all(math.isclose(got[n], want[n], rel_tol=10 * TOLERANCE[dtype], abs_tol=1e-4) for n in want)
            assert apart(exported(two), exported(one)) < TOLERANCE[dtype]
            two.update(0.25, 0.01, 1.0)
            one.update(0.25, 0.01, 1.0)
        assert apart(wide(two.weights()), wide(one.weights())) < TOLERANCE[dtype]
