"""What NIXL can do to a reader: be late, fail, land after nobody waits any more. The agent is a fake; the memory is not."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from gyre.transfer import (
    BackendUnavailable,
    DeadlineExceeded,
    RegionDescriptor,
    RegionUnknown,
    TornRead,
    Transfer,
    TransferConfig,
    TransferError,
    backends_of,
)
from gyre.transfer.landing import MAX_QUARANTINED
from gyre.transfer.nixl import MAX_IN_FLIGHT, NixlBackend, Piece, chunks, merged
from gyre.transfer.nixl_agent import PROGRESS_US, installed, open_agent
from nixl_fakes import FakeFabric

SIZE = 3000  # three landing buffers' worth of float32
HEADER_READS = 1


@pytest.fixture
def fabric() -> FakeFabric:
    return FakeFabric()


@pytest.fixture
def owner(fabric: FakeFabric) -> Iterator[Transfer]:
    with Transfer(TransferConfig("owner", backends=("nixl",)), fabric.backend("owner")) as transfer:
        yield transfer


@pytest.fixture
def reader(fabric: FakeFabric) -> NixlBackend:
    return fabric.backend("reader")


def described(owner: Transfer, value: float = 7.0) -> RegionDescriptor:
    owner.register("g", {"g": np.full(SIZE, value, np.float32)})
    return RegionDescriptor.from_wire(owner.describe("g").to_wire())


class Time:
    """A clock that a test turns; every look at it costs a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def read(reader: NixlBackend, descriptor: RegionDescriptor, deadline: float = 1000.0) -> np.ndarray:
    into = {"g": np.zeros(SIZE, np.float32)}
    reader.copy_out(descriptor, into, deadline, Time())
    return into["g"]


def test_buffers_larger_than_a_landing_buffer_arrive_in_pieces(owner: Transfer, reader: NixlBackend) -> None:
    assert np.all(read(reader, described(owner)) == 7.0)
    assert reader.num_quarantined == 0


def test_pieces_cover_every_byte_once_and_fill_the_transfers(owner: Transfer) -> None:
    owner.register("many", {n: np.zeros(s, np.uint8) for n, s in (("a", 10), ("b", 25), ("c", 0), ("d", 1))})
    descriptor = owner.describe("many")
    into = {info.name: np.zeros(info.shape, np.uint8) for info in descriptor.buffers}
    made = list(chunks(descriptor, into, 16))
    assert [sum(p.num_bytes for p in chunk) for chunk in made] == [16, 16, 4]
    assert [p.num_bytes for chunk in made for p in chunk] == [10, 6, 16, 3, 1]


def test_neighbours_are_one_transfer() -> None:
    pieces = [Piece(at, 4, memoryview(bytearray(4))) for at in (100, 104, 96, 100, 104, 300)]
    assert list(merged(pieces)) == [(100, 8), (96, 12), (300, 4)]


def test_what_arrived_is_looked_at_while_the_next_transfer_flies(
    fabric: FakeFabric, owner: Transfer, reader: NixlBackend
) -> None:
    descriptor = described(owner)
    into = {"g": np.zeros(SIZE, np.float32)}
    assert np.all(read(reader, descriptor) == 7.0)
    fabric.posted.clear()
    arrivals = reader._stream(descriptor, chunks(descriptor, into, 4096), 30.0, lambda: 0.0)
    next(arrivals)
    assert len(fabric.posted) == MAX_IN_FLIGHT
    arrivals.close()
    assert all(handle.released for handle in fabric.posted) and reader.num_quarantined == 0


def test_a_deadline_sets_the_buffer_aside_until_the_transfer_has_ended(
    fabric: FakeFabric, owner: Transfer, reader: NixlBackend
) -> None:
    descriptor = described(owner)
    fabric.behaviour, fabric.skip = "slow", HEADER_READS
    into = {"g": np.zeros(SIZE, np.float32)}
    with pytest.raises(DeadlineExceeded, match="before its deadline"):
        reader.copy_out(descriptor, into, 30.0, Time())
    late = fabric.posted[-1]
    assert not late.released and reader.num_quarantined == MAX_IN_FLIGHT
    fabric.behaviour = "done"
    again = read(reader, described(owner, 9.0))
    late.land()
    assert np.all(again == 9.0) and np.all(into["g"] == 0.0), "what lands late reaches nobody's array"
    assert not late.released and reader.num_quarantined == MAX_IN_FLIGHT


def test_a_buffer_comes_back_when_its_late_transfer_is_done(
    fabric: FakeFabric, owner: Transfer, reader: NixlBackend
) -> None:
    descriptor = described(owner)
    fabric.behaviour = "slow"
    with pytest.raises(DeadlineExceeded):
        read(reader, descriptor, 30.0)
    late = fabric.posted[-1]
    fabric.behaviour = "done"
    fabric.finish(late)
    assert np.all(read(reader, descriptor) == 7.0)
    assert late.released and reader.num_quarantined == 0
    assert {target for h in fabric.posted for _, target, _ in h.copies} >= {late.copies[0][1]}


def test_reads_stop_before_too_much_memory_is_at_risk(fabric: FakeFabric, owner: Transfer, reader: NixlBackend) -> None:
    descriptor = described(owner)
    fabric.behaviour = "slow"
    for _ in range(MAX_QUARANTINED):
        with pytest.raises(DeadlineExceeded):
            read(reader, descriptor, 30.0)
    with pytest.raises(BackendUnavailable, match="have not ended"):
        read(reader, descriptor, 30.0)
    fabric.behaviour = "done"
    fabric.finish(fabric.posted[0])
    assert np.all(read(reader, descriptor) == 7.0)


@pytest.mark.parametrize("behaviour", ["error", "raises", "refused"])
def test_a_failed_transfer_is_released_once_and_its_memory_not_used_again(
    fabric: FakeFabric, owner: Transfer, reader: NixlBackend, behaviour: str
) -> None:
    descriptor = described(owner)
    fabric.behaviour = behaviour
    with pytest.raises(RegionUnknown, match="over nixl failed"):
        read(reader, descriptor)
    (failed,) = fabric.posted
    assert failed.released and reader.num_quarantined == 0
    agent = next(a for a in fabric.agents.values() if a.name.startswith("reader"))
    assert not agent.holds(failed.copies[0][1], 1), "its memory is no longer registered"
    fabric.behaviour = "done"
    assert np.all(read(reader, descriptor) == 7.0)


def test_a_late_transfer_that_fails_in_quarantine_is_released_too(
    fabric: FakeFabric, owner: Transfer, reader: NixlBackend
) -> None:
    descriptor = described(owner)
    fabric.behaviour = "slow"
    with pytest.raises(DeadlineExceeded):
        read(reader, descriptor, 30.0)
    fabric.posted[0].state = "RAISES"
    fabric.behaviour = "done"
    assert np.all(read(reader, descriptor) == 7.0)
    assert fabric.posted[0].released and reader.num_quarantined == 0


def test_a_rewrite_between_two_transfers_is_a_torn_read(fabric: FakeFabric, owner: Transfer, reader: NixlBackend) -> None:
    descriptor = described(owner)
    region = owner.find("g")
    assert region is not None

    class Rewriting(Time):
        def __call__(self) -> float:
            if len(fabric.posted) == HEADER_READS + 1 and region.generation == 1:
                with region.rewriting() as arrays:
                    arrays["g"] += 1
            return super().__call__()

    with pytest.raises(TornRead, match="changed while it was read"):
        reader.copy_out(descriptor, {"g": np.zeros(SIZE, np.float32)}, 1000.0, Rewriting())


def test_closing_with_a_transfer_in_flight_releases_nothing_and_keeps_its_memory(
    fabric: FakeFabric, owner: Transfer, reader: NixlBackend
) -> None:
    descriptor = described(owner)
    fabric.behaviour = "slow"
    with pytest.raises(DeadlineExceeded):
        read(reader, descriptor, 30.0)
    late = fabric.posted[-1]
    reader.close()
    reader.close()
    assert not late.released
    fabric.finish(late)  # writes into memory that is still there


def test_an_owner_that_is_gone_is_unknown(fabric: FakeFabric, owner: Transfer, reader: NixlBackend) -> None:
    descriptor = described(owner)
    assert descriptor.nixl is not None
    gone = replace(descriptor, nixl=replace(descriptor.nixl, agent="gone", metadata=b"gone"))
    with pytest.raises(RegionUnknown, match="refuses its metadata"):
        read(reader, gone)
    owner.release("g")
    with pytest.raises(RegionUnknown, match="cannot reach its owner"):
        read(reader, descriptor)


def test_an_agent_is_opened_by_the_first_who_needs_it(fabric: FakeFabric, owner: Transfer) -> None:
    assert fabric.agents == {}
    described(owner)
    assert len(fabric.agents) == 1


def test_the_configured_choice_names_the_backends() -> None:
    assert backends_of("shared_memory") == ("shm",) and backends_of("tcp") == ("tcp",)
    assert backends_of("auto") == (("shm", "nixl", "tcp") if installed() else ("shm", "tcp"))
    with pytest.raises(BackendUnavailable, match="transfer = 'rdma': use one of"):
        backends_of("rdma")


@pytest.mark.skipif(installed(), reason="nixl-cu12 is installed here")
def test_without_the_package_nixl_is_refused_with_what_to_install() -> None:
    with pytest.raises(TransferError, match=r"install opengyre-transfer\[nixl\]"):
        backends_of("nixl")
    with Transfer(TransferConfig("owner", backends=("nixl",))) as owner:
        owner.register("w", {"w": np.zeros(1)})
        with pytest.raises(BackendUnavailable, match=r"install opengyre-transfer\[nixl\]"):
            owner.describe("w")


@pytest.mark.skipif(not installed(), reason="needs nixl-cu12: make test-nixl")
async def test_an_agent_without_work_leaves_the_processor_alone() -> None:
    api = open_agent("idle")
    before = time.process_time()
    await asyncio.sleep(1.0)
    assert time.process_time() - before < 0.3, "its progress thread polls without a pause"
    assert api.agent is not None


def test_the_pause_of_the_progress_thread_is_set_behind_the_agents_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python agent writes 0 into the binding's configuration, whatever it is asked for."""
    made: list[tuple[str, int]] = []

    def make(name: str, config: SimpleNamespace) -> None:
        made.append((name, config.pthrDelay))

    bindings = SimpleNamespace(nixlAgent=make)

    def nixl_agent(name: str, _: object) -> SimpleNamespace:
        bindings.nixlAgent(name, SimpleNamespace(pthrDelay=0))
        return SimpleNamespace(backends={"UCX": 1})

    api = SimpleNamespace(nixl_agent=nixl_agent, nixl_agent_config=lambda backends: backends)
    modules = {"nixl_cu12._api": api, "nixl_cu12._bindings": bindings}
    monkeypatch.setattr("gyre.transfer.nixl_agent.installed", lambda: True)
    monkeypatch.setattr("gyre.transfer.nixl_agent.importlib.import_module", modules.__getitem__)
    opened = open_agent("owner")
    assert made == [(opened.name, PROGRESS_US)]
    assert bindings.nixlAgent is make
