"""A region: named arrays in one block of memory that others may read, guarded by a sequence counter.

The counter is 2 * generation while the contents are stable and odd while the owner rewrites them. A reader compares it
before and after its copy with the generation it was promised, and then checks the checksums, so it can fail but never
return a mix of two generations.
"""

from __future__ import annotations

import mmap
import secrets
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gyre.transfer.describe import BufferInfo, checksum, lay_out
from gyre.transfer.errors import RegionUnknown, StaleGeneration

HEADER_BYTES = 4096
MAGIC = b"GYRETRF1"
_HEADER = struct.Struct("<8s16sQQ")  # magic, token, counter, released
USED_HEADER_BYTES = _HEADER.size
_COUNTER_AT = 24
_RELEASED_AT = 32
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14, which Python does not name
_POPULATE_BYTES = 4 << 20  # at once: the call keeps every other thread of Python waiting


@dataclass(frozen=True)
class Header:
    """The first page of a region, as a reader sees it at one instant."""

    token: str
    counter: int
    released: bool

    def require(self, region: str, token: str, generation: int) -> None:
        """Raise `RegionUnknown` or `StaleGeneration` unless the region is stable at `generation`."""
        if self.released or self.token != token:
            raise RegionUnknown(f"region {region!r} was released or belongs to another process now")
        if self.counter != 2 * generation:
            state = "is being rewritten after" if self.counter % 2 else "holds"
            raise StaleGeneration(f"region {region!r} {state} generation {self.counter // 2}, asked for {generation}")


def read_header(memory: mmap.mmap | bytearray, region: str) -> Header:
    """Parse the header page; raises `RegionUnknown` when it is not one of ours."""
    magic, token, counter, released = _HEADER.unpack_from(memory, 0)
    if magic != MAGIC:
        raise RegionUnknown(f"region {region!r}: there is no transfer header where it was")
    return Header(token.hex(), counter, bool(released))


class Region:
    """Owner's side. `arrays` are views of the registered memory: torch can wrap them with `from_numpy`."""

    def __init__(
        self, name: str, arrays: dict[str, np.ndarray], path: Path | None, *, generation: int = 1, has_rows: bool = False
    ) -> None:
        """Allocate memory (a file at `path`, or anonymous) and copy `arrays` in.

        has_rows: the region is a pool of rows (see `rows`): `arrays` only say dtype and shape, the memory stays zeros.
        """
        infos, payload_bytes = lay_out(arrays)
        self.name = name
        self.path = path
        self.has_rows = has_rows
        self._memory = _allocate(path, HEADER_BYTES + max(payload_bytes, 1))
        self._infos = infos
        self._described: tuple[BufferInfo, ...] | None = None
        self.arrays = {info.name: view(self._memory, info) for info in infos}
        if not has_rows:
            for key, array in arrays.items():
                self.arrays[key][...] = array
        token = secrets.token_bytes(16)
        _HEADER.pack_into(self._memory, 0, MAGIC, token, 2 * generation, 0)
        self.token = token.hex()

    @property
    def address(self) -> int:
        """Of the header page, which the payload follows."""
        return int(np.frombuffer(self._memory, np.uint8).ctypes.data)

    @property
    def num_bytes(self) -> int:
        """Header page and payload."""
        return len(self._memory)

    @property
    def generation(self) -> int:
        """Number of completed writes, the registration included."""
        return self.header().counter // 2

    def header(self) -> Header:
        return read_header(self._memory, self.name)

    def payload(self, info: BufferInfo) -> memoryview:
        """The bytes of one buffer, without a copy."""
        start = HEADER_BYTES + info.offset_bytes
        return memoryview(self._memory)[start : start + info.num_bytes]

    def row_bytes(self) -> np.ndarray:
        """uint8 [num_rows, row_bytes] of a pool of rows, without a copy."""
        (info,) = self._infos
        return np.frombuffer(self.payload(info), np.uint8).reshape(info.shape[0], -1)

    def populate(self) -> None:
        """Give every page its memory now, so that what arrives later does not wait for pages (that takes several times as
        long as the copy). Contents stay. Blocking: call it on a thread. Where the system cannot, pages come as they are used.
        """
        if sys.platform != "linux":
            return
        with suppress(OSError):
            for at in range(0, len(self._memory), _POPULATE_BYTES):
                if self.header().released:
                    return
                self._memory.madvise(_POPULATE_WRITE, at, min(_POPULATE_BYTES, len(self._memory) - at))

    @contextmanager
    def rewriting(self) -> Iterator[dict[str, np.ndarray]]:
        """Readers fail while this is open; closing it makes the next generation, also when the body raised."""
        self.open_for_writing()
        try:
            yield self.arrays
        finally:
            self.close_generation()

    def open_for_writing(self) -> None:
        """Mark the contents unstable; idempotent. For owners that write over a longer time than one block."""
        counter = self.header().counter
        self._set_counter(counter | 1)
        self._described = None

    def close_generation(self) -> int:
        """End the writing; returns the new generation (unchanged if nothing was open)."""
        counter = self.header().counter
        if counter % 2:
            self._set_counter(counter + 1)
        return self.generation

    def describe_buffers(self) -> tuple[BufferInfo, ...]:
        """The buffers with checksums of this generation; raises `StaleGeneration` while it is being rewritten."""
        infos = self.describe_layout()
        if self._described is None:
            self._described = tuple(replace(i, checksum=checksum(self.arrays[i.name])) for i in infos)
        return self._described

    def describe_layout(self) -> tuple[BufferInfo, ...]:
        """The buffers without checksums; raises `StaleGeneration` while the region as a whole is being rewritten."""
        if self.header().counter % 2:
            raise StaleGeneration(f"region {self.name!r} is being rewritten: close the generation before describing it")
        return self._infos

    def release(self) -> None:
        """Tell readers it is gone, and unlink the file. The owner's own views stay valid until dropped.

        A pool of rows in a file is emptied, too: readers keep such files mapped, and an engine that sleeps wants the
        memory back now. The owner's views then show zeros.
        """
        struct.pack_into("<Q", self._memory, _RELEASED_AT, 1)
        if self.path is None:
            return
        self.path.unlink(missing_ok=True)
        if self.has_rows and hasattr(mmap, "MADV_REMOVE"):
            with suppress(OSError):  # not every file system can
                self._memory.madvise(mmap.MADV_REMOVE, HEADER_BYTES)

    def _set_counter(self, counter: int) -> None:
        struct.pack_into("<Q", self._memory, _COUNTER_AT, counter)


def view(memory: mmap.mmap | memoryview, info: BufferInfo) -> np.ndarray:
    """The array of `info` over a mapped region, without a copy."""
    count = info.num_bytes // np.dtype(info.dtype).itemsize
    flat = np.frombuffer(memory, dtype=info.dtype, count=count, offset=HEADER_BYTES + info.offset_bytes)
    return flat.reshape(info.shape)


def _allocate(path: Path | None, num_bytes: int) -> mmap.mmap:
    if path is None:
        return mmap.mmap(-1, num_bytes)
    with path.open("x+b") as file:
        file.truncate(num_bytes)
        return mmap.mmap(file.fileno(), num_bytes)
