"""The trajectory service's decisions: facts of four streams in, one `group.completed` per group out.

    group.dispatched ------\\
    call.recorded ----------+-> per execution: records, end, verdict -> settled
    execution.terminated ---+                                             |
    execution.scored -------/          every execution of a group settled -> blobs, then group.completed, exactly once

The facts may come in any interleaving, twice and late. A group leaves memory with its completion; what still arrives
for it is counted and ignored.
"""

from typing import Any

from gyre.contracts.events import (
    CallRecorded,
    ExecutionScored,
    ExecutionTerminated,
    ExecutionUnscorable,
    GroupCompleted,
    GroupDispatched,
)
from gyre.runtime.effects import Effect, Kept, Publish, Tick
from gyre.trajectory.completion import complete, summary
from gyre.trajectory.config import TrajectoryConfig
from gyre.trajectory.group import Verdict
from gyre.trajectory.roles import RoleClassifier, classifier
from gyre.trajectory.state import ExecutionState, Finished, GroupState, State, load, recall, save, take_kept

Event = GroupDispatched | CallRecorded | ExecutionTerminated | ExecutionScored | ExecutionUnscorable | Tick


class TrajectoryCore:
    """A pure state machine; see `gyre.runtime.effects.Core`."""

    local_events: tuple[type, ...] = ()

    def __init__(self, config: TrajectoryConfig, roles: RoleClassifier | None = None) -> None:
        self._config = config
        self._roles = roles or classifier(config.harness)

    def initial(self) -> State:
        return State()

    def step(self, state: State, event: Any, now: float) -> tuple[State, list[Effect]]:
        if isinstance(event, Tick):
            return state, self._tick(state, now)
        if event.group in state.completed:
            state.count("not_taken.late")
            return state, []
        group = state.groups.setdefault(event.group, GroupState())
        if isinstance(event, GroupDispatched):
            self._dispatched(state, group, event)
        else:
            self._of_execution(state, group, event, now)
        return state, self._complete(state, event.group)

    def resume(self, state: State, now: float) -> list[Effect]:
        """Nothing is ever outstanding: blobs are written, and facts stored, together with the state they come from."""
        return []

    def take_kept(self, state: State) -> Kept:
        return take_kept(state)

    def recall(self, state: State, name: str, data: bytes) -> None:
        recall(state, name, data)

    def snapshot(self, state: State) -> bytes:
        return save(state)

    def restore(self, data: bytes) -> State:
        return load(data)

    def _dispatched(self, state: State, group: GroupState, event: GroupDispatched) -> None:
        if group.dispatched is not None:
            state.count("not_taken.duplicate")
            return
        group.dispatched = event
        for execution in [e for e in group.executions if not group.knows(e)]:
            del group.executions[execution]
            state.count("not_taken.unknown-execution")

    def _of_execution(self, state: State, group: GroupState, event: Event, now: float) -> None:
        if not group.knows(event.execution):
            state.count("not_taken.unknown-execution")
            return
        execution = group.executions.setdefault(event.execution, ExecutionState())
        trusted = execution.log.refusal is None
        if isinstance(event, CallRecorded):
            self._recorded(state, execution, event)
        elif isinstance(event, ExecutionTerminated):
            self._terminated(state, execution, event, now)
        else:
            self._judged(state, execution, event)
        execution.settle()  # the last record, or the end, may show that one waits for a base that never was
        if trusted:
            self._count_refusal(state, execution)

    def _count_refusal(self, state: State, execution: ExecutionState) -> None:
        if execution.log.refusal is not None:
            state.count(f"refused.{execution.log.refusal.reason}")

    def _recorded(self, state: State, execution: ExecutionState, event: CallRecorded) -> None:
        if execution.log.add(event):
            execution.unkept.append(event)
        else:
            state.count("not_taken.duplicate")

    def _terminated(self, state: State, execution: ExecutionState, event: ExecutionTerminated, now: float) -> None:
        if execution.terminated is not None:
            state.count("not_taken.duplicate")
            return
        execution.terminated, execution.terminated_at = event, now

    def _judged(self, state: State, execution: ExecutionState, event: Verdict) -> None:
        if execution.verdict is not None:
            state.count("not_taken.duplicate")
            return
        execution.verdict = event

    def _tick(self, state: State, now: float) -> list[Effect]:
        """Give up on records that are overdue; their executions leave the step as unscorable."""
        effects: list[Effect] = []
        for name in list(state.groups):
            overdue = [e for _, e in state.groups[name].members()
                       if e.awaits_records and now - e.terminated_at > self._config.record_timeout_s]
            for execution in overdue:
                execution.log.close(execution.terminated.num_calls if execution.terminated else 0)
                self._count_refusal(state, execution)
            if overdue:
                effects += self._complete(state, name)
        return effects

    def _complete(self, state: State, name: str) -> list[Effect]:
        group = state.groups[name]
        if not group.complete:
            return []
        fact, blobs = complete(name, group, self._config, self._roles)
        del state.groups[name]
        state.completed[name] = Finished(len(fact.outcomes), summary(fact))
        state.left.append(name)
        self._count(state, fact)
        while len(state.completed) > self._config.num_remembered_groups:
            del state.completed[next(iter(state.completed))]
        return [*blobs, Publish(fact)]

    def _count(self, state: State, fact: GroupCompleted) -> None:
        """What operators should see of a group: whether it can teach, and what is not known of its contexts."""
        if fact.purpose == "train":
            state.count(f"groups.{fact.signal}")
            for outcome in fact.outcomes:
                state.count(f"executions.{outcome.kind}")
        for what, num in {"oversize_micro_steps": sum(ref.oversize for ref in fact.micro_steps),
                          "unknown_roots": sum(outcome.num_unknown_roots for outcome in fact.outcomes)}.items():
            if num:
                state.count(what, num)
