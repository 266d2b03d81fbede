"""What every engine backend does: token ids in, token ids out.

Chat templates, stop strings, tool parsing and detokenisation live in the gateway, once, for all backends.
Every stream is zero or more `TokenEvent` with consecutive indexes and then exactly one `Finish`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
from gyre.contracts.errors import EngineError
from gyre.rollout.engines.moving import Capabilities, Mover, Prefix

if TYPE_CHECKING:  # the gateway and the scripted engine run without torch
    import torch

QUEUE_FULL = "waiting queue full"  # how the message of EngineBusy begins
MIN_TEMPERATURE = 1e-4  # below it log-probs over temperature leave float32

FinishReason = Literal["stop", "length", "abort", "error", "moved"]


class EngineBusy(EngineError):
    """The waiting queue is full; another cell may have room."""


class AdmissionClosed(EngineError):
    """The engine takes no new request: it is paused, asleep, or its weights are not verified yet."""


class InvalidRequest(EngineError, ValueError):
    """The request can never be served; the message names the field, the value and what would be right."""


class WeightsMismatch(EngineError):
    """The weights that arrived are not those that were announced."""


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """One generation. `prompt_ids` is int32 of shape [P].

    A replay appends the tokens that were already emitted to `prompt_ids`, says how many in `num_emitted` and reduces
    `max_tokens` by as many; its events then start at index `num_emitted`, and equal (seed, position) draw equal noise.
    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 restrict nothing. Prefixes are shared within `namespace` alone.
    `ticket`: KV that this engine holds or can fetch for exactly these tokens (`engines/moving.py`); one that is of no use
    is ignored.

    Raises:
        InvalidRequest: a field is out of range.
    """

    request_id: str
    prompt_ids: np.ndarray
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    namespace: str = ""
    num_emitted: int = 0
    ticket: bytes = b""

    def __post_init__(self) -> None:
        prompt = self.prompt_ids
        if prompt.dtype != np.int32 or prompt.ndim != 1 or len(prompt) == 0:
            raise InvalidRequest(f"prompt_ids: {prompt.dtype}{list(prompt.shape)} must be int32 of shape [P], P >= 1")
        if self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens: {self.max_tokens} must be at least 1")
        if not (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < float("inf")):
            raise InvalidRequest(f"temperature: {self.temperature} must be 0 (greedy), or finite and at least "
                                 f"{MIN_TEMPERATURE}")
        if not 0 < self.top_p <= 1:
            raise InvalidRequest(f"top_p: {self.top_p} must be in (0, 1]")
        if self.top_k < 0:
            raise InvalidRequest(f"top_k: {self.top_k} must be 0 (off) or positive")
        if not 0 <= self.seed < 2**64:
            raise InvalidRequest(f"seed: {self.seed} must fit into an unsigned 64-bit integer")
        if not 0 <= self.num_emitted < len(prompt):
            raise InvalidRequest(f"num_emitted: {self.num_emitted} must leave a prompt of its own ({len(prompt)} ids)")


class TokenEvent(NamedTuple):
    """One sampled token. A named tuple, because one is made per token.

    `logprob` is float32 under the untempered policy (T = 1), `behaviour_logprob` under the distribution that was
    really sampled (0 when greedy). `kv_version` is the oldest weights version of any key or value that was attended to;
    it is older than `weights_version` only under carry = "keep".
    """

    index: int
    token_id: int
    logprob: float
    behaviour_logprob: float
    weights_version: int
    kv_version: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The terminal event. `stop`: the last token is a stop token. `length`: the budget is used up. `moved`: the request
    was frozen for a move and goes on elsewhere.

    `num_reused`: tokens of the prompt that were not computed, because their keys and values were there.
    """

    reason: FinishReason
    detail: str = ""
    num_reused: int = 0


Event = TokenEvent | Finish


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Whether the engine's live weights are those it claims, and whether it computes with them correctly."""

    version: int
    checksum: str
    ok: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What the router needs to know. KV capacities are in tokens; free counts what can be evicted at once.

    `num_held`: tickets that hold KV or room for it now.
    """

    num_running: int
    num_waiting: int
    kv_tokens_free: int
    kv_tokens_total: int
    version: int
    asleep: bool
    admitting: bool
    num_tokens_sampled: int = 0
    num_tokens_prefilled: int = 0
    num_tokens_reused: int = 0
    num_preempted: int = 0
    num_held: int = 0


class EventStream:
    """One request's events: an async iterator, or batches through `take`. Used from the engine's event loop only."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._finished = False
        self._waiter: asyncio.Future[None] | None = None
        self._waits_for_finish = False

    @property
    def finished(self) -> bool:
        """Whether the terminal event has been pushed (it may not have been taken yet)."""
        return self._finished

    def push(self, event: Event) -> None:
        """Appends an event and wakes the reader if this is what it waits for. After `Finish` nothing is accepted."""
        if self._finished:
            return
        self._events.append(event)
        self._finished = isinstance(event, Finish)
        if self._waiter is not None and (self._finished or not self._waits_for_finish):
            _wake(self._waiter)

    async def take(self, linger_s: float = 0.0) -> list[Event]:
        """All events since the last call, at least one. Lingers for more, but never past the terminal event."""
        if not self._events:
            await self._wait(None)
        if linger_s > 0 and not self._finished:
            await self._wait(linger_s)
        events, self._events = self._events, []
        return events

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            for event in await self.take():
                yield event
                if isinstance(event, Finish):
                    return

    async def _wait(self, linger_s: float | None) -> None:
        """Until an event arrives, or with a linger until the terminal event arrives or the linger is over."""
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        self._waits_for_finish = linger_s is not None
        timer = None if linger_s is None else loop.call_later(linger_s, _wake, waiter)
        try:
            await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Engine(Protocol):
    """A backend. All methods are called from one event loop."""

    failed: asyncio.Event
    """Set when the engine cannot go on (its requests have ended with `error`); its process should be restarted."""

    capabilities: Capabilities
    """Fixed for the engine's life."""

    mover: Mover | None
    """Set for an engine that moves requests in stages."""

    def submit(self, request: GenerateRequest) -> EventStream:
        """Queues a request.

        Raises:
            InvalidRequest: it can never be served here.
            AdmissionClosed: the engine is paused (and does not hold the request's ticket), asleep or unverified.
            EngineBusy: the waiting queue is full.
        """
        ...

    def abort(self, request_id: str) -> bool:
        """Ends a request with `Finish("abort")` after what it has emitted. False if it is not in flight."""
        ...

    def pause(self) -> None:
        """Closes admission; requests in flight go on."""
        ...

    def resume(self) -> None:
        """Opens admission. Raises `AdmissionClosed` while asleep or before a probe of these weights succeeded."""
        ...

    async def load_weights(self, version: int, checksum: str, state: Mapping[str, torch.Tensor]) -> None:
        """Swaps weights between two tokens; requests in flight stay and their KV is rebuilt under the new ones.

        Raises:
            WeightsMismatch: `state` does not have this checksum, or does not fit the policy. Nothing has changed.
        """
        ...

    async def export_ticket(self, request_id: str) -> bytes:
        """Ends a request with `Finish("moved")` and holds its KV for whoever shows the ticket to an engine of this kind.

        For engines of kind `ticket`. Raises MoveRefused: it is not in flight, or the engine cannot move it.
        """
        ...

    async def export_prefix(self, namespace: str) -> Prefix:
        """Holds the newest prefix that is cached for `namespace`, for an execution that waits on a tool. Nothing stops.

        For engines of kind `ticket`. Raises MoveRefused: nothing is cached, or the engine cannot move it.
        """
        ...

    async def release_ticket(self, ticket: bytes) -> None:
        """Drops what is held for a ticket; unknown ones are ignored."""
        ...

    async def sleep(self) -> int:
        """Closes admission, aborts what is in flight and gives the memory back. Returns the bytes that were freed."""
        ...

    async def wake(self) -> None:
        """Takes memory again. Admission stays closed until a probe succeeds and `resume` is called."""
        ...

    async def probe(self) -> ProbeResult:
        """Re-digests the live weights and checks next-token predictions. Only a success allows `resume`."""
        ...

    def load_report(self) -> LoadReport:
        """The current load."""
        ...

    async def close(self) -> None:
        """Ends every request with `Finish("abort")` and stops working."""
        ...


def drain_with(streams: Iterable[EventStream], finish: Finish) -> None:
    """Gives every stream its terminal event (streams that have one ignore it)."""
    for stream in streams:
        stream.push(finish)
