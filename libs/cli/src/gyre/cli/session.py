"""One training run seen from outside: ask the scheduler to open it, read its facts as they are said, until it closes."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import grpc
import grpc.aio
from gyre.contracts import codec
from gyre.contracts.codec import Envelope
from gyre.contracts.errors import ContractError, GyreError
from gyre.contracts.events import EvaluationRequested, Fact
from gyre.contracts.subjects import CALL, EVAL, STREAMS, TABLE, Stream, filter_of
from gyre.proto.scheduler.v1 import service_pb2 as pb
from gyre.proto.scheduler.v1 import service_pb2_grpc
from gyre.runtime import rpc
from gyre.runtime.blobs import BlobStore
from gyre.runtime.bus import Bus
from gyre.runtime.config import Deployment

log = logging.getLogger(__name__)
START_ATTEMPTS = 120


async def start_run(deployment: Deployment, config_digest: str) -> tuple[int, bool]:
    """Ask the scheduler to open the run, waiting until one leads; returns the number of the opening, and whether it was open.

    Raises:
        GyreError: no scheduler leads, or it runs another configuration.
    """
    async with rpc.channel(deployment.scheduler.address, timeout_s=5.0) as channel:
        stub = service_pb2_grpc.SchedulerServiceStub(channel)
        for _ in range(START_ATTEMPTS):
            try:
                reply = await stub.StartRun(pb.StartRunRequest(config_digest=config_digest))
                return reply.opening, reply.already_open
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise GyreError(f"the scheduler refused to start the run: {error.details()}") from error
            await asyncio.sleep(0.25)
    raise GyreError(f"no scheduler leads at {deployment.scheduler.address}")


async def stop_run(deployment: Deployment, reason: str) -> None:
    """Ask for the run to close after its open burst; a scheduler that is gone is not asked."""
    async with rpc.channel(deployment.scheduler.address, timeout_s=5.0) as channel:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await service_pb2_grpc.SchedulerServiceStub(channel).StopRun(pb.StopRunRequest(reason=reason))


def read_streams() -> list[tuple[Stream, list[type]]]:
    """The streams that tell a run's story; evaluation requests are work, not story."""
    by_stream = {s.name: (s, [row.record for row in TABLE if row.stream is s]) for s in STREAMS if s is not EVAL}
    return [(stream, [r for r in records if r is not EvaluationRequested]) for stream, records in by_stream.values()]


async def _say_why_it_ended(reading: Coroutine[Any, Any, None], queue: asyncio.Queue[Any]) -> None:
    """A stream that is no longer read would leave its follower waiting for ever."""
    try:
        await reading
    except Exception as error:  # passed on to whoever follows
        await queue.put(error)
    else:
        await queue.put(GyreError("nats: connection closed"))


async def follow(bus: Bus, run: str, blobs: BlobStore, calls: bool = True) -> AsyncIterator[tuple[Envelope, Fact]]:
    """Every fact of a run from its beginning, as it is said, for ever; ordered inside each stream."""
    queue: asyncio.Queue[tuple[Envelope, Fact] | BaseException] = asyncio.Queue(4096)

    async def read(stream: Stream, records: list[type]) -> None:
        async for batch in bus.follow(stream, [filter_of(run, r) for r in records]):
            for received in batch:
                try:
                    envelope = codec.decode_envelope(received.data)
                    body = blobs.get(envelope.ref) if envelope.ref else None
                    await queue.put((envelope, codec.fact_of(envelope, body)))
                except ContractError as error:
                    log.warning("ignored %s %d: %s", received.subject, received.sequence, error)

    wanted = [(s, r) for s, r in read_streams() if calls or s is not CALL]
    readers = [asyncio.create_task(_say_why_it_ended(read(stream, records), queue)) for stream, records in wanted]
    try:
        while True:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        for reader in readers:
            reader.cancel()


