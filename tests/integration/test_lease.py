"""Leadership on a real NATS server: one writer at a time, and a stale leader is refused by the broker itself."""

import asyncio
from pathlib import Path

import pytest
from gyre.contracts import codec
from gyre.contracts import events as e
from gyre.contracts.subjects import CTL, filter_of
from gyre.runtime.blobs import DirectoryBlobs
from gyre.runtime.bus import Bus
from gyre.runtime.clock import SystemClock
from gyre.scheduler.lease import Lease, LostLease

RUN = "lease-run"
TTL_S = 0.6


@pytest.fixture
async def lease(nats_server, tmp_path: Path):
    buses = []

    async def make() -> Lease:
        bus = await Bus.connect(nats_server.url, "scheduler")
        await bus.bootstrap()
        buses.append(bus)
        return Lease(bus, DirectoryBlobs(tmp_path), SystemClock(), RUN, TTL_S)

    make.buses = buses
    yield make
    for bus in buses:
        await bus.client.close()


async def facts(bus: Bus, record: type) -> list[e.Fact]:
    return [codec.decode(r.data)[1] for r in await bus.read_all(CTL, [filter_of(RUN, record)])]


async def test_of_many_racers_exactly_one_leads(lease):
    racers = [await lease() for _ in range(6)]
    tasks = [asyncio.create_task(r.take()) for r in racers]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=10)
    winner = racers[tasks.index(next(iter(done)))]
    for _ in range(8):  # the winner renews, so nobody else gets in
        await winner.renew()
        await asyncio.wait(pending, timeout=TTL_S / 4)
    assert len([t for t in tasks if t.done()]) == 1
    for task in pending:
        task.cancel()
    taken = await facts(lease.buses[0], e.LeaseTaken)
    assert {f.holder for f in taken} == {winner.holder}


async def test_a_stale_leader_can_say_nothing(lease):
    old, new = await lease(), await lease()
    await old.take()
    await old.say(e.BurstOpened(0, 0, 1), {})
    await asyncio.wait_for(new.take(), 10)  # the old one did not renew for a whole time to live
    with pytest.raises(LostLease):
        await old.say(e.BurstOpened(1, 1, 1), {})
    with pytest.raises(LostLease):
        await old.renew()
    await new.say(e.BurstOpened(2, 2, 1), {})
    assert [f.burst for f in await facts(lease.buses[0], e.BurstOpened)] == [0, 2]


async def test_a_leader_that_could_not_renew_in_time_stops_by_itself(lease):
    leader = await lease()
    await leader.take()
    await asyncio.sleep(TTL_S * 1.5)
    with pytest.raises(LostLease, match="could not renew"):
        await leader.renew()


async def test_a_fact_that_is_said_twice_is_stored_once(lease):
    leader = await lease()
    await leader.take()
    first = await leader.say(e.BurstOpened(0, 0, 1), {})
    assert await leader.say(e.BurstOpened(0, 0, 1), {}) == first
    assert len(await facts(lease.buses[0], e.BurstOpened)) == 1
