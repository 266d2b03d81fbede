"""One engine and its cell's devices: when it may wake, what it must verify, when it lets go.

1. Every command carries the cell's epoch; one older than the newest seen is refused, and an epoch keeps its role.
2. Awake means: devices held, weights loaded, checksum verified, probe answered; only then is admission open.
3. Commands are idempotent, because whoever sent one and lost the answer sends it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from gyre.contracts.errors import EngineError
from gyre.rollout.engines.base import Engine, LoadReport, ProbeResult
from gyre.rollout.engines.weights import WeightsLoader, WeightsSource
from gyre.runtime import telemetry
from gyre.runtime.devices import DeviceLock

DEVICE_POLL_S = 0.05
DEVICE_WAIT_S = 5.0

Sleep = Callable[[float], Awaitable[None]]


class StaleEpoch(EngineError):
    """A command of an epoch that is over, or that contradicts what its epoch already did."""


class DevicesTaken(EngineError):
    """The cell's trainer still holds the devices; the command may be sent again."""


class EngineCell:
    """Serialises the commands that change an engine's state and fences them by epoch."""

    def __init__(
        self, engine: Engine, lock: DeviceLock, loader: WeightsLoader, sleep: Sleep = asyncio.sleep
    ) -> None:
        self.engine = engine
        self._lock = lock
        self._loader = loader
        self._sleep = sleep
        self._one_at_a_time = asyncio.Lock()
        self._loaded: tuple[int, str] | None = None

    @property
    def epoch(self) -> int:
        """The newest epoch seen, also by an earlier process of this cell; -1 if there was none."""
        return self._lock.last().epoch

    @property
    def awake(self) -> bool:
        """Whether the engine holds the devices."""
        return self._lock.held

    def load_report(self) -> LoadReport:
        """The engine's load; asleep also while it never was awake."""
        report = self.engine.load_report()
        return report if self.awake else replace(report, asleep=True, admitting=False, kv_tokens_free=0)

    async def wake(self, epoch: int, source: WeightsSource) -> ProbeResult:
        """Devices, memory, weights, checksum, probe, admission.

        Raises:
            StaleEpoch: `epoch` is over, or was one of training.
            DevicesTaken: the trainer has not let go yet.
            EngineError: the weights cannot be had, are not those announced, or fail the probe. Admission is closed.
        """
        async with self._one_at_a_time:
            self._fence(epoch, "engine")
            if not self.awake:
                with telemetry.span("gyre.engine.devices"):
                    await self._take_devices(epoch)
            elif not self._lock.try_take(epoch):
                raise StaleEpoch(f"epoch {epoch}: the cell is at epoch {self.epoch}")
            with telemetry.span("gyre.engine.restore"):
                await self.engine.wake()
            return await self._serve(source)

    async def load_weights(self, source: WeightsSource) -> ProbeResult:
        """Swaps weights of an awake engine; what is in flight goes on under them. Raises EngineError."""
        async with self._one_at_a_time:
            if not self.awake:
                raise EngineError("weights cannot be loaded while the engine sleeps; wake it instead")
            return await self._serve(source)

    async def sleep(self, epoch: int) -> int:
        """Closes admission, frees memory, gives the devices back. Returns the freed bytes. Raises StaleEpoch."""
        async with self._one_at_a_time:
            if self.awake or epoch != self.epoch:
                self._fence(epoch, "nobody")
            freed = await self.engine.sleep()
            self._lock.give_back(epoch)
            return freed

    def check_export(self, epoch: int) -> None:
        """Whether what this engine holds may leave it under `epoch`. Raises StaleEpoch."""
        if epoch < self.epoch:
            raise StaleEpoch(f"epoch {epoch} is over: the cell is at epoch {self.epoch}")
        if not self.awake:
            raise StaleEpoch("the engine sleeps: nothing can be moved from it")

    async def close(self) -> None:
        """Ends the engine's requests and gives the devices back."""
        await self.engine.close()
        self._lock.give_back()

    async def _serve(self, source: WeightsSource) -> ProbeResult:
        """Loads `source` unless it is loaded, verifies, opens admission."""
        wanted = (source.version, source.checksum)
        if self._loaded == wanted and self.engine.load_report().admitting:
            return ProbeResult(*wanted, ok=True)
        if self._loaded != wanted:
            with telemetry.span("gyre.weights.pull", gyre__weights__version=source.version) as span:
                state = await self._loader.fetch(source)
                span.set_attribute("gyre.bytes", sum(tensor.nbytes for tensor in state.values()))
            with telemetry.span("gyre.weights.verify", gyre__weights__checksum=source.checksum):
                await self.engine.load_weights(source.version, source.checksum, state)
            self._loaded = wanted
        with telemetry.span("gyre.engine.probe") as span:
            probe = await self.engine.probe()
            span.set_attribute("gyre.outcome", "ok" if probe.ok else probe.detail)
        if not probe.ok:
            self._loaded = None  # whoever asks again gets them fetched again
            raise EngineError(f"weights {source.version} fail the probe: {probe.detail}")
        with telemetry.span("gyre.engine.admit"):
            self.engine.resume()
        return probe

    def _fence(self, epoch: int, holder: str) -> None:
        last = self._lock.last()
        if epoch < last.epoch:
            raise StaleEpoch(f"epoch {epoch} is over: the cell is at epoch {last.epoch}")
        if epoch == last.epoch and last.holder != holder:
            raise StaleEpoch(f"epoch {epoch} belongs to {last.holder} already")

    async def _take_devices(self, epoch: int) -> None:
        for _ in range(round(DEVICE_WAIT_S / DEVICE_POLL_S)):
            if self._lock.try_take(epoch):
                return
            await self._sleep(DEVICE_POLL_S)
        raise DevicesTaken(f"the trainer of this cell still holds its devices after {DEVICE_WAIT_S} s")
