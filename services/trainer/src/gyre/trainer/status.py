"""What a worker says of itself; `gyre status` shows one line of it."""

from __future__ import annotations

import os
from collections.abc import Callable

from gyre.proto.common.v1 import status_pb2
from gyre.runtime.devices import DeviceLock
from gyre.runtime.process import Process
from gyre.trainer.ledger import Ledger


class StatusSource:
    """Collects a worker's status. `gauges` are the shell's own numbers."""

    def __init__(
        self, process: Process, ledger: Ledger, lock: DeviceLock, gauges: Callable[[], dict[str, float]]
    ) -> None:
        self._process, self._ledger, self._lock, self._gauges = process, ledger, lock, gauges

    def status(self) -> status_pb2.Status:
        state = self._ledger.state
        return status_pb2.Status(
            process=self._process.name, service="trainer", run=self._process.run, pid=os.getpid(),
            uptime_s=self._process.uptime_s, cell=self._process.index, role=state.cell.role, epoch=state.cell.epoch,
            weights_version=state.position, gauges=self._gauges(),
            detail="holds the devices" if self._lock.held else "off the devices",
        )  # fmt: skip
