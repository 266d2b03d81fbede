"""NATS JetStream behind a small surface: bootstrap and verify streams, publish, consume, follow.

Rules that come from how the server and its client behave: every publish carries `Nats-Msg-Id` and is retried until it
is acknowledged (a timeout means unknown, not failed); pull requests are short, because one that was
open when the server restarted is forgotten; a connection that the client closes for good ends the process.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import nats
import nats.errors
from gyre.contracts.errors import BusError, Fenced
from gyre.contracts.subjects import STREAMS, Stream
from gyre.runtime.clock import Clock, SystemClock
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    DiscardPolicy,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.errors import APIError, BadRequestError, NotFoundError

log = logging.getLogger(__name__)

PUBLISH_TIMEOUT_S = 5.0
FETCH_TIMEOUT_S = 3.0
PAGE = 512  # messages that are read at once
PULL_EXPIRES_S = 2.0  # how long the server keeps a pull request open
NUM_QUIET = 2  # requests without a message before the consumer is looked at
QUIET_STATUS = ("404", "408")
ACK_WAIT_S = 30.0
DUPLICATE_WINDOW_S = 3600.0
WRONG_LAST_SEQUENCE = (10071, 10164)
TRANSIENT = (TimeoutError, nats.errors.NoRespondersError, nats.errors.ConnectionClosedError,
             nats.errors.ConnectionReconnectingError, nats.errors.OutboundBufferLimitError, nats.errors.NoServersError,
             ConnectionError, APIError)


class _Gap(Exception):
    """A delivery is missing."""


@dataclass(frozen=True, slots=True)
class Received:
    """One message with its place in its stream. `ack` may be awaited once it is applied."""

    stream: str
    subject: str
    sequence: int
    delivery: int  # number of this delivery in its consumer
    num_delivered: int
    headers: dict[str, str]
    data: bytes
    message: Msg

    async def ack(self) -> None:
        with contextlib.suppress(nats.errors.Error):
            await self.message.ack()

    async def in_progress(self) -> None:
        with contextlib.suppress(nats.errors.Error):
            await self.message.in_progress()

    async def give_back(self) -> None:
        """Let another worker have it at once."""
        with contextlib.suppress(nats.errors.Error):
            await self.message.nak()


def stream_config(stream: Stream, replicas: int = 1) -> StreamConfig:
    """How a stream is kept: on disk, refusing new messages when full instead of dropping old ones."""
    return StreamConfig(name=stream.name, subjects=[stream.subjects], storage=StorageType.FILE,
                        retention=RetentionPolicy.WORK_QUEUE if stream.work_queue else RetentionPolicy.LIMITS,
                        discard=DiscardPolicy.NEW, num_replicas=replicas, duplicate_window=DUPLICATE_WINDOW_S)


class Bus:
    """One connection of one process."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self.client = client
        self.js: JetStreamContext = client.jetstream(timeout=PUBLISH_TIMEOUT_S)
        self.closed = asyncio.Event()
        self._clock = clock

    @classmethod
    async def connect(cls, url: str, name: str, clock: Clock | None = None) -> "Bus":
        """Connect and keep reconnecting for ever. Raises BusError if the first connection fails for a minute."""
        client = Client()
        bus_box: list[Bus] = []

        async def on_closed() -> None:
            if bus_box:
                bus_box[0].closed.set()

        async def on_error(error: Exception) -> None:
            log.warning("nats: %s", error)

        async def on_disconnected() -> None:
            log.warning("nats: disconnected")

        async def on_reconnected() -> None:
            log.info("nats: reconnected")

        options = {"name": name, "max_reconnect_attempts": -1, "reconnect_time_wait": 0.25, "ping_interval": 5,
                   "max_outstanding_pings": 2, "connect_timeout": 5, "drain_timeout": 10, "error_cb": on_error,
                   "closed_cb": on_closed, "disconnected_cb": on_disconnected, "reconnected_cb": on_reconnected}
        try:
            async with asyncio.timeout(60):
                await client.connect(servers=[url], allow_reconnect=True, **options)
        except (TimeoutError, nats.errors.Error, OSError) as error:
            raise BusError(f"nats at {url}: cannot connect: {error!r}") from error
        bus_box.append(cls(client, clock or SystemClock()))
        return bus_box[0]

    async def close(self) -> None:
        """Flush and disconnect; a connection that is down is simply dropped."""
        with contextlib.suppress(TimeoutError, nats.errors.Error, OSError):
            await self.client.flush(timeout=2)
        with contextlib.suppress(OSError):
            await self.client.close()

    # ------------------------------------------------------------ streams

    async def bootstrap(self, replicas: int = 1) -> None:
        """Create missing streams; never deletes or empties one. Only the bootstrap calls this."""
        for stream in STREAMS:
            try:
                await self.js.add_stream(stream_config(stream, replicas))
            except BadRequestError:
                await self.js.update_stream(stream_config(stream, replicas))

    async def verify_streams(self) -> None:
        """Raises BusError naming the streams that are missing or have other subjects."""
        for stream in STREAMS:
            try:
                info = await self._with_retry(lambda s=stream: self.js.stream_info(s.name))
            except NotFoundError:
                raise BusError(f"stream {stream.name} is missing; run `gyre bootstrap`") from None
            if info.config.subjects != [stream.subjects]:
                raise BusError(f"stream {stream.name} has subjects {info.config.subjects}, "
                               f"expected [{stream.subjects!r}]")

    async def last_sequence(self, stream: str) -> int:
        """Sequence of the stream's last message, 0 if there is none."""
        info = await self._with_retry(lambda: self.js.stream_info(stream))
        return info.state.last_seq

    async def last_message(self, subject: str) -> dict[str, str] | None:
        """Headers of the last message on `subject` with its sequence as `sequence`, None if there is none."""
        stream = next(s for s in STREAMS if subject.startswith(s.subjects[:-1]))
        try:
            message = await self._with_retry(lambda: self.js.get_last_msg(stream.name, subject))
        except NotFoundError:
            return None
        return dict(message.headers or {}) | {"sequence": str(message.seq)}

    async def _with_retry(self, call: Callable, attempts: int = 40) -> object:
        for _ in range(attempts - 1):
            try:
                return await call()
            except NotFoundError:
                raise
            except TRANSIENT:
                await self._clock.sleep(0.5)
        return await call()

    # ------------------------------------------------------------ publish

    async def publish(self, subject: str, body: bytes, message_id: str, headers: dict[str, str] | None = None,
                      expected_last: tuple[str, int] | None = None) -> int:
        """Publish until acknowledged; returns the sequence (of the first copy, if this was a duplicate).

        `expected_last` = (subject, sequence): refused unless that subject's last message has that sequence.

        Raises:
            Fenced: the condition did not hold. It does not say that this message is not stored: re-read first.
        """
        all_headers = dict(headers or {}) | {"Nats-Msg-Id": message_id}
        if expected_last is not None:
            all_headers["Nats-Expected-Last-Subject-Sequence"] = str(expected_last[1])
            if expected_last[0] != subject:
                all_headers["Nats-Expected-Last-Subject-Sequence-Subject"] = expected_last[0]
        delay_s = 0.1
        while True:
            try:
                ack = await self.js.publish(subject, body, timeout=PUBLISH_TIMEOUT_S, headers=all_headers)
                return ack.seq
            except TRANSIENT as error:
                if isinstance(error, APIError) and error.err_code in WRONG_LAST_SEQUENCE:
                    raise Fenced(f"{subject}: {error.description}") from error
                if self.closed.is_set():
                    raise BusError("nats: connection closed") from error
                log.warning("nats: publish of %s not acknowledged (%r), retrying", message_id, error)
                await self._clock.sleep(delay_s)
                delay_s = min(delay_s * 2, 2.0)

    # ------------------------------------------------------------ consume

    async def share(self, stream: Stream, durable: str, filters: list[str], *, batch: int = 1,
                    max_ack_pending: int = 256) -> AsyncIterator[list[Received]]:
        """Work from a durable pull consumer that several processes share, for ever. Order is not kept; whoever does
        not acknowledge in time loses the message to another worker."""
        config = ConsumerConfig(durable_name=durable, ack_policy=AckPolicy.EXPLICIT, ack_wait=ACK_WAIT_S,
                                max_deliver=-1, max_ack_pending=max_ack_pending, filter_subjects=filters)
        while not self.closed.is_set():
            try:
                await self._ensure_consumer(stream.name, config)
                async for messages in self._pull(stream.name, durable, batch):
                    yield messages
            except (*TRANSIENT, nats.errors.Error) as error:
                log.warning("nats: consumer %s on %s: %r, rebuilding", durable, stream.name, error)
                await self._clock.sleep(0.5)

    async def _ensure_consumer(self, stream: str, config: ConsumerConfig) -> None:
        try:
            await self.js.consumer_info(stream, config.durable_name)
        except NotFoundError:
            await self.js.add_consumer(stream, config)

    async def consume(self, stream: Stream, durable: str, filters: list[str],
                      start: int) -> AsyncIterator[list[Received]]:
        """Every message from sequence `start` on, each once and in order, through a durable consumer; for ever.

        The position is the caller's (its applied sequence), not the server's: a server that restarts, or a process that
        died with messages in hand, makes the server deliver newer messages before it redelivers older ones. So the
        consumer is made anew at the caller's position, and again whenever a delivery is missing.
        """
        position = start
        while not self.closed.is_set():
            config = ConsumerConfig(
                durable_name=durable, ack_policy=AckPolicy.EXPLICIT, ack_wait=ACK_WAIT_S, max_deliver=-1,
                max_ack_pending=8192, filter_subjects=filters, deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
                opt_start_seq=max(position, 1))
            try:
                await self._forget(stream.name, durable)
                await self.js.add_consumer(stream.name, config)
                async for messages in self._without_gaps(stream.name, durable):
                    fresh = [m for m in messages if m.sequence >= position]
                    position = max(position, messages[-1].sequence + 1)
                    if fresh:
                        yield fresh
            except (*TRANSIENT, nats.errors.Error, _Gap) as error:
                log.warning("nats: consumer %s on %s from %d: %r, rebuilding", durable, stream.name, position, error)
                await self._clock.sleep(0.2)

    async def _without_gaps(self, stream: str, consumer: str) -> AsyncIterator[list[Received]]:
        """Batches whose deliveries are numbered 1, 2, 3, ... Raises _Gap when one is missing, also when none follows it."""
        expected = 1
        async for messages in self._pull(stream, consumer, 256, idle=True):
            for index, received in enumerate(messages):
                if received.delivery != expected:
                    if index:
                        yield messages[:index]
                    raise _Gap(f"delivery {received.delivery} instead of {expected}")
                expected += 1
            if messages:
                yield messages
                continue
            delivered = (await self.js.consumer_info(stream, consumer)).delivered
            if delivered is not None and delivered.consumer_seq >= expected:
                raise _Gap(f"delivery {expected} of {delivered.consumer_seq} did not arrive")

    async def _forget(self, stream: str, durable: str) -> None:
        with contextlib.suppress(NotFoundError):
            await self.js.delete_consumer(stream, durable)

    async def _pull(self, stream: str, consumer: str, batch: int, idle: bool = False) -> AsyncIterator[list[Received]]:
        """What a pull consumer has, as soon as it has it; with `idle` also an empty list after some quiet seconds.

        One request is open at a time and asked again when it ends. (The client's own `fetch` holds what it has until the
        batch is full or its time is up, and can lose a message that arrives just then.)
        """
        arrived: asyncio.Queue[Msg] = asyncio.Queue()  # bounded by `batch`: the server sends no more than was asked for
        inbox = self.client.new_inbox()
        subscription = await self.client.subscribe(inbox, cb=arrived.put)
        request = json.dumps({"batch": batch, "expires": int(PULL_EXPIRES_S * 1e9)}).encode()
        num_quiet = 0
        try:
            while not self.closed.is_set():
                await self.client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", request, inbox)
                left = batch
                while left > 0:
                    messages, status = await _drain(arrived)
                    left -= len(messages)
                    num_quiet = 0 if messages else num_quiet + 1
                    if messages:
                        yield messages
                    if status:
                        break
                if num_quiet and status not in QUIET_STATUS:
                    await self._clock.sleep(0.2)
                if num_quiet >= NUM_QUIET:
                    await self.js.consumer_info(stream, consumer)  # raises if the consumer is gone
                    num_quiet = 0
                    if idle and arrived.empty():
                        yield []
        finally:
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()

    # ------------------------------------------------------------ follow

    async def follow(self, stream: Stream, filters: list[str], start: int = 1) -> AsyncIterator[list[Received]]:
        """Every message from sequence `start` on, in order, without any durable position; for ever."""
        position = start
        while not self.closed.is_set():
            config = ConsumerConfig(ack_policy=AckPolicy.NONE, deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
                                    opt_start_seq=max(position, 1), filter_subjects=filters, inactive_threshold=30.0)
            try:
                info = await self.js.add_consumer(stream.name, config)
                async for messages in self._without_gaps(stream.name, info.name):
                    fresh = [m for m in messages if m.sequence >= position]
                    position = max(position, messages[-1].sequence + 1)
                    if fresh:
                        yield fresh
            except (*TRANSIENT, nats.errors.Error, _Gap) as error:
                log.warning("nats: following %s from %d: %r, again", stream.name, position, error)
                await self._clock.sleep(0.5)

    async def pages(self, stream: Stream, filters: list[str], newest: bool = False) -> AsyncIterator[list[Received]]:
        """Every message that is in the stream now and matches one of `filters`, some hundreds at a time, in order.

        `newest`: only the last one on each subject.
        """
        policy = DeliverPolicy.LAST_PER_SUBJECT if newest else DeliverPolicy.ALL
        config = ConsumerConfig(ack_policy=AckPolicy.NONE, deliver_policy=policy, filter_subjects=filters,
                                inactive_threshold=10.0)
        info = await self.js.add_consumer(stream.name, config)
        left = info.num_pending or 0
        subscription = await self.js.pull_subscribe_bind(consumer=info.name, stream=stream.name)
        while left > 0:
            messages = await subscription.fetch(min(PAGE, left), timeout=FETCH_TIMEOUT_S)
            left -= len(messages)
            yield [_received(m) for m in messages]

    async def read_all(self, stream: Stream, filters: list[str]) -> list[Received]:
        """Every message that is in the stream now and matches one of `filters`."""
        return [received async for page in self.pages(stream, filters) for received in page]


async def _drain(arrived: "asyncio.Queue[Msg]") -> tuple[list[Received], str]:
    """Wait for the first message, then take all that came with it; and the status that ended the request, if it ended."""
    messages: list[Received] = []
    try:
        async with asyncio.timeout(PULL_EXPIRES_S + 1.0):
            message = await arrived.get()
    except TimeoutError:
        return [], "lost"  # the server was restarted and does not know the request any more
    while True:
        status = (message.headers or {}).get("Status", "")
        if status:
            return messages, status
        messages.append(_received(message))
        if arrived.empty():
            return messages, ""
        message = arrived.get_nowait()


def _received(message: Msg) -> Received:
    meta = message.metadata
    return Received(meta.stream, message.subject, meta.sequence.stream, meta.sequence.consumer, meta.num_delivered,
                    dict(message.headers or {}), message.data, message)
