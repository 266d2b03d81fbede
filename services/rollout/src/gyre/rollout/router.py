"""Which engine a call goes to, and how a call outlives its engine.

A call goes to the engine that served its execution last, if that one admits, else to the least loaded one. When no
engine admits, the call waits: the harness sees a pause. When its engine dies or is drained, the call is replayed on
another one: prompt + emitted tokens, budget reduced, so no token is lost or said twice.
"""

import asyncio
import logging
from collections.abc import AsyncIterable, Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from gyre.contracts.errors import EngineError
from gyre.contracts.events import FinishReason, Sampling, VersionSpan
from gyre.runtime.clock import Clock

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """Bounds of one call's life."""

    max_replays: int = 16  # engines that may fail under one call
    max_engine_errors: int = 2  # `finish = error` answers before the call fails
    stall_timeout_s: float = 3600.0  # wait for an engine that admits
    call_timeout_s: float = 3600.0  # one attempt on one engine


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
    """One try of a job on one engine; the last `num_emitted` ids of `prompt` are output that earlier tries sampled."""

    request_id: str
    namespace: str
    prompt: np.ndarray
    max_tokens: int
    sampling: Sampling
    stop_ids: tuple[int, ...]
    num_emitted: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of an attempt. `index`: place of the first one in the whole output. The last chunk has a `finish`."""

    index: int
    ids: np.ndarray
    logprobs: np.ndarray
    behaviour_logprobs: np.ndarray
    versions: tuple[int, ...]
    finish: str = ""
    detail: str = ""


class EngineGone(EngineError):
    """The engine cannot be reached or gave up the request; another one may serve it."""


class EngineRefused(EngineError):
    """The engine will never serve this request."""


class EngineClient(Protocol):
    """One engine as the router sees it."""

    def generate(self, attempt: Attempt) -> AsyncIterable[Chunk]:
        """Raises EngineGone or EngineRefused."""
        ...


class Output:
    """What was sampled so far, over all attempts of a call."""

    def __init__(self, on_tokens: Callable[[list[int]], None] | None = None) -> None:
        self.ids: list[int] = []
        self.versions: list[int] = []
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
        if chunk.index != len(self.ids):
            raise EngineGone(f"chunk begins at {chunk.index}, but {len(self.ids)} tokens were emitted")
        if not len(new) == len(chunk.versions) == len(chunk.logprobs) == len(chunk.behaviour_logprobs):
            raise EngineGone(f"chunk of {len(new)} ids has {len(chunk.versions)} versions and "
                             f"{len(chunk.logprobs)}/{len(chunk.behaviour_logprobs)} logprobs")
        self.ids.extend(new)
        self.versions.extend(chunk.versions)
        self._logprobs.append(chunk.logprobs)
        self._behaviour.append(chunk.behaviour_logprobs)
        if self._on_tokens:
            self._on_tokens(new)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids int32, logprobs float32, behaviour logprobs float32), each [T]."""
        return (np.asarray(self.ids, np.int32), _joined(self._logprobs), _joined(self._behaviour))

    def spans(self) -> tuple[VersionSpan, ...]:
        """Runs of equal weights version."""
        spans: list[VersionSpan] = []
        start = 0
        for end in range(1, len(self.versions) + 1):
            if end == len(self.versions) or self.versions[end] != self.versions[start]:
                spans.append(VersionSpan(start, end, self.versions[start]))
                start = end
        return tuple(spans)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts).astype(np.float32, copy=False) if parts else np.empty(0, np.float32)


class Stall(Protocol):
    """Counts the time a call waits while no engine admits."""

    def begin(self, now: float) -> None: ...

    def end(self, now: float) -> None: ...


@dataclass(slots=True, eq=False)
class _Engine:
    cell: int
    client: EngineClient
    admitting: bool = False
    live: set[asyncio.Task[None]] = field(default_factory=set)


class Router:
    """Routes of all live calls. One event loop owns it."""

    def __init__(self, clients: dict[int, EngineClient], limits: RouterLimits, clock: Clock) -> None:
        self._engines = {cell: _Engine(cell, client) for cell, client in clients.items()}
        self._limits = limits
        self._clock = clock
        self._affinity: dict[str, int] = {}
        self._admits = asyncio.Event()
        self.num_replayed = 0

    # ------------------------------------------------------------ admission

    def set_admitting(self, cell: int, admitting: bool) -> None:
        """Open or stop an engine for new calls; live ones go on."""
        self._engines[cell].admitting = admitting
        if any(e.admitting for e in self._engines.values()):
            self._admits.set()
        else:
            self._admits.clear()

    def is_admitting(self, cell: int) -> bool:
        return self._engines[cell].admitting

    def num_live(self, cell: int) -> int:
        """Calls that are on the engine now."""
        return len(self._engines[cell].live)

    def forget(self, execution: str) -> None:
        """The execution has ended; its affinity goes."""
        self._affinity.pop(execution, None)

    async def drain(self, cell: int, timeout_s: float) -> tuple[int, int]:
        """Empty an engine that no longer admits. Returns (moved, replayed).

        Its calls are replayed elsewhere if another engine admits; otherwise they may end within `timeout_s` and are
        cut off then, to go on wherever admission opens next. Cached prefixes are not moved yet, so `moved` is 0.
        """
        engine = self._engines[cell]
        self.set_admitting(cell, False)
        if engine.live and not self._admits.is_set():
            await asyncio.wait(set(engine.live), timeout=timeout_s)
        cut = [task for task in engine.live if task.cancel()]
        if cut:
            await asyncio.wait(cut)
        return 0, len(cut)

    # ------------------------------------------------------------ calls

    async def generate(self, job: Job, output: Output, stall: Stall) -> None:
        """Run a call to its end; `output` grows meanwhile and has a `finish` afterwards.

        Raises:
            EngineRefused: no engine will serve it.
            EngineError: engines failed too often, or none admitted in time.
        """
        errors, last = 0, ""
        for number in range(self._limits.max_replays):
            engine = await self._choose(job.execution, stall)
            output.finish = None
            try:
                await self._attempt(engine, job, output, number)
            except EngineGone as error:
                last = str(error)
                log.warning("cell %d: %s: %s", engine.cell, job.request_id, error)
            output.finish = _settled(output, job)
            if output.finish in ("stop", "length"):
                return
            errors += output.finish == "error"
            if errors > self._limits.max_engine_errors:
                break
            self.num_replayed += 1
        raise EngineError(f"{job.request_id}: engines failed it too often{last and f'; the last one: {last}'}")

    async def _choose(self, execution: str, stall: Stall) -> _Engine:
        while not self._admits.is_set():
            stall.begin(self._clock.now())
            try:
                async with asyncio.timeout(self._limits.stall_timeout_s):
                    await self._admits.wait()
            except TimeoutError:
                raise EngineError(f"no engine admitted for {self._limits.stall_timeout_s} s") from None
            finally:
                stall.end(self._clock.now())
        home = self._engines.get(self._affinity.get(execution, -1))
        if home is None or not home.admitting:
            home = min((e for e in self._engines.values() if e.admitting), key=lambda e: (len(e.live), e.cell))
            self._affinity[execution] = home.cell
        return home

    async def _attempt(self, engine: _Engine, job: Job, output: Output, number: int) -> None:
        """One try, in a task of its own, so that `drain` can end the try without ending the call."""
        task = asyncio.create_task(self._stream(engine, _attempt_of(job, output, number, self._limits), output))
        engine.live.add(task)
        task.add_done_callback(engine.live.discard)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            raise
        if task.cancelled():
            raise EngineGone("drained")
        output.cell = engine.cell
        error = task.exception()
        if isinstance(error, EngineGone) or output.finish == "abort":
            # Whoever watches the engine opens it again once it answers.
            self.set_admitting(engine.cell, False)
        if error is not None:
            raise error

    async def _stream(self, engine: _Engine, attempt: Attempt, output: Output) -> None:
        async for chunk in engine.client.generate(attempt):
            output.take(chunk)
            if chunk.finish:
                if chunk.finish in ("error", "abort"):
                    log.warning("cell %d: %s: %s %s", engine.cell, attempt.request_id, chunk.finish, chunk.detail)
                output.finish = chunk.finish  # type: ignore[assignment]
                return
        raise EngineGone("the stream ended without a finish")


def _settled(output: Output, job: Job) -> FinishReason | None:
    """The finish of a call after a try: an engine that died may have said the last token, but not that it was."""
    if output.finish in ("stop", "length"):
        return output.finish
    if output.ids and output.ids[-1] in job.stop_ids:
        return "stop"
    return "length" if len(output.ids) >= job.max_tokens else output.finish


def _attempt_of(job: Job, output: Output, number: int, limits: RouterLimits) -> Attempt:
    """The next try of `job`: what was emitted becomes the end of the prompt and is taken off the budget."""
    prompt = job.prompt
    if output.ids:
        prompt = np.concatenate((prompt, np.asarray(output.ids, np.int32)))
    request_id = f"{job.request_id}.{number}" if number else job.request_id
    return Attempt(request_id, job.execution, prompt, job.max_tokens - len(output.ids), job.sampling, job.stop_ids,
                   len(output.ids), limits.call_timeout_s)
