"""What a worker says of itself; `gyre status` shows one line of it."""

from __future__ import annotations

import os
from typing import Protocol

from gyre.proto.common.v1 import status_pb2
from gyre.runtime.devices import DeviceLock
from gyre.runtime.process import Process
from gyre.trainer.ledger import Ledger


class Shell(Protocol):
    """What core and satellite both can say of themselves."""

    @property
    def version(self) -> int:
        """Of the weights in memory; -1 before there are any."""
        ...

    def gauges(self) -> dict[str, float]: ...


class StatusSource:
    """Collects a worker's status."""

    def __init__(self, process: Process, ledger: Ledger, lock: DeviceLock, shell: Shell) -> None:
        self._process, self._ledger, self._lock, self._shell = process, ledger, lock, shell

    def status(self) -> status_pb2.Status:
        state = self._ledger.state
        return status_pb2.Status(
            process=self._process.name, service="trainer", run=self._process.run, pid=os.getpid(),
            uptime_s=self._process.uptime_s, cell=self._process.index, role=state.cell.role, epoch=state.cell.epoch,
            weights_version=self._shell.version if self._shell.version >= 0 else None, gauges=self._shell.gauges(),
            detail="holds the devices" if self._lock.held else "off the devices",
        )  # fmt: skip
