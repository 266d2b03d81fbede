"""Same host: the reader maps the owner's file and copies; the owner's process takes no part in it."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from gyre.transfer.backend import COPY_CHUNK_BYTES, as_bytes, check_deadline
from gyre.transfer.describe import RegionDescriptor
from gyre.transfer.errors import RegionUnknown, TornRead, TransferError
from gyre.transfer.region import HEADER_BYTES, read_header


class SharedMemoryReader:
    """Maps the descriptor's file read-only. `host` is this machine's identity."""

    name = "shm"

    def __init__(self, host: str) -> None:
        self._host = host

    def reaches(self, descriptor: RegionDescriptor) -> bool:
        return (
            descriptor.path is not None
            and descriptor.host == self._host
            and (Path(descriptor.path).exists() or descriptor.address is None)
        )

    async def read(self, descriptor: RegionDescriptor, into: Mapping[str, np.ndarray], deadline: float) -> None:
        clock = asyncio.get_running_loop().time
        await asyncio.to_thread(copy_out, descriptor, into, deadline, clock)


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
