"""Brings one cell's engine to what the core wants, and keeps it there.

Level-triggered: it compares what is wanted with what the engine says of itself, again and again, so an engine that was
killed and came back, or a service that was, needs no special path.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Protocol

from gyre.contracts.errors import EngineError
from gyre.contracts.events import WeightsPublished
from gyre.rollout.attempt import EngineGone
from gyre.rollout.engine_client import Observed
from gyre.rollout.local import EngineAsleep, EngineLost, EngineServing, SettleCell
from gyre.rollout.router import Router
from gyre.runtime import telemetry
from gyre.runtime.clock import Clock
from gyre.runtime.transition_traces import transition_id

log = logging.getLogger(__name__)


class EngineControl(Protocol):
    """The commands and queries of an engine. All raise EngineGone if it cannot be reached."""

    async def observe(self) -> Observed: ...

    async def set_admission(self, open_: bool) -> None: ...

    async def sleep(self, epoch: int) -> None: ...

    async def wake(self, epoch: int, weights: WeightsPublished) -> tuple[int, str]: ...

    async def load(self, weights: WeightsPublished) -> tuple[int, str]: ...

    async def probe(self) -> tuple[int, str, bool]: ...


Post = Callable[[Any], Awaitable[None]]


class Keeper:
    """Keeps one cell. `settle` gives it what is wanted; `run` does the rest."""

    def __init__(self, cell: int, engine: EngineControl, router: Router, post: Post, clock: Clock,
                 check_s: float = 1.0, drain_timeout_s: float = 60.0, lost_after_s: float = 15.0) -> None:
        self.cell = cell
        self.observed: Observed | None = None
        self._engine, self._router, self._post, self._clock = engine, router, post, clock
        self._check_s, self._drain_timeout_s, self._lost_after_s = check_s, drain_timeout_s, lost_after_s
        self._failing_since: float | None = None
        self._lost_epoch = -1  # at which that was said
        self._wanted: SettleCell | None = None
        self._trace: Mapping[str, str] = {}
        self._since_ns = 0  # when what is wanted was, or when it was last tried
        self._said: tuple[int, int] | None = None  # (epoch, version) that was reported; version -1: asleep
        self._wake = asyncio.Event()

    def settle(self, wanted: SettleCell, trace: Mapping[str, str] | None = None) -> None:
        """This is what the cell's engine is to do from now on. Admission stops at once if it is to sleep.

        `trace` is the context of what wants it, if that is no transition.
        """
        moves = wanted.epoch > 0 and not wanted.is_confirmed
        if not moves or self._wanted is None or self._wanted.epoch != wanted.epoch:
            self._since_ns = time.time_ns()
        self._wanted = wanted
        self._trace = telemetry.transition(self.cell, wanted.epoch) if moves else trace or {}
        if not wanted.serve:
            self._router.set_admitting(self.cell, False)
        self._wake.set()

    async def run(self) -> None:
        """Compare and correct, for ever."""
        while True:
            await self.look()
            await self._pause()

    async def look(self) -> None:
        """One comparison; an engine that does not answer is closed, and one that does not serve is after a while lost."""
        try:
            await self.check()
            self._failing_since, self._lost_epoch = None, -1
        except EngineError as error:
            log.info("cell %d: %s", self.cell, error)
            self.observed = None
            self._router.observe(self.cell, None)
            if isinstance(error, EngineGone):
                self._router.set_admitting(self.cell, False)
            await self._miss(error)

    async def _miss(self, error: EngineError) -> None:
        """Say that the engine is lost once it has not served for longer than its restart takes.

        Also if this process never saw it serve, because the one before may have said that it does: the core knows.
        """
        now = self._clock.now()
        self._failing_since = now if self._failing_since is None else self._failing_since
        wanted = self._wanted
        if wanted is None or not wanted.serve or self._lost_epoch == wanted.epoch:
            return
        if now - self._failing_since < self._lost_after_s:
            return
        self._said, self._lost_epoch = None, wanted.epoch
        self._router.set_admitting(self.cell, False)
        what = "out of reach" if isinstance(error, EngineGone) else "does not serve"
        await self._post(EngineLost(self.cell, wanted.epoch, f"{what} for {self._lost_after_s:g} s: {error}"))

    async def _pause(self) -> None:
        """Until something new is wanted or the next check is due."""
        try:
            async with asyncio.timeout(self._check_s):
                await self._wake.wait()
        except TimeoutError:
            return

    async def check(self) -> None:
        """One comparison and what follows from it. Raises EngineError."""
        self._wake.clear()
        self.observed = await self._engine.observe()
        self._router.observe(self.cell, self.observed)
        wanted = self._wanted
        if wanted is None:
            return
        if not wanted.serve:
            await self._put_to_sleep(wanted, self.observed)
        elif wanted.weights is not None:
            await self._serve(wanted, wanted.weights, self.observed)

    async def _put_to_sleep(self, wanted: SettleCell, observed: Observed) -> None:
        if self._said == (wanted.epoch, -1) and observed.asleep:
            return
        num_moved = num_replayed = 0
        with self._attempt("gyre.rollout.release", wanted.epoch):
            if not observed.asleep:
                await self._engine.set_admission(False)
                with telemetry.span("gyre.rollout.drain", gyre__calls=self._router.num_live(self.cell)) as span:
                    num_moved, num_replayed = await self._router.drain(self.cell, self._drain_timeout_s,
                                                                           wanted.epoch)
                    span.set_attributes({"gyre.moved": num_moved, "gyre.replayed": num_replayed})
            # Also when it sleeps already: the epoch is new, and the lock has to be free under it.
            with telemetry.span("gyre.engine.sleep"):
                await self._engine.sleep(wanted.epoch)
            self._said = (wanted.epoch, -1)
            await self._post(EngineAsleep(self.cell, wanted.epoch, num_moved, num_replayed))

    async def _serve(self, wanted: SettleCell, weights: WeightsPublished, observed: Observed) -> None:
        serves = (observed.version, observed.asleep, observed.admitting) == (weights.version, False, True)
        if serves and self._said == (wanted.epoch, weights.version):
            self._router.set_admitting(self.cell, True)
            return
        with self._attempt("gyre.engine.wake", wanted.epoch, gyre__weights__version=weights.version):
            await self._bring_to_service(wanted, weights, observed)

    @contextlib.contextmanager
    def _attempt(self, name: str, epoch: int, **attributes: int) -> Iterator[None]:
        """One try; its span begins where the one before ended, so that an engine that is waited for leaves no gap."""
        try:
            with telemetry.span(name, self._trace, start_ns=self._since_ns, gyre__cell__id=self.cell, gyre__cell__epoch=epoch,
                                gyre__transition__id=transition_id(self.cell, epoch), **attributes):
                yield
        finally:
            self._since_ns = time.time_ns()

    async def _bring_to_service(self, wanted: SettleCell, weights: WeightsPublished, observed: Observed) -> None:
        version, checksum = observed.version, weights.checksum
        if observed.asleep or self._said is None:
            version, checksum = await self._engine.wake(wanted.epoch, weights)
        elif observed.version != weights.version:
            version, checksum = await self._engine.load(weights)
        elif not observed.admitting:
            await self._engine.set_admission(True)
        if version != weights.version or checksum != weights.checksum:
            raise EngineError(f"serves version {version} ({checksum}), wanted {weights.version} ({weights.checksum})")
        if self._wanted is not wanted:
            return
        # What it says of itself now, or calls that leave an engine before the next check would not be moved to it, or from it.
        self._router.observe(self.cell, await self._engine.observe())
        self._router.set_admitting(self.cell, True)
        if self._said != (wanted.epoch, version):
            self._said = (wanted.epoch, version)
            await self._post(EngineServing(self.cell, wanted.epoch, version, checksum))
