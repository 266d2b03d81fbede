"""Calls with whole prompts, written down as a gateway would: each against the earlier call it shares most with.

Prefixes are exact: blocks of ids are found by the chained digest that records carry anyway, the rest by comparison.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from gyre.contracts.digest import TokenChain
from gyre.contracts.events import CallEvidence, CallRecorded, FinishReason, VersionSpan
from gyre.contracts.ids import call_id
from gyre.trajectory.portable.fields import TraceError
from gyre.trajectory.record import Call, CallLog
from gyre.trajectory.tree import common_prefix

STEP = 256  # ids between two places at which prefixes are looked up; a multiple of the digest's block


@dataclass(frozen=True, slots=True, eq=False)
class ForeignCall:
    """One model call as another tool wrote it down.

    place      where it stands, for messages: file and step
    prompt     int32 [P]; output int32 [T]
    logprobs   float32 [T], or None where the trace has none: 0 is recorded
    tags       what the trace says of whose call it is, in the words that `said.py` reads
    replays, task_of  numbers of earlier calls, as in CallEvidence
    """

    place: str
    prompt: np.ndarray
    output: np.ndarray
    logprobs: np.ndarray | None = None
    model: str = "unknown"
    tags: dict[str, str] = field(default_factory=dict)
    replays: int | None = None
    task_of: int | None = None
    finish_reason: FinishReason = "stop"


@dataclass(slots=True)
class Recorder:
    """Takes the calls of one execution in their order.

    `_after`: digest state of k * STEP ids -> what calls that begin so have in the next STEP -> the latest of them. It
    grows by one entry per block of unique ids and one per call.
    """

    execution: str
    group: str
    log: CallLog = field(default_factory=CallLog)
    _after: dict[bytes, dict[bytes, Call]] = field(default_factory=dict)

    def add(self, call: ForeignCall) -> None:
        """Record one call. Raises TraceError if it does not fit into a record."""
        known = self._known(call.prompt)
        base, keep = self._locate(call.prompt, known[-1])
        index, num = len(self.log.calls), len(call.output)
        name = self._name(index)
        delta = call.prompt[keep:].copy()  # a view would keep the whole prompt
        start = base.chain_at(keep) if base else TokenChain()
        logprobs = np.zeros(num, np.float32) if call.logprobs is None else call.logprobs
        evidence = CallEvidence(call.tags, self._named(call.replays), (), self._named(call.task_of))
        record = CallRecorded(
            self.execution, self.group, name, index, base.record.call if base else None, keep, len(call.prompt),
            delta, call.output, logprobs, logprobs, (VersionSpan(0, num, 0),) if num else (), call.finish_reason,
            start.extend(delta).extend(call.output).hexdigest(), call.model, evidence=evidence)
        self.log.add(record)
        if self.log.refusal is not None:
            raise TraceError(f"{call.place}: {self.log.refusal}")
        self._remember(self.log.calls[name], call, known)

    def _known(self, prompt: np.ndarray) -> list[TokenChain]:
        """Digest states of 0, STEP, 2 * STEP ... ids, as far as an earlier call begins with the same ids."""
        chains = [TokenChain()]
        while chains[-1].length + STEP <= len(prompt):
            further = chains[-1].extend(prompt[chains[-1].length:chains[-1].length + STEP])
            if further.state not in self._after:
                break
            chains.append(further)
        return chains

    def _locate(self, prompt: np.ndarray, known: TokenChain) -> tuple[Call | None, int]:
        """The call, of equals the latest, that shares most with the beginning of `prompt`, and how much that is."""
        at, best, most = known.length, None, (-1, -1)
        rest = prompt[at:at + STEP]
        for call in self._after.get(known.state, {}).values():
            same = common_prefix(call.read(at, min(call.length, at + STEP)), rest)
            if (same, call.record.index) > most:
                best, most = call, (same, call.record.index)
        return (best, at + most[0]) if best is not None and at + most[0] else (None, 0)

    def _remember(self, call: Call, foreign: ForeignCall, known: list[TokenChain]) -> None:
        for chain, further in zip(known, known[1:], strict=False):
            self._after[chain.state][further.state] = call
        chain = known[-1]
        sequence = np.concatenate((foreign.prompt[chain.length:], foreign.output))
        for at in range(0, len(sequence) + 1, STEP):  # the last block is short, perhaps empty
            further = chain.extend(sequence[at:at + STEP])
            self._after.setdefault(chain.state, {})[further.tail or further.state] = call
            chain = further

    def _name(self, number: int) -> str:
        return call_id(self.execution, number)

    def _named(self, number: int | None) -> str | None:
        return None if number is None else self._name(number)


def record_calls(calls: Iterable[ForeignCall], execution: str, group: str = "imported") -> tuple[Call, ...]:
    """The calls of one execution, resolved, in their order. Whole prompts are held one at a time. Raises TraceError."""
    recorder = Recorder(execution, group)
    for call in calls:
        recorder.add(call)
    return recorder.log.ordered()


def execution_name(text: str) -> str:
    """An id that calls can be named after, for a session that others call `text`."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-")[:56] or "session"
