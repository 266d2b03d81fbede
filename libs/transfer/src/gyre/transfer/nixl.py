"""NIXL: one-sided reads over UCX, which is RDMA where there is a fabric, and shared memory or TCP where there is none.

The owner registers each region's whole block, header page included. A reader needs nothing of the owner's process: it
reads the header, the buffers, and the header again, so generations and tears are found as over shared memory, and the
checksums are verified after that. Every call into the agent is made under one lock, on a worker thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gyre.transfer.backend import Clock, as_bytes, check_deadline, in_thread
from gyre.transfer.describe import NixlTarget, RegionDescriptor
from gyre.transfer.errors import DeadlineExceeded, RegionUnknown, TornRead, TransferError
from gyre.transfer.landing import LANDING_BYTES, Landing, LandingPool, deregister, keep_forever
from gyre.transfer.nixl_agent import MEMORY, PLUGIN, NixlApi, open_agent
from gyre.transfer.region import HEADER_BYTES, USED_HEADER_BYTES, Region, read_header
from gyre.transfer.rows import ROWS, RowRead, Span

FIRST_PAUSE_S = 0.0001
LONGEST_PAUSE_S = 0.001
MAX_IN_FLIGHT = 2  # transfers of one read: one flies while the one before it is copied out and looked at


@dataclass(frozen=True)
class Piece:
    """`num_bytes` at `offset` from the region's first byte (its header), wanted in `target`."""

    offset: int
    num_bytes: int
    target: memoryview


@dataclass(frozen=True)
class Flight:
    """A transfer of `pieces` into a landing buffer, and the state that posting it reported."""

    pieces: list[Piece]
    landing: Landing
    handle: Any
    state: str


class NixlBackend:
    """This process's agent: exports its regions, reads others'. `close` it before its memory goes."""

    name = "nixl"

    def __init__(
        self, owner: str, open_api: Callable[[str], NixlApi] = open_agent,
        pause: Callable[[float], None] = time.sleep, landing_bytes: int = LANDING_BYTES,
    ) -> None:  # fmt: skip
        self._owner, self._open_api, self._pause, self._landing_bytes = owner, open_api, pause, landing_bytes
        self._lock = threading.Lock()
        self._api: NixlApi | None = None
        self._pool: LandingPool | None = None
        self._exported: dict[str, tuple[Any, NixlTarget]] = {}  # by region token
        self._known: set[tuple[str, str]] = set()  # (agent, region token) whose metadata is loaded

    # ------------------------------------------------------------ the owner's side

    def export(self, region: Region) -> NixlTarget:
        """Register the region's memory (once); raises `BackendUnavailable` or `TransferError`."""
        with self._lock:
            api, _ = self._opened()
            if region.token not in self._exported:
                try:
                    done = api.agent.register_memory([(region.address, region.num_bytes, 0, "")], MEMORY)
                    metadata = api.agent.get_partial_agent_metadata(done, True, [PLUGIN])
                except api.errors as error:
                    raise TransferError(f"region {region.name!r}: nixl cannot register it: {error!r}") from error
                self._exported[region.token] = (done, NixlTarget(api.name, metadata, region.address))
            return self._exported[region.token][1]

    def withdraw(self, region: Region) -> None:
        """The region is released: readers in flight fail. Unknown regions are ignored."""
        with self._lock:
            known = self._exported.pop(region.token, None)
            if known is not None and self._api is not None:
                deregister(self._api, known[0])

    # ------------------------------------------------------------ the reader's side

    def reaches(self, descriptor: RegionDescriptor) -> bool:
        return descriptor.nixl is not None

    async def read(self, descriptor: RegionDescriptor, into: Mapping[str, np.ndarray], deadline: float) -> None:
        await asyncio.to_thread(self.copy_out, descriptor, into, deadline, asyncio.get_running_loop().time)

    def copy_out(
        self, descriptor: RegionDescriptor, into: Mapping[str, np.ndarray], deadline: float, clock: Clock
    ) -> None:
        """The read itself, on a worker thread; `clock` is the one `deadline` is measured on."""
        check_deadline(deadline, clock(), descriptor.region)
        self._load(descriptor)
        self._require(descriptor, deadline, clock)
        for _ in self._stream(descriptor, chunks(descriptor, into, self._landing_bytes), deadline, clock):
            pass
        try:
            self._require(descriptor, deadline, clock)
        except DeadlineExceeded:
            raise
        except TransferError as error:
            raise TornRead(f"region {descriptor.region!r} changed while it was read: {error}") from error

    async def read_rows(self, wanted: RowRead, deadline: float) -> None:
        await in_thread(lambda clock: wanted.fill(self.arrivals(wanted, deadline, clock)))

    def arrivals(self, wanted: RowRead, deadline: float, clock: Clock) -> Iterator[Span]:
        """Fetch the rows, as many in one transfer as a landing buffer holds, between two looks at the header. What has
        arrived is looked at while the next transfer flies."""
        descriptor = wanted.descriptor
        check_deadline(deadline, clock(), descriptor.region)
        self._load(descriptor)
        self._require(descriptor, deadline, clock)
        first = num_bytes = 0
        for arrived in self._stream(descriptor, packed(row_pieces(wanted), self._landing_bytes), deadline, clock):
            num_bytes += arrived
            stop = num_bytes // wanted.row_bytes
            yield first, stop
            first = stop
        self._require(descriptor, deadline, clock)

    @property
    def num_quarantined(self) -> int:
        """Buffers that a read given up may still write to."""
        return 0 if self._pool is None else self._pool.num_quarantined

    def close(self) -> None:
        """Deregister everything. Idempotent. With a transfer still in flight the agent is kept alive for good."""
        with self._lock:
            if self._api is None or self._pool is None:
                return
            if not self._pool.close(self._pause):
                keep_forever(self._api.agent)
            for registration, _ in self._exported.values():
                deregister(self._api, registration)
            self._exported.clear()
            self._api = self._pool = None

    # ------------------------------------------------------------ one transfer

    def _opened(self) -> tuple[NixlApi, LandingPool]:
        """The agent; opening one takes a good part of a second, so only who needs it pays."""
        if self._api is None or self._pool is None:
            self._api = self._open_api(self._owner)
            self._pool = LandingPool(self._api, self._landing_bytes)
        return self._api, self._pool

    def _load(self, descriptor: RegionDescriptor) -> None:
        """Learn how to reach the region's memory; regions of one agent add up."""
        target = _target(descriptor)
        with self._lock:
            api, _ = self._opened()
            key = (target.agent, descriptor.token)
            if key in self._known or target.agent == api.name:
                return
            try:
                api.agent.add_remote_agent(target.metadata)
            except api.errors as error:
                raise RegionUnknown(f"region {descriptor.region!r}: nixl refuses its metadata: {error!r}") from error
            self._known.add(key)

    def _require(self, descriptor: RegionDescriptor, deadline: float, clock: Clock) -> None:
        """Raise unless the region is stable at the described generation, by its own header."""
        page = bytearray(USED_HEADER_BYTES)
        self._fetch(descriptor, [Piece(0, len(page), memoryview(page))], deadline, clock)
        header = read_header(page, descriptor.region)
        header.require(descriptor.region, descriptor.token, descriptor.generation)

    def _fetch(self, descriptor: RegionDescriptor, pieces: list[Piece], deadline: float, clock: Clock) -> None:
        """One transfer of `pieces` into a landing buffer, and from there to their targets."""
        self._land(descriptor, self._post(descriptor, pieces, deadline, clock), deadline, clock)

    def _stream(
        self, descriptor: RegionDescriptor, transfers: Iterable[list[Piece]], deadline: float, clock: Clock
    ) -> Iterator[int]:
        """Carry out transfers in order, the next one under way while one is copied out; yields the bytes of each."""
        flying: deque[Flight] = deque()
        try:
            for pieces in transfers:
                flying.append(self._post(descriptor, pieces, deadline, clock))
                if len(flying) == MAX_IN_FLIGHT:
                    yield self._land(descriptor, flying.popleft(), deadline, clock)
            while flying:
                yield self._land(descriptor, flying.popleft(), deadline, clock)
        finally:
            for flight in flying:
                self._give_up(flight)

    def _post(self, descriptor: RegionDescriptor, pieces: list[Piece], deadline: float, clock: Clock) -> Flight:
        check_deadline(deadline, clock(), descriptor.region)
        with self._lock:
            api, pool = self._opened()
            landing = pool.take()
            handle = self._prepare(api, pool, descriptor, pieces, landing)
            return Flight(pieces, landing, handle, _guarded(api, api.agent.transfer, handle))

    def _land(self, descriptor: RegionDescriptor, flight: Flight, deadline: float, clock: Clock) -> int:
        """Wait until it has ended and copy it to its targets; returns its bytes."""
        api, pool = self._opened()
        state = self._wait(api, flight.handle, flight.state, deadline, clock)
        at = 0
        if state == "DONE":
            arrived = memoryview(flight.landing.memory)
            for piece in flight.pieces:
                piece.target[:] = arrived[at : at + piece.num_bytes]
                at += piece.num_bytes
        with self._lock:
            _conclude(api, pool, flight.landing, flight.handle, state)
        if state == "PROC":
            raise DeadlineExceeded(f"reading region {descriptor.region!r} over nixl did not end before its deadline")
        if state != "DONE":
            raise RegionUnknown(f"region {descriptor.region!r}: the transfer over nixl failed: {state}")
        return at

    def _give_up(self, flight: Flight) -> None:
        """Nobody waits for it any more; its buffer is used again only once it has ended."""
        with self._lock:
            api, pool = self._opened()
            state = flight.state if flight.state != "PROC" else _guarded(api, api.agent.check_xfer_state, flight.handle)
            _conclude(api, pool, flight.landing, flight.handle, state)

    def _prepare(
        self, api: NixlApi, pool: LandingPool, descriptor: RegionDescriptor, pieces: list[Piece], landing: Landing
    ) -> Any:
        target = _target(descriptor)
        local, remote, at = [], [], landing.address
        for offset, num_bytes in merged(pieces):
            local.append((at, num_bytes, 0))
            remote.append((target.address + offset, num_bytes, 0))
            at += num_bytes
        try:
            here, there = api.agent.get_xfer_descs(local, MEMORY), api.agent.get_xfer_descs(remote, MEMORY)
            return api.agent.initialize_xfer("READ", here, there, target.agent)
        except api.errors as error:
            pool.give_back(landing)  # nothing was posted
            self._known.discard((target.agent, descriptor.token))
            raise RegionUnknown(f"region {descriptor.region!r}: nixl cannot reach its owner: {error!r}") from error

    def _wait(self, api: NixlApi, handle: Any, state: str, deadline: float, clock: Clock) -> str:
        """The terminal state, or "PROC" when the deadline has passed."""
        pause_s = FIRST_PAUSE_S
        while state == "PROC" and clock() < deadline:
            self._pause(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            with self._lock:
                state = _guarded(api, api.agent.check_xfer_state, handle)
        return state


def chunks(
    descriptor: RegionDescriptor, into: Mapping[str, np.ndarray], chunk_bytes: int
) -> Iterator[list[Piece]]:
    """The wanted buffers in pieces, packed into transfers of at most `chunk_bytes`."""
    infos = ((descriptor.buffer(name), array) for name, array in into.items())
    whole = (Piece(HEADER_BYTES + info.offset_bytes, info.num_bytes, as_bytes(array)) for info, array in infos)
    return packed(whole, chunk_bytes)


def row_pieces(wanted: RowRead) -> Iterator[Piece]:
    """One piece for each run of rows that are adjacent on both sides."""
    size, target = wanted.row_bytes, as_bytes(wanted.target)
    start = HEADER_BYTES + wanted.descriptor.buffer(ROWS).offset_bytes
    for _, runs in wanted.spans(max(1, wanted.num_bytes)):
        for row, into_row, count in runs.tolist():
            yield Piece(start + row * size, count * size, target[into_row * size : (into_row + count) * size])


def packed(pieces: Iterable[Piece], chunk_bytes: int) -> Iterator[list[Piece]]:
    """The pieces, cut where a transfer of at most `chunk_bytes` is full."""
    chunk: list[Piece] = []
    room = chunk_bytes
    for piece in pieces:
        at = 0
        while at < piece.num_bytes:
            num_bytes = min(room, piece.num_bytes - at)
            chunk.append(Piece(piece.offset + at, num_bytes, piece.target[at : at + num_bytes]))
            at, room = at + num_bytes, room - num_bytes
            if room == 0:
                yield chunk
                chunk, room = [], chunk_bytes
    if chunk:
        yield chunk


def merged(pieces: Iterable[Piece]) -> Iterator[tuple[int, int]]:
    """(offset, number of bytes) of what the pieces want, neighbours as one: each costs a transfer of its own."""
    start = stop = 0
    for piece in pieces:
        if piece.offset != stop:
            if stop > start:
                yield start, stop - start
            start = piece.offset
        stop = piece.offset + piece.num_bytes
    if stop > start:
        yield start, stop - start


def _guarded(api: NixlApi, call: Callable[[Any], str], handle: Any) -> str:
    """The state a call reports; the library raises its error states, which are terminal."""
    try:
        return call(handle)
    except api.errors as error:
        return repr(error)


def _conclude(api: NixlApi, pool: LandingPool, landing: Landing, handle: Any, state: str) -> None:
    if state == "DONE":
        api.agent.release_xfer_handle(handle)
        pool.give_back(landing)
    elif state == "PROC":
        pool.quarantine(landing, handle)
    else:
        pool.discard(landing, handle)


def _target(descriptor: RegionDescriptor) -> NixlTarget:
    assert descriptor.nixl is not None
    return descriptor.nixl
