"""Emptying an engine whose cell leaves rollout: its calls move, then the prefixes of executions that wait on a tool.

What cannot be moved, or not in time, is replayed from its tokens. Several calls move at once, a few between two engines,
so that the first ones are away soon; the others go on decoding until it is their turn.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from gyre.contracts.errors import EngineError
from gyre.rollout.engines.moving import ExportOf
from gyre.rollout.live_call import LiveCall, Route
from gyre.rollout.migration import Expected, Move, MoveLimits, Progress, Verdict, migrate
from gyre.rollout.routes import Engine, Routes
from gyre.runtime import telemetry

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Trip:
    """A move that is under way between two engines of the table."""

    move: Move
    source: Engine
    destination: Engine

    @property
    def name(self) -> bytes:
        """The ticket as engines of kind `staged` take it."""
        return self.move.ticket.encode()


@dataclass(slots=True)
class _Left:
    """Calls that left the engine before they ended."""

    moved: set[LiveCall] = field(default_factory=set)
    cut: set[LiveCall] = field(default_factory=set)


class Drain:
    """Moves calls and prefixes off engines. `prefix` makes tickets differ from those of an earlier life of the service."""

    def __init__(self, routes: Routes, limits: MoveLimits, prefix: str = "") -> None:
        self._routes, self._limits, self._prefix = routes, limits, prefix
        self._numbers = count()
        self._pairs: dict[tuple[int, int], asyncio.Semaphore] = {}
        self._releases: set[asyncio.Task[None]] = set()

    async def run(self, cell: int, epoch: int, timeout_s: float) -> tuple[int, int]:
        """Empty an engine that no longer admits, for the transition of its cell to `epoch`. Returns (moved, replayed).

        While no other engine admits, calls may end within `timeout_s` and are cut off then, to go on wherever admission
        opens next.
        """
        engine = self._routes.engines[cell]
        calls = {call: call.num_cut for call in engine.live}
        left = _Left()
        await _within(timeout_s, (self._evacuate(call, engine, epoch, left) for call in calls))
        last = list(engine.live)
        left.cut.update(call for call in last if call.cut("drained"))
        await _within(timeout_s, (call.silence() for call in last))
        await _within(self._limits.prefixes_s, (self._move_prefix(e, engine, epoch)
                                                for e in self._routes.idle_on(cell)))
        left.cut.update(call for call, before in calls.items() if call.num_cut > before)
        return len(left.moved), len(left.cut - left.moved)

    # ------------------------------------------------------------ calls

    async def _evacuate(self, call: LiveCall, source: Engine, epoch: int, left: _Left) -> None:
        """Get one call off an engine: moved, or replayed with the reason for it."""
        tried: set[int] = set()
        reason = ""
        while call.is_on(source):
            found = self._destination(call.job.execution, call.num_tokens(), call.max_tokens(), source, tried)
            if found == "nowhere":
                await self._stay(call)
                continue
            if isinstance(found, str):
                left.cut.add(call)
                self._replay(call, reason or found)
                return
            tried.add(found.cell)
            trip = self._trip(ExportOf(request_id=call.request_id), call.request_id, epoch, source, found)
            reason = await self._bounded(trip, call.max_tokens(), self._carry(call, trip, left))
            if reason == "withheld" and call.is_on(source) and call.has_spoken:
                # Most likely it has ended there, and its last chunk is on the way.
                await _within(self._limits.grace_s, [call.silence()])

    async def _stay(self, call: LiveCall) -> None:
        """Until the call has ended where it is, or another engine admits."""
        loop = asyncio.get_running_loop()
        waits = {loop.create_task(call.silence())}
        if not self._routes.admits.is_set():
            waits.add(loop.create_task(self._routes.admits.wait()))  # type: ignore[arg-type]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _replay(self, call: LiveCall, reason: str) -> None:
        """Cut a call off its engine; it goes where it would have been moved to."""
        for engine in self._routes.destinations(call.job.execution, call.max_tokens())[:1]:
            call.go_on(call.number, [Route(engine, reason=reason)])
        call.cut(reason)
        with telemetry.span("gyre.kv.migrate", gyre__execution=call.job.execution, gyre__outcome="replayed",
                            gyre__reason=reason, gyre__tokens=call.num_tokens()):
            pass

    async def _carry(self, call: LiveCall, trip: _Trip, left: _Left) -> str:
        """Move a call. Returns why it did not arrive at the destination, in one word; empty if it did."""
        number, progress = call.number, Progress()
        if not call.is_on(trip.source):
            return "ended"
        call.mover = asyncio.current_task()
        has_arrived = False
        with telemetry.span("gyre.kv.migrate", gyre__execution=call.job.execution, gyre__cell__id=trip.source.cell,
                            gyre__cell__to=trip.destination.cell) as span:
            try:
                verdict = await migrate(trip.move, self._limits, lambda: call.stop(number), progress, call.num_tokens)
                has_arrived = await self._go_on(call, number, trip, verdict, progress)
            finally:
                call.carry_on(number)
                self._release(trip, keeps_destination=has_arrived)
                _describe(span, trip.move.ticket, progress, "moved" if has_arrived else progress.reason or "lost")
        if has_arrived:
            left.moved.add(call)
            self._count(progress)
            self._routes.counts.num_moved += 1
        return "" if has_arrived else progress.reason or "lost"

    async def _go_on(self, call: LiveCall, number: int, trip: _Trip, verdict: Verdict, progress: Progress) -> bool:
        """Swap the route as the verdict says. Returns whether the call went on at the destination with what was moved."""
        if verdict == "stays":
            return False
        opaque = progress.frozen.opaque if progress.frozen else b""
        onward = Route(trip.destination, opaque or trip.name)
        back = Route(trip.source, opaque or trip.name)
        routes = {"destination": [onward, back], "source": [back], "anywhere": []}[verdict]
        if not trip.destination.admitting and onward in routes:
            routes.remove(onward)
        if not call.go_on(number, routes, progress.reason or "lost"):
            return False
        await call.silence(self._limits.stream_s)
        fetches = bool(opaque) and onward in routes  # and the source must neither be released nor sleep before it is through
        landed = await call.landed(self._limits.fetch_s if fetches else self._limits.land_s)
        return (call.route if landed is None else landed) is onward

    def _destination(self, execution: str, num_tokens: int, max_tokens: int, source: Engine,
                     tried: set[int]) -> Engine | str:
        """The best engine that can take what the source holds, or one word why it has to be computed again."""
        said, limits = source.said, self._limits
        others = [e for e in self._routes.destinations(execution, max_tokens) if e is not source]
        if not others:
            return "nowhere"
        if said.migration == "replay":
            return "unable"
        if num_tokens < limits.min_tokens:
            return "short"
        same = [e for e in others if (e.said.migration, e.said.layout) == (said.migration, said.layout)]
        able = [e for e in same if e.said.version == said.version]
        left = [e for e in able if e.cell not in tried]
        if left and len(tried) < limits.max_destinations:
            return left[0]
        return "failed" if able else "version" if same else "layout"

    # ------------------------------------------------------------ prefixes

    async def _move_prefix(self, execution: str, source: Engine, epoch: int) -> None:
        """Move what is cached of an execution that waits on a tool; its next call then finds it there."""
        held = self._routes.num_held(execution, source.cell)
        found = self._destination(execution, held, held, source, set())
        if not isinstance(found, str):
            trip = self._trip(ExportOf(namespace=execution), execution, epoch, source, found)
            await self._bounded(trip, held, self._carry_prefix(execution, trip))

    async def _carry_prefix(self, execution: str, trip: _Trip) -> str:
        routes, progress = self._routes, Progress()
        if not self._waits_at(execution, trip.source):
            return "ended"
        task = asyncio.current_task()
        assert task is not None
        routes.arriving[execution] = task
        with telemetry.span("gyre.kv.migrate", gyre__execution=execution, gyre__cell__id=trip.source.cell,
                            gyre__cell__to=trip.destination.cell, gyre__idle=True) as span:
            try:
                await migrate(trip.move, self._limits, lambda: self._waits_at(execution, trip.source), progress)
            finally:
                del routes.arriving[execution]
                self._release(trip, keeps_destination=False)
                _describe(span, trip.move.ticket, progress, "moved" if progress.has_committed else progress.reason or "lost")
        if progress.has_committed and self._waits_at(execution, trip.source):
            routes.affinity[execution] = trip.destination.cell
            routes.holds(execution, trip.destination.cell, progress.num_tokens)
            self._count(progress)
            routes.counts.num_prefixes_moved += 1
        return progress.reason

    def _waits_at(self, execution: str, engine: Engine) -> bool:
        return execution in self._routes.idle_on(engine.cell)

    # ------------------------------------------------------------ both

    def _trip(self, what: ExportOf, name: str, epoch: int, source: Engine, destination: Engine) -> _Trip:
        said = source.said
        ticket = f"{self._prefix}{name}@{source.cell}.{epoch}.{next(self._numbers)}"
        expected = Expected(said.migration, destination.said.layout, destination.said.version)
        return _Trip(Move(ticket, what, epoch, source.peer, destination.peer, expected), source, destination)

    async def _bounded(self, trip: _Trip, num_tokens: int, work: Coroutine[Any, Any, str]) -> str:
        """Do the work when it is its turn between these two engines; until it is through its room is promised."""
        pair = self._pairs.setdefault((trip.source.cell, trip.destination.cell),
                                      asyncio.Semaphore(self._limits.max_pair_moves))
        trip.destination.pledged[trip.move.ticket] = num_tokens
        with contextlib.closing(work):
            try:
                async with pair:
                    return await work if trip.destination.admitting else "closed"
            finally:
                del trip.destination.pledged[trip.move.ticket]

    def _release(self, trip: _Trip, keeps_destination: bool) -> None:
        """Both sides let go of what the call does not need any more, in the background: a lease does it too."""
        for engine in (trip.source,) if keeps_destination else (trip.source, trip.destination):
            task = asyncio.get_running_loop().create_task(self._release_on(engine, trip.name))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def _release_on(self, engine: Engine, ticket: bytes) -> None:
        with contextlib.suppress(EngineError):
            await engine.peer.release(ticket, self._limits.step_s)

    def _count(self, progress: Progress) -> None:
        self._routes.counts.num_tokens_moved += progress.num_tokens
        self._routes.counts.num_bytes_moved += progress.num_bytes


def _describe(span: telemetry.Span, ticket: str, progress: Progress, outcome: str) -> None:
    for name, value in (("tokens", progress.num_tokens), ("bytes", progress.num_bytes), ("blocks", progress.num_blocks),
                        ("stages", progress.num_stages), ("outcome", outcome)):
        span.set_attribute(f"gyre.{name}", value)
    if progress.failed is not None:
        span.set_attribute("gyre.detail", str(progress.failed))
        log.info("%s: not moved: %s", ticket, progress.failed)


async def _within(timeout_s: float, works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Everything beside each other; what is not through in time is cancelled."""
    tasks = [asyncio.get_running_loop().create_task(work) for work in works]
    if not tasks:
        return
    try:
        await asyncio.wait(tasks, timeout=timeout_s)
    finally:
        late = [task for task in tasks if task.cancel()]
    if late:
        await asyncio.wait(late)
    for task in tasks:
        if not task.cancelled() and task.exception() is not None:
            log.error("a move failed", exc_info=task.exception())
