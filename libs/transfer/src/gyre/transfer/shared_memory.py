"""Same host: the reader maps the owner's file and copies; the owner's process takes no part in it."""

from __future__ import annotations

import asyncio
import mmap
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gyre.transfer.backend import COPY_CHUNK_BYTES, Clock, as_bytes, check_deadline, in_thread
from gyre.transfer.describe import RegionDescriptor
from gyre.transfer.errors import RegionUnknown, TornRead, TransferError
from gyre.transfer.region import HEADER_BYTES, read_header
from gyre.transfer.rows import RowRead, Span

# Copied, then checked while it is still in a cache. Not less: below 1 MiB the C library's memcpy may choose an instruction
# that some processors run at a fifth of their speed when the destination is not aligned.
ROWS_CHUNK_BYTES = 1 << 20
MAX_KEPT_MAPS = 64


class SharedMemoryReader:
    """Maps the descriptor's file read-only. `host` is this machine's identity."""

    name = "shm"

    def __init__(self, host: str) -> None:
        self._host = host
        self._maps = Maps()

    def reaches(self, descriptor: RegionDescriptor) -> bool:
        return (
            descriptor.path is not None
            and descriptor.host == self._host
            and (Path(descriptor.path).exists() or descriptor.address is None)
        )

    async def read(self, descriptor: RegionDescriptor, into: Mapping[str, np.ndarray], deadline: float) -> None:
        clock = asyncio.get_running_loop().time
        await asyncio.to_thread(copy_out, descriptor, into, deadline, clock)

    async def read_rows(self, wanted: RowRead, deadline: float) -> None:
        await in_thread(lambda clock: wanted.fill(self.arrivals(wanted, deadline, clock)))

    def arrivals(self, wanted: RowRead, deadline: float, clock: Clock) -> Iterator[Span]:
        """Copy the rows, a piece at a time; the region is looked at before the first and after the last."""
        descriptor = wanted.descriptor
        check_deadline(deadline, clock(), descriptor.region)
        memory = self._maps.of(descriptor)
        self._require(memory, descriptor)
        source = wanted.rows_over(memory)
        for span, runs in wanted.spans(ROWS_CHUNK_BYTES):
            check_deadline(deadline, clock(), descriptor.region)
            wanted.copy(source, span, runs)
            yield span
        self._require(memory, descriptor)

    def _require(self, memory: mmap.mmap, descriptor: RegionDescriptor) -> None:
        """Raise unless the region is the described registration; a region that is not is not kept mapped."""
        try:
            read_header(memory, descriptor.region).require(descriptor.region, descriptor.token, descriptor.generation)
        except TransferError:
            self._maps.forget(descriptor)
            raise


@dataclass(frozen=True, eq=False)
class Kept:
    """A file that is mapped, as (device, inode), and where it was found."""

    path: Path
    identity: tuple[int, int]
    memory: mmap.mmap


class Maps:
    """Mappings of regions that are read again and again, by token; the least recently used goes first.

    A file's identity is compared with that of its path on every use: the file of a dead owner is unlinked by its
    successor, without a word in its header. Thread-safe. A mapping that is let go lives as long as a copy uses it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, Kept] = {}

    def of(self, descriptor: RegionDescriptor) -> mmap.mmap:
        """The region's memory, read-only; raises `RegionUnknown` when its file is gone."""
        path = Path(str(descriptor.path))
        with self._lock:
            kept = self._kept.pop(descriptor.token, None)
            try:
                status = path.stat()
            except FileNotFoundError as error:
                raise RegionUnknown(f"region {descriptor.region!r}: no shared file at {path}") from error
            identity = (status.st_dev, status.st_ino)
            if kept is None or kept.identity != identity:
                self._sweep()
                kept = Kept(path, identity, _map(descriptor))
            self._kept[descriptor.token] = kept
            return kept.memory

    def _sweep(self) -> None:
        """Let go of what was released meanwhile, and of the oldest when there are too many."""
        self._kept = {token: kept for token, kept in self._kept.items() if kept.path.exists()}
        while len(self._kept) >= MAX_KEPT_MAPS:
            del self._kept[next(iter(self._kept))]

    def forget(self, descriptor: RegionDescriptor) -> None:
        with self._lock:
            self._kept.pop(descriptor.token, None)


def copy_out(
    descriptor: RegionDescriptor, into: Mapping[str, np.ndarray], deadline: float, clock: Callable[[], float]
) -> None:
    """The copy itself, on a worker thread; `clock` is the one `deadline` is measured on."""
    with _map(descriptor) as memory:
        read_header(memory, descriptor.region).require(descriptor.region, descriptor.token, descriptor.generation)
        for name, array in into.items():
            info = descriptor.buffer(name)
            target = as_bytes(array)
            start = HEADER_BYTES + info.offset_bytes
            for at in range(0, info.num_bytes, COPY_CHUNK_BYTES):
                check_deadline(deadline, clock(), descriptor.region)
                end = min(at + COPY_CHUNK_BYTES, info.num_bytes)
                target[at:end] = memory[start + at : start + end]
        after = read_header(memory, descriptor.region)
        try:
            after.require(descriptor.region, descriptor.token, descriptor.generation)
        except TransferError as error:
            raise TornRead(f"region {descriptor.region!r} changed while it was read: {error}") from error


def _map(descriptor: RegionDescriptor) -> mmap.mmap:
    assert descriptor.path is not None
    try:
        with Path(descriptor.path).open("rb") as file:
            return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except FileNotFoundError as error:
        raise RegionUnknown(f"region {descriptor.region!r}: no shared file at {descriptor.path}") from error
