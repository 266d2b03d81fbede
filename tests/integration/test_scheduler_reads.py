"""A scheduler on a real NATS server: what it reads before it leads, and commands that are answered when they are stored."""

import asyncio
from pathlib import Path

import pytest
from gyre.contracts import events as e
from gyre.contracts.events import Fact
from gyre.contracts.subjects import EXEC, filter_of, message_id, subject_of
from gyre.runtime import bus as buses
from gyre.runtime.blobs import DirectoryBlobs
from gyre.runtime.bus import Bus
from gyre.runtime.clock import SystemClock
from gyre.runtime.service import encode_fact
from gyre.scheduler.lease import Lease
from gyre.scheduler.loop import Scheduler
from gyre.scheduler.schedules import schedule_of
from small_world import PLAN

RUN = "read-run"


@pytest.fixture
async def bus(nats_server):
    made = await Bus.connect(nats_server.url, "scheduler")
    await made.bootstrap()
    yield made
    await made.client.close()


async def say(bus: Bus, blobs: DirectoryBlobs, *facts: Fact) -> None:
    for fact in facts:
        data = encode_fact(fact, run=RUN, source="test", blobs=blobs)
        await bus.publish(subject_of(fact, RUN), data, message_id(fact, RUN))


async def test_pages_hold_everything_in_order_and_the_newest_of_each_subject_if_asked(bus, tmp_path, monkeypatch):
    monkeypatch.setattr(buses, "PAGE", 4)
    blobs = DirectoryBlobs(tmp_path)
    lost = [e.CellRolloutLost(cell, 0, n, "away") for n in range(1, 6) for cell in (0, 1)]
    await say(bus, blobs, *lost, *(e.ContextsReported(n, {"x": n}) for n in range(3)))
    pages = [page async for page in bus.pages(EXEC, [filter_of(RUN, e.CellRolloutLost)])]
    assert [m.sequence for page in pages for m in page] == list(range(1, 11))
    assert max(len(page) for page in pages) == 4
    both = [filter_of(RUN, record) for record in (e.CellRolloutLost, e.ContextsReported)]
    newest = [m.sequence async for page in bus.pages(EXEC, both, newest=True) for m in page]
    assert newest == [9, 10, 13]
    assert [page async for page in bus.pages(EXEC, [filter_of(RUN, e.CellRolloutReady)], newest=True)] == []


async def test_a_new_leader_knows_the_history_and_answers_when_the_run_is_open(bus, tmp_path: Path):
    blobs = DirectoryBlobs(tmp_path)
    reports = [e.ContextsReported(n, {"x": n}) for n in range(9)]
    await say(bus, blobs, e.RunOpened("d", 1, 2), e.RunClosed("completed", 0, 0), *reports)
    lease = Lease(bus, blobs, SystemClock(), RUN, 5.0)
    scheduler = Scheduler(RUN, PLAN, schedule_of("elastic"), bus, blobs, lease, SystemClock())
    stopping = asyncio.Event()
    running = asyncio.create_task(scheduler.run(stopping))
    async with asyncio.timeout(30):
        while not scheduler.leading:
            await SystemClock().sleep(0.01)
        assert (scheduler.state.closed, scheduler.state.water.reported) == ("completed", 8)
        assert scheduler.start() == (False, 1)
        await scheduler.read_back(lambda state: state.opening >= 1)
        assert scheduler.start() == (True, 1)
        stopping.set()
        await running
