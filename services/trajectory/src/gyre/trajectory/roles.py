"""Which agent a call belongs to, and which role class it has.

Explicit word of the harness comes first (`said.py` knows what the harnesses say), then the stream alone, call by call
in the order of the gateway:

1. a context that quotes the whole answer of an earlier call goes on with that call's agent, and that call was a summary;
2. a context whose first user text is an argument of a call's open tool call is a sub-agent of that call's agent;
3. a call that holds the whole prompt with which its base's context began is of that context: of its agent;
4. a context that replays an earlier answer as the assistant's goes on with that call's agent;
5. the first context is the main agent's; any other is taken as the main agent's, and counted as unknown.

Order of arrival is never used: sub-agents run beside one another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from gyre.contracts.events import CallRecorded, RoleClass
from gyre.trajectory.record import Call
from gyre.trajectory.said import READERS, Reader, Said
from gyre.trajectory.tree import Tree

ROLE_ORDERS: dict[str, tuple[RoleClass, ...]] = {
    "paper": ("main", "main-summary", "sub-agent", "sub-agent-summary"),
    "announcement": ("main", "sub-agent", "main-summary", "sub-agent-summary"),
}
MAIN = "main"

KnownBy = Literal["harness", "stream", "unknown"]


@dataclass(frozen=True, slots=True)
class CallRole:
    """Role of one call. `agent` names the agent inside its execution; `known_by` says what the role rests on."""

    role_class: RoleClass
    agent: str
    known_by: KnownBy


class RoleClassifier(Protocol):
    """Gives every call of one execution its role."""

    def classify(self, calls: Sequence[Call]) -> tuple[CallRole, ...]:
        """Roles of `calls`, which stand in gateway order (a base before what continues it)."""
        ...


@dataclass(frozen=True, slots=True)
class _Context:
    """A context: the calls that go on from one opening prompt of `length` tokens."""

    length: int
    agent: str
    is_sub: bool


@dataclass(slots=True)
class _Reading:
    """What was read of one execution so far, by name of call."""

    contexts: dict[str, _Context] = field(default_factory=dict)
    summaries: set[str] = field(default_factory=set)
    known: dict[str, KnownBy] = field(default_factory=dict)
    subs: dict[str, bool] = field(default_factory=dict)  # said agent -> whether it is a sub-agent


def classifier(harness: str) -> "HarnessRoles":
    """The classifier for one harness, by the name of its reader, or for `any`. `X-Gyre-*` always counts."""
    names = READERS if harness == "any" else dict.fromkeys(("gyre", harness))
    return HarnessRoles([READERS[name] for name in names])


class HarnessRoles:
    """What the readers of harnesses understand, then the stream."""

    def __init__(self, readers: Sequence[Reader] = tuple(READERS.values())) -> None:
        self._readers = tuple(readers)

    def classify(self, calls: Sequence[Call]) -> tuple[CallRole, ...]:
        reading = _Reading()
        for call in calls:
            self._read(call, reading)
        return tuple(self._role(call.record.call, reading) for call in calls)

    def _read(self, call: Call, reading: _Reading) -> None:
        record = call.record
        said = self._said(record)
        context, known = self._placed(record, reading)
        if said is not None and said.agent is not None:
            # Of agents that are only named, the first to speak is the main one.
            is_sub = said.is_sub if said.is_sub is not None else reading.subs.get(said.agent, bool(reading.subs))
            context = replace(context, agent=said.agent, is_sub=is_sub)
        elif said is not None and said.is_sub is not None and said.is_sub != context.is_sub:
            context = replace(context, agent=f"sub-{record.index}" if said.is_sub else MAIN, is_sub=said.is_sub)
        if said is not None:
            known = "harness"
            if said.is_summary:
                reading.summaries.add(record.call)
        reading.subs.setdefault(context.agent, context.is_sub)
        reading.contexts[record.call], reading.known[record.call] = context, known

    def _said(self, record: CallRecorded) -> Said | None:
        return next((said for said in (read(record) for read in self._readers) if said is not None), None)

    def _placed(self, record: CallRecorded, reading: _Reading) -> tuple[_Context, KnownBy]:
        """The context that `record` begins or goes on with. What it shows comes before where its tokens hang: two contexts
        may begin with the same prompt."""
        evidence, length = record.evidence, record.prompt_len
        quoted = [name for name in evidence.quotes if name in reading.contexts]
        if quoted:
            reading.summaries.add(quoted[-1])
            return replace(reading.contexts[quoted[-1]], length=length), "stream"
        if evidence.task_of in reading.contexts:
            return _Context(length, f"sub-{record.index}", is_sub=True), "stream"
        continued = _continued(record, reading.contexts)
        if continued is not None:
            return continued, "stream"
        if evidence.replays in reading.contexts:
            return replace(reading.contexts[evidence.replays], length=length), "stream"
        return _Context(length, MAIN, is_sub=False), "unknown" if reading.contexts else "stream"

    def _role(self, name: str, reading: _Reading) -> CallRole:
        context = reading.contexts[name]
        agent: RoleClass = "sub-agent" if context.is_sub else "main"
        summary: RoleClass = "sub-agent-summary" if context.is_sub else "main-summary"
        return CallRole(summary if name in reading.summaries else agent, context.agent, reading.known[name])


def _continued(record: CallRecorded, contexts: Mapping[str, _Context]) -> _Context | None:
    """The context that a call goes on with: it keeps the whole prompt that opened it, or the gateway knows better."""
    base = contexts.get(record.base_call or "")
    holds = base is not None and (record.evidence.continues or 0 < base.length <= record.keep_len)
    return base if holds else None


def leaf_calls(tree: Tree) -> dict[int, int]:
    """Leaf segment -> number of the first call whose sequence ends where the leaf ends."""
    found: dict[int, int] = {}
    for number, (call, segment) in enumerate(zip(tree.calls, tree.end, strict=True)):
        is_leaf = segment >= 0 and tree.exit[segment] == segment + 1
        if is_leaf and call.length == tree.depth[segment] + tree.size(segment):
            found.setdefault(segment, number)
    return found


def leaf_roles(tree: Tree, roles: Sequence[CallRole]) -> dict[int, RoleClass]:
    """Leaf segment -> role class of its path: that of the first call that ends there."""
    return {segment: roles[number].role_class for segment, number in sorted(leaf_calls(tree).items())}
