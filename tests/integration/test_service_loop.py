"""The event loop on a real NATS server: what is durable stays durable, each event is applied once and in order."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgpack
import pytest
from gyre.contracts import codec
from gyre.contracts.events import BacklogReported, ExecutionStarted, ExecutionTerminated, StepSealed
from gyre.contracts.subjects import DLQ, EXEC, TRAIN, filter_of, subject_of
from gyre.runtime.blobs import DirectoryBlobs
from gyre.runtime.bus import Bus
from gyre.runtime.clock import SystemClock
from gyre.runtime.effects import Effect, Publish, Tick
from gyre.runtime.service import Service, Subscription, encode_fact
from gyre.runtime.store import Store

RUN = "test-run"


@dataclass(frozen=True)
class Noted:
    """A local event."""

    serial: int


@dataclass
class Log:
    seen: list[str] = field(default_factory=list)


class LoggingCore:
    """Says one fact per local event and keeps the executions it was told of, in order."""

    local_events = (Noted,)

    def initial(self) -> Log:
        return Log()

    def step(self, state: Log, event: object, now: float) -> tuple[Log, list[Effect]]:
        if isinstance(event, ExecutionStarted):
            if event.group == "poison":
                raise RuntimeError("this fact kills its consumer")
            state.seen.append(event.execution)
        if isinstance(event, ExecutionTerminated):
            state.seen.append(f"{event.execution}: {len(event.reason)}")
        if isinstance(event, Noted):
            return state, [Publish(BacklogReported(event.serial, 0, 0, 0.0)), Publish(StepSealed(event.serial, (), (), 0))]
        return state, []

    def resume(self, state: Log, now: float) -> list[Effect]:
        return []

    def snapshot(self, state: Log) -> bytes:
        return codec.pack(state)

    def restore(self, data: bytes) -> Log:
        return codec.unpack(data, Log)


async def perform(effect: Effect, trace: Mapping[str, str]) -> None:
    raise AssertionError(f"no such effect: {effect}")


@dataclass
class Running:
    service: Service[Log]
    bus: Bus
    task: asyncio.Task

    async def stop(self) -> None:
        self.service.stop()
        await self.task
        await self.bus.close()

    async def crash(self) -> None:
        """Drop everything where it stands, as kill -9 does; SQLite keeps what was committed."""
        tasks = {self.task, *self.service._tasks}
        while left := {task for task in tasks if not task.done()}:
            for task in left:  # the client library can swallow a cancellation
                task.cancel()
            await asyncio.wait(left, timeout=0.5)
        self.service._store.close()
        with contextlib.suppress(OSError):
            await self.bus.client.close()

    async def until(self, condition: object) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.01)


@pytest.fixture
async def start(nats_server, tmp_path: Path) -> AsyncIterator:
    admin = await Bus.connect(nats_server.url, "bootstrap")
    await admin.bootstrap()

    async def start_one() -> Running:
        bus = await start_one.bus_class.connect(nats_server.url, "test")
        service = Service(name="tester", run=RUN, core=LoggingCore(), store=Store(tmp_path / "state.sqlite", "process"),
                          bus=bus, blobs=DirectoryBlobs(tmp_path / "blobs"), clock=SystemClock(),
                          subscriptions=[Subscription(EXEC, (ExecutionStarted, ExecutionTerminated))], perform=perform,
                          single_writer_subjects=(StepSealed,))
        return Running(service, bus, asyncio.create_task(service.run()))

    start_one.admin = admin
    start_one.bus_class = Bus
    start_one.blobs = DirectoryBlobs(tmp_path / "blobs")
    yield start_one
    await admin.client.close()


async def say(start, number: int, group: str = "g1") -> None:
    fact = ExecutionStarted(f"x{number:04d}", group, "train", 0)
    body = encode_fact(fact, run=RUN, source="test", blobs=start.blobs)
    await start.admin.publish(subject_of(fact, RUN), body, f"started-{number}")


async def serials(start) -> list[int]:
    received = await start.admin.read_all(TRAIN, [filter_of(RUN, BacklogReported)])
    return [codec.decode(r.data)[1].serial for r in received]


async def test_every_fact_is_applied_once_and_in_order_across_a_crash(start):
    first = await start()
    for number in range(300):
        await say(start, number)
    await first.until(lambda: len(first.service.state.seen) >= 50)
    await first.crash()
    for number in range(300, 400):
        await say(start, number)
    second = await start()
    await second.until(lambda: len(second.service.state.seen) >= 400)
    assert second.service.state.seen == [f"x{n:04d}" for n in range(400)]
    await second.stop()


async def test_submitted_events_survive_a_crash_before_they_are_published(start, nats_server):
    running = await start()
    await running.service.submit(Noted(0))
    await running.until(lambda: running.service.outbox_depth == 0)
    nats_server.kill()
    for serial in range(1, 20):
        await running.service.submit(Noted(serial))
    assert running.service.outbox_depth > 0
    await running.crash()
    nats_server.start()
    again = await start()
    await again.until(lambda: again.service.outbox_depth == 0)
    assert await serials(start) == list(range(20))
    await again.stop()


async def test_an_outage_of_the_server_loses_and_doubles_nothing(start, nats_server):
    running = await start()
    for number in range(20):
        await say(start, number)
        await running.service.submit(Noted(number))
    nats_server.kill()
    for number in range(20, 40):
        await running.service.submit(Noted(number))
    nats_server.start()
    for number in range(20, 40):
        await say(start, number)
    await running.until(lambda: running.service.outbox_depth == 0 and len(running.service.state.seen) == 40)
    assert running.service.state.seen == [f"x{n:04d}" for n in range(40)]
    assert await serials(start) == list(range(40))
    await running.stop()


class LossyBus(Bus):
    """Loses one message on its way from the client library to the service."""

    lost = False

    async def _pull(self, *arguments: object, **options: object) -> AsyncIterator[list]:
        async for messages in super()._pull(*arguments, **options):
            if not self.lost and any(m.sequence == 3 for m in messages):
                self.lost = True
                messages = [m for m in messages if m.sequence != 3]
                if not messages:
                    continue
            yield messages


async def test_a_message_that_did_not_arrive_is_read_again_although_none_follows_it(start):
    start.bus_class = LossyBus
    running = await start()
    for number in range(3):
        await say(start, number)
    await running.until(lambda: len(running.service.state.seen) == 3)
    assert running.bus.lost
    assert running.service.state.seen == ["x0000", "x0001", "x0002"]
    await running.stop()


async def test_a_fact_said_again_after_a_restart_is_stored_once(start):
    running = await start()
    await running.service.submit(Noted(7))
    await running.until(lambda: running.service.outbox_depth == 0)
    await running.stop()
    again = await start()
    await again.service.submit(Noted(7))
    await again.until(lambda: again.service.outbox_depth == 0)
    assert await serials(start) == [7]
    await again.stop()


async def test_unreadable_messages_go_to_the_dead_letter_stream_and_the_consumer_goes_on(start):
    running = await start()
    subject = subject_of(ExecutionStarted("x0000", "g1", "train", 0), RUN)
    await start.admin.publish(subject, b"\xc1 not MessagePack", "bad-1")
    unknown = {"v": 1, "type": "execution.vanished", "id": "1", "run": RUN, "source": "t", "time": 1, "key": "k", "data": {}}
    await start.admin.publish(subject, msgpack.packb(unknown), "bad-2")
    await say(start, 1)
    await running.until(lambda: running.service.state.seen == ["x0001"])
    await running.until(lambda: running.service.outbox_depth == 0)
    letters = [codec.decode(r.data)[1] for r in await start.admin.read_all(DLQ, ["gyre.v1.dlq.>"])]
    assert [letter.reason.partition(":")[0] for letter in letters] == ["BrokenBody", "UnknownType"]
    assert letters[0].body == b"\xc1 not MessagePack"
    await running.stop()


async def test_a_fact_that_kills_its_consumer_is_dead_lettered_after_three_tries(start):
    await say(start, 0, group="poison")
    await say(start, 1)
    for _ in range(10):
        running = await start()
        done, _ = await asyncio.wait([running.task], timeout=1.5)
        if not done:
            break
        assert isinstance(running.task.exception(), RuntimeError)
        await running.crash()
    await running.until(lambda: running.service.state.seen == ["x0001"])
    await running.until(lambda: running.service.outbox_depth == 0)
    letters = [codec.decode(r.data)[1] for r in await start.admin.read_all(DLQ, ["gyre.v1.dlq.>"])]
    assert [letter.reason for letter in letters] == ["ContractError: crashed its consumer 3 times"]
    await running.stop()


async def test_a_large_fact_travels_by_reference(start):
    fact = ExecutionTerminated("x0001", "g1", "q", "train", "failed", 0, 1.0, reason="r" * 600_000)
    body = encode_fact(fact, run=RUN, source="test", blobs=start.blobs)
    assert len(body) < 2000
    await start.admin.publish(subject_of(fact, RUN), body, "large")
    running = await start()
    await running.until(lambda: running.service.state.seen == ["x0001: 600000"])
    await running.stop()


def test_ticks_are_local_events():
    assert Tick() == Tick()
