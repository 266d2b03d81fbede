"""An engine without a model: tokens and delays come from a script, everything else is as the contract says.

It drives the control plane (gateway, router, transitions) where what is said does not matter but when it is said does.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gyre.contracts.errors import EngineError
from gyre.rollout.engines.base import (
    AdmissionClosed,
    EngineBusy,
    EventStream,
    Finish,
    GenerateRequest,
    InvalidRequest,
    LoadReport,
    ProbeResult,
    TokenEvent,
)
from gyre.rollout.engines.moving import Capabilities, Mover, MoveRefused

if TYPE_CHECKING:
    import torch

Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class ScriptedToken:
    """One token of a script, emitted `delay_s` after the one before it."""

    token_id: int
    logprob: float = -1.0
    delay_s: float = 0.0


class Script(Protocol):
    """What a request is answered. It may end early: the request then finishes with `stop`."""

    def __call__(self, request: GenerateRequest) -> Iterator[ScriptedToken]:
        """Yields the tokens after `request.prompt_ids`; a replay must get the same ones (depend on positions)."""
        ...


@dataclass(frozen=True)
class ScriptedConfig:
    """Bounds, as in the torch engine; `kv_tokens` is only counted."""

    kv_tokens: int = 65_536
    max_running: int = 64
    max_waiting: int = 1024


def seeded_script(vocab_size: int, delay_s: float = 0.0) -> Script:
    """Tokens drawn from (seed, position) alone, uniform over the vocabulary, each `delay_s` after the last."""
    logprob = -math.log(vocab_size)

    def script(request: GenerateRequest) -> Iterator[ScriptedToken]:
        position = len(request.prompt_ids)
        while True:
            noise = hashlib.blake2b(f"{request.seed}/{position}".encode(), digest_size=8).digest()
            yield ScriptedToken(int.from_bytes(noise, "little") % vocab_size, logprob, delay_s)
            position += 1

    return script


class ScriptedEngine:
    """`gyre.rollout.engines.base.Engine` over a `Script`. Starts without weights and with admission closed."""

    capabilities = Capabilities()
    mover: Mover | None = None

    def __init__(self, script: Script, config: ScriptedConfig, sleep: Sleep = asyncio.sleep) -> None:
        self.failed = asyncio.Event()
        self._script = script
        self._config = config
        self._sleep = sleep
        self._slots = asyncio.Semaphore(config.max_running)
        self._streams: dict[str, tuple[GenerateRequest, EventStream, asyncio.Task[None]]] = {}
        self._running: set[str] = set()
        self._num_sampled = 0
        self._version, self._checksum = -1, ""
        self._admitting = self._verified = self._asleep = False

    def submit(self, request: GenerateRequest) -> EventStream:
        """See `Engine.submit`."""
        if not self._admitting:
            raise AdmissionClosed("admission is closed: the engine is paused, asleep or not probed")
        if request.request_id in self._streams:
            raise InvalidRequest(f"request_id: {request.request_id!r} is in flight already")
        if len(request.prompt_ids) + request.max_tokens > self._config.kv_tokens:
            raise InvalidRequest(f"prompt_ids + max_tokens: exceed {self._config.kv_tokens}, the longest context")
        num_waiting = len(self._streams) - len(self._running)
        if num_waiting >= self._config.max_waiting:
            raise EngineBusy(f"waiting queue full: {num_waiting} requests; try another cell or later")
        stream = EventStream()
        task = asyncio.get_running_loop().create_task(self._serve(request, stream))
        self._streams[request.request_id] = (request, stream, task)
        return stream

    def abort(self, request_id: str) -> bool:
        """See `Engine.abort`."""
        return self._end(request_id, Finish("abort"))

    def pause(self) -> None:
        """See `Engine.pause`."""
        self._admitting = False

    def resume(self) -> None:
        """See `Engine.resume`."""
        if self._asleep or not self._verified:
            raise AdmissionClosed("admission stays closed: the engine sleeps or has not been probed")
        self._admitting = True

    async def load_weights(self, version: int, checksum: str, state: Mapping[str, torch.Tensor]) -> None:
        """See `Engine.load_weights`. There is no model, so `state` is not read and the checksum is taken as given."""
        if self._asleep:
            raise EngineError("weights cannot be loaded while the engine sleeps; wake it first")
        self._version, self._checksum, self._verified = version, checksum, False

    async def export_ticket(self, request_id: str) -> bytes:
        """See `Engine.export_ticket`."""
        raise MoveRefused("the scripted engine holds nothing that could move")

    async def release_ticket(self, ticket: bytes) -> None:
        """See `Engine.release_ticket`."""

    async def sleep(self) -> int:
        """See `Engine.sleep`."""
        self._admitting = self._verified = False
        self._asleep = True
        for request_id in list(self._streams):
            self._end(request_id, Finish("abort", "the engine sleeps"))
        return 0

    async def wake(self) -> None:
        """See `Engine.wake`."""
        self._asleep = False

    async def probe(self) -> ProbeResult:
        """See `Engine.probe`."""
        self._verified = self._version >= 0 and not self._asleep
        return ProbeResult(self._version, self._checksum, self._verified, "" if self._verified else "no weights")

    def load_report(self) -> LoadReport:
        """See `Engine.load_report`. A request counts its prompt and its whole budget."""
        used = sum(len(r.prompt_ids) + r.max_tokens for r, _, _ in self._streams.values())
        return LoadReport(
            num_running=len(self._running),
            num_waiting=len(self._streams) - len(self._running),
            kv_tokens_free=0 if self._asleep else max(0, self._config.kv_tokens - used),
            kv_tokens_total=self._config.kv_tokens,
            version=self._version,
            asleep=self._asleep,
            admitting=self._admitting,
            num_tokens_sampled=self._num_sampled,
        )

    async def close(self) -> None:
        """See `Engine.close`."""
        self._admitting = False
        tasks = [task for _, _, task in self._streams.values()]
        for request_id in list(self._streams):
            self._end(request_id, Finish("abort", "the engine is closing"))
        if tasks:
            await asyncio.wait(tasks)

    async def _serve(self, request: GenerateRequest, stream: EventStream) -> None:
        async with self._slots:
            self._running.add(request.request_id)
            finish = await self._emit(request, stream)
        self._forget(request.request_id)
        stream.push(finish)

    async def _emit(self, request: GenerateRequest, stream: EventStream) -> Finish:
        for number, token in enumerate(self._script(request), start=1):
            await self._sleep(token.delay_s)
            index = request.num_emitted + number - 1
            stream.push(TokenEvent(index, token.token_id, token.logprob, token.logprob, self._version, self._version))
            self._num_sampled += 1
            if token.token_id in request.stop_token_ids:
                return Finish("stop")
            if number == request.max_tokens:
                return Finish("length")
        return Finish("stop", "the script ended")

    def _end(self, request_id: str, finish: Finish) -> bool:
        if request_id not in self._streams:
            return False
        _, stream, task = self._forget(request_id)
        task.cancel()
        stream.push(finish)
        return True

    def _forget(self, request_id: str) -> tuple[GenerateRequest, EventStream, asyncio.Task[None]]:
        self._running.discard(request_id)
        return self._streams.pop(request_id)
