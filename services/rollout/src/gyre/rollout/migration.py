"""One move of a request, or of a cached prefix, from one engine to another.

    open -> reserve and read stage -> pull (-> read stage -> pull) ... -> freeze -> pull tail -> commit

Until `freeze` the request goes on decoding on the source and a failure costs nothing. `freeze` is the point of no
return: the source's stream ends with its last token, and the call goes on at the destination if it committed, at the
source if only the destination failed, and from its tokens if neither has its KV. Every step has a deadline and may be
asked again when its answer was lost; the last word on who goes on has the call's number (`live_call.py`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, cast

from gyre.contracts.errors import EngineError
from gyre.contracts.events import Sampling
from gyre.rollout.attempt import Attempt, EngineClient, EngineGone, EngineRefused
from gyre.rollout.engines.moving import ExportOf, Frozen, MoveRefused, Offer, Reservation, Stage, TicketUnknown

T = TypeVar("T")
Side = Literal["source", "destination"]
Verdict = Literal["stays", "destination", "source", "anywhere"]


@dataclass(frozen=True, slots=True)
class MoveLimits:
    """Bounds of moves. With fewer than `min_tokens` computed tokens a replay is cheaper than a move."""

    min_tokens: int = 256
    margin_tokens: int = 256  # reserved beyond what is known, for what is sampled while it is copied
    last_blocks: int = 16  # what may be left to copy when the request is frozen
    max_stages: int = 3  # copies while it decodes; then it is frozen whatever is left
    max_pair_moves: int = 4  # at once between two engines
    max_destinations: int = 2  # tried for one request
    step_s: float = 5.0  # a question that moves no bytes
    pull_s: float = 20.0  # one stage's bytes
    total_s: float = 40.0  # one move
    stop_s: float = 8.0  # from the freeze to the commit: what a failure adds to the pause of the stream at most
    lease_s: float = 60.0  # what either side holds, since it was last asked for
    stream_s: float = 5.0  # from the freeze until the source's last token has arrived here
    land_s: float = 10.0  # until the destination says the first token; the source has nothing to keep for it
    fetch_s: float = 60.0  # the same where the destination fetches a ticket's KV meanwhile: no longer than the source keeps it
    grace_s: float = 0.5  # for the last chunk of a request that the source knows no more, because it has ended
    prefixes_s: float = 20.0  # all cached prefixes of a cell


class EnginePeer(EngineClient, Protocol):
    """One engine as the router sees it, with what `engines/moving.py` says it can do.

    All raise EngineGone (no answer in time: it may or may not have been done), MoveRefused or TicketUnknown.
    """

    async def open_export(self, ticket: str, what: ExportOf, epoch: int, lease_s: float, timeout_s: float) -> Offer: ...

    async def read_stage(self, ticket: str, first_block: int, timeout_s: float) -> Stage: ...

    async def freeze(self, ticket: str, first_block: int, what: ExportOf, epoch: int, timeout_s: float) -> Frozen: ...

    async def reserve(self, reservation: Reservation, timeout_s: float) -> None: ...

    async def pull(self, ticket: str, region: str, stage: Stage, timeout_s: float) -> None: ...

    async def commit(self, ticket: str, frozen: Frozen, timeout_s: float) -> None: ...

    async def release(self, ticket: bytes, timeout_s: float) -> bool: ...


class MoveFailed(EngineError):
    """A step of a move failed. `reason`: one word for counters."""

    def __init__(self, side: Side, reason: str, detail: str) -> None:
        super().__init__(f"{side}: {reason}: {detail}")
        self.side, self.reason = side, reason


@dataclass(frozen=True, slots=True)
class Expected:
    """What source and destination must have in common, as both last said."""

    kind: str
    layout: str
    version: int


@dataclass(frozen=True, slots=True)
class Move:
    """What is moved: `ticket` names the move and is never used twice; `epoch` is that of the cell that is emptied."""

    ticket: str
    what: ExportOf
    epoch: int
    source: EnginePeer
    destination: EnginePeer
    expected: Expected


@dataclass(slots=True)
class Progress:
    """How far a move came. `may_be_frozen`: `freeze` was sent and not refused."""

    num_tokens: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    num_stages: int = 0
    may_be_frozen: bool = False
    has_committed: bool = False
    frozen: Frozen | None = None
    failed: MoveFailed | None = None

    @property
    def reason(self) -> str:
        """One word for why it failed; empty if it did not."""
        return self.failed.reason if self.failed else ""


def verdict(progress: Progress) -> Verdict:
    """Where a request can go on without being computed again; `stays`: it never stopped on the source."""
    if progress.has_committed:
        return "destination"
    if not progress.may_be_frozen:
        return "stays"
    return "source" if progress.frozen is not None else "anywhere"


def is_last(num_blocks: int, num_stages: int, limits: MoveLimits) -> bool:
    """Whether what is left, `num_blocks`, is little enough to stop for, or was chased long enough."""
    return num_blocks <= limits.last_blocks or num_stages >= limits.max_stages


def misfit(offer: Offer, expected: Expected) -> str:
    """What source and destination do not have in common: one word, or nothing."""
    if offer.layout != expected.layout or not offer.layout:
        return "layout"
    return "version" if offer.weights_version != expected.version else ""


async def migrate(move: Move, limits: MoveLimits, freezing: Callable[[], bool], progress: Progress,
                  num_heard: Callable[[], int] = lambda: 0) -> Verdict:
    """Carry out a move and say where its request can go on. Raises nothing but CancelledError.

    `freezing` is called before the source is asked to stop; False means that there is nothing to stop any more.
    `num_heard`: how many tokens the request is known to have by now, which may be less than there are; 0: nobody knows.
    """
    try:
        async with asyncio.timeout(limits.total_s):
            if move.expected.kind == "ticket":
                frozen = await _freeze(move, limits, freezing, progress, 0)
                if move.what.namespace:
                    await _fetch(move, limits, frozen, progress)
                progress.has_committed = True
            else:
                await _copy(move, limits, freezing, progress, num_heard)
    except MoveFailed as failed:
        progress.failed = failed
    except TimeoutError:
        progress.failed = MoveFailed("source", "late", f"not through after {limits.total_s} s")
    return verdict(progress)


async def _copy(move: Move, limits: MoveLimits, freezing: Callable[[], bool], progress: Progress,
                num_heard: Callable[[], int]) -> None:
    """The protocol of engines of kind `staged`. Raises MoveFailed."""
    source, destination, ticket, step_s = move.source, move.destination, move.ticket, limits.step_s
    offer = await _ask("source", lambda: source.open_export(ticket, move.what, move.epoch, limits.lease_s, step_s))
    progress.num_tokens = offer.num_tokens
    if wrong := misfit(offer, move.expected):
        raise MoveFailed("source", wrong, f"{offer.layout!r} under weights {offer.weights_version}")
    # What is sampled while it is copied comes on top; a reservation grows as stages are pulled, so that a large budget
    # that is hardly ever used up neither refuses the move nor drives out what the destination has cached.
    room = Reservation(ticket, move.epoch, offer.layout, offer.weights_version, offer.namespace,
                       min(offer.max_tokens, offer.num_tokens + limits.margin_tokens),
                       limits.lease_s)
    stage = await _both(_read(move, 0, limits), _ask("destination", lambda: destination.reserve(room, step_s)))
    num_chased = num_copied = next_block = 0
    while not is_last(len(stage.rows), num_chased, limits):
        await _pull(move, offer, stage, limits, progress)
        # What was known at the start comes in as many stages as the source makes of it; only then it is chased.
        block_tokens = len(stage.token_ids) // len(stage.rows)
        num_copied += len(stage.token_ids)
        next_block += len(stage.rows)
        num_chased += num_copied + block_tokens >= offer.num_tokens
        if num_chased and 0 < num_heard() - num_copied <= block_tokens * limits.last_blocks // 2:
            break  # few more by what was heard, and not twice as many by what was not: the source need not be asked
        stage = await _read(move, next_block, limits)
    frozen = await _freeze(move, limits, freezing, progress, next_block)
    progress.num_tokens = frozen.num_known
    try:
        async with asyncio.timeout(limits.stop_s):
            await _pull(move, offer, frozen.tail, limits, progress)
            await _ask("destination", lambda: destination.commit(ticket, frozen, step_s))
    except TimeoutError:
        raise MoveFailed("destination", "late", f"not committed {limits.stop_s} s after the freeze") from None
    progress.has_committed = True


async def _fetch(move: Move, limits: MoveLimits, frozen: Frozen, progress: Progress) -> None:
    """Nobody calls for a cached prefix, so the destination is asked for one token behind it. Raises MoveFailed.

    The token is thrown away. The ticket goes to the destination alone and never back: what does not arrive is computed
    again by the execution's next call, as if nothing had been tried.
    """
    attempt = Attempt(move.ticket, move.what.namespace, frozen.known_ids, 1, Sampling(temperature=0.0), (), 0, limits.pull_s,
                      frozen.opaque)
    try:
        async for chunk in move.destination.generate(attempt):
            if chunk.finish:
                progress.num_tokens = min(chunk.num_reused, frozen.num_known)
                if chunk.finish not in ("stop", "length") or not chunk.num_reused:
                    raise MoveFailed("destination", "lost", f"{chunk.finish} {chunk.detail}, its KV did not come along")
                return
    except (EngineGone, EngineRefused) as error:
        raise MoveFailed("destination", "gone" if isinstance(error, EngineGone) else "refused", str(error)) from error
    raise MoveFailed("destination", "gone", "the stream ended without a finish")


async def _read(move: Move, first_block: int, limits: MoveLimits) -> Stage:
    return await _ask("source", lambda: move.source.read_stage(move.ticket, first_block, limits.step_s))


async def _pull(move: Move, offer: Offer, stage: Stage, limits: MoveLimits, progress: Progress) -> None:
    await _ask("destination", lambda: move.destination.pull(move.ticket, offer.region, stage, limits.pull_s))
    progress.num_stages += 1
    progress.num_blocks += len(stage.rows)
    progress.num_bytes += len(stage.rows) * offer.block_bytes


async def _freeze(move: Move, limits: MoveLimits, freezing: Callable[[], bool], progress: Progress,
                  first_block: int) -> Frozen:
    """The point of no return. Without an answer nobody knows whether it was passed; a refusal says that it was not."""
    if not freezing():
        raise MoveFailed("source", "ended", "the request ended meanwhile")
    progress.may_be_frozen = True
    try:
        frozen = await _ask("source", lambda: move.source.freeze(
            move.ticket, first_block, move.what, move.epoch, limits.step_s))
    except MoveFailed as failed:
        progress.may_be_frozen = failed.reason in ("gone", "late")
        raise
    progress.frozen = frozen
    return frozen


async def _both(first: Coroutine[Any, Any, T], second: Coroutine[Any, Any, Any]) -> T:
    """The result of the first of two that are asked beside each other. A failure is raised when both are through, so that
    what is released then is all there is."""
    result, other = await asyncio.gather(first, second, return_exceptions=True)
    for failed in (other, result):
        if isinstance(failed, BaseException):
            raise failed
    return cast(T, result)


async def _ask(side: Side, ask: Callable[[], Awaitable[T]]) -> T:
    """The answer of one side, asked again if the first answer was lost. Raises MoveFailed."""
    try:
        try:
            return await ask()
        except EngineGone:
            return await ask()
    except TicketUnknown as error:
        raise MoveFailed(side, "lost", str(error)) from error
    except MoveRefused as error:
        raise MoveFailed(side, "refused" if side == "destination" else "withheld", str(error)) from error
    except EngineGone as error:
        raise MoveFailed(side, "gone", str(error)) from error
