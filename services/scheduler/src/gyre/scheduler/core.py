"""The scheduler's core: its state is the fold of the facts it reads back, its decisions are facts to say next.

`fold(state, fact)` may be given the streams in any interleaving; `decide(state, plan, schedule)` is a pure function of
the state and repeats itself until the facts it asked for have been read back.
"""

from collections import Counter
from dataclasses import dataclass, field

from gyre.contracts import events as e
from gyre.scheduler.burst import evaluation_group, train_group
from gyre.scheduler.config import Plan
from gyre.scheduler.schedules import Schedule, View
from gyre.scheduler.transition import CellState, next_assignment
from gyre.scheduler.waterlevel import Waterlevel

BEFORE, AFTER = "before", "after"


@dataclass(slots=True)
class State:
    """Everything the scheduler knows. `burst` is the number of the last burst opened, -1 before the first."""

    cells: list[CellState]
    opening: int = -1  # number of the newest opening
    closed: str = ""
    stop_reason: str = ""
    burst: int = -1
    burst_open: bool = False
    burst_version: int = 0
    burst_steps: int = 0
    num_train_groups: int = 0  # the query cursor
    groups: set[str] = field(default_factory=set)
    completed: set[str] = field(default_factory=set)
    # Counted as they come, by burst number (training) or label (evaluation), because every decision asks for them.
    num_dispatched: Counter[int | str] = field(default_factory=Counter)
    num_completed: Counter[int | str] = field(default_factory=Counter)
    water: Waterlevel = field(default_factory=Waterlevel)
    steps_finished: int = 0
    published_version: int = 0

    @property
    def opened(self) -> bool:
        return self.opening >= 0

    @property
    def settled(self) -> bool:
        return all(cell.settled for cell in self.cells)

    def phase(self) -> str:
        """One word for people: idle, evaluating, rollout, training or closed."""
        if self.closed or not self.opened:
            return "closed" if self.closed else "idle"
        if not self.burst_open:
            return "evaluating"
        return "training" if any(c.role == "train" for c in self.cells) else "rollout"


def initial(num_cells: int) -> State:
    """The state before any fact."""
    return State([CellState(cell) for cell in range(num_cells)])


# ---------------------------------------------------------------- fold


def fold(state: State, fact: e.Fact) -> State:
    """The state after `fact`; a fact that is seen again changes nothing."""
    match fact:
        case e.RunOpened() if fact.opening > state.opening:
            state.opening, state.closed, state.stop_reason = fact.opening, "", ""
        case e.RunClosed() if fact.opening == state.opening:
            state.closed = fact.reason
        case e.BurstOpened() if fact.burst > state.burst:
            state.burst, state.burst_open = fact.burst, True
            state.burst_version, state.burst_steps = fact.version, fact.num_steps
        case e.BurstClosed() if fact.burst == state.burst:
            state.burst_open = False
        case e.GroupDispatched():
            _fold_dispatch(state, fact)
        case e.ExecutionTerminated():
            state.water.terminate(fact.execution)
        case e.GroupCompleted():
            if fact.group not in state.completed:
                state.completed.add(fact.group)
                state.num_completed[_batch(fact)] += 1
        case e.StepFinished() if fact.version > state.steps_finished:
            state.steps_finished = fact.version
        case e.WeightsPublished():
            state.published_version = max(state.published_version, fact.version)
            state.steps_finished = max(state.steps_finished, fact.version)
        case e.CellRoleAssigned() | e.CellRolloutReady() | e.CellTrainJoined():
            _fold_cell(state, fact)
    return state


def _batch(fact: e.GroupDispatched | e.GroupCompleted) -> int | str:
    return fact.burst if fact.purpose == "train" else fact.label


def _fold_dispatch(state: State, fact: e.GroupDispatched) -> None:
    if fact.group in state.groups:
        return
    state.groups.add(fact.group)
    state.num_dispatched[_batch(fact)] += 1
    state.num_train_groups += fact.purpose == "train"
    state.water.dispatch([spec.execution for spec in fact.executions])


def _fold_cell(state: State, fact: e.CellRoleAssigned | e.CellRolloutReady | e.CellTrainJoined) -> None:
    if not 0 <= fact.cell < len(state.cells):
        return
    cell = state.cells[fact.cell]
    match fact:
        case e.CellRoleAssigned():
            cell.assign(fact)
        case e.CellTrainJoined():
            cell.confirm_train(fact)
        case e.CellRolloutReady():
            cell.confirm_rollout(fact)


# ---------------------------------------------------------------- decide


def decide(state: State, plan: Plan, schedule: Schedule) -> list[e.Fact]:
    """The facts to say now, in order; empty while there is nothing to do but wait."""
    if state.closed or not state.opened:
        return []
    if state.burst_open:
        return _inside_burst(state, plan, schedule)
    if not _all_serve(state):
        return _bring_back(state)
    if plan.evaluate_at_start and not state.stop_reason and state.burst < 0:
        pending = _evaluate(state, plan, BEFORE)
        if pending is not None:
            return pending
    if state.steps_finished < plan.num_steps and not state.stop_reason:
        return [e.BurstOpened(state.burst + 1, state.published_version, plan.steps_per_burst)]
    if plan.evaluate_at_end and not state.stop_reason:
        pending = _evaluate(state, plan, AFTER)
        if pending is not None:
            return pending
    if state.water.level > 0:
        return []
    reason = f"stopped: {state.stop_reason}" if state.stop_reason else "completed"
    return [e.RunClosed(reason, state.published_version, state.opening)]


def _all_serve(state: State) -> bool:
    return all(cell.serves(state.published_version) for cell in state.cells)


def _bring_back(state: State) -> list[e.Fact]:
    """Outside bursts every cell belongs in rollout; those that are on their way are left alone."""
    return [next_assignment(c, "rollout", state.published_version) for c in state.cells if c.role == "train"]


def _evaluate(state: State, plan: Plan, label: str) -> list[e.Fact] | None:
    """Dispatch what is missing of a held-out evaluation; None once all of it is completed."""
    wanted = len(plan.held_out_tasks)
    if state.num_dispatched[label] < wanted:
        groups = (evaluation_group(plan, label, i, state.burst, state.published_version) for i in range(wanted))
        return [g for g in groups if g.group not in state.groups]
    return [] if state.num_completed[label] < wanted else None


def _inside_burst(state: State, plan: Plan, schedule: Schedule) -> list[e.Fact]:
    missing = _missing_dispatches(state, plan)
    if missing:
        return missing
    end = state.burst_version + state.burst_steps
    if state.published_version >= end:
        if _all_serve(state):
            return [e.BurstClosed(state.burst, state.published_version)]
        return _bring_back(state)
    if not state.settled:
        return []
    cell = schedule.next_to_train(_view(state, end))
    return [] if cell is None else [next_assignment(state.cells[cell], "train", state.published_version)]


def _missing_dispatches(state: State, plan: Plan) -> list[e.Fact]:
    """Groups of the open burst that are not dispatched yet (a leader may have died between two of them)."""
    wanted, have = plan.num_outstanding, state.num_dispatched[state.burst]
    return [train_group(plan, state.burst, index, state.num_train_groups + index - have, state.burst_version)
            for index in range(have, wanted)]


def _view(state: State, end: int) -> View:
    return View(tuple(state.cells), state.water.level, state.num_completed[state.burst], end - state.steps_finished)
