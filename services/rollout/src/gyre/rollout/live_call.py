"""A call that is being answered: on which engine it is, where it goes on after that, and how long it has paused.

A call is on one engine at a time. Its tries are numbered, and the number decides every race:

1. A chunk is taken only from the current try; what an engine says after the call has left it is dropped.
2. A move may stop the call, and say where it goes on, only if the call is still on the try that the move began with.
3. A new try begins after the one before has ended and, if that was stopped for a move, after the move has said where.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gyre.rollout.attempt import Chunk, Job, Output
from gyre.rollout.routes import Engine
from gyre.runtime.clock import Clock


class Stall(Protocol):
    """Counts the time a call waits for the service and not for its own tokens."""

    def begin(self, now: float) -> None: ...

    def end(self, now: float) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Where a try goes. `ticket`: KV of the call that waits there; `reason`: why the call comes without one."""

    engine: Engine
    ticket: bytes = b""
    reason: str = ""


class LiveCall:
    """One call of the router. Used from its event loop only."""

    def __init__(self, job: Job, output: Output, stall: Stall, clock: Clock) -> None:
        self.job = job
        self.output = output
        self.number = 0
        self.request_id = job.request_id
        self.route: Route | None = None  # of the current try
        self.routes: deque[Route] = deque()  # of the next ones, in this order
        self.reason = ""  # why the last try ended early
        self.num_cut = 0  # tries that ended before the call did and left it nothing but its tokens
        self.mover: asyncio.Task[None] | None = None  # moves it; cancelled when there is nothing to move any more
        self.is_over = False
        self._task: asyncio.Task[str] | None = None
        self.has_spoken = False  # the current try
        self._silent = asyncio.Event()
        self._silent.set()
        self._decided = asyncio.Event()
        self._decided.set()
        self._landed: asyncio.Future[Route | None] | None = None
        self._last_left = -1  # the newest try after which a move has said where the call goes on
        self._stall, self._clock = stall, clock
        self._is_paused = False

    # ------------------------------------------------------------ its own loop

    def begin(self, route: Route, request_id: str, task: asyncio.Task[str]) -> None:
        """A try begins, called `request_id` on its engine."""
        self.route, self.request_id, self._task, self.has_spoken = route, request_id, task, False
        self._silent = asyncio.Event()
        route.engine.live.add(self)

    def end(self) -> None:
        """The try has ended."""
        assert self.route is not None
        self.route.engine.live.discard(self)
        self.route = self._task = None
        self._silent.set()

    def take(self, number: int, chunk: Chunk) -> bool:
        """A chunk of try `number`; False if that is not the current one. Raises EngineGone if it does not fit."""
        if number != self.number or self.is_over:
            return False
        self.output.take(chunk)
        if len(chunk.ids) and not self.has_spoken:
            self.has_spoken = True
            if number > self._last_left:  # else these were said before it stopped, and decide nothing of what follows
                self.routes.clear()  # what waits at other engines is of the past from here on
                self._land(self.route)
                if self._decided.is_set():
                    self.resume()
        return True

    async def decision(self) -> None:
        """Until whoever stopped the call has said where it goes on; nobody else may move it any more."""
        if self._decided.is_set() and self.mover is not None:
            self.mover.cancel()
        await self._decided.wait()
        self.num_cut += not (self.routes and self.routes[0].ticket)

    def over(self) -> None:
        """The call has ended, one way or the other."""
        self.is_over = True
        self.resume()
        self._land(None)
        if self.mover is not None:
            self.mover.cancel()

    def pause(self) -> None:
        """It waits for the service from now on."""
        if not self._is_paused:
            self._is_paused = True
            self._stall.begin(self._clock.now())

    def resume(self) -> None:
        """It does not wait any more."""
        if self._is_paused:
            self._is_paused = False
            self._stall.end(self._clock.now())

    # ------------------------------------------------------------ who moves it

    def num_tokens(self) -> int:
        """Tokens that are known now."""
        return len(self.job.prompt) + len(self.output.ids)

    def max_tokens(self) -> int:
        """Tokens that may become known."""
        return len(self.job.prompt) + self.job.max_tokens

    def is_on(self, engine: Engine) -> bool:
        return self.route is not None and self.route.engine is engine

    def stop(self, number: int) -> bool:
        """The call is about to be stopped on its engine; False if it is not on that try any more."""
        if number != self.number or self.is_over or self.route is None:
            return False
        self._decided.clear()
        self.pause()
        return True

    def carry_on(self, number: int) -> None:
        """It was not stopped on try `number` after all, or nobody is left to say where it goes on."""
        self.mover = None
        if not self._decided.is_set():
            self._decided.set()
            if number == self.number and self.route is not None and (self.has_spoken or number == 0):
                self.resume()  # a later try has paused the call until its first token

    def go_on(self, number: int, routes: Sequence[Route], reason: str = "") -> bool:
        """The compare-and-set of the route: after try `number` it takes `routes`, each if the one before said nothing.

        Without routes it chooses an engine itself. False if the call is not on that try any more.
        """
        is_current = number == self.number and not self.is_over
        if is_current:
            self._last_left = number
            self.routes = deque(routes)
            self.reason = reason
            self._landed = asyncio.get_running_loop().create_future()
        self.mover = None
        self._decided.set()
        return is_current

    async def landed(self, timeout_s: float) -> Route | None:
        """The route on which the first token after `go_on` was said; None if that took too long or the call ended."""
        if self._landed is None:
            return None
        done, _ = await asyncio.wait({self._landed}, timeout=timeout_s)
        return self._landed.result() if done else None

    def silence(self, timeout_s: float | None = None) -> Coroutine[Any, Any, None]:
        """Until the try that is the current one now has ended; with `timeout_s` it is cut off then."""
        return self._silence(self._silent, timeout_s)

    async def _silence(self, silent: asyncio.Event, timeout_s: float | None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await silent.wait()
        except TimeoutError:
            if silent is self._silent:
                self.cut("late")
            await silent.wait()

    def cut(self, reason: str) -> bool:
        """End the current try. The call goes on by the routes it was given, else from its tokens wherever there is room.

        Returns whether there was a try that had not ended.
        """
        if self._task is None or self._task.done():
            return False
        if not self._task.cancelling():
            self.reason = reason
            self._task.cancel()
        return True

    def _land(self, route: Route | None) -> None:
        if self._landed is not None and not self._landed.done():
            self._landed.set_result(route)
