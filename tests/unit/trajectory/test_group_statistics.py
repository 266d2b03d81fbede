"""Outcome rules and advantages, with the numbers of the peers' tests and bugs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gyre.contracts.events import BlobRef, ExecutionScored, ExecutionTerminated, ExecutionUnscorable
from gyre.trajectory.group import MAX_REWARD, Standing, advantages, group_advantages, standing, statistics

SNAPSHOT = BlobRef("s", "0" * 32, 1)


def end(**fields: Any) -> ExecutionTerminated:
    return replace(ExecutionTerminated("x", "g", "q", "train", "finished", 1, 1.0, SNAPSHOT), **fields)


def score(reward: float, **fields: Any) -> ExecutionScored:
    return ExecutionScored("x", "g", reward, 1, 2, "e", **fields)


UNSCORABLE = ExecutionUnscorable("x", "g", "evaluator failed 3 times", "e")


@pytest.mark.parametrize(("terminated", "verdict", "quarantine", "kind", "reward"), [
    (end(), score(0.5), "", "scored", 0.5),
    (end(ending="timed_out"), score(0.5), "", "scored", 0.5),
    (end(ending="failed", exit_code=1), score(0.0), "", "scored", 0.0),
    (end(), score(0.7, placeholder=True), "", "placeholder", 0.0),
    (end(snapshot=None), None, "", "placeholder", 0.0),
    (end(), UNSCORABLE, "", "unscorable", 0.0),
    (end(), score(float("nan")), "", "unscorable", 0.0),
    (end(), score(float("inf")), "", "unscorable", 0.0),
    (end(), score(1e200), "", "unscorable", 0.0),
    (end(), score(-1.1e30), "", "unscorable", 0.0),
    (end(), score(-1e30), "", "scored", -1e30),
    (end(), score(1.0), "digest: call c: ...", "unscorable", 0.0),
    (end(ending="dropped"), None, "", "dropped", 0.0),
    (end(ending="dropped"), score(1.0), "digest: call c: ...", "dropped", 0.0),
])
def test_what_an_execution_counts_for(terminated: ExecutionTerminated, verdict: Any, quarantine: str, kind: str,
                                      reward: float) -> None:
    found = standing(terminated, verdict, quarantine)
    assert (found.kind, found.reward) == (kind, reward)
    assert (found.reason == "") == (kind == "scored" or terminated.ending == "dropped")


@pytest.mark.parametrize("kind", ["grpo", "mean", "rloo"])
def test_the_largest_rewards_give_advantages_that_float32_holds(kind: Any) -> None:
    found = np.array(advantages([MAX_REWARD, -MAX_REWARD], kind), np.float32)
    assert found[0] == -found[1] == np.float32({"grpo": 0.5**0.5, "mean": 1e30, "rloo": 2e30}[kind])


@pytest.mark.parametrize(("kind", "expected"), [("grpo", 0.866024), ("mean", 0.5), ("rloo", 0.666667)])
def test_two_of_four_succeed(kind: Any, expected: float) -> None:
    assert advantages([1, 0, 0, 1], kind) == pytest.approx([expected, -expected, -expected, expected], abs=1e-6)


def test_a_rejected_execution_does_not_move_the_baseline() -> None:
    """C21: 1.154699, not 0.866024."""
    standings = [Standing("scored", 1.0), Standing("scored"), Standing("scored"), Standing("unscorable")]
    found, stats = group_advantages(standings, "grpo")
    assert found == pytest.approx([1.154699, -0.577349, -0.577349, 0.0], abs=1e-6)
    assert stats.num_votes == 3


def test_a_placeholder_votes_with_zero_and_is_not_trained() -> None:
    standings = [Standing("scored", 1.0), Standing("placeholder"), Standing("dropped")]
    found, stats = group_advantages(standings, "mean")
    assert found == [0.5, 0.0, 0.0]
    assert (stats.num_votes, stats.mean) == (2, 0.5)


def test_one_vote_per_execution_whatever_its_number_of_paths() -> None:
    """O13 and C24: an execution of three rows with reward 1 and one of one row with 0; the baseline is 0.5."""
    assert advantages([1.0, 0.0], "mean") == [0.5, -0.5]


@pytest.mark.parametrize("kind", ["grpo", "mean", "rloo"])
@pytest.mark.parametrize("rewards", [[], [0.7], [0.7] * 4, [0.0, 0.0], [0.95 + 6e-8 * i for i in range(8)], [1e6, 1e6]])
def test_a_group_of_one_and_equal_rewards_give_zero(kind: Any, rewards: list[float]) -> None:
    """C19 and C20: neither the raw reward nor noise divided by its own size."""
    assert advantages(rewards, kind) == [0.0] * len(rewards)


def test_statistics_of_few_votes_are_defined() -> None:
    assert (statistics([]).mean, statistics([]).std) == (0.0, 0.0)
    assert (statistics([0.7]).mean, statistics([0.7]).std) == (0.7, 0.0)
    assert statistics([1, 0, 0, 1]).std == pytest.approx(0.577350, abs=1e-6)


@pytest.mark.parametrize("kind", ["grpo", "mean", "rloo"])
def test_advantages_of_a_group_sum_to_zero_and_are_finite(kind: Any) -> None:
    for rewards in ([1e-3, 0.0], [1e9, -1e9, 3.0], [0.1, 0.2, 0.9, 0.9]):
        assert sum(advantages(rewards, kind)) == pytest.approx(0.0, abs=1e-6 * max(map(abs, rewards)))
