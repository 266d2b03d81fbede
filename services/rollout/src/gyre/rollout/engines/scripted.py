"""An engine without a model: tokens and delays come from a script, everything else is as the contract says.

It drives the control plane (gateway, router, transitions) where what is said does not matter but when it is said does.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from gyre.contracts.errors import EngineError
from gyre.rollout.engines.base import (
    QUEUE_FULL,
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
from gyre.rollout.engines.moving import Capabilities, ExportOf, Migration, Mover, MoveRefused, Prefix, tokens_digest
from gyre.rollout.engines.scripted_mover import ScriptedMover

if TYPE_CHECKING:
    import torch

MAX_PREFIXES = 256  # namespaces whose newest prefix is remembered

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
    """Bounds, as in the torch engine; `kv_tokens` is only counted. `migration`: how it pretends to move requests."""

    kv_tokens: int = 65_536
    max_running: int = 64
    max_waiting: int = 1024
    migration: Migration = "staged"
    block_tokens: int = 16


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


@dataclass(slots=True)
class _Live:
    """A request in flight and what it was answered so far."""

    request: GenerateRequest
    stream: EventStream
    num_reused: int
    ids: list[int] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    def known(self) -> np.ndarray:
        """All ids, int32 [T]."""
        return np.concatenate((self.request.prompt_ids, np.asarray(self.ids, np.int32)))


class ScriptedEngine:
    """`gyre.rollout.engines.base.Engine` over a `Script`. Starts without weights and with admission closed."""

    def __init__(self, script: Script, config: ScriptedConfig, sleep: Sleep = asyncio.sleep,
                 now: Callable[[], float] = time.monotonic) -> None:
        self.failed = asyncio.Event()
        layout = f"scripted/{config.block_tokens}"
        self.capabilities = Capabilities(config.migration, layout if config.migration != "replay" else "")
        self._held = ScriptedMover(self, layout, config.block_tokens, now)
        self.mover: Mover | None = self._held if config.migration == "staged" else None
        self._script = script
        self._config = config
        self._sleep = sleep
        self._slots = asyncio.Semaphore(config.max_running)
        self._live: dict[str, _Live] = {}
        self._running: set[str] = set()
        self._prefixes: OrderedDict[str, np.ndarray] = OrderedDict()
        self._opaque: set[bytes] = set()
        self._num_sampled = self._num_prefilled = self._num_reused = 0
        self._version, self._checksum = -1, ""
        self._admitting = self._verified = self._asleep = False

    def submit(self, request: GenerateRequest) -> EventStream:
        """See `Engine.submit`."""
        is_moving = self._verified and self._held.holds(request.ticket)
        if not self._admitting and not is_moving:
            raise AdmissionClosed("admission is closed: the engine is paused, asleep or not probed")
        if request.request_id in self._live:
            raise InvalidRequest(f"request_id: {request.request_id!r} is in flight already")
        if len(request.prompt_ids) + request.max_tokens > self._config.kv_tokens:
            raise InvalidRequest(f"prompt_ids + max_tokens: exceed {self._config.kv_tokens}, the longest context")
        num_waiting = len(self._live) - len(self._running)
        if num_waiting >= self._config.max_waiting:
            raise EngineBusy(f"{QUEUE_FULL}: {num_waiting} requests; try another cell or later")
        live = _Live(request, EventStream(), self._reuse(request))
        self._num_reused += live.num_reused
        self._num_prefilled += len(request.prompt_ids) - live.num_reused
        self._live[request.request_id] = live
        live.task = asyncio.get_running_loop().create_task(self._serve(live))
        return live.stream

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
        self._drop_kv()

    async def export_ticket(self, request_id: str) -> bytes:
        """See `Engine.export_ticket`."""
        if self.capabilities.migration != "ticket":
            raise MoveRefused("this engine does not move requests by ticket")
        _, ids, _ = self.find(ExportOf(request_id))
        self.freeze(request_id)
        return self._ticket(ids, request_id)

    async def export_prefix(self, namespace: str) -> Prefix:
        """See `Engine.export_prefix`."""
        if self.capabilities.migration != "ticket":
            raise MoveRefused("this engine does not move prefixes by ticket")
        _, ids, _ = self.find(ExportOf(namespace=namespace))
        return Prefix(ids, self._ticket(ids, namespace))

    async def release_ticket(self, ticket: bytes) -> None:
        """See `Engine.release_ticket`."""
        self._opaque.discard(ticket)

    async def sleep(self) -> int:
        """See `Engine.sleep`."""
        self._admitting = self._verified = False
        self._asleep = True
        for request_id in list(self._live):
            self._end(request_id, Finish("abort", "the engine sleeps"))
        self._drop_kv()
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
        return LoadReport(
            num_running=len(self._running),
            num_waiting=len(self._live) - len(self._running),
            kv_tokens_free=0 if self._asleep else self.num_free,
            kv_tokens_total=self._config.kv_tokens,
            version=self._version,
            asleep=self._asleep,
            admitting=self._admitting,
            num_tokens_sampled=self._num_sampled,
            num_tokens_prefilled=self._num_prefilled,
            num_tokens_reused=self._num_reused,
            num_held=self._held.num_held + len(self._opaque),
        )

    async def close(self) -> None:
        """See `Engine.close`."""
        self._admitting = False
        tasks = [live.task for live in self._live.values() if live.task is not None]
        for request_id in list(self._live):
            self._end(request_id, Finish("abort", "the engine is closing"))
        if tasks:
            await asyncio.wait(tasks)

    # ------------------------------------------------------------ what its mover needs

    @property
    def version(self) -> int:
        """Of the loaded weights."""
        return self._version

    @property
    def is_asleep(self) -> bool:
        return self._asleep

    @property
    def num_free(self) -> int:
        """Tokens there is room for. A request counts its prompt and its whole budget."""
        used = sum(len(live.request.prompt_ids) + live.request.max_tokens for live in self._live.values())
        return max(0, self._config.kv_tokens - used - self._held.num_tokens_held)

    def find(self, what: ExportOf) -> tuple[str, np.ndarray, int]:
        """See `scripted_mover.Host`."""
        if not what.request_id:
            ids = self._prefixes.get(what.namespace)
            if ids is None:
                raise MoveRefused(f"namespace: nothing is cached for {what.namespace!r}")
            return what.namespace, ids, len(ids)
        live = self._live.get(what.request_id)
        if live is None or what.request_id not in self._running:
            raise MoveRefused(f"request_id: {what.request_id!r} is not running")
        return live.request.namespace, live.known(), len(live.request.prompt_ids) + live.request.max_tokens

    def freeze(self, request_id: str) -> None:
        """See `scripted_mover.Host`."""
        self._end(request_id, Finish("moved"))

    def keep_prefix(self, namespace: str, ids: np.ndarray) -> None:
        """See `scripted_mover.Host`."""
        self._prefixes[namespace] = ids
        self._prefixes.move_to_end(namespace)
        while len(self._prefixes) > MAX_PREFIXES:
            self._prefixes.popitem(last=False)

    def _reuse(self, request: GenerateRequest) -> int:
        """How many tokens of the prompt need not be computed."""
        ids = request.prompt_ids
        if request.ticket and (num_held := self._held.take(request.ticket, ids)):
            return num_held
        if request.ticket and self.capabilities.migration == "ticket" and _names(request.ticket, self._version, ids):
            return len(ids) - 1
        cached = self._prefixes.get(request.namespace, ids[:0])
        num = min(len(cached), len(ids) - 1)
        differs = np.flatnonzero(cached[:num] != ids[:num])
        num = int(differs[0]) if len(differs) else num
        return num - num % self._config.block_tokens

    def _drop_kv(self) -> None:
        self._held.clear()
        self._prefixes.clear()
        self._opaque.clear()

    # ------------------------------------------------------------ the script

    def _ticket(self, ids: np.ndarray, name: str) -> bytes:
        ticket = json.dumps([self._version, tokens_digest(ids).hex(), name]).encode()
        self._opaque.add(ticket)
        return ticket

    async def _serve(self, live: _Live) -> None:
        async with self._slots:
            self._running.add(live.request.request_id)
            finish = await self._emit(live)
        self._forget(live.request.request_id)
        live.stream.push(finish)

    async def _emit(self, live: _Live) -> Finish:
        request = live.request
        for number, token in enumerate(self._script(request), start=1):
            await self._sleep(token.delay_s)
            index, version = request.num_emitted + number - 1, self._version
            live.ids.append(token.token_id)
            live.stream.push(TokenEvent(index, token.token_id, token.logprob, token.logprob, version, version))
            self._num_sampled += 1
            if token.token_id in request.stop_token_ids:
                return Finish("stop", num_reused=live.num_reused)
            if number == request.max_tokens:
                return Finish("length", num_reused=live.num_reused)
        return Finish("stop", "the script ended", live.num_reused)

    def _end(self, request_id: str, finish: Finish) -> bool:
        if request_id not in self._live:
            return False
        live = self._forget(request_id)
        if live.task is not None:
            live.task.cancel()
        live.stream.push(finish)
        return True

    def _forget(self, request_id: str) -> _Live:
        self._running.discard(request_id)
        live = self._live.pop(request_id)
        self.keep_prefix(live.request.namespace, live.known())
        return live


def _names(ticket: bytes, version: int, ids: np.ndarray) -> bool:
    """Whether a ticket of an engine of kind `ticket` stands for these ids under these weights."""
    try:
        said = json.loads(ticket)
    except ValueError:
        return False
    return isinstance(said, list) and said[:2] == [version, tokens_digest(ids).hex()]
