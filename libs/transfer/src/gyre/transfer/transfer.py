"""The library's face: register local arrays, describe them, read described ones."""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gyre.transfer.backend import Reader, check_destination, host_identity
from gyre.transfer.describe import Address, BufferInfo, RegionDescriptor, checksum
from gyre.transfer.errors import BackendUnavailable, ChecksumMismatch, LayoutMismatch, RegionUnknown, TransferError
from gyre.transfer.nixl import NixlBackend
from gyre.transfer.nixl_agent import installed as nixl_installed
from gyre.transfer.region import Region
from gyre.transfer.rows import ROWS, RowRead, rows_like
from gyre.transfer.shared_memory import SharedMemoryReader
from gyre.transfer.tcp import TcpReader, TcpServer


@dataclass(frozen=True)
class TransferConfig:
    """How one process takes part. Without `directory` and `listen` it can only read.

    owner: unique name among live processes sharing `directory`; a restart under the same name reclaims its files.
    directory: where shared-memory files go (a tmpfs such as /dev/shm, or any directory both sides see).
    listen: address the TCP server binds; port 0 takes any. advertise: the host name others reach it by.
    backends: ways to read, in order of preference (see `backends_of`); with "nixl" its regions are served by it too.
    """

    owner: str
    directory: Path | None = None
    listen: Address | None = None
    advertise: str | None = None
    backends: tuple[str, ...] = ("shm", "tcp")


def backends_of(choice: str) -> tuple[str, ...]:
    """The backends of a configured `transfer`: auto, shared_memory, tcp or nixl. Raises `BackendUnavailable`.

    auto: shared memory on one host; between hosts NIXL where both sides have it, else TCP.
    """
    known = {
        "auto": ("shm", "nixl", "tcp") if nixl_installed() else ("shm", "tcp"),
        "shared_memory": ("shm",), "tcp": ("tcp",), "nixl": ("nixl",),
    }  # fmt: skip
    if choice not in known:
        raise BackendUnavailable(f"transfer = {choice!r}: use one of {sorted(known)}")
    if choice == "nixl" and not nixl_installed():
        raise BackendUnavailable("transfer = 'nixl' needs the package nixl-cu12: install opengyre-transfer[nixl]")
    return known[choice]


class Transfer:
    """Registered regions of this process and reads of others'. Use as a context manager or call `close`."""

    def __init__(self, config: TransferConfig, nixl: NixlBackend | None = None) -> None:
        """Reclaim what an earlier process of this owner left, start serving; raises `TransferError` or `OSError`.

        nixl: instead of this process's own agent (for tests).
        """
        if not config.owner or "/" in config.owner or config.owner.startswith("."):
            raise TransferError(f"owner {config.owner!r} must be a plain file name")
        self._config = config
        self._host = host_identity()
        self._nixl = (nixl or NixlBackend(config.owner)) if "nixl" in config.backends else None
        self._readers = self._readers_of(config.backends)
        self._regions: dict[str, Region] = {}
        self._registrations: Counter[str] = Counter()  # of pools of rows, by name
        self._directory, self._lock = _claim_directory(config)
        self._server = None if config.listen is None else TcpServer(config.listen, self)
        self._port = 0 if self._server is None else self._server.start()

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def register(self, name: str, arrays: Mapping[str, np.ndarray]) -> Region:
        """Copy `arrays` into registered memory under `name`; the returned region's `arrays` are that memory.

        Registering a name again releases the earlier region: its descriptors become `RegionUnknown`.
        """
        path = self._make_room(name)
        self._regions[name] = Region(name, dict(arrays), path)
        return self._regions[name]

    def register_rows(self, name: str, num_rows: int, row_shape: tuple[int, ...], dtype: npt.DTypeLike) -> Region:
        """Register a pool of rows: `region.arrays["rows"]` is [num_rows, *row_shape], zeros, written at any time.

        Each row is stable or not by itself: whoever tells a reader which rows to read sends `row_checksum`s along.
        Registering a name again releases the earlier region, as with `register`. Raises `LayoutMismatch` for a size
        that cannot be.
        """
        like = rows_like(name, num_rows, row_shape, dtype)
        path = self._make_room(name)
        self._registrations[name] += 1
        region = Region(name, {ROWS: like}, path, generation=self._registrations[name], has_rows=True)
        self._regions[name] = region
        return region

    def _make_room(self, name: str) -> Path | None:
        """Release what is registered as `name`; returns the path of its successor's file, if it gets one."""
        if self._directory is None and self._server is None and self._nixl is None:
            raise BackendUnavailable(f"region {name!r}: this process has neither a directory nor a listen address")
        self.release(name)
        if self._directory is None:
            return None
        return self._directory / f"{name.replace('/', '_')}.{secrets.token_hex(4)}.region"

    def find(self, name: str) -> Region | None:
        return self._regions.get(name)

    def describe(self, name: str) -> RegionDescriptor:
        """The region at its present generation, with checksums; raises `RegionUnknown` or `StaleGeneration`."""
        region = self._registered(name, has_rows=False)
        return self._descriptor(region, region.describe_buffers())

    def describe_rows(self, name: str) -> RegionDescriptor:
        """The pool `name` as it is registered now, without checksums; raises `RegionUnknown`.

        `generation` counts the registrations of this name (and `Region.rewriting`, for an owner that invalidates every
        row at once): a descriptor from before a release is refused, never read.
        """
        region = self._registered(name, has_rows=True)
        return self._descriptor(region, region.describe_layout())

    def _registered(self, name: str, has_rows: bool) -> Region:
        region = self._regions.get(name)
        if region is None:
            raise RegionUnknown(f"no region {name!r} is registered here; registered: {sorted(self._regions)}")
        if region.has_rows != has_rows:
            use = "register_rows and describe_rows" if region.has_rows else "register and describe"
            raise LayoutMismatch(f"region {name!r} is for {use}")
        return region

    def _descriptor(self, region: Region, buffers: tuple[BufferInfo, ...]) -> RegionDescriptor:
        path = None if region.path is None else str(region.path)
        nixl = None if self._nixl is None else self._nixl.export(region)
        return RegionDescriptor(
            region.name, self._config.owner, region.generation, region.token, self._host, path, self._address(),
            buffers, nixl,
        )  # fmt: skip

    def release(self, name: str) -> None:
        """Stop serving `name`; unknown names are ignored."""
        region = self._regions.pop(name, None)
        if region is not None:
            region.release()
            if self._nixl is not None:
                self._nixl.withdraw(region)

    async def read(
        self,
        descriptor: RegionDescriptor,
        *,
        timeout_s: float,
        into: Mapping[str, np.ndarray] | None = None,
        names: Iterable[str] | None = None,
    ) -> dict[str, np.ndarray]:
        """Read `names` (default: all buffers) at exactly the described generation, checksums verified.

        into: destination arrays (same dtype and shape, C order); allocated when absent. On any error their contents
        are undefined. Raises `StaleGeneration`, `TornRead`, `ChecksumMismatch`, `DeadlineExceeded`, `RegionUnknown`,
        `BackendUnavailable`, `LayoutMismatch`.
        """
        wanted = [b.name for b in descriptor.buffers] if names is None else list(names)
        target = {n: _destination(descriptor, n, into) for n in wanted}
        reader = self._reader_of(descriptor)
        await reader.read(descriptor, target, asyncio.get_running_loop().time() + timeout_s)
        await asyncio.to_thread(_verify, descriptor, target)
        return target

    async def read_rows(
        self,
        descriptor: RegionDescriptor,
        rows: np.ndarray,
        checksums: Sequence[bytes],
        into: np.ndarray,
        into_rows: np.ndarray,
        *,
        timeout_s: float,
    ) -> None:
        """Fill `into[into_rows[i]]` with row `rows[i]` of a pool described by `describe_rows`, and verify it.

        rows, into_rows: int64 [R], R <= `MAX_ROWS`. checksums: R `row_checksum`s. into: [P, *row_shape], C-contiguous,
        of the pool's dtype; its other rows are not touched. On any error, and on cancellation, the contents of
        `into_rows` are undefined, and nothing writes into them once this has ended. Raises `ChecksumMismatch` naming the
        row, `DeadlineExceeded`, `RegionUnknown` or `StaleGeneration` (not this registration any more), `LayoutMismatch`,
        `BackendUnavailable`.
        """
        wanted = RowRead.checked(descriptor, rows, checksums, into, into_rows)
        reader = self._reader_of(descriptor)
        await reader.read_rows(wanted, asyncio.get_running_loop().time() + timeout_s)

    def _reader_of(self, descriptor: RegionDescriptor) -> Reader:
        reader = next((r for r in self._readers if r.reaches(descriptor)), None)
        if reader is None:
            tried = [r.name for r in self._readers]
            raise BackendUnavailable(f"region {descriptor.region!r} of {descriptor.owner!r} is out of reach of {tried}")
        return reader

    def close(self) -> None:
        """Release every region and stop serving. Idempotent."""
        for name in list(self._regions):
            self.release(name)
        if self._server is not None:
            self._server.stop()
        if self._nixl is not None:
            self._nixl.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _readers_of(self, names: tuple[str, ...]) -> tuple[Reader, ...]:
        known: dict[str, Reader] = {"shm": SharedMemoryReader(self._host), "tcp": TcpReader()}
        if self._nixl is not None:
            known["nixl"] = self._nixl
        for name in names:
            if name not in known:
                raise BackendUnavailable(f"unknown transfer backend {name!r}: known are 'nixl', 'shm' and 'tcp'")
        return tuple(known[name] for name in names)

    def _address(self) -> Address | None:
        if self._config.listen is None:
            return None
        return Address(self._config.advertise or self._config.listen.host, self._port)


def _claim_directory(config: TransferConfig) -> tuple[Path | None, int | None]:
    """The owner's own directory, locked, with the files of a dead predecessor removed."""
    if config.directory is None:
        return None, None
    home = config.directory / config.owner
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(home / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise TransferError(
            f"owner {config.owner!r} is alive in {config.directory}: owners need unique names"
        ) from error
    for leftover in home.glob("*.region"):
        leftover.unlink(missing_ok=True)
    return home, lock


def _destination(descriptor: RegionDescriptor, name: str, into: Mapping[str, np.ndarray] | None) -> np.ndarray:
    info = descriptor.buffer(name)
    array = np.empty(info.shape, info.dtype) if into is None else into[name]
    check_destination(info, array)
    return array


def _verify(descriptor: RegionDescriptor, arrays: Mapping[str, Any]) -> None:
    for name, array in arrays.items():
        expected = descriptor.buffer(name).checksum
        actual = checksum(array)
        if actual != expected:
            raise ChecksumMismatch(f"buffer {name!r} of {descriptor.region!r}: checksum {actual}, expected {expected}")
