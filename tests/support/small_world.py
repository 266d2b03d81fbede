"""Everybody but the scheduler, without time: answers each of its facts with the facts the others would say, in any order."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from gyre.contracts import events as e
from gyre.runtime.config import TimeoutCalls
from gyre.scheduler import core
from gyre.scheduler.config import Plan
from gyre.scheduler.schedules import Capacity, Schedule

PLAN = Plan(num_steps=3, seed=1, num_cells=2, steps_per_burst=1, num_outstanding=2, executions_per_group=2,
            train_tasks=("train/a", "train/b", "train/c"), held_out_tasks=("held-out/x",), executions_per_held_out=1,
            evaluate_at_start=True, evaluate_at_end=True, timeout_s=60, overall_timeout_s=120,
            timeout_calls=TimeoutCalls(0.5, 2, 4), config_digest="d", groups_per_step=2, capacity=Capacity(4))


@dataclass
class World:
    """`pending`: facts that will be said, in an order that the dice decide. `seen`: those that were said."""

    plan: Plan
    pending: list[e.Fact] = field(default_factory=list)
    version: int = 0  # steps done
    published: int = 0
    burst_end: int = 0
    serial: int = 0
    open_executions: dict[str, set[str]] = field(default_factory=dict)
    dispatched: dict[str, e.GroupDispatched] = field(default_factory=dict)
    num_completed: int = 0
    roles: dict[int, e.Role] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        for cell in range(self.plan.num_cells + self.plan.num_standalone):
            self.roles[cell], self.epochs[cell] = "rollout", 0
            self.pending.append(e.CellRolloutReady(cell, 0, 0, ""))

    def hear(self, fact: e.Fact) -> None:
        """A fact of the scheduler."""
        match fact:
            case e.BurstOpened():
                self.burst_end = fact.version + fact.num_steps
                self._train()
            case e.GroupDispatched():
                assert fact.group not in self.dispatched
                self.dispatched[fact.group] = fact
                self.open_executions[fact.group] = {spec.execution for spec in fact.executions}
                self.pending += [e.ExecutionTerminated(s.execution, fact.group, fact.query, fact.purpose, "finished", 1, 1.0,
                                                       max_context=100) for s in fact.executions]
            case e.CellRoleAssigned():
                assert fact.epoch == self.epochs[fact.cell] + 1
                self.epochs[fact.cell], self.roles[fact.cell] = fact.epoch, fact.role
                self.joined.discard(fact.cell)
                if fact.role == "train":
                    self.pending.append(e.CellTrainJoined(fact.cell, fact.epoch, self.version, self.version))
                else:
                    self.pending.append(e.CellRolloutReady(fact.cell, fact.epoch, self.published, "c"))

    def said(self, fact: e.Fact) -> None:
        """A fact of the others has been said; what follows from it."""
        match fact:
            case e.ExecutionTerminated() if fact.execution in self.open_executions.get(fact.group, ()):
                self.open_executions[fact.group].discard(fact.execution)
                if not self.open_executions[fact.group]:
                    self._complete(self.dispatched[fact.group])
            case e.GroupCompleted() if fact.purpose == "train":
                self.num_completed += 1
                self._report()
                self._train()
            case e.CellTrainJoined() if fact.epoch == self.epochs[fact.cell]:
                self.joined.add(fact.cell)
                self._train()
            case e.WeightsPublished():
                self.published = max(self.published, fact.version)
                self.pending += [e.CellRolloutReady(cell, self.epochs[cell], fact.version, "c")
                                 for cell, role in self.roles.items() if role == "rollout"]

    def _complete(self, group: e.GroupDispatched) -> None:
        self.pending.append(e.GroupCompleted(group.group, group.burst, group.query, group.purpose, group.version, (),
                                             len(group.executions), 0.5, 0.0, (), group.label))

    def _report(self) -> None:
        self.serial += 1
        waiting = max(0, self.num_completed - self.version * self.plan.groups_per_step)
        self.pending.append(e.BacklogReported(self.serial, self.version, waiting, float(waiting), 0.5, 1.0))

    def _train(self) -> None:
        size = self.plan.groups_per_step
        while 0 in self.joined and self.version < self.burst_end and self.num_completed >= (self.version + 1) * size:
            self.pending.append(e.StepFinished(self.version, self.version + 1, 0, True, 2, 1, 1, 0.0, 0.0, 0.0))
            self.version += 1
            self._report()
            if self.version == self.burst_end:
                self.pending.append(e.WeightsPublished(self.version, "c", 0, "ckpt"))


Check = Callable[[core.State, e.Fact], None]
Hear = Callable[[e.Fact], None]


def play(plan: Plan, schedule: Schedule, seed: int, duplicate: float = 0.0, forget: float = 0.0,
         check: Check = lambda state, fact: None, hear: Hear = lambda fact: None) -> tuple[core.State, list[e.Fact]]:
    """A whole run; facts arrive shuffled, sometimes twice; the scheduler sometimes restarts and folds everything anew.

    `check(state, fact)` sees each of the scheduler's facts with the state it was decided on; `hear(fact)` all that is said.
    """
    dice, world = random.Random(seed), World(plan)
    said: list[e.Fact] = [e.RunOpened("d", plan.seed, plan.num_cells, num_standalone=plan.num_standalone)]
    heard = list(said)
    state = core.fold(core.initial(plan.num_cells, plan.num_standalone), said[0])
    for _ in range(20_000):
        for fact in core.decide(state, plan, schedule).facts:
            check(state, fact)
            said.append(fact)
            world.hear(fact)
            heard.append(fact)
            state = core.fold(state, fact)
        if state.closed:
            for fact in heard:
                hear(fact)
            return state, said
        if world.pending:
            fact = world.pending.pop(dice.randrange(len(world.pending)))
            if dice.random() < duplicate:
                world.pending.append(fact)
            if fact not in heard:
                world.said(fact)
            heard.append(fact)
            state = core.fold(state, fact)
        if dice.random() < forget:
            state = core.initial(plan.num_cells, plan.num_standalone)
            for fact in sorted(heard, key=lambda f: isinstance(f, e.GroupDispatched)):  # another interleaving of streams
                state = core.fold(state, fact)
    raise AssertionError(f"the run did not close: {state}")
