"""Which engine a call goes to, and how a call outlives its engine.

A call goes to the engine that served its execution last, if that one admits; else to one that holds a prefix of it, else
to the least loaded one. When no engine admits, the call waits: the harness sees a pause. When its engine is drained, the
call moves to another one with what was computed (`drain.py`); when that cannot be, or the engine dies, it is replayed:
prompt + emitted tokens, budget reduced. No token is lost or said twice.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from gyre.contracts.errors import EngineError
from gyre.rollout.attempt import Attempt, EngineFull, EngineGone, EngineRefused, Job, Output, attempt_of, settled
from gyre.rollout.drain import Drain
from gyre.rollout.engine_client import Observed
from gyre.rollout.live_call import LiveCall, Route, Stall
from gyre.rollout.migration import EnginePeer, MoveLimits
from gyre.rollout.routes import Availability, MoveCounts, Routes, leaves_in_order
from gyre.runtime.clock import Clock

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """Bounds of one call's life."""

    max_replays: int = 16  # engines that may fail under one call
    max_engine_errors: int = 2  # `finish = error` answers before the call fails
    stall_timeout_s: float = 3600.0  # wait for an engine that admits
    call_timeout_s: float = 3600.0  # one attempt on one engine
    full_s: float = 0.5  # until an engine whose queue was full is asked again
    max_live: int = 2**31  # calls that an engine runs at once
    moves: MoveLimits = field(default_factory=MoveLimits)


class _Cut(EngineGone):
    """This service ended the try itself, for a move or a drain."""


class Router:
    """Routes of all live calls. One event loop owns it.

    `availability(cell)` grows with the time the cell will go on serving. `prefix` begins the names of tickets; another
    life of the service has another one.
    """

    def __init__(self, peers: Mapping[int, EnginePeer], limits: RouterLimits, clock: Clock,
                 availability: Availability = leaves_in_order, prefix: str = "") -> None:
        self._routes = Routes(peers, availability, limits.max_live)
        self._drain = Drain(self._routes, limits.moves, prefix)
        self._limits = limits
        self._clock = clock
        self.num_replayed = 0

    # ------------------------------------------------------------ engines

    def set_admitting(self, cell: int, admitting: bool) -> None:
        """Open or stop an engine for new calls; live ones go on."""
        self._routes.set_admitting(cell, admitting)

    def is_admitting(self, cell: int) -> bool:
        return self._routes.engines[cell].admitting

    def num_live(self, cell: int) -> int:
        """Calls that are on the engine now."""
        return len(self._routes.engines[cell].live)

    def observe(self, cell: int, said: Observed | None) -> None:
        """What the engine says of itself; None: it cannot be reached."""
        self._routes.observe(cell, said)

    def said(self, cell: int) -> Observed:
        """What the engine last said of itself."""
        return self._routes.engines[cell].said

    @property
    def counts(self) -> MoveCounts:
        return self._routes.counts

    def forget(self, execution: str) -> None:
        """The execution has ended; its affinity goes."""
        self._routes.forget(execution)

    async def drain(self, cell: int, timeout_s: float, epoch: int = 0) -> tuple[int, int]:
        """Empty an engine for the transition of its cell to `epoch`; it stops admitting. Returns (moved, replayed)."""
        self.set_admitting(cell, False)
        return await self._drain.run(cell, epoch, timeout_s)

    # ------------------------------------------------------------ calls

    async def generate(self, job: Job, output: Output, stall: Stall) -> None:
        """Run a call to its end; `output` grows meanwhile and has a `finish` afterwards.

        Raises:
            EngineRefused: no engine will serve it.
            EngineError: engines failed too often, or none admitted in time.
        """
        call = LiveCall(job, output, stall, self._clock)
        try:
            await self._run(call)
        finally:
            call.over()

    async def _run(self, call: LiveCall) -> None:
        failures = errors = 0
        last = ""
        while failures < self._limits.max_replays and errors <= self._limits.max_engine_errors:
            route = await self._route(call)
            finish, is_failure = "", True
            try:
                finish = await self._attempt(route, call)
                is_failure = finish != "moved"
            except _Cut as cut:
                is_failure, last = False, str(cut)
            except EngineFull as full:
                is_failure, last = False, str(full)
                await self._let_others_pass(call)
            except EngineGone as error:
                last = str(error)
                log.warning("cell %d: %s: %s", route.engine.cell, call.request_id, error)
            call.output.finish = settled(call.output, call.job, finish)
            if call.output.finish is not None:
                return
            call.pause()
            failures += is_failure
            errors += finish == "error"
            await call.decision()
            call.pause()
            call.number += 1
        raise EngineError(f"{call.job.request_id}: engines failed it too often{last and f'; the last one: {last}'}")

    async def _let_others_pass(self, call: LiveCall) -> None:
        """Its engine is full: after a while it asks again, wherever there is least to do then."""
        call.pause()
        self._routes.affinity.pop(call.job.execution, None)
        await asyncio.sleep(self._limits.full_s)

    async def _route(self, call: LiveCall) -> Route:
        """Where the call goes next: as the move that stopped it says, else wherever it may be served."""
        route = None
        while call.routes and route is None:
            route = call.routes.popleft()
            if not (route.ticket or route.engine.admitting):
                route = None
        if route is None:
            route = await self._choose(call)
        self._routes.affinity[call.job.execution] = route.engine.cell
        if call.number and not route.ticket:
            self.num_replayed += 1
            self.counts.replayed[route.reason] += 1
        return route

    async def _choose(self, call: LiveCall) -> Route:
        execution = call.job.execution
        arriving = self._routes.arriving.get(execution)
        if arriving is not None:
            call.pause()
            await asyncio.wait({arriving}, timeout=self._limits.moves.total_s)
        while not self._routes.admits.is_set():
            call.pause()
            try:
                async with asyncio.timeout(self._limits.stall_timeout_s):
                    await self._routes.admits.wait()
            except TimeoutError:
                raise EngineError(f"no engine admitted for {self._limits.stall_timeout_s} s") from None
        if call.number == 0:
            call.resume()  # from here on it waits for its own tokens
        return Route(self._routes.home(execution), reason=call.reason or "gone")

    async def _attempt(self, route: Route, call: LiveCall) -> str:
        """One try, in a task of its own, so that the try can be ended without the call. Returns the engine's finish."""
        engine, call.reason = route.engine, ""
        attempt = attempt_of(call.job, call.output, call.number, self._limits.call_timeout_s, route.ticket)
        task = asyncio.create_task(self._stream(call, engine.peer, attempt))
        call.begin(route, attempt.request_id, task)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            call.end()
        if task.cancelled():
            raise _Cut(call.reason)
        call.output.cell = engine.cell
        error = task.exception()
        if isinstance(error, EngineFull):
            raise error
        if isinstance(error, EngineGone) or (error is None and task.result() == "abort"):
            # Whoever watches the engine opens it again once it answers.
            self.set_admitting(engine.cell, False)
        if isinstance(error, EngineRefused) and call.number:
            raise EngineGone(f"refuses what another engine took: {error}")
        if error is not None:
            raise error
        self._routes.holds(call.job.execution, engine.cell, call.num_tokens())
        return task.result()

    async def _stream(self, call: LiveCall, peer: EnginePeer, attempt: Attempt) -> str:
        number = call.number
        async for chunk in peer.generate(attempt):
            if not call.take(number, chunk):
                raise EngineGone("the call went on without it")
            if chunk.finish:
                if chunk.finish in ("error", "abort"):
                    log.warning("%s: %s %s", attempt.request_id, chunk.finish, chunk.detail)
                if number and chunk.finish in ("stop", "length"):
                    self.counts.num_tokens_recomputed += max(0, len(attempt.prompt) - 1 - chunk.num_reused)
                return chunk.finish
        raise EngineGone("the stream ended without a finish")
