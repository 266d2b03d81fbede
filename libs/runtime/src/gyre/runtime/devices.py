"""The devices of a cell: one lock and one epoch file, shared by its engine and its trainer worker.

Whoever holds `<cells_dir>/<cell>/device.lock` (flock) owns the devices. `epoch.json` beside it says since which epoch;
an epoch that is older takes nothing. The kernel drops the lock with the process, so kill -9 cannot leak it.
"""

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Holder = Literal["engine", "trainer", "nobody"]


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """Who last took the devices, at which epoch. `nobody`: they were given back for the other side to take."""

    epoch: int = -1
    holder: Holder = "nobody"


class DeviceLock:
    """One side's hand on the devices of a cell."""

    def __init__(self, cells_dir: Path, cell: int, holder: Holder) -> None:
        self._home = cells_dir / str(cell)
        self._holder = holder
        self._file: int | None = None

    @property
    def held(self) -> bool:
        """Whether this side owns the devices now."""
        return self._file is not None

    def is_free(self) -> bool:
        """Whether nobody owns the devices now."""
        if self.held or not self._try_lock():
            return False
        self._unlock()
        return True

    def try_take(self, epoch: int) -> bool:
        """Takes the devices for `epoch`, or returns False: the other side holds them, or a newer epoch has begun."""
        held_before = self.held
        if not held_before and not self._try_lock():
            return False
        if self.last().epoch > epoch:
            if not held_before:
                self._unlock()
            return False
        self._write(EpochRecord(epoch, self._holder))
        return True

    def give_back(self, epoch: int | None = None) -> None:
        """Lets go; with `epoch`, what is older can no longer take the devices. Idempotent."""
        if epoch is not None and epoch > self.last().epoch:
            self._write(EpochRecord(epoch))
        self._unlock()

    def last(self) -> EpochRecord:
        """What the epoch file says."""
        try:
            raw = json.loads((self._home / "epoch.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return EpochRecord()
        return EpochRecord(int(raw["epoch"]), raw["holder"])

    def _try_lock(self) -> bool:
        self._home.mkdir(parents=True, exist_ok=True)
        file = os.open(self._home / "device.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        self._file = file
        return True

    def _unlock(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, record: EpochRecord) -> None:
        aside = self._home / f".epoch.{os.getpid()}"
        self._home.mkdir(parents=True, exist_ok=True)
        aside.write_text(
            json.dumps({"epoch": record.epoch, "holder": record.holder, "pid": os.getpid()}), encoding="utf-8"
        )
        aside.replace(self._home / "epoch.json")
