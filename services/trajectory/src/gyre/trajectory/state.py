"""What the core remembers: the facts of every group that is not complete. Trees are derived from them when it is."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from gyre.contracts import codec
from gyre.contracts.events import (
    CallRecorded,
    ExecutionScored,
    ExecutionTerminated,
    ExecutionUnscorable,
    GroupDispatched,
)
from gyre.runtime.effects import Kept
from gyre.trajectory.group import Verdict
from gyre.trajectory.record import CallLog, Refusal


@dataclass(slots=True)
class ExecutionState:
    """What is known of one execution. `terminated_at` is when this service heard of its end."""

    log: CallLog = field(default_factory=CallLog)
    terminated: ExecutionTerminated | None = None
    terminated_at: float = 0.0
    verdict: Verdict | None = None
    unkept: list[CallRecorded] = field(default_factory=list)  # records that are in no snapshot yet

    @property
    def quarantine(self) -> str:
        """Why its records cannot be trusted, or ""."""
        return str(self.log.refusal) if self.log.refusal else ""

    @property
    def awaits_records(self) -> bool:
        """Terminated, but some of its call records are still on their way."""
        return self.terminated is not None and self.log.refusal is None and len(self.log) < self.terminated.num_calls

    def settle(self) -> bool:
        """Whether nothing that is still to come can change what it counts for."""
        if self.terminated is None:
            return False
        if self.terminated.ending == "dropped" or self.log.refusal is not None:
            return True
        if self.awaits_records:
            return False
        self.log.close(self.terminated.num_calls)
        return self.log.refusal is not None or self.terminated.snapshot is None or self.verdict is not None


@dataclass(slots=True)
class GroupState:
    """One group; facts of its executions may come before it is known to be dispatched."""

    dispatched: GroupDispatched | None = None
    executions: dict[str, ExecutionState] = field(default_factory=dict)

    def members(self) -> Iterator[tuple[str, ExecutionState]]:
        """Executions in the order of their dispatch."""
        if self.dispatched is not None:
            for spec in self.dispatched.executions:
                yield spec.execution, self.executions.setdefault(spec.execution, ExecutionState())

    def knows(self, execution: str) -> bool:
        """Whether `execution` is, or may turn out to be, of this group."""
        return self.dispatched is None or any(spec.execution == execution for spec in self.dispatched.executions)

    @property
    def num_settled(self) -> int:
        return sum(execution.settle() for _, execution in self.members())

    @property
    def complete(self) -> bool:
        return self.dispatched is not None and all(execution.settle() for _, execution in self.members())


@dataclass(frozen=True, slots=True)
class Finished:
    """What is remembered of a completed group."""

    num_executions: int
    detail: str


@dataclass(slots=True)
class State:
    """Open groups, what came of completed ones (oldest first), and counts for operators."""

    groups: dict[str, GroupState] = field(default_factory=dict)
    completed: dict[str, Finished] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)  # groups that completed since the last snapshot

    def count(self, what: str, num: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + num


@dataclass(frozen=True, slots=True)
class _SavedExecution:
    execution: str
    refusal: Refusal | None
    terminated: ExecutionTerminated | None
    terminated_at: float
    scored: ExecutionScored | None
    unscorable: ExecutionUnscorable | None


@dataclass(frozen=True, slots=True)
class _SavedGroup:
    group: str
    dispatched: GroupDispatched | None
    executions: tuple[_SavedExecution, ...]


@dataclass(frozen=True, slots=True)
class _SavedState:
    groups: tuple[_SavedGroup, ...]
    completed: dict[str, Finished]
    counts: dict[str, int]


def save(state: State) -> bytes:
    """The state as MessagePack: facts only, since everything else follows from them; call records are kept beside it."""
    groups = tuple(
        _SavedGroup(name, group.dispatched, tuple(_saved(e, execution) for e, execution in group.executions.items()))
        for name, group in state.groups.items())
    return codec.pack(_SavedState(groups, state.completed, state.counts))


def _saved(name: str, execution: ExecutionState) -> _SavedExecution:
    verdict = execution.verdict
    return _SavedExecution(name, execution.log.refusal, execution.terminated, execution.terminated_at,
                           verdict if isinstance(verdict, ExecutionScored) else None,
                           verdict if isinstance(verdict, ExecutionUnscorable) else None)


def take_kept(state: State) -> Kept:
    """Records that came, and groups that completed, since the last snapshot."""
    rows: list[tuple[str, bytes]] = []
    for group, its_state in state.groups.items():
        for execution in its_state.executions.values():
            rows += [(f"{group}/{r.execution}/{r.call}", codec.pack(r)) for r in execution.unkept]
            execution.unkept.clear()
    dropped = tuple(f"{group}/" for group in state.left)
    state.left.clear()
    return Kept(tuple(rows), dropped)


def recall(state: State, name: str, data: bytes) -> None:
    """Put a kept record back; its digest is verified again. Raises BrokenBody."""
    record = codec.unpack(data, CallRecorded)
    group = state.groups.get(name.partition("/")[0])
    if group is not None and record.execution in group.executions:
        group.executions[record.execution].log.add(record)


def load(data: bytes) -> State:
    """The inverse of `save`. Raises BrokenBody."""
    saved = codec.unpack(data, _SavedState)
    groups = {g.group: GroupState(g.dispatched, {e.execution: _loaded(e) for e in g.executions}) for g in saved.groups}
    return State(groups, dict(saved.completed), dict(saved.counts))


def _loaded(saved: _SavedExecution) -> ExecutionState:
    return ExecutionState(CallLog(refusal=saved.refusal), saved.terminated, saved.terminated_at,
                          saved.scored or saved.unscorable)
