"""Everything a run said, folded: the one place from which lines, reports and checks are derived.

The ledger is a grow-only map from (type, key) to the fact, stamped with its earliest time. Adding is commutative and
idempotent, so the streams of a run may be read in any interleaving, twice, or again after a crash, and the ledger is
the same. It keeps no token of a call, only what there is to count; `gyre.cli.views` derives what people look at.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from gyre.contracts import events as e
from gyre.contracts.codec import Envelope, decode_envelope, fact_of, from_plain, pack, unpack
from gyre.contracts.errors import BrokenBody, UnknownType
from gyre.contracts.subjects import STREAMS, TABLE, Stream, filter_of, row_of
from gyre.runtime.blobs import BlobStore
from gyre.runtime.bus import Bus

F = TypeVar("F")
CALL_TYPE = "call.recorded"
UNCOUNTED = (e.LeaseTaken, e.BacklogReported, e.EvaluationRequested, e.CallRecorded)


@dataclass(frozen=True, slots=True)
class Stamped(Generic[F]):
    """A fact and when it was first said, in Unix nanoseconds."""

    fact: F
    time_ns: int


@dataclass(frozen=True, slots=True)
class CallNote:
    """What there is to count of a recorded call."""

    call: str
    execution: str
    index: int
    prompt_len: int
    num_sampled: int
    digest: str
    time_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class _CallHead:
    """The fields of `CallRecorded` that a note needs; the others are not decoded."""

    call: str
    execution: str
    index: int
    prompt_len: int
    output_ids: np.ndarray
    digest: str


@dataclass(slots=True)
class RunLedger:
    """The facts of run `run`, each once. `conflicts`: said twice with different contents; `unreadable`: why not."""

    run: str
    facts: dict[type, dict[str, Stamped]] = field(default_factory=dict)
    calls: dict[str, CallNote] = field(default_factory=dict)
    conflicts: set[str] = field(default_factory=set)
    unreadable: dict[str, str] = field(default_factory=dict)

    def all(self, record: type[F]) -> dict[str, Stamped[F]]:
        """Every fact of one type by its key, in order of time."""
        found = self.facts.get(record, {})
        return dict(sorted(found.items(), key=lambda item: (item[1].time_ns, item[0])))

    def get(self, record: type[F], key: str) -> Stamped[F] | None:
        return self.facts.get(record, {}).get(key)

    @property
    def span_ns(self) -> tuple[int, int]:
        """Time of the first and of the last fact; (0, 0) for an empty ledger."""
        times = [s.time_ns for found in self.facts.values() for s in found.values()]
        times += [note.time_ns for note in self.calls.values()]
        return (min(times), max(times)) if times else (0, 0)


def fold(ledger: RunLedger, fact: e.Fact, time_ns: int) -> RunLedger:
    """The ledger with `fact` in it, said at `time_ns`. The given ledger is changed and returned."""
    row = row_of(fact)
    if isinstance(fact, e.CallRecorded):
        _add_call(ledger, CallNote(fact.call, fact.execution, fact.index, fact.prompt_len, len(fact.output_ids),
                                   fact.digest, time_ns))
        return ledger
    if isinstance(fact, UNCOUNTED):
        return ledger
    known = ledger.facts.setdefault(row.record, {})
    key = row.key(fact)
    new = Stamped(fact, time_ns)
    known[key] = new if key not in known else _earlier(ledger, f"{row.type} {key}", known[key], new)
    return ledger


def _earlier(ledger: RunLedger, name: str, one: Stamped, other: Stamped) -> Stamped:
    """Which of two facts with one key counts: the first said, and of a step the one of its newest attempt."""
    if isinstance(one.fact, e.StepFinished) and one.fact.attempt != other.fact.attempt:
        return max(one, other, key=lambda s: s.fact.attempt)
    bodies = pack(one.fact), pack(other.fact)
    if bodies[0] != bodies[1]:
        ledger.conflicts.add(name)
    return min((one.time_ns, bodies[0], one), (other.time_ns, bodies[1], other), key=lambda s: s[:2])[2]


def _add_call(ledger: RunLedger, note: CallNote) -> None:
    known = ledger.calls.get(note.call)
    if known is not None and (known.digest, known.index) != (note.digest, note.index):
        ledger.conflicts.add(f"{CALL_TYPE} {note.call}")
    if known is None or (note.time_ns, note.digest) < (known.time_ns, known.digest):
        ledger.calls[note.call] = note


def fold_message(ledger: RunLedger, message: bytes, blobs: BlobStore | None = None) -> RunLedger:
    """Fold one message as it lies in a stream. `blobs` is asked for a body that travelled by reference.

    What this release cannot read is noted in `unreadable` and never stops the reading.
    """
    name = "a message"
    try:
        envelope = decode_envelope(message)
        name = f"{envelope.type} {envelope.key}"
        if envelope.run == ledger.run:
            _fold_envelope(ledger, envelope, blobs)
    except (BrokenBody, UnknownType) as error:
        ledger.unreadable[name] = str(error)
    return ledger


def _fold_envelope(ledger: RunLedger, envelope: Envelope, blobs: BlobStore | None) -> None:
    body = blobs.get(envelope.ref) if envelope.ref is not None and blobs is not None else None
    if envelope.type != CALL_TYPE:
        fold(ledger, fact_of(envelope, body), envelope.time)
        return
    if envelope.ref is not None and body is None:
        raise BrokenBody(f"{envelope.type}: its body lies at {envelope.ref.path} and was not loaded")
    head = unpack(body, _CallHead) if body is not None else from_plain(envelope.data, _CallHead)
    _add_call(ledger, CallNote(head.call, head.execution, head.index, head.prompt_len, len(head.output_ids),
                               head.digest, envelope.time))


async def load_ledger(bus: Bus, run: str, blobs: BlobStore | None = None, with_calls: bool = True) -> RunLedger:
    """Read what the streams hold of `run` now. `with_calls` False leaves out the call records, by far the most.

    Raises:
        BusError: NATS refused or is gone. InvalidId: `run` is no id.
    """
    ledger = RunLedger(run)
    for stream in STREAMS:
        filters = filters_of(stream, run, with_calls)
        if filters:
            for received in await bus.read_all(stream, filters):
                fold_message(ledger, received.data, blobs)
    return ledger


def filters_of(stream: Stream, run: str, with_calls: bool = True) -> list[str]:
    """The subjects of `stream` whose facts a ledger keeps; none for the evaluators' work queue."""
    skipped = tuple(r for r in UNCOUNTED if r is not e.CallRecorded or not with_calls)
    return [filter_of(run, row.record) for row in TABLE
            if row.stream == stream and not stream.work_queue and row.record not in skipped]


def fold_all(run: str, facts: Iterable[tuple[e.Fact, int]]) -> RunLedger:
    """The ledger of (fact, time in ns) pairs."""
    ledger = RunLedger(run)
    for fact, time_ns in facts:
        fold(ledger, fact, time_ns)
    return ledger
