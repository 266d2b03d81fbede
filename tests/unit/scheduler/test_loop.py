"""What a new leader reads before it leads: a long history costs it neither its lease nor more than it needs."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from gyre.contracts import events as e
from gyre.contracts.events import Fact
from gyre.contracts.subjects import CTL, Stream, filter_of, row_of, subject_of
from gyre.runtime.blobs import DirectoryBlobs
from gyre.runtime.bus import Received
from gyre.runtime.clock import ManualClock
from gyre.runtime.service import encode_fact
from gyre.scheduler.loop import Scheduler, pause_after
from gyre.scheduler.schedules import schedule_of
from small_world import PLAN

RUN = "r"
PAGE = 2


class FakeBus:
    """Streams that hold `facts`; pages of two."""

    def __init__(self, facts: list[Fact], directory: Path) -> None:
        self._facts, self.blobs, self.said = facts, DirectoryBlobs(directory), []
        self.num_read = 0
        self.followed: dict[str, int] = {}
        self.reads = asyncio.Event()
        self.arrives: asyncio.Queue[Fact] = asyncio.Queue()

    async def pages(self, stream: Stream, filters: list[str], newest: bool = False) -> AsyncIterator[list[Received]]:
        found = [(n + 1, f) for n, f in enumerate(self._facts) if filter_of(RUN, type(f)) in filters]
        if newest:
            found = list({subject_of(f, RUN): (n, f) for n, f in found}.values())
        for start in range(0, len(found), PAGE):
            await self.reads.wait()
            self.num_read += len(found[start:start + PAGE])
            yield [self._received(stream, n, f) for n, f in found[start:start + PAGE]]

    def _received(self, stream: Stream, sequence: int, fact: Fact) -> Received:
        data = encode_fact(fact, run=RUN, source="test", blobs=self.blobs)
        return Received(stream.name, "", sequence, sequence, 1, {}, data, None)

    async def follow(self, stream: Stream, filters: list[str], start: int = 1) -> AsyncIterator[list[Received]]:
        self.followed[stream.name] = start
        while True:
            fact = await self.arrives.get() if stream is CTL else await asyncio.Event().wait()
            self._facts.append(fact)
            yield [self._received(stream, len(self._facts), fact)]


class FakeLease:
    """Ours for ever; `renewed_at`: how much had been read whenever it was looked at."""

    def __init__(self, bus: FakeBus) -> None:
        self._bus = bus
        self.renewed_at: list[int] = []

    async def take(self) -> None: ...

    async def renew_if_due(self) -> None:
        self.renewed_at.append(self._bus.num_read)

    async def say(self, fact: Fact, trace: Mapping[str, str]) -> int:
        self._bus.said.append(fact)
        return 0


def history() -> list[Fact]:
    """A run that was closed after a long time; all its streams in one, because the numbers do not matter."""
    contexts = [e.ContextsReported(n, {"x": n}) for n in range(100)]
    backlogs = [e.BacklogReported(n, 0, 0, 0.0, 0.0) for n in range(100)]
    opened: list[Fact] = [e.RunOpened("d", 1, 2)]
    steps = [e.StepFinished(n, n + 1, 0, True, 2, 1, 1, 0.0, 0.0, 0.0) for n in range(5)]
    return [*opened, *contexts, *steps, *backlogs, e.RunClosed("completed", 5, 0)]


async def test_a_new_leader_renews_its_lease_while_it_reads_and_commands_wait_until_it_has_read(tmp_path: Path) -> None:
    bus = FakeBus(history(), tmp_path)
    lease = FakeLease(bus)
    scheduler = Scheduler(RUN, PLAN, schedule_of("elastic"), bus, bus.blobs, lease, ManualClock())
    stopping = asyncio.Event()
    running = asyncio.create_task(scheduler.run(stopping))
    await asyncio.sleep(0)
    assert not scheduler.leading, "an opening asked for now would have the number of one that is over"
    bus.reads.set()
    while not scheduler.leading:
        await asyncio.sleep(0)
    read = [0, 2, 3, 5, 7, 8, 9]
    assert sorted(set(lease.renewed_at)) == read, "after every page; of what supersedes itself only the newest"
    assert (scheduler.state.water.reported, scheduler.state.backlog.serial, scheduler.state.steps_finished) == (99, 99, 5)
    assert scheduler.start() == (False, 1)
    while len(bus.followed) < 4:
        await asyncio.sleep(0)
    positions = {row_of(f).stream.name: n + 2 for n, f in enumerate(history()) if not isinstance(f, e.BacklogReported)}
    assert bus.followed["GYRE_TRAIN"] == positions["GYRE_TRAIN"], "from the last that was read in order"
    stopping.set()
    await running


def test_folding_the_streams_anew_takes_a_hundredth_of_the_time_at_most() -> None:
    assert [pause_after(took_s) for took_s in (0.1, 3.0, 20.0)] == [300.0, 300.0, 2000.0]


async def test_a_fact_whose_body_lies_in_the_blob_store_counts_as_any_other(tmp_path: Path) -> None:
    """A large group's does: unread, the group would never be complete and its step never due."""
    ref = e.BlobRef("micro-steps/x", "d" * 32, 1)
    micro_steps = tuple(e.MicroStepRef(f"m{i:05d}", "d", 1.0, 1, 1, 1, ref) for i in range(4000))
    completed = e.GroupCompleted("g", 0, "q", "train", 0, (), 2, 0.5, 0.0, micro_steps)
    bus = FakeBus([e.RunOpened("d", 1, 2), completed, e.RunClosed("completed", 1, 0)], tmp_path)
    bus.reads.set()
    scheduler = Scheduler(RUN, PLAN, schedule_of("elastic"), bus, bus.blobs, FakeLease(bus), ManualClock())
    stopping = asyncio.Event()
    running = asyncio.create_task(scheduler.run(stopping))
    while not scheduler.leading:
        await asyncio.sleep(0)
    assert bus.blobs.names("messages/r/group.completed") == ["g"]
    assert scheduler.state.num_train_completed == 1
    stopping.set()
    await running


async def test_a_command_is_answered_when_what_it_asked_for_is_in_the_stream(tmp_path: Path) -> None:
    """Answered before, it would be lost with the process: nobody asks again, and the run is never opened."""
    bus = FakeBus([], tmp_path)
    bus.reads.set()
    scheduler = Scheduler(RUN, PLAN, schedule_of("elastic"), bus, bus.blobs, FakeLease(bus), ManualClock())
    stopping = asyncio.Event()
    running = asyncio.create_task(scheduler.run(stopping))
    while not scheduler.leading:
        await asyncio.sleep(0)
    assert scheduler.start() == (False, 0)
    answered = asyncio.create_task(scheduler.read_back(lambda state: state.opening >= 0))
    while not bus.said:
        await asyncio.sleep(0)
    assert not answered.done(), "said, and nobody knows yet whether it is stored"
    bus.arrives.put_nowait(bus.said[0])
    await answered
    assert scheduler.start() == (True, 0)
    stopping.set()
    await running
