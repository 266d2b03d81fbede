"""The decisions of `gyre-rollout serve`, pure: dispatched groups and roles in, facts and work for the shell out.

Numbered by what may happen: 1 a group is dispatched, 2 a harness starts, 3 calls finish, 4 a limit fires, 5 a harness
exits, 6 its workspace is preserved, 7 a cell changes role, 8 weights are published.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from gyre.contracts import codec
from gyre.contracts.events import (
    CellRoleAssigned,
    CellTrainReleased,
    ContextsReported,
    EvaluationRequested,
    ExecutionStarted,
    ExecutionTerminated,
    GroupDispatched,
    WeightsPublished,
)
from gyre.rollout import cell as cells
from gyre.rollout import execution as life
from gyre.rollout.cell import Cell
from gyre.rollout.execution import Execution
from gyre.rollout.local import (
    LOCAL_EVENTS,
    CallFinished,
    ContextsDue,
    DiscardExecution,
    EngineAsleep,
    EngineLost,
    EngineServing,
    HarnessNotStarted,
    HarnessStarted,
    KillHarness,
    LimitFired,
    OpenGateway,
    PreserveWorkspace,
    ProcessExited,
    ServiceWasAway,
    StartHarness,
    WorkspacePreserved,
)
from gyre.runtime.effects import Effect, Publish

MAX_GROUPS_REMEMBERED = 4096


@dataclass(slots=True)
class State:
    """Everything `serve` has to remember. `executions` are those that have not terminated, in order of dispatch."""

    executions: dict[str, Execution] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)  # group -> burst, so that none is dispatched twice
    cells: dict[int, Cell] = field(default_factory=dict)
    weights: WeightsPublished | None = None
    num_terminated: int = 0
    num_reports: int = 0  # of contexts
    reported: dict[str, int] = field(default_factory=dict)  # the last of them
    seen_at: float = 0.0  # time of the last event


Effects = list[Effect]


class RolloutCore:
    """`max_running`: executions that are not just waiting for their start, at once. Cells are 0..`num_cells` - 1."""

    local_events: tuple[type, ...] = LOCAL_EVENTS

    def __init__(self, max_running: int, num_cells: int) -> None:
        self._max_running = max_running
        self._num_cells = num_cells
        self._handlers: dict[type, Callable[[State, Any, float], Effects]] = {
            GroupDispatched: self._group_dispatched, HarnessStarted: self._harness_started,
            HarnessNotStarted: self._harness_not_started, CallFinished: self._call_finished,
            LimitFired: self._limit_fired, ProcessExited: self._process_exited,
            WorkspacePreserved: self._workspace_preserved, CellRoleAssigned: self._role_assigned,
            CellTrainReleased: self._train_released, WeightsPublished: self._weights_published,
            EngineAsleep: self._engine_asleep, EngineServing: self._engine_serving,
            EngineLost: self._engine_lost, ContextsDue: self._contexts_due, ServiceWasAway: self._service_was_away,
        }

    def initial(self) -> State:
        return State(cells={cell: Cell(cell) for cell in range(self._num_cells)})

    def step(self, state: State, event: Any, now: float) -> tuple[State, Effects]:
        state.seen_at = max(state.seen_at, now)
        handler = self._handlers.get(type(event))
        return state, handler(state, event, now) if handler else []

    def resume(self, state: State, now: float) -> Effects:
        """Every harness is adopted or started, every kill, packing and cell is taken up again; then the gateway opens.

        Opened earlier, it would tell a harness that outlived this service that its execution has ended.
        """
        effects: Effects = []
        for execution in state.executions.values():
            if execution.takes_calls:
                effects.append(_start(execution, is_running=execution.phase == "running"))
            elif execution.phase == "ending":
                effects.append(KillHarness(execution.id))
            elif execution.phase == "preserving":
                effects.append(PreserveWorkspace(execution.id))
        effects += self._settle(state, *state.cells)
        effects += self._start_waiting(state, now)
        away_s = max(0.0, now - state.seen_at) if state.seen_at else 0.0
        return [*effects, OpenGateway(away_s, tuple(state.executions), may_sweep=bool(state.groups))]

    def snapshot(self, state: State) -> bytes:
        return codec.pack(state)

    def restore(self, data: bytes) -> State:
        return codec.unpack(data, State)

    # ------------------------------------------------------------ executions

    def _group_dispatched(self, state: State, fact: GroupDispatched, now: float) -> Effects:
        if fact.group in state.groups:
            return []
        state.groups[fact.group] = fact.burst
        while len(state.groups) > MAX_GROUPS_REMEMBERED:
            state.groups.pop(next(iter(state.groups)))
        for spec in fact.executions:
            state.executions[spec.execution] = Execution(spec, fact.group, fact.query, fact.task, fact.purpose,
                                                         fact.version)
        return self._start_waiting(state, now)

    def _start_waiting(self, state: State, now: float) -> Effects:
        waiting = [e for e in state.executions.values() if e.phase == "dispatched"]
        room = self._max_running - (len(state.executions) - len(waiting))
        effects: Effects = []
        for execution in waiting[:max(room, 0)]:
            state.executions[execution.id] = life.starting(execution, now)
            effects.append(_start(execution))
        return effects

    def _harness_started(self, state: State, event: HarnessStarted, now: float) -> Effects:
        execution = state.executions.get(event.execution)
        if execution is None or execution.phase != "starting":
            return []
        state.executions[execution.id] = life.running(execution, event.pid, now)
        return [Publish(ExecutionStarted(execution.id, execution.group, execution.purpose, execution.version))]

    def _harness_not_started(self, state: State, event: HarnessNotStarted, now: float) -> Effects:
        execution = state.executions.get(event.execution)
        if execution is None or execution.phase not in ("starting", "ending"):
            return []
        if execution.phase == "starting" and execution.num_starts < life.MAX_STARTS:
            state.executions[execution.id] = life.starting(execution, now)
            return [_start(execution)]
        dropped = replace(execution, ending="dropped", reason=f"not started: {event.reason}", ended_at=now)
        return self._terminate(state, dropped, None, now)

    def _call_finished(self, state: State, event: CallFinished, now: float) -> Effects:
        record = event.record
        execution = state.executions.get(record.execution)
        if execution is None or not execution.takes_calls or record.index != execution.num_calls:
            return []
        state.executions[execution.id] = life.called(execution, event.stall_s, record.prompt_len + len(record.output_ids))
        return [Publish(record)]

    def _contexts_due(self, state: State, event: ContextsDue, now: float) -> Effects:
        contexts = {e.id: e.context for e in state.executions.values() if e.context}
        if contexts == state.reported:
            return []
        state.reported, state.num_reports = contexts, state.num_reports + 1
        return [Publish(ContextsReported(state.num_reports, contexts))]

    def _service_was_away(self, state: State, event: ServiceWasAway, now: float) -> Effects:
        for execution in state.executions.values():
            if execution.phase == "running":
                state.executions[execution.id] = replace(execution, stall_s=execution.stall_s + event.seconds)
        return []

    def _limit_fired(self, state: State, event: LimitFired, now: float) -> Effects:
        execution = state.executions.get(event.execution)
        ending = life.limited(execution, event.limit) if execution else None
        if ending is None:
            return []
        state.executions[ending.id] = ending
        return [KillHarness(ending.id)]

    def _process_exited(self, state: State, event: ProcessExited, now: float) -> Effects:
        execution = state.executions.get(event.execution)
        gone = life.exited(execution, event, now) if execution else None
        if gone is None:
            return []
        state.executions[gone.id] = gone
        if gone.ending == "dropped":
            return self._terminate(state, gone, None, now)
        return [PreserveWorkspace(gone.id)]

    def _workspace_preserved(self, state: State, event: WorkspacePreserved, now: float) -> Effects:
        execution = state.executions.get(event.execution)
        if execution is None or execution.phase != "preserving":
            return []
        reason = "; ".join(filter(None, (execution.reason, event.reason)))
        execution = replace(execution, reason=reason)
        if event.snapshot is None:
            # Nobody can score it, and that is not the policy's doing.
            execution = replace(execution, ending="dropped", reason=f"workspace not preserved: {reason}")
        return self._terminate(state, execution, event, now)

    def _terminate(self, state: State, execution: Execution, preserved: WorkspacePreserved | None,
                   now: float) -> Effects:
        """The one place where an execution ends."""
        del state.executions[execution.id]
        state.num_terminated += 1
        snapshot = preserved.snapshot if preserved else None
        begun = execution.started_at or execution.starting_at
        effects: Effects = [Publish(ExecutionTerminated(
            execution=execution.id, group=execution.group, query=execution.query, purpose=execution.purpose,
            ending=execution.ending, num_calls=execution.num_calls,
            wall_s=max(0.0, (execution.ended_at or now) - begun), snapshot=snapshot, limit=execution.limit,
            reason=execution.reason, exit_code=execution.exit_code, num_harness_errors=execution.num_errors,
            stall_s=execution.stall_s, undelivered=execution.undelivered, max_context=execution.max_context))]
        if snapshot is not None and execution.ending != "dropped":
            effects.append(Publish(EvaluationRequested(execution.id, execution.group, execution.query, execution.task,
                                                       execution.purpose, execution.ending, snapshot)))
        return [*effects, DiscardExecution(execution.id), *self._start_waiting(state, now)]

    # ------------------------------------------------------------ cells

    def _role_assigned(self, state: State, fact: CellRoleAssigned, now: float) -> Effects:
        known = state.cells.get(fact.cell)
        changed = cells.assigned(known, fact) if known else None
        if changed is None:
            return []
        state.cells[fact.cell] = changed
        return self._settle(state, fact.cell)

    def _train_released(self, state: State, fact: CellTrainReleased, now: float) -> Effects:
        known = state.cells.get(fact.cell)
        if known is None:
            return []
        state.cells[fact.cell] = cells.train_released(known, fact)
        return self._settle(state, fact.cell)

    def _weights_published(self, state: State, fact: WeightsPublished, now: float) -> Effects:
        if state.weights is not None and fact.version <= state.weights.version:
            return []
        state.weights = fact
        return self._settle(state, *state.cells)

    def _engine_asleep(self, state: State, event: EngineAsleep, now: float) -> Effects:
        state.cells[event.cell], fact = cells.asleep(state.cells[event.cell], event)
        return [Publish(fact, epoch=fact.epoch)] if fact else []

    def _engine_serving(self, state: State, event: EngineServing, now: float) -> Effects:
        state.cells[event.cell], fact = cells.serving(state.cells[event.cell], event)
        return [Publish(fact, epoch=fact.epoch)] if fact else []

    def _engine_lost(self, state: State, event: EngineLost, now: float) -> Effects:
        state.cells[event.cell], fact = cells.lost(state.cells[event.cell], event)
        return [Publish(fact, epoch=fact.epoch)] if fact else []

    def _settle(self, state: State, *numbers: int) -> Effects:
        targets = (cells.target(state.cells[n], state.weights) for n in numbers)
        return [target for target in targets if target is not None]


def _start(execution: Execution, is_running: bool = False) -> StartHarness:
    return StartHarness(execution.id, execution.group, execution.task, execution.purpose, execution.spec, is_running)
