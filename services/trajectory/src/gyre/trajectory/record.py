"""Calls of one execution: each record is resolved against the call it continues, verified, and kept as a delta.

A record whose base is not here yet waits for it; records may come late, twice and in any order, and the log that
results is the same. Extending a context hashes its new tokens only. A record that does not fit is refused, never
repaired: re-tokenising or re-aligning would train tokens in a context in which they were not sampled.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from gyre.contracts.codec import pack
from gyre.contracts.digest import TokenChain
from gyre.contracts.events import CallRecorded, call_fault

MARK = 4096  # tokens between two kept chain states: a fork re-hashes fewer than this
_LOGPROB_SLACK = 1e-3  # rounding may lift a log-prob of a certain token a little above 0

Reason = Literal["contradiction", "conflict", "base-not-earlier", "keep-without-base", "keep-beyond-base", "digest",
                 "logprob", "unknown-base", "missing-calls"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a record did not fit. One refusal quarantines its execution."""

    call: str
    reason: Reason
    detail: str

    def __str__(self) -> str:
        return f"{self.reason}: call {self.call}: {self.detail}"


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A resolved call: `record` continues `base`; `chain` is the digest state of the whole sequence.

    marks  chain states at the multiples of MARK in (keep_len, length]
    """

    record: CallRecorded
    base: "Call | None"
    chain: TokenChain
    marks: tuple[TokenChain, ...]

    @property
    def length(self) -> int:
        """Tokens of prompt plus output."""
        return self.record.prompt_len + len(self.record.output_ids)

    def own(self) -> np.ndarray:
        """What the call adds to its base: int32 [length - keep_len], prompt delta then output."""
        return np.concatenate((self.record.prompt_delta, self.record.output_ids))

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the sequence, int32, gathered along the calls it continues."""
        pieces: list[np.ndarray] = []
        call: Call | None = self
        while call is not None and stop > start:
            keep = call.record.keep_len
            if stop > keep:
                low = max(start, keep)
                pieces.append(call.own()[low - keep:stop - keep])
                stop = low
            call = call.base
        return np.concatenate(pieces[::-1]) if pieces else np.empty(0, np.int32)

    def chain_at(self, length: int) -> TokenChain:
        """Digest state after the first `length` tokens; re-hashes fewer than MARK of them."""
        if length == self.length:
            return self.chain
        mark = length // MARK * MARK
        return self._mark(mark).extend(self.read(mark, length))

    def _mark(self, length: int) -> TokenChain:
        call: Call | None = self
        while call is not None and length > 0:
            first = call.record.keep_len // MARK * MARK + MARK
            if length >= first:
                return call.marks[(length - first) // MARK]
            call = call.base
        return TokenChain()


@dataclass(slots=True)
class CallLog:
    """All calls of one execution that have arrived, by name: resolved, waiting for their base, refused.

    `refusal` is why the first of the refused did not fit.
    """

    calls: dict[str, Call] = field(default_factory=dict)
    waiting: dict[str, CallRecorded] = field(default_factory=dict)
    refused: dict[str, CallRecorded] = field(default_factory=dict)
    refusal: Refusal | None = None

    def __len__(self) -> int:
        return len(self.calls) + len(self.waiting) + len(self.refused)

    def add(self, record: CallRecorded) -> bool:
        """Take one record. False if it was here already; a record that does not fit sets `refusal`."""
        known = self._known(record.call)
        if known is not None:
            if not _same(known, record):
                self._refuse(record, "conflict", "recorded before with other contents")
            return False
        fault = call_fault(record)
        if fault:
            self._refuse(record, "contradiction", fault)
            self.refused[record.call] = record
            return True
        if record.base_call is not None and record.base_call not in self.calls:
            self.waiting[record.call] = record
            return True
        self._resolve(record)
        return True

    def ordered(self) -> tuple[Call, ...]:
        """Resolved calls in the order in which the gateway accepted them; a base stands before what continues it."""
        return tuple(sorted(self.calls.values(), key=lambda c: (c.record.index, c.record.call)))

    def records(self) -> Iterator[CallRecorded]:
        """Every accepted record, such that adding them to an empty log gives this log."""
        yield from (c.record for c in self.calls.values())
        yield from self.waiting.values()
        yield from self.refused.values()

    def close(self, num_calls: int) -> None:
        """No more records will come: what still waits, or is missing out of `num_calls`, is refused."""
        for record in self.waiting.values():
            self._refuse(record, "unknown-base", f"continues {record.base_call!r}, which was never recorded")
        if len(self) < num_calls and self.refusal is None:
            self.refusal = Refusal("-", "missing-calls", f"{len(self)} of {num_calls} records arrived")

    def _known(self, call: str) -> CallRecorded | None:
        resolved = self.calls.get(call)
        return resolved.record if resolved else self.waiting.get(call) or self.refused.get(call)

    def _resolve(self, record: CallRecorded) -> None:
        """Resolve `record` and whatever waited for it, with an explicit queue."""
        queue = [record]
        while queue:
            record = queue.pop()
            base = self.calls[record.base_call] if record.base_call is not None else None
            call = self._fit(record, base)
            if call is None:
                self.refused[record.call] = record
                continue
            self.calls[record.call] = call
            ready = [r for r in self.waiting.values() if r.base_call == record.call]
            for one in ready:
                del self.waiting[one.call]
            queue.extend(ready)

    def _fit(self, record: CallRecorded, base: Call | None) -> Call | None:
        if base is None and record.keep_len:
            return self._refuse(record, "keep-without-base", f"keeps {record.keep_len} tokens of nothing")
        if base is not None and base.record.index >= record.index:
            return self._refuse(record, "base-not-earlier", f"index {record.index}, base {base.record.index}")
        if base is not None and not 0 <= record.keep_len <= base.length:
            return self._refuse(record, "keep-beyond-base", f"keeps {record.keep_len} of {base.length} tokens")
        if not _logprobs_fit(record):
            return self._refuse(record, "logprob", "a log-prob is not finite or above 0")
        start = base.chain_at(record.keep_len) if base is not None else TokenChain()
        chain, marks = _extend(start, np.concatenate((record.prompt_delta, record.output_ids)))
        if chain.hexdigest() != record.digest:
            return self._refuse(record, "digest", f"tokens give {chain.hexdigest()}, recorded {record.digest}")
        return Call(record, base, chain, marks)

    def _refuse(self, record: CallRecorded, reason: Reason, detail: str) -> None:
        if self.refusal is None:
            self.refusal = Refusal(record.call, reason, detail)


def _extend(chain: TokenChain, ids: np.ndarray) -> tuple[TokenChain, tuple[TokenChain, ...]]:
    """The chain after `ids`, and its states at every multiple of MARK on the way."""
    marks: list[TokenChain] = []
    at = 0
    while at < len(ids):
        stop = at + MARK - chain.length % MARK
        chain = chain.extend(ids[at:stop])
        at = stop
        if chain.length % MARK == 0:
            marks.append(chain)
    return chain, tuple(marks)


def _same(one: CallRecorded, other: CallRecorded) -> bool:
    """Whether two records of one call are one: what differs would make the tree, or a role, depend on which came first."""
    return one is other or pack(one) == pack(other)


def _logprobs_fit(record: CallRecorded) -> bool:
    values = record.behaviour_logprobs
    return bool(np.isfinite(values).all()) and (len(values) == 0 or float(values.max()) <= _LOGPROB_SLACK)
