"""The seam between a descriptor and the wire: one Protocol, one small class per way of reaching memory."""

from __future__ import annotations

import asyncio
import contextlib
import math
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from gyre.transfer.describe import BufferInfo, RegionDescriptor
from gyre.transfer.errors import DeadlineExceeded, LayoutMismatch, TransferError
from gyre.transfer.rows import RowRead

COPY_CHUNK_BYTES = 4 << 20

Clock = Callable[[], float]


class Reader(Protocol):
    """Reads described buffers without the owner's help (or as close to it as the wire allows)."""

    name: str

    def reaches(self, descriptor: RegionDescriptor) -> bool:
        """Whether this backend can get at the descriptor's memory from here."""
        ...

    async def read(self, descriptor: RegionDescriptor, into: Mapping[str, np.ndarray], deadline: float) -> None:
        """Fill `into` (C-contiguous, checked) before `deadline` (event-loop time); raises a `TransferError`."""
        ...

    async def read_rows(self, wanted: RowRead, deadline: float) -> None:
        """Fill and verify the rows of `wanted` before `deadline`; raises a `TransferError`. Nothing is written later."""
        ...


async def in_thread(work: Callable[[Clock], None]) -> None:
    """Run `work` on a worker thread and wait until it has ended, also when this is cancelled.

    `work` is given the clock of its deadline. After a cancellation that clock says that every deadline has passed, so
    `work`, which has to look at it again and again, ends soon, and nothing of it writes into a caller's memory later.
    """
    loop = asyncio.get_running_loop()
    given_up = threading.Event()
    running = loop.run_in_executor(None, work, lambda: math.inf if given_up.is_set() else loop.time())
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        given_up.set()
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        with contextlib.suppress(TransferError):
            running.result()
        raise



def host_identity(boot_id: Path = Path("/proc/sys/kernel/random/boot_id")) -> str:
    """A name equal for two processes exactly when they run on the same booted machine."""
    if boot_id.exists():
        return boot_id.read_text(encoding="ascii").strip()
    return _macos_boot() or platform.node()


def _macos_boot() -> str:
    """macOS's name of this boot; empty on other systems."""
    if sys.platform != "darwin":
        return ""
    command = ["sysctl", "-n", "kern.bootsessionuuid"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout.strip()


def check_destination(info: BufferInfo, array: np.ndarray) -> None:
    """Raise `LayoutMismatch` unless `array` can take the bytes of `info` as they are."""
    if array.dtype.str != info.dtype or tuple(array.shape) != info.shape:
        raise LayoutMismatch(
            f"buffer {info.name!r} is {info.dtype}{list(info.shape)}, "
            f"the destination is {array.dtype.str}{list(array.shape)}"
        )
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise LayoutMismatch(f"buffer {info.name!r}: the destination must be C-contiguous and writeable")


def as_bytes(array: np.ndarray) -> memoryview:
    """The array's bytes as one flat writable view."""
    return memoryview(array.reshape(-1).view(np.uint8))


def check_deadline(deadline: float, now: float, region: str) -> None:
    """Raise `DeadlineExceeded` when `now` is past `deadline` (same clock)."""
    if now >= deadline:
        raise DeadlineExceeded(f"reading region {region!r} did not end before its deadline")


def loop_time() -> float:
    """The running loop's clock, which deadlines are measured on."""
    return asyncio.get_running_loop().time()
