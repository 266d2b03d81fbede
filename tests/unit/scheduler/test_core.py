"""The scheduler's fold and decisions, driven by a small world that answers each fact as the services would."""

import random
from dataclasses import replace

import pytest
from gyre.contracts import events as e
from gyre.runtime.config import TimeoutCalls
from gyre.scheduler import core
from gyre.scheduler.burst import train_group, train_task
from gyre.scheduler.config import Plan
from gyre.scheduler.schedules import Colocate
from hypothesis import given, settings
from hypothesis import strategies as st

PLAN = Plan(num_steps=3, seed=1, num_cells=2, steps_per_burst=1, num_outstanding=2, executions_per_group=2,
            train_tasks=("train/a", "train/b", "train/c"), held_out_tasks=("held-out/x",), executions_per_held_out=1,
            evaluate_at_start=True, evaluate_at_end=True, timeout_s=60, overall_timeout_s=120,
            timeout_calls=TimeoutCalls(0.5, 2, 4), config_digest="d")


class World:
    """Answers every fact of the scheduler with the facts the other services would say, in any order."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.pending: list[e.Fact] = [e.CellRolloutReady(c, 0, 0, "") for c in range(plan.num_cells)]
        self.version = 0
        self.epochs = dict.fromkeys(range(plan.num_cells), 0)
        self.training: set[int] = set()
        self.completed_in_burst = 0

    def hear(self, fact: e.Fact) -> None:
        match fact:
            case e.GroupDispatched():
                for spec in fact.executions:
                    self.pending.append(e.ExecutionTerminated(spec.execution, fact.group, fact.query, fact.purpose,
                                                              "finished", 1, 1.0))
                self.pending.append(e.GroupCompleted(fact.group, fact.burst, fact.query, fact.purpose, fact.version,
                                                     (), len(fact.executions), 0.5, 0.0, (), fact.label))
            case e.CellRoleAssigned(role="train"):
                assert fact.epoch > self.epochs[fact.cell]
                self.epochs[fact.cell] = fact.epoch
                self.pending.append(e.CellTrainJoined(fact.cell, fact.epoch, self.version, self.version))
                self.training.add(fact.cell)
                if len(self.training) == self.plan.num_cells:
                    self._finish_burst()
            case e.CellRoleAssigned():
                assert fact.epoch > self.epochs[fact.cell]
                self.epochs[fact.cell] = fact.epoch
                self.training.discard(fact.cell)
                self.pending.append(e.CellRolloutReady(fact.cell, fact.epoch, self.version, "c"))

    def _finish_burst(self) -> None:
        for _ in range(self.plan.steps_per_burst):
            self.pending.append(e.StepFinished(self.version, self.version + 1, 0, True, 2, 1, 1, 0.0, 0.0, 0.0))
            self.version += 1
        self.pending.append(e.WeightsPublished(self.version, "c", 0, "ckpt"))


def play(plan: Plan, seed: int, duplicate: float = 0.0, forget: float = 0.0) -> tuple[core.State, list[e.Fact]]:
    """Run a whole training; facts arrive shuffled, sometimes twice; the scheduler sometimes restarts."""
    dice, world, said = random.Random(seed), World(plan), [e.RunOpened("d", plan.seed, plan.num_cells)]
    heard: list[e.Fact] = list(said)
    state = core.fold(core.initial(plan.num_cells), said[0])
    for _ in range(10_000):
        for fact in core.decide(state, plan, Colocate()):
            said.append(fact)
            world.hear(fact)
            heard.append(fact)
            state = core.fold(state, fact)
        if state.closed:
            return state, said
        if world.pending:
            fact = world.pending.pop(dice.randrange(len(world.pending)))
            if dice.random() < duplicate:
                world.pending.append(fact)
            heard.append(fact)
            state = core.fold(state, fact)
        if dice.random() < forget:
            state = core.initial(plan.num_cells)
            for fact in sorted(heard, key=lambda f: isinstance(f, e.GroupDispatched)):  # another interleaving of streams
                state = core.fold(state, fact)
    raise AssertionError(f"the run did not close: {state}")


def test_a_run_evaluates_trains_all_steps_evaluates_and_closes():
    state, said = play(PLAN, 0)
    assert state.closed == "completed"
    assert state.steps_finished == state.published_version == 3
    labels = [f.label for f in said if isinstance(f, e.GroupDispatched) and f.purpose == "eval"]
    assert labels == ["before", "after"]
    bursts = [f.burst for f in said if isinstance(f, e.BurstOpened)]
    assert bursts == [0, 1, 2] == [f.burst for f in said if isinstance(f, e.BurstClosed)]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), duplicate=st.sampled_from([0.0, 0.3]), forget=st.sampled_from([0.0, 0.05]))
def test_any_order_of_facts_duplicates_and_restarts_dispatch_everything_once(seed, duplicate, forget):
    state, said = play(PLAN, seed, duplicate, forget)
    groups = [f.group for f in said if isinstance(f, e.GroupDispatched)]
    assert len(groups) == len(set(groups)) == 3 * PLAN.num_outstanding + 2
    executions = [s.execution for f in said if isinstance(f, e.GroupDispatched) for s in f.executions]
    assert len(executions) == len(set(executions))
    assert state.water.level == 0


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_transitions_to_training_are_serial_core_first_and_only_at_waterlevel_zero(seed):
    state = core.fold(core.initial(2), e.RunOpened("d", 1, 2))
    world, dice = World(PLAN), random.Random(seed)
    for _ in range(10_000):
        if state.closed:
            break
        for fact in core.decide(state, PLAN, Colocate()):
            if isinstance(fact, e.CellRoleAssigned) and fact.role == "train":
                assert state.water.level == 0
                assert state.settled
                assert [c.role for c in state.cells] == ["train"] * fact.cell + ["rollout"] * (2 - fact.cell)
            world.hear(fact)
            state = core.fold(state, fact)
        if world.pending:
            state = core.fold(state, world.pending.pop(dice.randrange(len(world.pending))))
    assert state.closed


def test_a_burst_that_was_opened_but_not_fully_dispatched_is_completed_by_the_next_leader():
    state = core.fold(core.initial(2), e.RunOpened("d", 1, 2))
    state.burst, state.burst_open, state.burst_version, state.burst_steps = 0, True, 0, 1
    first = train_group(PLAN, 0, 0, 0, 0)
    state = core.fold(state, first)
    missing = core.decide(state, PLAN, Colocate())
    assert [f.group for f in missing] == ["g00000-001"]
    assert missing == [train_group(PLAN, 0, 1, 1, 0)]


def test_stopping_ends_the_open_burst_and_closes_without_the_last_evaluation():
    state = core.fold(core.initial(2), e.RunOpened("d", 1, 2))
    for cell in range(2):
        state = core.fold(state, e.CellRolloutReady(cell, 0, 0, ""))
    state.burst, state.stop_reason = 0, "user"
    assert core.decide(state, PLAN, Colocate()) == [e.RunClosed("stopped: user", 0)]


def test_a_run_that_was_stopped_is_opened_again_where_it_was():
    state = core.fold(core.initial(2), e.RunOpened("d", 1, 2))
    state = core.fold(state, e.RunClosed("stopped: user", 0))
    assert core.decide(state, PLAN, Colocate()) == []
    state = core.fold(state, e.RunOpened("d", 1, 2, 0, 0, opening=1))
    state = core.fold(state, e.RunClosed("stopped: user", 0))  # the old one, seen again
    assert (state.phase(), state.closed) == ("evaluating", "")


def test_nothing_is_dispatched_before_every_engine_is_ready():
    state = core.fold(core.initial(2), e.RunOpened("d", 1, 2))
    state = core.fold(state, e.CellRolloutReady(0, 0, 0, ""))
    assert core.decide(state, PLAN, Colocate()) == []
    state = core.fold(state, e.CellRolloutReady(1, 0, 0, ""))
    assert isinstance(core.decide(state, PLAN, Colocate())[0], e.GroupDispatched)


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
    assert core.decide(state, PLAN, Colocate()) == []
    state = core.fold(state, e.CellRolloutReady(1, 0, 1, "c"))
    assert core.decide(state, PLAN, Colocate()) == [e.BurstClosed(0, 1)]


def test_facts_of_an_older_epoch_confirm_nothing():
    state = core.fold(core.initial(1), e.CellRoleAssigned(0, 3, "train", "t", 0))
    state = core.fold(state, e.CellTrainJoined(0, 1, 0, 0))
    assert not state.settled
    state = core.fold(state, e.CellRoleAssigned(0, 2, "rollout", "t", 0))
    assert (state.cells[0].role, state.cells[0].epoch) == ("train", 3)
    state = core.fold(state, e.CellTrainJoined(0, 3, 0, 0))
    assert state.settled


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
    state, _ = play(replace(PLAN, num_cells=num_cells), 3)
    assert state.closed == "completed"
