"""A cell's worker joins and leaves training: the pure rule, and the device lock it shares with the cell's engine.

The scheduler assigns `train` at epoch e; the engine releases the devices at epoch e; the worker takes them and says
joined. At the burst's end the scheduler assigns `rollout` at a newer epoch; the worker lets go and says released. An
epoch that is not newer than one seen is ignored.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path

from gyre.contracts.events import CellRoleAssigned, CellRolloutReleased, Role


@dataclass(slots=True)
class CellState:
    """What the facts say of this worker's cell; part of the durable state.

    assigned: epoch and role of the newest assignment. rollout_released: newest epoch the engine let go at.
    joined, released: newest epochs this worker took or gave back the devices at.
    """

    epoch: int = 0
    role: Role = "rollout"
    rollout_released: int = -1
    joined: int = -1
    released: int = -1

    def assign(self, fact: CellRoleAssigned) -> None:
        if fact.epoch > self.epoch:
            self.epoch, self.role = fact.epoch, fact.role

    def engine_released(self, fact: CellRolloutReleased) -> None:
        self.rollout_released = max(self.rollout_released, fact.epoch)

    @property
    def should_hold(self) -> bool:
        """Training is this cell's role and the engine is off the devices."""
        return self.role == "train" and self.rollout_released >= self.epoch

    @property
    def owes_release(self) -> bool:
        """The cell is back in rollout, and the engine waits for our word."""
        return self.role == "rollout" and self.joined > self.released


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
