"""Everything a run said, each fact once: what lines, reports and checks are derived from.

A fact log is a grow-only map from (type, key) to the fact, stamped with its earliest time. Adding is commutative and
idempotent, so the streams of a run may be read in any interleaving, twice, or again after a crash, and the log is
the same. It keeps no token of a call, only what there is to count; `gyre.cli.views` derives what people look at.
"""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from gyre.contracts import events as e
from gyre.contracts.codec import Envelope, decode_envelope, fact_of, from_plain, pack, unpack
from gyre.contracts.errors import BrokenBody, UnknownType
from gyre.contracts.subjects import TABLE, Stream, filter_of, row_of
from gyre.runtime.blobs import BlobStore

F = TypeVar("F")
CALL_TYPE = "call.recorded"
UNCOUNTED = (e.LeaseTaken, e.BacklogReported, e.EvaluationRequested, e.CallRecorded)


@dataclass(frozen=True, slots=True)
class Stamped(Generic[F]):
    """A fact and when it was first said, in Unix seconds."""

    fact: F
    time_s: float


@dataclass(frozen=True, slots=True)
class CallNote:
    """What there is to count of a recorded call."""

    call: str
    execution: str
    index: int
    prompt_len: int
    num_sampled: int
    digest: str
    time_s: float
    base_call: str | None = None
    keep_len: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _CallHead:
    """The fields of `CallRecorded` that a note needs; the others are not decoded."""

    call: str
    execution: str
    index: int
    prompt_len: int
    output_ids: np.ndarray
    digest: str
    base_call: str | None
    keep_len: int


@dataclass(slots=True)
class FactLog:
    """The facts of one run. Messages of other runs than `run` are passed over, if it is given.

    conflicts   facts that were said twice with different contents
    unreadable  messages that this release cannot read -> why
    """

    run: str = ""
    facts: dict[type, dict[str, Stamped]] = field(default_factory=dict)
    calls: dict[str, CallNote] = field(default_factory=dict)
    conflicts: set[str] = field(default_factory=set)
    unreadable: dict[str, str] = field(default_factory=dict)

    def all(self, record: type[F]) -> dict[str, Stamped[F]]:
        """Every fact of one type by its key, in order of time."""
        found = self.facts.get(record, {})
        return dict(sorted(found.items(), key=lambda item: (item[1].time_s, item[0])))

    def get(self, record: type[F], key: str) -> Stamped[F] | None:
        return self.facts.get(record, {}).get(key)

    @property
    def span_s(self) -> tuple[float, float]:
        """Time of the first and of the last fact; (0, 0) if there is none."""
        times = [s.time_s for found in self.facts.values() for s in found.values()]
        times += [note.time_s for note in self.calls.values()]
        return (min(times), max(times)) if times else (0.0, 0.0)

    def fold(self, fact: e.Fact, time_s: float) -> None:
        """Take `fact`, said at `time_s`."""
        row = row_of(fact)
        if isinstance(fact, e.CallRecorded):
            self._add_call(CallNote(fact.call, fact.execution, fact.index, fact.prompt_len, len(fact.output_ids),
                                    fact.digest, time_s, fact.base_call, fact.keep_len))
        elif not isinstance(fact, UNCOUNTED):
            known = self.facts.setdefault(row.record, {})
            key = row.key(fact)
            new = Stamped(fact, time_s)
            known[key] = new if key not in known else self._which(f"{row.type} {key}", known[key], new)

    def fold_message(self, message: bytes, blobs: BlobStore | None = None) -> None:
        """Take one message as it lies in a stream. `blobs` is asked for a body that travelled by reference.

        What this release cannot read is noted in `unreadable` and never stops the reading.
        """
        name = "a message"
        try:
            envelope = decode_envelope(message)
            name = f"{envelope.type} {envelope.key}"
            if self.run in ("", envelope.run):
                self._fold_envelope(envelope, blobs)
        except (BrokenBody, UnknownType) as error:
            self.unreadable[name] = str(error)

    def _fold_envelope(self, envelope: Envelope, blobs: BlobStore | None) -> None:
        body = blobs.get(envelope.ref) if envelope.ref is not None and blobs is not None else None
        time_s = envelope.time / 1e9
        if envelope.type != CALL_TYPE:
            self.fold(fact_of(envelope, body), time_s)
            return
        if envelope.ref is not None and body is None:
            raise BrokenBody(f"{envelope.type}: its body lies at {envelope.ref.path} and was not loaded")
        head = unpack(body, _CallHead) if body is not None else from_plain(envelope.data, _CallHead)
        self._add_call(CallNote(head.call, head.execution, head.index, head.prompt_len, len(head.output_ids),
                                head.digest, time_s, head.base_call, head.keep_len))

    def _which(self, name: str, one: Stamped, other: Stamped) -> Stamped:
        """Which of two facts with one key counts: the first said, and of a step the one of its newest attempt."""
        if isinstance(one.fact, e.StepFinished) and one.fact.attempt != other.fact.attempt:
            return max(one, other, key=lambda s: s.fact.attempt)
        bodies = pack(one.fact), pack(other.fact)
        if bodies[0] != bodies[1]:
            self.conflicts.add(name)
        return min((one.time_s, bodies[0], one), (other.time_s, bodies[1], other), key=lambda s: s[:2])[2]

    def _add_call(self, note: CallNote) -> None:
        known = self.calls.get(note.call)
        if known is not None and (known.digest, known.index) != (note.digest, note.index):
            self.conflicts.add(f"{CALL_TYPE} {note.call}")
        if known is None or (note.time_s, note.digest) < (known.time_s, known.digest):
            self.calls[note.call] = note


def filters_of(stream: Stream, run: str, with_calls: bool = True) -> list[str]:
    """The subjects of `stream` whose facts are counted; none for the evaluators' work queue."""
    skipped = tuple(r for r in UNCOUNTED if r is not e.CallRecorded or not with_calls)
    return [filter_of(run, row.record) for row in TABLE
            if row.stream == stream and not stream.work_queue and row.record not in skipped]
