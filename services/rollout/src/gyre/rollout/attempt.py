"""A call, its tries, and what was sampled over all of them: the words that router, drain and engine clients share."""

from collections.abc import AsyncIterable, Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from gyre.contracts.errors import EngineError
from gyre.contracts.events import FinishReason, Sampling, VersionSpan


@dataclass(frozen=True, slots=True)
class Job:
    """One call: `prompt` int32 [T]; at most `max_tokens` output tokens."""

    request_id: str
    execution: str
    prompt: np.ndarray
    max_tokens: int
    sampling: Sampling
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of a job on one engine; the last `num_emitted` ids of `prompt` are output that earlier tries sampled.

    `ticket`: KV of exactly this prompt that the engine holds, or can fetch; empty if there is none.
    """

    request_id: str
    namespace: str
    prompt: np.ndarray
    max_tokens: int
    sampling: Sampling
    stop_ids: tuple[int, ...]
    num_emitted: int
    timeout_s: float
    ticket: bytes = b""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of an attempt. `index`: place of the first one in the whole output. The last chunk has a `finish`.

    `kv_versions`: the oldest weights version of the KV behind each token; empty: equal to `versions`.
    `num_reused`, with a finish: tokens of the attempt's prompt that were not computed.
    """

    index: int
    ids: np.ndarray
    logprobs: np.ndarray
    behaviour_logprobs: np.ndarray
    versions: tuple[int, ...]
    finish: str = ""
    detail: str = ""
    kv_versions: tuple[int, ...] = ()
    num_reused: int = 0


class EngineGone(EngineError):
    """The engine cannot be reached or gave up the request; another one may serve it."""


class EngineFull(EngineGone):
    """The engine serves, but its queue is full; it is none of the failures that a call survives only so often."""


class EngineRefused(EngineError):
    """The engine will never serve this request."""


class EngineClient(Protocol):
    """One engine as the router sees it."""

    def generate(self, attempt: Attempt) -> AsyncIterable[Chunk]:
        """Raises EngineGone (EngineFull), or EngineRefused."""
        ...


class Output:
    """What was sampled so far, over all attempts of a call."""

    def __init__(self, on_tokens: Callable[[list[int]], None] | None = None) -> None:
        self.ids: list[int] = []
        self.versions: list[int] = []
        self.kv_versions: list[int] = []
        self.finish: FinishReason | None = None
        self.cell = 0
        self._logprobs: list[np.ndarray] = []
        self._behaviour: list[np.ndarray] = []
        self._on_tokens = on_tokens

    def take(self, chunk: Chunk) -> None:
        """Append a chunk. Raises EngineGone if it does not continue what is there."""
        new = chunk.ids.tolist()
        if not new:
            return
        kv_versions = chunk.kv_versions or chunk.versions
        if chunk.index != len(self.ids):
            raise EngineGone(f"chunk begins at {chunk.index}, but {len(self.ids)} tokens were emitted")
        if not len(new) == len(chunk.versions) == len(chunk.logprobs) == len(chunk.behaviour_logprobs):
            raise EngineGone(f"chunk of {len(new)} ids has {len(chunk.versions)} versions and "
                             f"{len(chunk.logprobs)}/{len(chunk.behaviour_logprobs)} logprobs")
        if len(kv_versions) != len(new):
            raise EngineGone(f"chunk of {len(new)} ids has {len(kv_versions)} KV versions")
        self.ids.extend(new)
        self.versions.extend(chunk.versions)
        self.kv_versions.extend(kv_versions)
        self._logprobs.append(chunk.logprobs)
        self._behaviour.append(chunk.behaviour_logprobs)
        if self._on_tokens:
            self._on_tokens(new)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids int32, logprobs float32, behaviour logprobs float32), each [T]."""
        return (np.asarray(self.ids, np.int32), _joined(self._logprobs), _joined(self._behaviour))

    def spans(self) -> tuple[VersionSpan, ...]:
        """Runs of equal weights version and equal version of the KV behind it."""
        spans: list[VersionSpan] = []
        start = 0
        pairs = list(zip(self.versions, self.kv_versions, strict=True))
        for end in range(1, len(pairs) + 1):
            if end == len(pairs) or pairs[end] != pairs[start]:
                version, kv_version = pairs[start]
                spans.append(VersionSpan(start, end, version, None if kv_version == version else kv_version))
                start = end
        return tuple(spans)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts).astype(np.float32, copy=False) if parts else np.empty(0, np.float32)


def settled(output: Output, job: Job, finish: str) -> FinishReason | None:
    """The finish of a call after a try: an engine that died may have said the last token, but not that it was."""
    if finish in ("stop", "length"):
        return finish  # type: ignore[return-value]
    if output.ids and output.ids[-1] in job.stop_ids:
        return "stop"
    return "length" if len(output.ids) >= job.max_tokens else None


def attempt_of(job: Job, output: Output, number: int, timeout_s: float, ticket: bytes = b"") -> Attempt:
    """The next try of `job`: what was emitted becomes the end of the prompt and is taken off the budget."""
    prompt = job.prompt
    if output.ids:
        prompt = np.concatenate((prompt, np.asarray(output.ids, np.int32)))
    request_id = f"{job.request_id}.{number}" if number else job.request_id
    return Attempt(request_id, job.execution, prompt, job.max_tokens - len(output.ids), job.sampling, job.stop_ids,
                   len(output.ids), timeout_s, ticket)
