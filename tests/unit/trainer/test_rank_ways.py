"""Two ranks within a memory budget: every way through a micro-step is one process's gradient, and they take it together."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cell_of_ranks import Ranks
from gyre.contracts.microstep import MicroStep
from gyre.policy.checkpoint import save_checkpoint
from gyre.trainer.backends.split import split
from gyre.trainer.backends.torch import TorchBackend
from gyre.trainer.metrics import WAYS
from gyre.trainer.tree_forward import LOGITS_CHUNK
from gyre.trainer.tree_training import HeldBytes, held_bytes
from rank_cases import KINDS, TOLERANCE, WIDEST, alone, apart, exported, fits, wide
from trees import hand_built, random_micro_step, tiny_decoder

CASES = [*WIDEST, *((*k, "bfloat16") for k in KINDS if k[0] != "torch" and fits(*k, "bfloat16"))]

LARGE = [random_micro_step(seed, num_trees=3, tree_tokens=60) for seed in (1, 2)]
SMALL = random_micro_step(3, num_trees=2, tree_tokens=4)
ONE_PATH = hand_built([-1, *range(39)], list(range(1, 40)), [0] * 39)  # nothing is left for the second rank


def held(dtype: str) -> HeldBytes:
    return held_bytes(tiny_decoder().to(getattr(torch, dtype)))


def largest_part(micro_step: MicroStep) -> int:
    return max(part.num_tokens for part in split(micro_step, 2) if part is not None)


def budget_for(way: str, dtype: str) -> float:
    """Within which SMALL fits whole and the others take this way."""
    sizes, costs = [largest_part(m) for m in (*LARGE, ONE_PATH)], held(dtype)
    small, one_layer = largest_part(SMALL) * costs.whole, costs.whole / 2
    budget = small if way == "depth_first" else max(sizes) * (costs.checkpointed + one_layer)
    ways = {costs.way(size, 2, budget) for size in sizes}
    assert ways == {way} and small <= budget
    return budget


def add_to_both(two: Any, one: TorchBackend, micro_step: MicroStep, tolerance: float) -> str:
    """The way that two ranks took through it; everything else they say is what one process says."""
    want, got = one.accumulate(micro_step), two.accumulate(micro_step)
    taken = {way: got.pop(way) for way in WAYS if way in got}
    assert list(taken.values()) in ([], [1.0]), "a micro-step counts once"
    assert got.keys() == want.keys()
    assert all(math.isclose(got[n], want[n], rel_tol=10 * tolerance, abs_tol=10 * tolerance) for n in want)
    return next(iter(taken), "whole")


@pytest.mark.parametrize("way", ["checkpointed", "depth_first"])
@pytest.mark.parametrize("kind, stage, dtype", CASES)
def test_two_ranks_that_cannot_hold_a_micro_step_are_one_that_can(
    two_ranks: Ranks, kind: str, stage: int, dtype: str, way: str
) -> None:
    """Small ones stay whole; all add up in one place, also with a rank that has no part, at the weights of each version."""
    tolerance, one = TOLERANCE[dtype], alone(dtype)
    with two_ranks.lead(kind, dtype, stage, memory_bytes=budget_for(way, dtype)) as two:
        for _ in range(2):
            ways = [add_to_both(two, one, m, tolerance) for m in (SMALL, LARGE[0], ONE_PATH, SMALL, LARGE[1])]
            assert ways == ["whole", way, way, "whole", way]
            assert apart(exported(two), exported(one)) < tolerance
            assert two.update(0.125, 0.01, 0.5) == pytest.approx(one.update(0.125, 0.01, 0.5), rel=tolerance)
        assert apart(wide(two.weights()), wide(one.weights())) < tolerance


@pytest.mark.parametrize("way", ["checkpointed", "depth_first"])
@pytest.mark.parametrize("kind, stage, dtype", WIDEST)
def test_a_reference_policy_and_an_entropy_bonus_go_every_way(
    two_ranks: Ranks, kind: str, stage: int, dtype: str, way: str
) -> None:
    loss = {"kl_coefficient": 0.1, "entropy_coefficient": 0.05}
    tolerance, one = TOLERANCE[dtype], alone(dtype, False, loss)
    options = {"loss": loss, "tied": False, "memory_bytes": budget_for(way, dtype)}
    with two_ranks.lead(kind, dtype, stage, **options) as two:
        for micro_step in LARGE:  # at the second the policy is no longer its reference
            assert add_to_both(two, one, micro_step, tolerance) == way
            assert apart(exported(two), exported(one)) < tolerance
            assert two.update(0.25, 0.01, 1.0) == pytest.approx(one.update(0.25, 0.01, 1.0), rel=tolerance)
            two.sleep()
            two.wake()
        assert apart(wide(two.weights()), wide(one.weights())) < tolerance


@pytest.mark.parametrize("kind, stage, dtype", CASES)
def test_one_ranks_part_decides_for_all(two_ranks: Ranks, kind: str, stage: int, dtype: str) -> None:
    """The longer part has to be checkpointed, the shorter would fit whole."""
    micro_step = hand_built([-1, *range(29), -1, 30], [*range(1, 30), 31], [0] * 29 + [1])
    costs, one = held(dtype), alone(dtype)
    sizes = [part.num_tokens for part in split(micro_step, 2) if part is not None]
    assert sorted(sizes) == [2, 30]
    with two_ranks.lead(kind, dtype, stage, memory_bytes=29 * costs.whole) as two:
        assert add_to_both(two, one, micro_step, TOLERANCE[dtype]) == "checkpointed"
        assert apart(exported(two), exported(one)) < TOLERANCE[dtype]


@pytest.mark.parametrize("way", ["whole", "checkpointed"])
@pytest.mark.parametrize("kind, stage, dtype", WIDEST)
def test_one_rank_makes_its_logits_in_chunks_and_the_other_does_not(
    two_ranks: Ranks, kind: str, stage: int, dtype: str, way: str
) -> None:
    """Backward makes those chunks again, through weights that the ranks share."""
    lengths = [300] + [21] * (LOGITS_CHUNK // 20 + 10)  # one long path costs as much as many short ones
    starts = np.cumsum([0, *lengths])
    parent = [-1 if i in starts else i - 1 for i in range(starts[-1])]
    target = [i for i, p in enumerate(parent) if p >= 0]
    micro_step = hand_built(parent, target, (np.searchsorted(starts, target, "right") - 1).tolist())
    few, many = (part for part in split(micro_step, 2) if part is not None)
    assert few.num_targets <= LOGITS_CHUNK < many.num_targets
    budget, one = math.inf if way == "whole" else many.num_tokens * held(dtype).whole * 0.9, alone(dtype)
    with two_ranks.lead(kind, dtype, stage, memory_bytes=budget) as two:
        for _ in range(2):
            assert add_to_both(two, one, micro_step, TOLERANCE[dtype]) == way
            assert apart(exported(two), exported(one)) < TOLERANCE[dtype]
            assert two.update(0.25, 0.01, 1.0) == pytest.approx(one.update(0.25, 0.01, 1.0), rel=TOLERANCE[dtype])
        assert apart(wide(two.weights()), wide(one.weights())) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind, stage, dtype", WIDEST)
def test_a_worker_of_ranks_takes_its_budget_from_the_configuration(
    two_ranks: Ranks, kind: str, stage: int, dtype: str, tmp_path: Path
) -> None:
    decoder, one = tiny_decoder(), alone(dtype)
    save_checkpoint(tmp_path, decoder.config, decoder.state_dict())
    for memory_gib, way in ((1e-9, "depth_first"), (0.0, "whole")):  # 0: no bound
        with two_ranks.lead(kind, dtype, stage, policy=str(tmp_path), memory_gib=memory_gib) as two:
            assert add_to_both(two, one, SMALL, TOLERANCE[dtype]) == way
            assert apart(exported(two), exported(one)) < TOLERANCE[dtype]
            one.zero_gradients()


def test_what_checkpointing_needs_is_loaded_when_a_worker_starts_and_not_in_its_first_micro_step(tmp_path: Path) -> None:
    decoder = tiny_decoder()
    save_checkpoint(tmp_path, decoder.config, decoder.state_dict())
    script = """if True:
        import sys
        from pathlib import Path
        from gyre.runtime.config import CheckpointConfig, OptimizerConfig
        from gyre.trainer.backends.launch import open_backend
        from gyre.trainer.config import TrainerConfig
        from gyre.trainer.loss import LossConfig
        from gyre.trainer.step import MembershipRules
        from trees import random_micro_step
        policy, *nowhere = [Path(sys.argv[1])] * 3
        config = TrainerConfig(1, 2, "r", "cpu", policy, *nowhere, "", 1, MembershipRules(1, 0), LossConfig(),
                               OptimizerConfig(), CheckpointConfig())
        backend, loaded = open_backend(config, None).backend, set(sys.modules)
        backend.accumulate(random_micro_step(0))
        print([name for name in set(sys.modules) - loaded if name.startswith("torch._dynamo")])
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", script, tmp_path], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
