"""Another host: a small server thread of the owner sends registered bytes over a plain TCP stream.

Request and answers are length-prefixed JSON; payload bytes follow raw. After the payload the server says whether the
region stayed at the asked generation. The server has its own thread and loop, so a reader never waits for the owner's.
There is no encryption: it belongs on a private network, and only descriptor holders know a region's token.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from gyre.transfer import errors
from gyre.transfer.backend import Clock, as_bytes, check_deadline, in_thread
from gyre.transfer.describe import Address, BufferInfo, RegionDescriptor
from gyre.transfer.region import Region
from gyre.transfer.rows import MAX_ROWS, RowRead, Span

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 1 << 20
MAX_CONNECTIONS = 256
SERVE_TIMEOUT_S = 600.0
ROWS_CHUNK_BYTES = 1 << 20
WAIT_S = 0.05
INDEX = np.dtype("<i8")


class RegionSource(Protocol):
    """Where the server looks regions up."""

    def find(self, name: str) -> Region | None: ...


class TcpReader:
    """Reads buffers from an owner's `TcpServer`, receiving straight into the destination arrays."""

    name = "tcp"

    def reaches(self, descriptor: RegionDescriptor) -> bool:
        return descriptor.address is not None

    async def read(self, descriptor: RegionDescriptor, into: Mapping[str, np.ndarray], deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await self._read(descriptor, into)
        except TimeoutError as error:
            raise errors.DeadlineExceeded(f"reading region {descriptor.region!r} over tcp took too long") from error
        except (OSError, EOFError) as error:
            raise errors.RegionUnknown(f"region {descriptor.region!r}: owner unreachable over tcp: {error}") from error

    async def _read(self, descriptor: RegionDescriptor, into: Mapping[str, np.ndarray]) -> None:
        assert descriptor.address is not None
        sock = await _connect(descriptor.address)
        try:
            request = {
                "region": descriptor.region,
                "token": descriptor.token,
                "generation": descriptor.generation,
                "ranges": [[descriptor.buffer(n).offset_bytes, descriptor.buffer(n).num_bytes] for n in into],
            }
            await _send_message(sock, request)
            _raise_for(await _receive_message(sock), descriptor.region)
            for array in into.values():
                await _receive_exactly(sock, as_bytes(array))
            _raise_for(await _receive_message(sock), descriptor.region)
        finally:
            sock.close()

    async def read_rows(self, wanted: RowRead, deadline: float) -> None:
        descriptor = wanted.descriptor
        assert descriptor.address is not None
        try:
            async with asyncio.timeout_at(deadline):
                sock = await _connect(descriptor.address)
            with sock:
                sock.settimeout(WAIT_S)
                await in_thread(lambda clock: wanted.fill(_arrivals(Line(sock, descriptor.region, deadline, clock), wanted)))
        except TimeoutError as error:
            raise errors.DeadlineExceeded(f"reading region {descriptor.region!r} over tcp took too long") from error
        except (OSError, EOFError) as error:
            raise errors.RegionUnknown(f"region {descriptor.region!r}: owner unreachable over tcp: {error}") from error


class TcpServer:
    """Serves `source`'s regions on its own thread; `start` returns the port (0 in the address means any)."""

    def __init__(self, listen: Address, source: RegionSource) -> None:
        self._listen = listen
        self._source = source
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gyre-transfer", daemon=True)
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._connections: set[asyncio.Task[None]] = set()

    def start(self) -> int:
        """Bind and serve; raises `OSError` when the address cannot be bound."""
        family = socket.AF_INET6 if ":" in self._listen.host else socket.AF_INET
        self._socket = socket.create_server((self._listen.host, self._listen.port), family=family, backlog=64)
        self._socket.setblocking(False)
        self._thread.start()
        self._accepting = asyncio.run_coroutine_threadsafe(self._accept(), self._loop)
        return int(self._socket.getsockname()[1])

    def stop(self) -> None:
        """Stop accepting, drop connections, end the thread. Idempotent."""
        if self._loop.is_closed() or not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(timeout=5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5.0)
        self._loop.close()

    async def _shut(self) -> None:
        self._accepting.cancel()
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()

    async def _accept(self) -> None:
        while True:
            await self._slots.acquire()
            try:
                sock, _ = await self._loop.sock_accept(self._socket)
            except OSError as error:  # no file descriptor is left, or the peer has gone: others wait in the backlog
                log.warning("a connection was not accepted: %s", error)
                self._slots.release()
                await asyncio.sleep(WAIT_S)
                continue
            task = self._loop.create_task(self._serve(sock))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(SERVE_TIMEOUT_S):
                await self._answer(sock, await _receive_message(sock))
        except (OSError, EOFError, TimeoutError, ValueError):
            pass  # the reader went away or sent nonsense: it sees the closed connection, nobody else is concerned
        finally:
            sock.close()
            self._slots.release()

    async def _answer(self, sock: socket.socket, request: dict[str, Any]) -> None:
        region = self._source.find(str(request["region"]))
        rows = await self._receive_rows(sock, request)
        before = _refusal(region, request) if rows is None else _refusal_of_rows(region, request, rows)
        await _send_message(sock, before)
        if before["error"] is not None or region is None:
            return
        if rows is not None:
            await self._send_rows(sock, region, rows)
            await _send_message(sock, _refusal(region, request))
            return
        for offset, num_bytes in request["ranges"]:
            whole = region.payload(BufferInfo("", "|u1", (int(num_bytes),), int(offset)))
            await self._loop.sock_sendall(sock, whole)
        after = _refusal(region, request)
        if after["error"] is not None:
            after["error"] = "TornRead"
        await _send_message(sock, after)

    async def _receive_rows(self, sock: socket.socket, request: dict[str, Any]) -> np.ndarray | None:
        """int64 [R]: the rows asked for, which follow a request for rows. Read even if it will be refused: closing a
        connection with something unread in it would take the answer from the reader."""
        if "num_rows" not in request:
            return None
        num_rows = int(request["num_rows"])
        if not 0 <= num_rows <= MAX_ROWS:
            raise ValueError(f"a request for {num_rows} rows: at most {MAX_ROWS} are allowed")
        rows = np.empty(num_rows, INDEX)
        await _receive_exactly(sock, as_bytes(rows))
        return rows

    async def _send_rows(self, sock: socket.socket, region: Region, rows: np.ndarray) -> None:
        """Adjacent rows from where they are, others gathered, so that many small ones do not cost a call each."""
        pool = region.row_bytes()
        step = max(1, ROWS_CHUNK_BYTES // pool.shape[1])
        for at in range(0, len(rows), step):
            some = rows[at : at + step]
            adjacent = some[-1] - some[0] == len(some) - 1 and np.all(np.diff(some) == 1)
            chunk = pool[some[0] : some[0] + len(some)] if adjacent else pool[some]
            await self._loop.sock_sendall(sock, as_bytes(chunk))


class Line:
    """A connection used from a thread: no wait goes past the deadline (by `WAIT_S` at most)."""

    def __init__(self, sock: socket.socket, region: str, deadline: float, clock: Clock) -> None:
        self._sock, self._region, self._deadline, self._clock = sock, region, deadline, clock

    def send(self, data: memoryview) -> None:
        self._move(self._sock.send, data)

    def receive(self, target: memoryview) -> None:
        self._move(self._sock.recv_into, target)

    def receive_message(self) -> dict[str, Any]:
        prefix = bytearray(_LENGTH.size)
        self.receive(memoryview(prefix))
        body = bytearray(_length_of(prefix))
        self.receive(memoryview(body))
        return json.loads(body)

    def _move(self, call: Callable[[memoryview], int], data: memoryview) -> None:
        moved = 0
        while moved < len(data):
            check_deadline(self._deadline, self._clock(), self._region)
            try:
                count = call(data[moved:])
            except TimeoutError:
                continue
            if count == 0:
                raise EOFError("connection closed in the middle of a message")
            moved += count


def _arrivals(line: Line, wanted: RowRead) -> Iterator[Span]:
    """Ask for all rows at once and put each chunk of them in its places."""
    region = wanted.descriptor.region
    request = {
        "region": region,
        "token": wanted.descriptor.token,
        "generation": wanted.descriptor.generation,
        "num_rows": len(wanted.rows),
        "row_bytes": wanted.row_bytes,
    }
    line.send(memoryview(_packed(request) + wanted.rows.astype(INDEX).tobytes()))
    _raise_for(line.receive_message(), region)
    landing = np.empty((max(1, ROWS_CHUNK_BYTES // wanted.row_bytes), wanted.row_bytes), np.uint8)
    for (first, stop), runs in wanted.spans(ROWS_CHUNK_BYTES):
        if len(runs) == 1:
            _, into_row, count = runs[0].tolist()
            line.receive(as_bytes(wanted.target[into_row : into_row + count]))
        else:
            line.receive(as_bytes(landing[: stop - first]))
            wanted.target[wanted.into_rows[first:stop]] = landing[: stop - first]
        yield first, stop
    _raise_for(line.receive_message(), region)


def _refusal(region: Region | None, request: dict[str, Any]) -> dict[str, Any]:
    """`{"error": None}` when the region is stable at the asked generation, else the error's class name and detail."""
    if region is None:
        return {"error": "RegionUnknown", "detail": "the owner serves no such region"}
    try:
        region.header().require(region.name, str(request["token"]), int(request["generation"]))
    except errors.TransferError as error:
        return {"error": type(error).__name__, "detail": str(error)}
    return {"error": None}


def _refusal_of_rows(region: Region | None, request: dict[str, Any], rows: np.ndarray) -> dict[str, Any]:
    refusal = _refusal(region, request)
    if refusal["error"] is not None or region is None:
        return refusal
    if not region.has_rows:
        return {"error": "LayoutMismatch", "detail": "it is not a pool of rows"}
    num_rows, row_bytes = region.row_bytes().shape
    if row_bytes != request["row_bytes"] or (len(rows) and (rows.min() < 0 or rows.max() >= num_rows)):
        return {"error": "LayoutMismatch", "detail": f"it has {num_rows} rows of {row_bytes} bytes"}
    return refusal


def _raise_for(answer: dict[str, Any], region: str) -> None:
    kinds: dict[str, type[errors.TransferError]] = {
        kind.__name__: kind for kind in (errors.RegionUnknown, errors.StaleGeneration, errors.TornRead, errors.LayoutMismatch)
    }
    if answer["error"] is not None:
        raise kinds.get(answer["error"], errors.TransferError)(f"region {region!r}: {answer.get('detail', '')}")


async def _connect(address: Address) -> socket.socket:
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    sock = socket.socket(infos[0][0], socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_connect(sock, infos[0][4])
    except BaseException:
        sock.close()
        raise
    return sock


async def _send_message(sock: socket.socket, message: dict[str, Any]) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, _packed(message))


def _packed(message: dict[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body


def _length_of(prefix: bytearray) -> int:
    (length,) = _LENGTH.unpack(prefix)
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"message of {length} bytes: at most {MAX_MESSAGE_BYTES} are allowed")
    return length


async def _receive_message(sock: socket.socket) -> dict[str, Any]:
    prefix = bytearray(_LENGTH.size)
    await _receive_exactly(sock, memoryview(prefix))
    body = bytearray(_length_of(prefix))
    await _receive_exactly(sock, memoryview(body))
    return json.loads(body)


async def _receive_exactly(sock: socket.socket, target: memoryview) -> None:
    loop = asyncio.get_running_loop()
    received = 0
    while received < len(target):
        count = await loop.sock_recv_into(sock, target[received:])
        if count == 0:
            raise EOFError("connection closed in the middle of a message")
        received += count
