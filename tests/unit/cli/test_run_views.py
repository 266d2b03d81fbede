"""What is derived from the facts: cells, waterlevel, evaluations, means and the lines of steps."""

import dataclasses
import json
import math

import pytest
from gyre.cli.ledger import RunLedger
from gyre.cli.metrics import estimate, estimate_of, gain_of, moving_mean, paired_gain, step_lines, t_975
from gyre.cli.views import Join, cell_timelines, joins, level_at, roles_at, waterlevels
from gyre.contracts import events as e


def ledger_of(facts):
    ledger = RunLedger()
    for fact, time_s in facts:
        ledger.fold(fact, time_s)
    return ledger


def test_every_cell_goes_round_through_its_transitions(facts):
    for bars in cell_timelines(ledger_of(facts)).values():
        assert [b.role for b in bars[:5]] == ["rollout", "to train", "train", "to rollout", "rollout"]
        assert all(one.end_s == other.start_s for one, other in zip(bars, bars[1:], strict=False))
        assert len(bars) == 1 + 4 * 6


def test_a_confirmation_of_an_older_epoch_changes_nothing():
    ledger = ledger_of([(e.RunOpened("d", 0, 1), 0.0), (e.CellRoleAssigned(0, 1, "train", "t", 0), 1.0),
                        (e.CellRoleAssigned(0, 2, "rollout", "t", 0), 3.0), (e.CellTrainJoined(0, 1, 0, 0), 4.0),
                        (e.CellRolloutReady(0, 2, 0, "c"), 5.0), (e.RunClosed("completed", 0), 9.0)])
    assert roles_at(cell_timelines(ledger), 4.5) == {0: "to rollout"}
    assert roles_at(cell_timelines(ledger), 6.0) == {0: "rollout"}


def test_clocks_that_disagree_never_make_a_bar_run_backwards():
    ledger = ledger_of([(e.RunOpened("d", 0, 1), 0.0), (e.CellRoleAssigned(0, 1, "train", "t", 0), 5.0),
                        (e.CellTrainJoined(0, 1, 0, 0), 4.0), (e.RunClosed("completed", 0), 9.0)])
    bars = cell_timelines(ledger)[0]
    assert [(b.role, b.start_s, b.end_s) for b in bars] == [("rollout", 0.0, 5.0), ("train", 5.0, 9.0)]


def test_the_waterlevel_rises_by_dispatch_and_falls_to_zero(facts):
    curve = waterlevels(ledger_of(facts))
    assert max(level for _, level in curve) == 8
    assert curve[-1][1] == 0
    assert level_at(curve, curve[0][0] - 1) == 0


def test_an_evaluation_has_one_reward_per_task(facts):
    ledger = ledger_of(facts)
    before, after = ledger.evaluation("before"), ledger.evaluation("after")
    assert before.is_complete
    assert before.rewards.keys() == after.rewards.keys()
    assert len(before.rewards) == 8
    assert not ledger.evaluation("elsewhere").is_complete
    assert gain_of(ledger).mean == pytest.approx(estimate_of(ledger, "after").mean - estimate_of(ledger, "before").mean)


def test_an_unscorable_execution_has_no_vote_and_a_placeholder_votes_zero():
    specs = tuple(e.ExecutionSpec(f"x{i}", 0, 1.0, 2.0) for i in range(3))
    outcomes = tuple(e.Outcome(f"x{i}", kind, "finished", reward, 0.0, 0, 0, 0)
                     for i, (kind, reward) in enumerate((("scored", 0.8), ("placeholder", 0.0), ("unscorable", 0.0))))
    ledger = ledger_of([(e.GroupDispatched("g", -1, "q", "held-out/q", "eval", 0, specs, "before"), 0.0),
                        (e.GroupCompleted("g", -1, "q", "eval", 0, outcomes, 1, 0.4, 0.0, (), "before"), 1.0)])
    assert ledger.evaluation("before").rewards == {"held-out/q": 0.4}


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.706), (5, 2.571), (10, 2.228), (63, 1.998), (1000, 1.962)])
def test_the_t_quantile_is_that_of_the_tables(degrees, quantile):
    assert t_975(degrees) == pytest.approx(quantile, abs=0.004)


def test_a_mean_has_the_interval_of_student():
    found = estimate([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3.0
    assert found.half_width == pytest.approx(1.963, abs=0.001)
    assert found.text() == "3.000 ± 1.963"
    assert estimate([]) is None
    assert math.isnan(estimate([1.0]).low)
    assert estimate([1.0]).text() == "1.000"


def test_a_gain_is_paired_by_task():
    gain = paired_gain({"a": 0.1, "b": 0.5, "c": 0.9}, {"a": 0.3, "b": 0.7, "d": 0.0})
    assert (gain.mean, gain.num) == (pytest.approx(0.2), 2)
    assert gain.half_width == pytest.approx(0.0)


def test_a_moving_mean_leaves_out_what_is_unknown():
    assert moving_mean([1.0, math.nan, 3.0, 5.0], 2) == [1.0, 1.0, 3.0, 4.0]


def test_a_step_has_one_line_and_one_row(facts):
    lines = step_lines(ledger_of(facts), {"do_nothing": 0.0, "oracle": 1.0})
    assert [line.step for line in lines] == list(range(6))
    line = lines[1]
    assert (line.num_executions, line.num_timeouts_scored, line.num_harness_errors, line.waterlevel) == (6, 2, 2, 0)
    assert line.roles == ("T", "T")
    assert line.moving_reward == pytest.approx((lines[0].reward + lines[1].reward) / 2)
    assert "step 2/6  reward" in line.text(6)
    assert "nothing 0.000 oracle 1.000" in line.text(6)
    assert "  errors 2  clip 3 %  " in line.text(6)
    row = json.loads(json.dumps(line.row(), allow_nan=False))
    assert row["micro_steps_by_cell"] == {"0": 5, "1": 1}


def test_a_step_says_why_its_harnesses_failed(facts):
    """A harness that cannot be started gives rewards like any other that does badly: nobody would look for it."""
    said = iter(["sh: 1: exec: agent: not found", "Traceback\n  ...\nOSError: " + 200 * "x", "sh: 1: exec: agent: not found"])

    def failing(fact):
        if not isinstance(fact, e.ExecutionTerminated) or fact.purpose != "train" or (words := next(said, None)) is None:
            return fact
        return dataclasses.replace(fact, ending="failed", exit_code=127, reason=words)

    first = step_lines(ledger_of([(failing(fact), *rest) for fact, *rest in facts]), {})[0]
    assert (first.num_failed, first.failure) == (3, "exit code 127, sh: 1: exec: agent: not found")
    assert "  3 failed: exit code 127, sh: 1: exec: agent: not found  " in first.text(6)
    assert " failed" not in step_lines(ledger_of(facts), {})[0].text(6)


def test_a_step_waits_for_facts_of_other_streams(facts):
    late = [pair for pair in facts if isinstance(pair[0], e.GroupCompleted | e.ExecutionTerminated)]
    ledger = ledger_of([pair for pair in facts if pair not in late])
    assert step_lines(ledger, {}) == []
    for fact, time_s in late:
        ledger.fold(fact, time_s)
    assert [line.step for line in step_lines(ledger, {}, 4)] == [4, 5]


def test_a_step_without_votes_has_no_reward():
    ledger = ledger_of([(e.StepSealed(0, (), (), 0), 0.0), (e.StepFinished(0, 1, 0, False, 0, 0, 0, 0.0, 0.0, 0.0), 1.0)])
    line = step_lines(ledger, {})[0]
    assert line.row()["reward"] is None
    assert line.text(1).endswith("(no update)")


def test_a_satellite_that_comes_to_a_running_step_is_seen_with_what_was_unfinished():
    spec = e.ExecutionSpec("x", 0, 60.0, 120.0)
    ledger = ledger_of([
        (e.GroupDispatched("g", 0, "q", "t", "train", 0, (spec,)), 1.0),
        (e.CellTrainJoined(0, 1, 0, 0), 2.0),
        (e.CellTrainJoined(1, 1, 0, 0), 3.0),
        (e.ExecutionTerminated("x", "g", "q", "train", "finished", 1, 1.0), 4.0),
        (e.CellTrainJoined(2, 1, 0, 0), 5.0),
        (e.StepFinished(0, 1, 0, True, 1, 1, 1, 0.0, 0.0, 0.0), 6.0),
        (e.CellTrainJoined(3, 1, 0, 0), 7.0),
    ])
    assert joins(ledger) == (Join(0, 1, 3.0, 1), Join(0, 2, 5.0, 0))
