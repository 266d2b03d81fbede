"""The seam between a descriptor and the wire: one Protocol, one small class per way of reaching memory."""

from __future__ import annotations

import asyncio
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from gyre.transfer.describe import BufferInfo, RegionDescriptor
from gyre.transfer.errors import DeadlineExceeded, LayoutMismatch

COPY_CHUNK_BYTES = 4 << 20


class Reader(Protocol):
    """Reads described buffers without the owner's help (or as close to it as the wire allows)."""

    name: str

    def reaches(self, descriptor: RegionDescriptor) -> bool:
        """Whether this backend can get at the descriptor's memory from here."""
        ...

    async def read(self, descriptor: RegionDescriptor, into: Mapping[str, np.ndarray], deadline: float) -> None:
        """Fill `into` (C-contiguous, checked) before `deadline` (event-loop time); raises a `TransferError`."""
        ...



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
