"""A cell's devices while its engine is to let go of them and its worker waits for that.

An engine whose process is gone for good will not say that it is off the devices, and holds nothing: the kernel drops its
lock. Nobody trains without the core, so without this rule a run whose core's engine cannot be started again would stand
still. Should the engine come back after all, it finds that its cell trains at this epoch, and stays asleep.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from gyre.runtime.clock import Clock
from gyre.runtime.devices import DeviceLock
from gyre.trainer.core import EngineGone
from gyre.trainer.elastic import CellState
from gyre.trainer.ledger import Ledger

log = logging.getLogger(__name__)

ENGINE_GONE_S = 20.0  # nobody held the devices for so long: more than an engine takes between letting go and saying so
LOOK_S = 1.0


class Vacancy:
    """How long nobody has held the devices that a worker waits for."""

    def __init__(self, lock: DeviceLock, clock: Clock) -> None:
        self._lock, self._clock = lock, clock
        self._since: tuple[int, float] | None = None

    def look(self, cell: CellState) -> EngineGone | None:
        """What is to be said once it is clear that the engine is gone."""
        if not cell.waits_for_engine or not self._lock.is_free():
            self._since = None
            return None
        now = self._clock.now()
        if self._since is None or self._since[0] != cell.epoch:
            self._since = (cell.epoch, now)
        return EngineGone(cell.epoch) if now - self._since[1] >= ENGINE_GONE_S else None

    async def wait(self, attention: asyncio.Event, ledger: Ledger) -> None:
        """Until the state changes; meanwhile the devices are looked at, if that is what the worker waits for."""
        if not ledger.state.cell.waits_for_engine:
            await attention.wait()
            return
        gone = self.look(ledger.state.cell)
        if gone is not None:
            log.warning("epoch %d: the engine's process is gone, nobody holds the devices: taking them", gone.epoch)
            await ledger.submit(gone)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await attention.wait()
