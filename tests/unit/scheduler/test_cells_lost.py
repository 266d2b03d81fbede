"""Cells that are lost, late or alone, and gates that hold cells back."""

from dataclasses import replace

from gyre.contracts import events as e
from gyre.scheduler import core
from gyre.scheduler.burst import train_group
from gyre.scheduler.config import Plan
from gyre.scheduler.gates import GateCounts
from gyre.scheduler.schedules import Capacity, schedule_of
from small_world import PLAN

THREE = replace(PLAN, num_cells=3, num_steps=4, num_outstanding=4, evaluate_at_start=False, capacity=Capacity(4, 1000),
                transition_timeout_s=100.0)
ELASTIC = schedule_of("elastic")


def opened(plan: Plan = THREE, num_done: int = 0) -> core.State:
    """A burst is open, four groups of two executions are dispatched, `num_done` groups are completed; at second 10."""
    state = core.fold(core.initial(plan.num_cells), e.RunOpened("d", 1, plan.num_cells), 1.0)
    for cell in range(plan.num_cells):
        state = core.fold(state, e.CellRolloutReady(cell, 0, 0, ""), 2.0)
    state = core.fold(state, e.BurstOpened(0, 0, 1), 3.0)
    for index in range(4):
        group = train_group(plan, 0, index, index, 0)
        state = core.fold(state, group, 3.0)
        if index < num_done:
            for spec in group.executions:
                ended = e.ExecutionTerminated(spec.execution, group.group, "q", "train", "finished", 1, 1.0)
                state = core.fold(state, ended, 9.0)
            state = core.fold(state, e.GroupCompleted(group.group, 0, "q", "train", 0, (), 2, 0.5, 0.0, ()), 10.0)
    return state


def decided(state: core.State, now: float = 10.0, plan: Plan = THREE) -> core.Decision:
    return core.decide(state, plan, ELASTIC, now)


def assignment(decision: core.Decision) -> tuple[int, int, str, str]:
    [fact] = decision.facts
    assert isinstance(fact, e.CellRoleAssigned)
    return fact.cell, fact.epoch, fact.role, fact.reason


def test_the_core_goes_as_soon_as_what_is_unfinished_fits_and_a_group_waits() -> None:
    assert decided(opened(num_done=0), plan=replace(THREE, capacity=Capacity(3))).blocked == "count"
    assert decided(opened(num_done=0)).blocked == "supply"
    assert assignment(decided(opened(num_done=1))) == (0, 1, "train", "")


def test_tokens_hold_a_cell_back_that_the_count_would_let_go() -> None:
    state = opened(num_done=1)
    live = sorted(state.water.live)
    state = core.fold(state, e.ContextsReported(1, dict.fromkeys(live, 400)))
    assert decided(state).blocked == "tokens"
    state = core.fold(state, e.ContextsReported(2, dict.fromkeys(live, 300)))
    assert assignment(decided(state))[0] == 0


def test_a_satellite_needs_more_work_than_it_costs_to_join() -> None:
    state = opened(num_done=4)
    state = core.fold(state, e.CellRoleAssigned(0, 1, "train", "t", 0), 10.0)
    assert decided(state).facts == (), "one transition at a time"
    state = core.fold(state, e.CellTrainJoined(0, 1, 0, 0), 12.0)
    state = core.fold(state, e.BacklogReported(1, 0, 1, 10.0, 10.0, 1.0))
    assert decided(state).blocked == "supply"
    state = core.fold(state, e.BacklogReported(2, 0, 1, 10.5, 10.0, 1.0))
    assert assignment(decided(state))[:3] == (1, 1, "train")
    state = core.fold(state, e.CellRoleAssigned(1, 1, "train", "t", 0), 20.0)
    state = core.fold(state, e.CellTrainJoined(1, 1, 0, 0), 28.0)
    assert state.join_s == 8.0
    state = core.fold(state, e.BacklogReported(3, 0, 1, 17.0, 10.0, 1.0))
    assert decided(state).blocked == "supply", "8 seconds of joining are 8 units of work"
    state = core.fold(state, e.BacklogReported(4, 0, 1, 19.0, 10.0, 1.0))
    assert assignment(decided(state))[:3] == (2, 1, "train")


def test_a_transition_to_training_that_nobody_confirms_is_rolled_back_with_its_reason() -> None:
    state = core.fold(opened(num_done=1), e.CellRoleAssigned(0, 1, "train", "t", 0), 10.0)
    assert decided(state, 110.0).facts == ()
    assert assignment(decided(state, 110.5)) == (0, 2, "rollout", "train not confirmed within 100 s")
    state = core.fold(state, e.CellRoleAssigned(0, 2, "rollout", "t", 0), 111.0)
    state = core.fold(state, e.CellTrainJoined(0, 1, 0, 0), 112.0)
    assert decided(state, 112.0).facts == (), "a confirmation of the epoch before counts for nothing"
    state = core.fold(state, e.CellRolloutReady(0, 2, 0, ""), 113.0)
    assert assignment(decided(state, 113.0))[:3] == (0, 3, "train"), "and it is tried again"


def test_a_core_whose_engine_does_not_come_back_trains_on() -> None:
    """Nobody trains without the core: a run whose core's engine is broken would stand still for ever."""
    state = opened(num_done=4)
    state = core.fold(state, e.CellRoleAssigned(0, 1, "rollout", "t", 0), 10.0)
    assert decided(state, 110.0).facts == ()
    for schedule in (ELASTIC, schedule_of("async", 2), schedule_of("colocate"), schedule_of("rollpacker")):
        told = assignment(core.decide(state, THREE, schedule, 110.5))
        assert told == (0, 2, "train", "rollout not confirmed within 100 s"), schedule
    state = core.fold(state, e.CellRoleAssigned(0, 2, "train", "t", 0), 110.5)
    state = core.fold(state, e.CellTrainJoined(0, 2, 0, 0), 111.0)
    state = core.fold(state, e.BacklogReported(1, 0, 1, 100.0, 10.0, 1.0))
    assert assignment(decided(state, 111.0))[:3] == (1, 1, "train")


def test_the_core_does_not_stay_when_what_will_be_dispatched_does_not_fit_by_tokens() -> None:
    """Also when nothing is left over from the burst: what the executions before grew to says what the next ones will."""
    for max_context, stays in ((400, True), (600, False)):
        state = opened()
        for execution in sorted(state.water.live):
            ended = e.ExecutionTerminated(execution, "g", "q", "train", "finished", 1, 1.0, max_context=max_context)
            state = core.fold(state, ended, 9.0)
        for index in range(4):
            state = core.fold(state, e.GroupCompleted(f"g{index}", 0, "q", "train", 0, (), 2, 0.5, 0.0, ()), 10.0)
        state = core.fold(state, e.CellRoleAssigned(0, 1, "train", "t", 0), 10.0)
        state = core.fold(state, e.CellTrainJoined(0, 1, 0, 0), 11.0)
        state = core.fold(state, e.StepFinished(0, 1, 0, True, 2, 1, 1, 0.0, 0.0, 0.0), 12.0)
        state = core.fold(state, e.WeightsPublished(1, "c", 0, "ckpt"), 12.0)
        for cell in (1, 2):
            state = core.fold(state, e.CellRolloutReady(cell, 0, 1, "c"), 13.0)
        facts = decided(state, 13.0).facts  # 4 executions on two cells of 1000 tokens
        assert (facts == (e.BurstClosed(0, 1),)) == stays
        assert stays or assignment(decided(state, 13.0))[:3] == (0, 2, "rollout")


def test_the_core_does_not_stay_when_a_cell_that_is_missing_would_be_needed() -> None:
    plan = replace(THREE, capacity=Capacity(3))
    state = opened(plan, num_done=4)
    state = core.fold(state, e.CellRoleAssigned(2, 1, "rollout", "t", 0), 10.0)  # from training, in which it never was
    state = core.fold(state, e.CellRoleAssigned(0, 1, "train", "t", 0), 100.0)
    state = core.fold(state, e.CellTrainJoined(0, 1, 0, 0), 101.0)
    state = core.fold(state, e.StepFinished(0, 1, 0, True, 2, 1, 1, 0.0, 0.0, 0.0), 102.0)
    state = core.fold(state, e.WeightsPublished(1, "c", 0, "ckpt"), 102.0)
    state = core.fold(state, e.CellRolloutReady(1, 0, 1, "c"), 103.0)
    assert decided(state, 105.0, plan).facts == (), "the core stays: four executions fit two cells, of which one is waited for"
    assert assignment(decided(state, 111.0, plan))[:3] == (0, 2, "rollout")


def test_nobody_waits_at_the_end_of_a_burst_for_a_cell_that_does_not_come_back() -> None:
    state = opened(num_done=4)
    for cell in (0, 1):
        state = core.fold(state, e.CellRoleAssigned(cell, 1, "train", "t", 0), 10.0)
        state = core.fold(state, e.CellTrainJoined(cell, 1, 0, 0), 11.0)
    state = core.fold(state, e.StepFinished(0, 1, 0, True, 2, 1, 1, 0.0, 0.0, 0.0), 12.0)
    state = core.fold(state, e.WeightsPublished(1, "c", 0, "ckpt"), 12.0)
    back = decided(state, 12.0).facts
    assert [(f.cell, f.role) for f in back] == [(1, "rollout")], "the core's next step is ready and what follows fits"
    state = core.fold(state, back[0], 12.0)
    state = core.fold(state, e.CellRolloutReady(2, 0, 1, "c"), 13.0)
    assert decided(state, 100.0).facts == ()
    assert decided(state, 113.0).facts == (e.BurstClosed(0, 1),)


def test_a_lost_engine_is_no_capacity_until_it_serves_again() -> None:
    state = opened(num_done=1)
    state = core.fold(state, e.CellRolloutLost(2, 0, 1, "away"))
    assert decided(state).blocked == "count"
    state = core.fold(state, e.CellRolloutReady(2, 0, 0, "", 0))
    assert decided(state).blocked == "count", "that was said before it was lost"
    state = core.fold(state, e.CellRolloutReady(2, 0, 0, "", 1))
    assert assignment(decided(state))[0] == 0


def test_an_engine_that_has_let_its_cell_train_is_not_lost_any_more() -> None:
    """It answered. When the cell comes back it is waited for as any other, in whatever order the streams are read."""
    lost, joined = e.CellRolloutLost(0, 0, 1, "away"), e.CellTrainJoined(0, 1, 0, 0)
    for first, second in ((lost, joined), (joined, lost)):
        state = core.fold(opened(), e.CellRoleAssigned(0, 1, "train", "t", 0), 10.0)
        state = core.fold(core.fold(state, first, 11.0), second, 11.0)
        assert not state.cells[0].lost
        state = core.fold(state, e.CellRoleAssigned(0, 2, "rollout", "t", 0), 12.0)
        assert decided(state, 13.0).facts == ()
        state = core.fold(state, e.CellRolloutReady(0, 2, 0, "", 1), 14.0)
        state = core.fold(state, e.CellRolloutLost(0, 2, 2, "away"), 20.0)
        assert state.cells[0].lost


def test_a_cell_whose_engine_is_lost_is_the_last_that_is_told_to_train() -> None:
    """If the whole cell is dead nobody confirms, and everybody behind it would wait for that."""
    state = opened(num_done=4)
    state = core.fold(state, e.CellRoleAssigned(0, 1, "train", "t", 0), 10.0)
    state = core.fold(state, e.CellTrainJoined(0, 1, 0, 0), 10.0)
    state = core.fold(state, e.BacklogReported(1, 0, 1, 100.0, 10.0, 1.0))
    state = core.fold(state, e.CellRolloutLost(1, 0, 1, "away"))
    assert assignment(decided(state))[:3] == (2, 1, "train")
    assert assignment(core.decide(state, THREE, schedule_of("async", 2), 10.0))[:3] == (1, 1, "train"), "one that always trains"
    back = core.fold(state, e.CellRolloutReady(1, 0, 0, "", 1))
    assert assignment(decided(back))[:3] == (1, 1, "train"), "and where it was as soon as it serves again"
    state = core.fold(state, e.CellRolloutLost(1, 0, 2, "away"))
    state = core.fold(state, e.CellRoleAssigned(2, 1, "train", "t", 0), 10.0)
    state = core.fold(state, e.CellTrainJoined(2, 1, 0, 0), 11.0)
    assert assignment(decided(state, 11.0))[:3] == (1, 1, "train"), "its trainer may be there"


def test_with_work_left_and_no_cell_to_serve_it_the_youngest_satellite_returns_at_once() -> None:
    state = opened(num_done=2)
    for cell in (0, 1):
        state = core.fold(state, e.CellRoleAssigned(cell, 1, "train", "t", 0), 10.0)
        state = core.fold(state, e.CellTrainJoined(cell, 1, 0, 0), 11.0)
    state = core.fold(state, e.CellRolloutLost(2, 0, 1, "away"))
    reason = "no cell serves what is unfinished"
    assert assignment(decided(state, 12.0)) == (1, 2, "rollout", reason)
    state = core.fold(state, e.CellRoleAssigned(1, 2, "rollout", "t", 0), 12.0)
    assert decided(state, 13.0).facts == ()
    assert assignment(decided(state, 113.0)) == (0, 2, "rollout", reason), "it does not come back: the core is the last one"


def test_no_schedule_lets_the_last_cell_go_that_serves_what_is_unfinished() -> None:
    """The static split would send the core to training, and the recall back, for ever."""
    plan = replace(THREE, num_cells=2)
    state = core.fold(opened(plan), e.CellRolloutLost(1, 0, 1, "away"))
    assert core.decide(state, plan, schedule_of("async", 1), 10.0) == core.Decision(blocked="count")
    state = core.fold(state, e.CellRolloutReady(1, 0, 0, "", 1))
    assert assignment(core.decide(state, plan, schedule_of("async", 1), 10.0))[:3] == (0, 1, "train")


def test_a_burst_is_not_opened_while_nobody_serves_and_who_trains_comes_back() -> None:
    plan = replace(THREE, num_cells=2)
    state = opened(plan, num_done=4)
    state = core.fold(state, e.CellRoleAssigned(0, 1, "train", "t", 0), 10.0)
    state = core.fold(state, e.CellTrainJoined(0, 1, 0, 0), 11.0)
    state = core.fold(state, e.CellRolloutLost(1, 0, 1, "away"))
    state = core.fold(state, e.StepFinished(0, 1, 0, True, 2, 1, 1, 0.0, 0.0, 0.0), 12.0)
    state = core.fold(state, e.WeightsPublished(1, "c", 0, "ckpt"), 12.0)
    assert assignment(decided(state, 12.0, plan))[:3] == (0, 2, "rollout"), "although the next step is ready"
    state = core.fold(state, e.CellRoleAssigned(0, 2, "rollout", "t", 1), 12.0)
    assert decided(state, 13.0, plan).facts == ()
    state = core.fold(state, e.CellRolloutReady(0, 2, 1, "c"), 14.0)
    assert decided(state, 14.0, plan).facts == (e.BurstClosed(0, 1),)


def test_a_run_closes_although_no_engine_is_left_when_nothing_is_left_to_do() -> None:
    plan = replace(THREE, num_cells=1, num_steps=1, num_outstanding=4, groups_per_step=4, evaluate_at_end=False)
    state = opened(plan, num_done=4)
    state = core.fold(state, e.CellRoleAssigned(0, 1, "train", "t", 0), 10.0)
    state = core.fold(state, e.CellTrainJoined(0, 1, 0, 0), 11.0)
    state = core.fold(state, e.StepFinished(0, 1, 0, True, 2, 1, 1, 0.0, 0.0, 0.0), 12.0)
    state = core.fold(state, e.WeightsPublished(1, "c", 0, "ckpt"), 12.0)
    state = core.fold(state, decided(state, 12.0, plan).facts[0], 12.0)  # back to rollout, where its engine is broken
    assert decided(state, 100.0, plan).facts == ()
    assert decided(state, 113.0, plan).facts == (e.BurstClosed(0, 1),)
    state = core.fold(state, e.BurstClosed(0, 1), 113.0)
    assert decided(state, 113.0, plan).facts == (e.RunClosed("completed", 1, 0),)
    assert decided(state, 113.0, replace(plan, evaluate_at_end=True)).facts == (), "somebody has to serve the evaluation"


def test_a_run_that_is_asked_to_stop_before_any_engine_has_come_up_closes() -> None:
    state = core.fold(core.initial(2), e.RunOpened("d", 1, 2), 1.0)
    state = core.fold(state, e.RunStopRequested("asked", 0), 2.0)
    plan = replace(THREE, num_cells=2)
    assert decided(state, 100.0, plan).facts == ()
    assert decided(state, 102.0, plan).facts == (e.RunClosed("stopped: asked", 0, 0),)


def test_gates_are_counted_by_stretches() -> None:
    counts = GateCounts()
    for blocked in ("count", "count", "", "count", "supply", "supply"):
        counts.observe(0, blocked)
    counts.observe(1, "supply")
    assert counts.total == {"count": 2, "supply": 2}
    assert counts.in_burst == {"supply": 1}
