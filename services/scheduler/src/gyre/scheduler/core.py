"""The scheduler's core: its state is the fold of the facts it reads back, its decisions are facts to say next.

`fold(state, fact, at)` may be given the streams in any interleaving; `decide(state, plan, schedule, now)` is a pure function
and repeats itself until the facts it asked for have been read back. `at` and `now` are seconds of the services' clocks; they
only measure how long transitions take, so a wrong clock costs a transition and nothing else.
"""

from collections import Counter
from dataclasses import dataclass, field, replace

from gyre.contracts import events as e
from gyre.scheduler.burst import evaluation_group, train_group
from gyre.scheduler.config import Plan
from gyre.scheduler.schedules import Gate, Schedule, Supply, View
from gyre.scheduler.transition import CellState, Roster, next_assignment
from gyre.scheduler.waterlevel import Waterlevel

BEFORE, AFTER = "before", "after"
KEPT = 0.7  # of an earlier measurement when a new one comes


@dataclass(slots=True)
class State:
    """Everything the scheduler knows. `burst` is the number of the last burst opened, -1 before the first.

    `backlog` is the trainer's newest. `join_s`: seconds from the assignment of a satellite to its joining, averaged.
    """

    cells: list[CellState]
    opening: int = -1  # number of the newest opening
    opened_at: float = 0.0
    closed: str = ""
    stopping: tuple[int, str] = (-1, "")  # the newest opening that is to stop, and why
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
    num_train_completed: int = 0
    water: Waterlevel = field(default_factory=Waterlevel)
    steps_finished: int = 0
    published_version: int = 0
    backlog: e.BacklogReported | None = None
    join_s: float = 0.0
    _roster: Roster | None = None

    @property
    def roster(self) -> Roster:
        """The cells at a glance."""
        if self._roster is None:
            self._roster = Roster.of(self.cells)
        return self._roster

    @property
    def opened(self) -> bool:
        return self.opening >= 0

    @property
    def stop_reason(self) -> str:
        """Why this opening is to end after its burst; empty if it is not."""
        return self.stopping[1] if self.stopping[0] == self.opening else ""

    @property
    def burst_end(self) -> int:
        """Version at which the newest burst ends."""
        return self.burst_version + self.burst_steps

    def phase(self) -> str:
        """One word for people: idle, evaluating, rollout, mixed, training or closed."""
        if self.closed or not self.opened:
            return "closed" if self.closed else "idle"
        if not self.burst_open:
            return "evaluating"
        num_train = sum(c.role == "train" for c in self.cells)
        return "rollout" if num_train == 0 else "training" if num_train == len(self.cells) else "mixed"


@dataclass(frozen=True, slots=True)
class Decision:
    """Facts to say now, in order, and the gate that holds the next cell back."""

    facts: tuple[e.Fact, ...] = ()
    blocked: Gate = ""


WAIT = Decision()


def initial(num_cells: int, num_standalone: int = 0) -> State:
    """The state before any fact; standalone cells are numbered after the others."""
    return State([CellState(c, never_trains=c >= num_cells) for c in range(num_cells + num_standalone)])


# ---------------------------------------------------------------- fold


def fold(state: State, fact: e.Fact, at: float = 0.0) -> State:
    """The state after `fact`, said at second `at`; a fact that is seen again changes nothing."""
    match fact:
        case e.RunOpened() | e.RunStopRequested() | e.RunClosed() | e.BurstOpened() | e.BurstClosed():
            _fold_run(state, fact, at)
        case e.GroupDispatched():
            _fold_dispatch(state, fact)
        case e.ExecutionTerminated():
            state.water.terminate(fact.execution, fact.max_context)
        case e.ContextsReported():
            state.water.observe(fact.serial, fact.contexts)
        case e.GroupCompleted():
            _fold_completed(state, fact)
        case e.BacklogReported() | e.StepFinished() | e.WeightsPublished():
            _fold_training(state, fact)
        case e.CellRoleAssigned() | e.CellRolloutReady() | e.CellRolloutLost() | e.CellTrainJoined():
            _fold_cell(state, fact, at)
    return state


def _fold_run(
    state: State, fact: e.RunOpened | e.RunStopRequested | e.RunClosed | e.BurstOpened | e.BurstClosed, at: float
) -> None:
    match fact:
        case e.RunOpened() if fact.opening > state.opening:
            state.opening, state.opened_at, state.closed = fact.opening, at, ""
        case e.RunStopRequested():
            state.stopping = max(state.stopping, (fact.opening, fact.reason))
        case e.RunClosed() if fact.opening == state.opening:
            state.closed = fact.reason
        case e.BurstOpened() if fact.burst > state.burst:
            state.burst, state.burst_open = fact.burst, True
            state.burst_version, state.burst_steps = fact.version, fact.num_steps
        case e.BurstClosed() if fact.burst == state.burst:
            state.burst_open = False


def _fold_training(state: State, fact: e.BacklogReported | e.StepFinished | e.WeightsPublished) -> None:
    match fact:
        case e.BacklogReported() if state.backlog is None or fact.serial > state.backlog.serial:
            state.backlog = fact
        case e.StepFinished():
            state.steps_finished = max(state.steps_finished, fact.version)
        case e.WeightsPublished():
            state.published_version = max(state.published_version, fact.version)
            state.steps_finished = max(state.steps_finished, fact.version)


def _batch(fact: e.GroupDispatched | e.GroupCompleted) -> int | str:
    return fact.burst if fact.purpose == "train" else fact.label


def _fold_dispatch(state: State, fact: e.GroupDispatched) -> None:
    if fact.group in state.groups:
        return
    state.groups.add(fact.group)
    state.num_dispatched[_batch(fact)] += 1
    state.num_train_groups += fact.purpose == "train"
    state.water.dispatch([spec.execution for spec in fact.executions])


def _fold_completed(state: State, fact: e.GroupCompleted) -> None:
    if fact.group in state.completed:
        return
    state.completed.add(fact.group)
    state.num_completed[_batch(fact)] += 1
    state.num_train_completed += fact.purpose == "train"


CellFact = e.CellRoleAssigned | e.CellRolloutReady | e.CellRolloutLost | e.CellTrainJoined


def _fold_cell(state: State, fact: CellFact, at: float) -> None:
    if not 0 <= fact.cell < len(state.cells):
        return
    cell = state.cells[fact.cell]
    state._roster = None
    match fact:
        case e.CellRoleAssigned():
            cell.assign(fact, at)
        case e.CellTrainJoined():
            if cell.confirm_train(fact) and fact.cell != 0 and cell.assigned_at:
                took = max(0.0, at - cell.assigned_at)
                state.join_s = took if state.join_s == 0.0 else KEPT * state.join_s + (1 - KEPT) * took
        case e.CellRolloutReady():
            cell.confirm_rollout(fact)
        case e.CellRolloutLost():
            cell.lose(fact)


# ---------------------------------------------------------------- decide


def decide(state: State, plan: Plan, schedule: Schedule, now: float = 0.0) -> Decision:
    """The facts to say now, in order; empty while there is nothing to do but wait."""
    if state.closed or not state.opened:
        return WAIT
    if state.burst_open:
        return _inside_burst(state, plan, schedule, now)
    goes_on = state.steps_finished < plan.num_steps and not state.stop_reason
    evaluates = plan.evaluate_at_start and not state.stop_reason and state.burst < 0
    if goes_on and not evaluates:
        return _open_burst(state, plan, schedule, now)
    returning = _bring_back(state, [c for c in state.cells if c.role == "train"])
    label = BEFORE if evaluates else AFTER if plan.evaluate_at_end and not state.stop_reason else ""
    if returning or not _all_serve(state, plan, now, needs_one=bool(label)):
        return Decision(tuple(returning))
    pending = _evaluate(state, plan, label) if label else None
    if pending is not None:
        return Decision(tuple(pending))
    if evaluates:
        return _open_burst(state, plan, schedule, now)
    return _close(state)


def _close(state: State) -> Decision:
    if state.water.level > 0:
        return WAIT
    reason = f"stopped: {state.stop_reason}" if state.stop_reason else "completed"
    return Decision((e.RunClosed(reason, state.published_version, state.opening),))


def _open_burst(state: State, plan: Plan, schedule: Schedule, now: float) -> Decision:
    """Dispatch waits until every cell that rolls out serves the version the burst begins at."""
    returning = _bring_back(state, _returning(state, plan, schedule, now))
    if returning or not _all_serve(state, plan, now):
        return Decision(tuple(returning))
    num_steps = min(plan.steps_per_burst, plan.num_steps - state.published_version)
    return Decision((e.BurstOpened(state.burst + 1, state.published_version, num_steps),))


def _is_missing(cell: CellState, state: State, plan: Plan, now: float) -> bool:
    """Nobody waits for a cell that lost its engine, or that should have confirmed its role long ago."""
    if cell.role == "rollout" and cell.lost:
        return True
    began = max(cell.assigned_at, state.opened_at)
    return not cell.settled and began > 0 and now - began > plan.transition_timeout_s


def _all_serve(state: State, plan: Plan, now: float, needs_one: bool = True) -> bool:
    """Every cell that rolls out serves the published version, except those that are missing; at least one does.

    Not `needs_one`: nothing is to be dispatched now. What is over is over though no engine comes back.
    """
    serving = [c for c in state.cells if c.serves(state.published_version)]
    others = [c for c in state.cells if c.role == "rollout" and c not in serving]
    return (bool(serving) or not needs_one) and all(_is_missing(c, state, plan, now) for c in others)


def _bring_back(state: State, cells: list[CellState], reason: str = "") -> list[e.Fact]:
    return [next_assignment(c, "rollout", state.published_version, reason) for c in cells]


def _returning(state: State, plan: Plan, schedule: Schedule, now: float) -> list[CellState]:
    """Cells that trained and do not stay over the burst's end; all of them if nobody else can serve what comes."""
    if all(c.role == "train" or _is_missing(c, state, plan, now) for c in state.cells):
        return [c for c in state.cells if c.role == "train"]
    view = view_of(state, plan)
    view = replace(view, cells=tuple(c for c in view.cells if not _is_missing(c, state, plan, now)))  # nobody counts on those
    return [c for c in state.cells if c.role == "train" and not schedule.stays(c, view)]


def _evaluate(state: State, plan: Plan, label: str) -> list[e.Fact] | None:
    """Dispatch what is missing of a held-out evaluation; None once all of it is completed."""
    wanted = len(plan.held_out_tasks)
    if state.num_dispatched[label] < wanted:
        groups = (evaluation_group(plan, label, i, state.burst, state.published_version) for i in range(wanted))
        return [g for g in groups if g.group not in state.groups]
    return [] if state.num_completed[label] < wanted else None


def _inside_burst(state: State, plan: Plan, schedule: Schedule, now: float) -> Decision:
    missing = _missing_dispatches(state, plan)
    if missing:
        return Decision(tuple(missing))
    is_calm = state.roster.is_calm
    late = [] if is_calm else [c for c in state.cells if c.role == "train" and _is_missing(c, state, plan, now)]
    if late:
        reason = f"train not confirmed within {plan.transition_timeout_s:g} s"
        return Decision(tuple(_bring_back(state, late, reason)))
    if state.published_version >= state.burst_end:
        return _end_burst(state, plan, schedule, now)
    recalled = _recalled(state, plan, now)
    if recalled:
        return Decision(tuple(recalled))
    if not is_calm and any(not c.settled and not _is_missing(c, state, plan, now) for c in state.cells):
        return WAIT
    view, reason = view_of(state, plan), ""
    core = state.cells[0]
    if core.role == "rollout" and not core.settled:  # it has not come back in time; nobody trains without it, but it may
        view = replace(view, next_in_order=core)
        reason = "its engine is lost" if core.lost else f"rollout not confirmed within {plan.transition_timeout_s:g} s"
    choice = schedule.next_to_train(view)
    if choice.cell is None:
        return Decision(blocked=choice.blocked)
    cell = state.cells[choice.cell]
    if state.water.level and view.num_serving == cell.serves_any:
        return Decision(blocked="count")  # whatever the schedule: it would be recalled at once
    return Decision((next_assignment(cell, "train", state.published_version, reason),))


def _end_burst(state: State, plan: Plan, schedule: Schedule, now: float) -> Decision:
    ends = state.published_version >= plan.num_steps or state.stop_reason
    leaving = [c for c in state.cells if c.role == "train"] if ends else _returning(state, plan, schedule, now)
    returning = _bring_back(state, leaving)
    if returning or not _all_serve(state, plan, now, needs_one=False):
        return Decision(tuple(returning))
    return Decision((e.BurstClosed(state.burst, state.published_version),))


def _recalled(state: State, plan: Plan, now: float) -> list[e.Fact]:
    """With work unfinished and no cell to serve it, the youngest satellite returns at once; the core if it is alone."""
    if state.water.level == 0 or state.roster.is_calm and state.roster.num_rolling:
        return []
    if any(c.role == "rollout" and not _is_missing(c, state, plan, now) for c in state.cells):
        return []
    training = [c for c in state.cells if c.role == "train"]
    return _bring_back(state, training[-1:], "no cell serves what is unfinished")


def _missing_dispatches(state: State, plan: Plan) -> list[e.Fact]:
    """Groups of the open burst that are not dispatched yet (a leader may have died between two of them)."""
    wanted, have = plan.num_groups(state.burst_version) - state.num_train_groups, state.num_dispatched[state.burst]
    return [train_group(plan, state.burst, have + i, state.num_train_groups + i, state.burst_version) for i in range(wanted)]


def view_of(state: State, plan: Plan) -> View:
    """The snapshot a schedule decides on."""
    roster = state.roster
    outstanding = plan.num_outstanding * plan.executions_per_group
    next_version = max(state.burst_end, state.published_version)
    to_dispatch = max(0, plan.num_groups(next_version) - state.num_train_groups) * plan.executions_per_group
    return View(
        cells=roster.elastic, next_in_order=roster.next_in_order, num_serving=roster.num_serving,
        num_standalone=roster.num_standalone, water=state.water, capacity=plan.capacity, supply=_supply(state, plan),
        steps_left_in_burst=_steps_left(state),
        share_done=1.0 - state.water.level / outstanding, to_dispatch=to_dispatch)


def _is_unpublished(state: State) -> bool:
    """The burst's last step was finished and its weights are not there: if the core is not at it, it has to be again."""
    return state.steps_finished >= state.burst_end > state.published_version and state.cells[0].role != "train"


def _steps_left(state: State) -> int:
    return 1 if _is_unpublished(state) else state.burst_end - state.steps_finished


def _supply(state: State, plan: Plan) -> Supply:
    waiting = state.num_train_completed - state.steps_finished * plan.groups_per_step
    if _is_unpublished(state):
        waiting += plan.groups_per_step
    backlog = state.backlog
    if backlog is None:
        return Supply(max(waiting, 0), plan.groups_per_step)
    join = state.join_s * backlog.cost_per_s + backlog.micro_step_cost
    return Supply(max(waiting, 0), plan.groups_per_step, backlog.unclaimed_cost, join)
