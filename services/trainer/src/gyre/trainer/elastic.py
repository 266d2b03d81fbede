"""The devices of a cell: one lock and one epoch file, shared by its engine and its trainer worker.

Whoever holds `<cells_dir>/<cell>/device.lock` (flock) owns the devices; `epoch.json` beside it says since which epoch.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path


class DeviceLock:
    """The holder owns the cell's devices. The kernel drops the lock with the process, so kill -9 cannot leak it."""

    def __init__(self, cells_dir: Path, cell: int) -> None:
        self._home = cells_dir / str(cell)
        self._file: int | None = None

    @property
    def held(self) -> bool:
        return self._file is not None

    def try_take(self, epoch: int) -> bool:
        """Take the devices for `epoch`, or return False: held by the engine, or a newer epoch has begun."""
        if self._file is not None:
            return True
        self._home.mkdir(parents=True, exist_ok=True)
        file = os.open(self._home / "device.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        if self.last_epoch() > epoch:
            os.close(file)
            return False
        self._file = file
        self._write_epoch(epoch)
        return True

    def give_back(self) -> None:
        """Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def last_epoch(self) -> int:
        """The newest epoch anyone held the devices at, -1 if nobody did."""
        try:
            return int(json.loads((self._home / "epoch.json").read_text(encoding="utf-8"))["epoch"])
        except FileNotFoundError:
            return -1

    def _write_epoch(self, epoch: int) -> None:
        aside = self._home / f".epoch.{os.getpid()}"
        aside.write_text(json.dumps({"epoch": epoch, "holder": "trainer", "pid": os.getpid()}), encoding="utf-8")
        aside.replace(self._home / "epoch.json")
