"""The scheduler's fold and decisions, driven by a small world that answers each fact as the services would."""

import random
from dataclasses import replace

import pytest
from gyre.contracts import events as e
from gyre.contracts.subjects import STREAMS, row_of
from gyre.runtime.config import TimeoutCalls
from gyre.scheduler import core
from gyre.scheduler.burst import train_group, train_task
from gyre.scheduler.config import Plan
from gyre.scheduler.gates import summary
from gyre.scheduler.schedules import Colocate, Schedule, schedule_of
from hypothesis import given, settings
from hypothesis import strategies as st
from small_world import PLAN, play

ELASTIC = replace(PLAN, num_steps=6, num_cells=4, steps_per_burst=2, num_outstanding=6)  # phi = 1
SETTINGS = {
    "colocate": PLAN, "elastic": ELASTIC, "async": ELASTIC, "async+streaming": ELASTIC,
    "rollpacker": replace(PLAN, num_cells=4),
    "colocate+standalone": replace(ELASTIC, num_standalone=1),
    "colocate+standalone+streaming": replace(ELASTIC, num_standalone=2),
}


def decided(state: core.State, plan: Plan = PLAN, schedule: Schedule | None = None, now: float = 0.0) -> list[e.Fact]:
    return list(core.decide(state, plan, schedule or Colocate(), now).facts)


def test_a_run_evaluates_trains_all_steps_evaluates_and_closes():
    state, said = play(PLAN, Colocate(), 0)
    assert state.closed == "completed"
    assert state.steps_finished == state.published_version == 3
    labels = [f.label for f in said if isinstance(f, e.GroupDispatched) and f.purpose == "eval"]
    assert labels == ["before", "after"]
    bursts = [f.burst for f in said if isinstance(f, e.BurstOpened)]
    assert bursts == [0, 1, 2] == [f.burst for f in said if isinstance(f, e.BurstClosed)]


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), duplicate=st.sampled_from([0.0, 0.3]), forget=st.sampled_from([0.0, 0.05]))
def test_any_order_of_facts_duplicates_and_restarts_dispatch_everything_once(name, seed, duplicate, forget):
    plan = SETTINGS[name]
    state, said = play(plan, schedule_of(name, 2), seed, duplicate, forget)
    groups = [f.group for f in said if isinstance(f, e.GroupDispatched)]
    assert len(groups) == len(set(groups)) == plan.num_steps * plan.groups_per_step + 2
    executions = [s.execution for f in said if isinstance(f, e.GroupDispatched) for s in f.executions]
    assert len(executions) == len(set(executions))
    assert (state.water.level, state.closed, state.published_version) == (0, "completed", plan.num_steps)


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_transitions_to_training_are_serial_in_order_and_leave_room_for_what_is_unfinished(name, seed):
    plan, schedule = SETTINGS[name], schedule_of(name, 2)

    def check(state: core.State, fact: e.Fact) -> None:
        if isinstance(fact, e.GroupDispatched) and fact.purpose == "train":
            outstanding = state.num_train_groups + 1 - state.burst_version * plan.groups_per_step
            assert outstanding <= plan.num_outstanding
        if isinstance(fact, e.CellRoleAssigned) and fact.role == "train":
            assert all(c.settled for c in state.cells)
            roles = [c.role for c in state.cells]
            assert roles == ["train"] * fact.cell + ["rollout"] * (len(roles) - fact.cell)
            stays = len(roles) - fact.cell - 1
            if name == "elastic":
                assert state.water.level <= stays * plan.capacity.executions
            if name.startswith("colocate") and fact.cell == 0:
                assert state.water.level <= plan.num_standalone * plan.capacity.executions

    play(plan, schedule, seed, check=check)


def test_a_burst_that_was_opened_but_not_fully_dispatched_is_completed_by_the_next_leader():
    state = core.fold(core.initial(2), e.RunOpened("d", 1, 2))
    state.burst, state.burst_open, state.burst_version, state.burst_steps = 0, True, 0, 1
    first = train_group(PLAN, 0, 0, 0, 0)
    state = core.fold(state, first)
    missing = decided(state)
    assert [f.group for f in missing] == ["g00000-001"]
    assert missing == [train_group(PLAN, 0, 1, 1, 0)]


def test_stopping_ends_the_open_burst_and_closes_without_the_last_evaluation():
    state = core.fold(core.initial(2), e.RunOpened("d", 1, 2))
    for cell in range(2):
        state = core.fold(state, e.CellRolloutReady(cell, 0, 0, ""))
    state.burst = 0
    state = core.fold(state, e.RunStopRequested("user", 0))
    assert decided(state) == [e.RunClosed("stopped: user", 0)]


def test_a_run_that_was_stopped_is_opened_again_where_it_was():
    state = core.fold(core.initial(2), e.RunOpened("d", 1, 2))
    state = core.fold(state, e.RunClosed("stopped: user", 0))
    assert decided(state) == []
    state = core.fold(state, e.RunOpened("d", 1, 2, 0, 0, opening=1))
    state = core.fold(state, e.RunClosed("stopped: user", 0))  # the old one, seen again
    assert (state.phase(), state.closed) == ("evaluating", "")


def test_nothing_is_dispatched_before_every_engine_is_ready():
    state = core.fold(core.initial(2), e.RunOpened("d", 1, 2))
    state = core.fold(state, e.CellRolloutReady(0, 0, 0, ""))
    assert decided(state) == []
    state = core.fold(state, e.CellRolloutReady(1, 0, 0, ""))
    assert isinstance(decided(state)[0], e.GroupDispatched)


def test_a_cell_that_did_not_train_must_also_serve_the_new_version():
    state = core.fold(core.initial(2), e.RunOpened("d", 1, 2))
    state.burst, state.burst_open, state.burst_version, state.burst_steps = 0, True, 0, 1
    for index in range(2):
        group = train_group(PLAN, 0, index, index, 0)
        state = core.fold(state, group)
        for spec in group.executions:
            state = core.fold(state, e.ExecutionTerminated(spec.execution, group.group, "q", "train", "finished", 1, 1.0))
    for cell in range(2):
        state = core.fold(state, e.CellRolloutReady(cell, 0, 0, ""))
    state = core.fold(state, e.WeightsPublished(1, "c", 0, "ckpt"))
    state = core.fold(state, e.CellRolloutReady(0, 0, 1, "c"))
    assert decided(state) == []
    state = core.fold(state, e.CellRolloutReady(1, 0, 1, "c"))
    assert decided(state) == [e.BurstClosed(0, 1)]


def test_facts_of_an_older_epoch_confirm_nothing():
    state = core.fold(core.initial(1), e.CellRoleAssigned(0, 3, "train", "t", 0))
    state = core.fold(state, e.CellTrainJoined(0, 1, 0, 0))
    assert not state.cells[0].settled
    state = core.fold(state, e.CellRoleAssigned(0, 2, "rollout", "t", 0))
    assert (state.cells[0].role, state.cells[0].epoch) == ("train", 3)
    state = core.fold(state, e.CellTrainJoined(0, 3, 0, 0))
    assert state.cells[0].settled


def test_a_confirmation_that_is_read_before_the_assignment_counts_once_that_is_read():
    """They are in different streams, whose followers know nothing of each other."""
    state = core.fold(core.initial(1), e.CellRoleAssigned(0, 1, "train", "t", 0))
    state = core.fold(state, e.CellRolloutReady(0, 2, 5, "c"))
    assert not state.cells[0].settled
    state = core.fold(state, e.CellTrainJoined(0, 3, 0, 5))
    for epoch, role in ((2, "rollout"), (3, "train")):
        state = core.fold(state, e.CellRoleAssigned(0, epoch, role, "t", 5))
        assert state.cells[0].settled
    assert not core.fold(state, e.CellRoleAssigned(0, 4, "rollout", "t", 5)).cells[0].settled


@pytest.mark.parametrize("name", ["elastic", "async"])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_streams_give_one_state_in_whatever_interleaving(name, seed):
    plan, facts = SETTINGS[name], []
    play(plan, schedule_of(name, 2), seed, hear=facts.append)
    dice = random.Random(seed)
    streams = [[f for f in facts if row_of(f).stream is s] for s in STREAMS]
    in_turn, mixed = (core.initial(plan.num_cells) for _ in range(2))
    for fact in facts:
        in_turn = core.fold(in_turn, fact)
    while streams := [s for s in streams if s]:
        mixed = core.fold(mixed, dice.choice(streams).pop(0))
    assert summary(mixed) == summary(in_turn)


def test_tasks_are_drawn_without_repetition_inside_a_pass_and_anew_in_the_next():
    plan = replace(PLAN, train_tasks=tuple(f"train/{i}" for i in range(20)))
    first, second = ([train_task(plan, n * 20 + i) for i in range(20)] for n in range(2))
    assert sorted(first) == sorted(second) == sorted(plan.train_tasks)
    assert first != second
    assert first == [train_task(plan, i) for i in range(20)]


def test_about_the_configured_share_of_executions_is_limited_by_calls():
    plan = replace(PLAN, executions_per_group=8, timeout_calls=TimeoutCalls(0.33, 5, 8))
    specs = [s for i in range(200) for s in train_group(plan, 0, i, i, 0).executions]
    limits = [s.timeout_calls for s in specs if s.timeout_calls is not None]
    assert 0.28 < len(limits) / len(specs) < 0.38
    assert set(limits) == {5, 6, 7, 8}


@pytest.mark.parametrize("num_cells", [1, 2, 4])
def test_any_number_of_cells_works(num_cells):
    for name in ("colocate", "elastic", "rollpacker"):
        state, _ = play(replace(PLAN, num_cells=num_cells), schedule_of(name), 3)
        assert state.closed == "completed"
