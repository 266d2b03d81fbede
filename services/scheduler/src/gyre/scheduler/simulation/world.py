"""Everybody but the scheduler, in virtual time, around the scheduler's real core.

The services answer its facts as the real ones do and say theirs; each fact is folded `fact_s` later, and after every moment
the core is asked what it wants.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from gyre.contracts import events as e
from gyre.contracts.errors import ConfigError
from gyre.contracts.simulation import Simulated
from gyre.scheduler import core
from gyre.scheduler.config import Plan
from gyre.scheduler.gates import GateCounts
from gyre.scheduler.schedules import Schedule
from gyre.scheduler.simulation.agenda import Agenda
from gyre.scheduler.simulation.bounds import lower_bound
from gyre.scheduler.simulation.constants import HOUR, Constants, Loss
from gyre.scheduler.simulation.engines import Engines
from gyre.scheduler.simulation.measures import Lanes
from gyre.scheduler.simulation.trainer import Trainer
from gyre.scheduler.simulation.workload import Demand, Workload

EPOCH_S = 1.0  # the run's second 0 on the scheduler's clock, to which 0 is no time
MAX_DECISIONS = 1000  # at one moment
PATIENCE_S = 30 * 24 * HOUR  # without an execution or a step that ends, beyond what the longest execution takes


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run to simulate. `staleness_limit`: largest version trained at minus version dispatched at."""

    plan: Plan
    schedule: Schedule
    staleness_limit: int
    workload: Workload
    constants: Constants = field(default_factory=Constants)
    max_concurrent: int = 0
    seed: int = 0
    phi: int = 0
    num_training: int = 0


class Leader:
    """The scheduler: the core and nothing else."""

    def __init__(self, plan: Plan, schedule: Schedule) -> None:
        self.state = core.initial(plan.num_cells, plan.num_standalone)
        self.gates = GateCounts()
        self.num_events = 0
        self._plan, self._schedule = plan, schedule

    def fold(self, fact: e.Fact, now: float) -> None:
        """Read one fact back."""
        self.num_events += 1
        self.state = core.fold(self.state, fact, EPOCH_S + now)

    def decide(self, now: float) -> tuple[e.Fact, ...]:
        """What it says now."""
        decision = core.decide(self.state, self._plan, self._schedule, EPOCH_S + now)
        self.gates.observe(self.state.burst, decision.blocked)
        return decision.facts


@dataclass(slots=True)
class _Group:
    fact: e.GroupDispatched
    demands: tuple[Demand, ...]
    unscored: int


class World:
    """One simulated run; `run` plays it to its end."""

    def __init__(self, scenario: Scenario, leader: Leader | None = None) -> None:
        plan, constants = scenario.plan, scenario.constants
        self.scenario, self.agenda, self.lanes = scenario, Agenda(), Lanes()
        self.leader = leader or Leader(plan, scenario.schedule)
        self.engines = Engines(plan.capacity, constants.rollout, scenario.max_concurrent)
        self.trainer = Trainer(plan, scenario.schedule.streams, scenario.staleness_limit, constants.training, self.agenda,
                               self.lanes, self.say)
        self.num_cells = plan.num_cells + plan.num_standalone
        self.said: Callable[[e.Fact], None] = lambda fact: None  # for tests: sees every fact as it is folded
        self.ended: list[str] = []
        self.levels: list[tuple[float, int]] = [(0.0, 0)]
        self._level = 0
        self._roles: list[e.Role] = ["rollout"] * self.num_cells
        self._epochs = [0] * self.num_cells
        self._losses = [0] * self.num_cells  # how often the cell was lost
        self._lost: dict[int, list[Callable[[], None]]] = {}  # lost now -> what waits until it is back
        self._groups: dict[str, _Group] = {}
        self._executions: dict[str, tuple[str, Demand]] = {}
        self._num_switches = 0
        self._ask = True
        self._closed_at = 0.0
        self._came_so_far = (0.0, (0, 0))  # when something ended for the last time, and how much had ended

    # ------------------------------------------------------------ the loop

    def run(self) -> Simulated:
        """Play the run. Raises ConfigError if it comes to a standstill (a cell that is lost for good, say)."""
        plan, schedule = self.scenario.plan, self.scenario.schedule
        self._start()
        while not self.leader.state.closed:
            self._decide()
            if self.leader.state.closed:
                break
            engines = self.engines.next_time
            if min(engines, self.agenda.next_time) == float("inf") or self._stands_still():
                raise ConfigError(f"{schedule.name} stands still at {self.agenda.now:.0f} s: {_stand(self.leader.state)}")
            if engines <= self.agenda.next_time:
                self.agenda.now = max(engines, self.agenda.now)
                self._end_executions()
            else:
                act = self.agenda.pop()
                self.engines.advance(self.agenda.now)
                act()
            self._note_level()
        return self._result(plan, schedule)

    def _stands_still(self) -> bool:
        """Whether nothing but clocks and reports has gone on for long, as when a cell is lost nearly for good."""
        ended = (len(self.ended), len(self.trainer.steps))
        if ended != self._came_so_far[1]:
            self._came_so_far = (self.agenda.now, ended)
        return self.agenda.now - self._came_so_far[0] > PATIENCE_S + self.scenario.plan.timeout_s

    def _start(self) -> None:
        plan = self.scenario.plan
        self._fold(e.RunOpened(plan.config_digest, plan.seed, plan.num_cells, num_standalone=plan.num_standalone,
                               schedule=self.scenario.schedule.name))
        for cell in range(self.num_cells):
            self.engines.admit(cell)
            self.lanes.use(cell, 0.0, "roll")
            self._fold(e.CellRolloutReady(cell, 0, 0, ""))
        for loss in self.scenario.constants.losses:
            self.agenda.after(loss.at_s, lambda loss=loss: self._lose(loss))
        if plan.capacity.kv_tokens:
            self._report_contexts(0)

    def _decide(self) -> None:
        """Nothing changes its mind but a fact, or a deadline."""
        if not self._ask:
            return
        for _ in range(MAX_DECISIONS):
            facts = self.leader.decide(self.agenda.now)
            if not facts:
                self._ask = False
                return
            for fact in facts:
                self._fold(fact)
                self._hear(fact)
        raise AssertionError(f"the scheduler does not come to rest: {facts}")

    def say(self, fact: e.Fact) -> None:
        """Somebody says a fact; the scheduler reads it a little later."""
        self.agenda.after(self.scenario.constants.transition.fact_s, lambda: self._fold(fact))
        if isinstance(fact, e.WeightsPublished):
            self._swap(fact.version)

    def _fold(self, fact: e.Fact) -> None:
        self.said(fact)
        self._ask = True
        self.leader.fold(fact, self.agenda.now)

    def _note_level(self) -> None:
        now, cells = self.agenda.now, self.engines.num_running / self.scenario.plan.capacity.executions
        self.lanes.needed(now, min(-int(-cells // 1), self.num_cells))
        if self._level != self.levels[-1][1]:
            self.levels.append((now, self._level))

    # ------------------------------------------------------------ what the scheduler says

    def _hear(self, fact: e.Fact) -> None:
        match fact:
            case e.BurstOpened():
                self.trainer.open_burst(fact)
            case e.GroupDispatched():
                self._dispatch(fact)
            case e.CellRoleAssigned():
                self._assign(fact)
            case e.RunClosed():
                self._closed_at = self.agenda.now

    def _dispatch(self, fact: e.GroupDispatched) -> None:
        demands = self.scenario.workload.group(len(self._groups), len(fact.executions))
        self._groups[fact.group] = _Group(fact, demands, len(demands))
        self._level += len(demands)
        for spec, demand in zip(fact.executions, demands, strict=True):
            self._executions[spec.execution] = (fact.group, demand)
            self.engines.dispatch(spec.execution, demand)

    def _assign(self, fact: e.CellRoleAssigned) -> None:
        cell, t = fact.cell, self.scenario.constants.transition
        self._epochs[cell], self._roles[cell] = fact.epoch, fact.role
        self._num_switches += 1
        is_lost = cell in self._lost
        if fact.role == "train":
            self.engines.release(cell)
        else:
            self.trainer.leave(cell)
        if not is_lost:
            self.lanes.use(cell, self.agenda.now, "move")
        self._stage(fact, (t.release_s if fact.role == "train" else t.leave_s), lambda: self._half_way(fact))
        self.agenda.after(self.scenario.plan.transition_timeout_s + 1.0, self._deadline)

    def _deadline(self) -> None:
        self._ask = True

    def _stage(self, fact: e.CellRoleAssigned, seconds: float, then: Callable[[], None]) -> None:
        """`then` after `seconds`, unless the cell was told otherwise; if it is lost, once it is back."""
        def due() -> None:
            if self._epochs[fact.cell] != fact.epoch:
                return
            if fact.cell in self._lost:
                self._lost[fact.cell].append(due)
            else:
                then()

        self.agenda.after(seconds, due)

    def _half_way(self, fact: e.CellRoleAssigned) -> None:
        cell, t = fact.cell, self.scenario.constants.transition
        if fact.role == "train":
            self.say(e.CellRolloutReleased(cell, fact.epoch))
            self._stage(fact, t.join_s, lambda: self.trainer.join(cell, fact.epoch))
        else:
            self.say(e.CellTrainReleased(cell, fact.epoch, self.trainer.step))
            self._stage(fact, t.ready_s, lambda: self._serve(cell))

    def _serve(self, cell: int) -> None:
        self.lanes.use(cell, self.agenda.now, "roll")
        self.engines.admit(cell)
        self.say(e.CellRolloutReady(cell, self._epochs[cell], self.trainer.published, "c", self._losses[cell]))

    # ------------------------------------------------------------ what the others do

    def _end_executions(self) -> None:
        c = self.scenario.constants.rollout
        self.engines.advance(self.agenda.now)
        for name in self.engines.due():
            self.ended.append(name)
            group, demand = self._executions.pop(name)
            fact = self._groups[group].fact
            self._level -= 1
            self.say(e.ExecutionTerminated(name, group, fact.query, fact.purpose, "finished", 1, demand.duration_s,
                                           max_context=demand.max_context))
            self.agenda.after(c.evaluation_s, lambda group=group: self._score(group))

    def _score(self, name: str) -> None:
        group = self._groups[name]
        group.unscored -= 1
        if group.unscored:
            return
        fact, cuts = group.fact, self.scenario.constants.training.micro_steps
        self.say(e.GroupCompleted(name, fact.burst, fact.query, fact.purpose, fact.version, (), len(group.demands), 0.5, 0.5,
                                  ()))
        costs = tuple(d.train_s / cuts for d in group.demands for _ in range(cuts))
        self.trainer.complete(name, fact.version, costs)

    def _swap(self, version: int) -> None:
        """Engines that never left rollout take the new weights at a token boundary."""
        swap_s = self.scenario.constants.transition.swap_s
        serving = [c for c in self.engines.serving if self._roles[c] == "rollout" and c not in self._lost]
        if serving:
            self.engines.stand_still(swap_s)
        for cell in serving:
            epoch = self._epochs[cell]
            self.agenda.after(swap_s, lambda cell=cell, epoch=epoch: self._swapped(cell, epoch, version))

    def _swapped(self, cell: int, epoch: int, version: int) -> None:
        if self._epochs[cell] == epoch and cell not in self._lost:
            self.say(e.CellRolloutReady(cell, epoch, version, "c", self._losses[cell]))

    def _report_contexts(self, serial: int) -> None:
        self.say(e.ContextsReported(serial, self.engines.contexts()))
        self.agenda.after(self.scenario.constants.rollout.contexts_every_s, lambda: self._report_contexts(serial + 1))

    # ------------------------------------------------------------ losses

    def _lose(self, loss: Loss) -> None:
        cell = loss.cell
        if cell in self._lost:
            return
        self._lost[cell] = []
        self._losses[cell] += 1
        self.lanes.use(cell, self.agenda.now, "lost")
        if self._roles[cell] == "rollout":
            self.engines.release(cell, is_lost=True)
            self.say(e.CellRolloutLost(cell, self._epochs[cell], self._losses[cell], "simulated"))
        else:
            self.trainer.leave(cell)
        epoch = self._epochs[cell]
        self.agenda.after(loss.for_s, lambda: self._regain(cell, epoch))

    def _regain(self, cell: int, epoch: int) -> None:
        waiting = self._lost.pop(cell)
        self.lanes.use(cell, self.agenda.now, "move")
        if waiting:
            for act in waiting:
                act()
        elif self._epochs[cell] != epoch:
            return  # a stage of its transition is still to come
        elif self._roles[cell] == "rollout":
            self._serve(cell)
        else:
            self.trainer.join(cell, epoch)

    # ------------------------------------------------------------ the end

    def _result(self, plan: Plan, schedule: Schedule) -> Simulated:
        scenario, trainer, end = self.scenario, self.trainer, self._closed_at
        num_cut = sum(d.duration_s >= plan.timeout_s for g in self._groups.values() for d in g.demands)
        self.engines.advance(end)
        return Simulated(
            schedule=schedule.name, seed=scenario.seed, num_cells=plan.num_cells, num_standalone=plan.num_standalone,
            steps_per_burst=plan.steps_per_burst, phi=scenario.phi, num_training=scenario.num_training, makespan_s=end,
            lower_bound_s=lower_bound(plan, scenario.constants, [g.demands for g in self._groups.values()], len(trainer.stale)),
            cell_s=self.lanes.seconds(end, self.engines.busy_s), steps=tuple(trainer.steps),
            num_executions=len(self.ended), num_stale_groups=len(trainer.stale), num_switches=self._num_switches,
            num_moved=self.engines.num_moved, num_preempted=self.engines.num_preempted, gates=dict(self.leader.gates.total),
            num_events=self.leader.num_events, stretches=self.lanes.stretches(end), levels=tuple(self.levels),
            num_cut=num_cut)


def _stand(state: core.State) -> str:
    cells = " ".join(f"{c.cell}:{c.role}{'' if c.settled else '?'}{'!' if c.lost else ''}" for c in state.cells)
    return f"burst {state.burst}, {state.steps_finished} steps, waterlevel {state.water.level}, cells {cells}"
