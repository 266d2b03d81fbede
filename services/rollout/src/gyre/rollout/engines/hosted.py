"""`Engine` over a `Host`: what is the same for every engine that is not ours.

1. A request is one or more calls to the host. A weights swap ends them all, keeps their tokens, swaps, and sends the rest
   again: the host never mixes weights within a call, so the version of every token is known exactly.
2. The host's prefixes are keyed by (weights version, namespace), and reset on every swap and before memory is released.
3. Nothing the host says is trusted: tokens are counted, checked against the vocabulary, and end at a stop token.
4. Weights lie staged as a checkpoint until the next ones: after a sleep that dropped them they are loaded again.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gyre.contracts.errors import EngineError
from gyre.rollout.engines.base import (
    AdmissionClosed,
    EventStream,
    Finish,
    GenerateRequest,
    LoadReport,
    ProbeResult,
)
from gyre.rollout.engines.chores import Chores
from gyre.rollout.engines.golden import predictions_hold
from gyre.rollout.engines.held import HeldTickets
from gyre.rollout.engines.host import Call, Ended, Host, HostError, Piece
from gyre.rollout.engines.live import HostedConfig, Live, check_request
from gyre.rollout.engines.moving import Mover, MoveRefused, Prefix
from gyre.rollout.engines.prefixes import HostedPrefixes

if TYPE_CHECKING:
    import torch
    from gyre.policy.config import PolicyConfig
    from gyre.rollout.engines.staging import StagedWeights

log = logging.getLogger(__name__)


class HostedEngine:
    """`gyre.rollout.engines.base.Engine`. The host is started, and so takes the devices, when it is first needed."""

    mover: Mover | None = None

    def __init__(
        self, host: Host, policy: PolicyConfig, staged: StagedWeights, config: HostedConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`clock` (s) is for leases."""
        self.capabilities = host.capabilities
        self.failed = host.failed
        self._host = host
        self._policy = policy
        self._staged = staged
        self._config = config
        self._lives: dict[str, Live] = {}
        self._slots = asyncio.Semaphore(config.max_running)
        self._open = asyncio.Event()  # closed while nothing may be in flight
        self._idle = asyncio.Condition()
        self._version, self._checksum, self._fingerprint = -1, "", ""
        self._started = self._admitting = self._verified = self._asleep = self._missing = False
        self._num_probes = self._num_sampled = self._num_prefilled = self._num_reused = 0
        self._held = HeldTickets(config.held_s, clock)
        self._prefixes = HostedPrefixes(host, config.kv_tokens)
        self._chores = Chores()

    def submit(self, request: GenerateRequest) -> EventStream:
        """See `Engine.submit`."""
        comes_back = request.ticket in self._held and self._verified and not self._asleep
        if not self._admitting and not comes_back:
            raise AdmissionClosed("admission is closed: the engine is paused, asleep, failed or not probed")
        check_request(request, self._lives, self._config, self._policy.vocab_size)
        self._held.drop(request.ticket)
        live = Live(request, EventStream(), request.ticket)
        self._lives[request.request_id] = live
        self._begin(live)
        return live.stream

    def abort(self, request_id: str) -> bool:
        """See `Engine.abort`. What the host has sampled by then is still emitted."""
        live = self._lives.get(request_id)
        if live is None or live.ending is not None:
            return False
        self._end(live, Finish("abort"))
        return True

    def pause(self) -> None:
        """See `Engine.pause`."""
        self._admitting = False

    def resume(self) -> None:
        """See `Engine.resume`."""
        if self._asleep or not self._verified or self.failed.is_set():
            raise AdmissionClosed("admission stays closed: the engine sleeps, failed or has not been probed")
        self._admitting = True

    async def load_weights(self, version: int, checksum: str, state: Mapping[str, torch.Tensor]) -> None:
        """See `Engine.load_weights`. While it runs, requests wait and none is refused."""
        if self._asleep:
            raise EngineError("weights cannot be loaded while the engine sleeps; wake it first")
        directory = await asyncio.to_thread(self._staged.stage, version, checksum, state)
        await self._chores.whole(self._swap(version, checksum, directory))
        await asyncio.to_thread(self._staged.keep_only, version)

    async def export_ticket(self, request_id: str) -> bytes:
        """See `Engine.export_ticket`. Drain and export: end the call, keep its tokens, then prefill them once more for
        export, which the host's own cache makes nearly free. The token that samples is kept and emitted."""
        live = self._lives.get(request_id)
        if live is None or live.ending is not None:
            raise MoveRefused(f"request {request_id!r} is not in flight")
        if self.capabilities.migration != "ticket":
            raise MoveRefused("this engine cannot move a request; replay it")
        if not live.call_id or live.task is None:
            raise MoveRefused(f"request {request_id!r} has nothing computed yet")
        live.ending = Finish("moved")
        await self._host.abort(live.call_id)
        await asyncio.wait([live.task], timeout=self._config.end_wait_s)
        if not live.task.done() or live.complete is not None:
            self._finish(live, live.complete or Finish("error", "the host did not end the call"))
            raise MoveRefused(f"request {request_id!r} has ended")
        ticket = await self._export(live)
        self._held.add(ticket)
        return ticket

    async def export_prefix(self, namespace: str) -> Prefix:
        """See `Engine.export_prefix`. As a request's, without a request."""
        version = self._version
        prefix = await self._prefixes.export(
            namespace, self._salt(namespace), lambda: self._open.is_set() and self._version == version)
        self._held.add(prefix.ticket)
        return prefix

    async def release_ticket(self, ticket: bytes) -> None:
        """See `Engine.release_ticket`."""
        self._held.drop(ticket)
        await self._host.drop(ticket)

    async def sleep(self) -> int:
        """See `Engine.sleep`. Order matters: stop, end everything, forget every prefix, and only then release."""
        self._admitting = False
        return await self._chores.whole(self._fall_asleep())

    async def wake(self) -> None:
        """See `Engine.wake`. Weights that did not survive are loaded by the next `probe`, unless newer ones come first."""
        await self._chores.whole(self._wake_up())

    async def probe(self) -> ProbeResult:
        """See `Engine.probe`."""
        return await self._chores.whole(self._examine())

    def load_report(self) -> LoadReport:
        """See `Engine.load_report`. A request counts its prompt and its whole budget: the host's pool is not ours to see."""
        used = sum(len(live.request.prompt_ids) + live.request.max_tokens for live in self._lives.values())
        num_running = sum(live.running for live in self._lives.values())
        return LoadReport(
            num_running=num_running,
            num_waiting=len(self._lives) - num_running,
            kv_tokens_free=0 if self._asleep else max(0, self._config.kv_tokens - used),
            kv_tokens_total=self._config.kv_tokens,
            version=self._version,
            asleep=self._asleep,
            admitting=self._admitting,
            num_tokens_sampled=self._num_sampled,
            num_tokens_prefilled=self._num_prefilled,
            num_tokens_reused=self._num_reused,
            num_held=len(self._held),
        )

    async def close(self) -> None:
        """See `Engine.close`."""
        self._admitting = False
        tasks = [live.task for live in self._lives.values() if live.task is not None]
        for live in list(self._lives.values()):
            self._finish(live, Finish("abort", "the engine is closing"))
        if tasks:
            await asyncio.wait(tasks)
        await self._chores.cancel()
        if self._started:
            await self._host.close()

    def _begin(self, live: Live) -> None:
        live.ending = None
        live.task = asyncio.get_running_loop().create_task(self._serve(live))
        live.task.add_done_callback(lambda task: self._served(live, task))

    async def _serve(self, live: Live) -> None:
        """Emits until the request has ended. One that moves stays known until its ticket is made."""
        async with self._slots:
            live.running = True
            finish = await self._calls(live)
        if finish.reason != "moved":
            self._finish(live, finish)

    async def _calls(self, live: Live) -> Finish:
        while True:
            await self._open.wait()
            if live.ending is not None:
                return live.ending
            before = len(live.kept)
            ended = await self._call(live)
            live.num_reused = live.num_reused or ended.num_reused
            if ended.reason == "error":
                return Finish("error", ended.detail)
            if (complete := live.complete) is not None:
                return complete
            if live.ending is not None:
                return live.ending
            if ended.reason == "no_ticket":
                log.warning("request %s: %s; computed from its tokens", live.request.request_id, ended.detail)
            elif ended.reason in ("stop", "length") and len(live.kept) > before:
                continue  # at an end of the host's own choosing; only the request's stop tokens end it
            elif ended.reason != "abort" or self._open.is_set():
                return Finish("error", f"the host ended the call with {ended.reason} {ended.detail}".rstrip())

    async def _call(self, live: Live) -> Ended:
        call = self._call_of(live)
        try:
            async for part in self._host.generate(call):
                if isinstance(part, Ended):
                    self._num_prefilled += len(call.prompt_ids) - part.num_reused
                    self._num_reused += part.num_reused
                    return part
                wrong = self._emit(live, part)
                if wrong:
                    self._chores.later(self._host.abort(call.call_id))
                    return Ended("error", wrong)
            return Ended("error", "the host's stream ended without saying how")
        except HostError as error:
            return Ended("error", str(error))
        finally:
            await self._call_over(live)

    async def _call_over(self, live: Live) -> None:
        live.call_id = ""
        async with self._idle:
            self._idle.notify_all()

    def _call_of(self, live: Live) -> Call:
        return live.next_call(uuid.uuid4().hex, self._salt(live.request.namespace))

    def _salt(self, namespace: str) -> str:
        return f"{self._version}/{namespace}"

    def _emit(self, live: Live, piece: Piece) -> str:
        """Passes tokens on; says what is wrong with them."""
        before = len(live.kept)
        wrong = live.emit(piece, self._version, self._policy.vocab_size)
        self._num_sampled += len(live.kept) - before
        return wrong

    def _end(self, live: Live, finish: Finish) -> None:
        """Ends a request behind the tokens the host still owes, or now if it owes none, or after a deadline."""
        live.ending = finish
        if not live.call_id:
            return self._finish(live, finish)
        self._chores.later(self._host.abort(live.call_id))
        asyncio.get_running_loop().call_later(self._config.end_wait_s, self._finish, live, finish)
        return None

    def _finish(self, live: Live, finish: Finish) -> None:
        """The terminal event; a later one is ignored."""
        if self._lives.get(live.request.request_id) is live:
            del self._lives[live.request.request_id]
            if finish.reason in ("stop", "length"):
                self._prefixes.remember(live.request.namespace, live.known())
        live.stream.push(finish)
        if live.task is not None and live.task is not asyncio.current_task():
            live.task.cancel()

    def _served(self, live: Live, task: asyncio.Task[None]) -> None:
        """Nobody is left to wait, whatever went wrong in here."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a request failed", exc_info=error)
            self._finish(live, Finish("error", f"{type(error).__name__}: {error}"))

    async def _export(self, live: Live) -> bytes:
        try:
            if not self._open.is_set():
                raise MoveRefused("the weights are changing, or the engine falls asleep")
            exported = await self._host.export(self._call_of(live))
        except EngineError:
            if self._asleep:
                self._finish(live, Finish("abort", "the engine sleeps"))
            elif self._lives.get(live.request.request_id) is live:
                self._begin(live)  # nothing has changed: it goes on here
            raise
        finally:
            await self._call_over(live)
        wrong = "" if exported.token_id is None else self._emit(live, Piece([exported.token_id], [exported.logprob]))
        if wrong or live.complete is not None:
            await self._host.drop(exported.ticket)
            self._finish(live, Finish("error", wrong) if wrong else live.complete or Finish("moved"))
            raise MoveRefused(f"request {live.request.request_id!r} has ended")
        self._finish(live, Finish("moved"))
        return exported.ticket

    async def _swap(self, version: int, checksum: str, directory: Path) -> None:
        await self._start()
        await self._hold()
        self._verified = False
        await self._update(version, directory)
        self._version, self._checksum = version, checksum
        self._prefixes.clear()
        await self._let_go()

    async def _fall_asleep(self) -> int:
        if self._asleep:
            return 0
        self._asleep, self._verified = True, False
        self._held.clear()
        for live in list(self._lives.values()):
            live.ending = live.ending or Finish("abort", "the engine sleeps")
            if not live.call_id:
                self._finish(live, live.ending)
        if not self._started:
            return 0
        await self._hold()
        self._prefixes.clear()
        await self._host.reset_cache()
        return await self._host.release()

    async def _wake_up(self) -> None:
        if self._started and self._asleep:
            self._missing = not await self._host.restore() and self._version >= 0
            await self._let_go()
        await self._start()
        self._asleep = False

    async def _examine(self) -> ProbeResult:
        if self._version < 0 or self._asleep or self.failed.is_set():
            return ProbeResult(self._version, self._checksum, False, "no weights on the device")
        try:
            detail = await self._what_is_wrong()
        except HostError as error:
            detail = str(error)
        self._verified = detail == ""
        if not self._verified:
            self._admitting = False
        return ProbeResult(self._version, self._checksum, self._verified, detail)

    async def _start(self) -> None:
        if self.failed.is_set():
            raise HostError("the engine failed; its process must be restarted")
        if not self._started:
            await self._host.start()
            self._started = True
            self._open.set()

    async def _hold(self) -> None:
        """Ends every call, with its tokens kept. Returns when nothing is in flight."""
        self._open.clear()
        await self._host.hold()
        try:
            async with asyncio.timeout(self._config.end_wait_s), self._idle:
                await self._idle.wait_for(lambda: not any(live.call_id for live in self._lives.values()))
        except TimeoutError:
            self._break("the host did not end its calls")
            raise HostError(f"calls still in flight after {self._config.end_wait_s} s") from None

    async def _let_go(self) -> None:
        await self._host.go_on()
        self._open.set()

    async def _update(self, version: int, directory: Path) -> None:
        try:
            self._fingerprint = await self._host.update(version, directory)
            await self._host.reset_cache()
        except HostError as error:
            self._break(f"weights {version} may be half loaded: {error}")
            raise
        self._missing = False

    async def _what_is_wrong(self) -> str:
        if self._missing:
            await self._hold()
            await self._update(self._version, self._staged.directory(self._version))
            await self._let_go()
        live = await self._host.fingerprint()
        if live != self._fingerprint:
            return f"live weights have the fingerprint {live}, loaded were {self._fingerprint}"
        self._num_probes += 1
        salt = f"{self._version}/probe/{self._num_probes}"
        return await predictions_hold(self._host, self._policy, self._staged.directory(self._version), salt)

    def _break(self, why: str) -> None:
        """The host's state is unknown: nothing goes on, the process is to be restarted."""
        log.error("the engine failed: %s", why)
        self._admitting = self._verified = False
        self.failed.set()
        for live in list(self._lives.values()):
            live.call_id = ""
            self._finish(live, Finish("error", why))
