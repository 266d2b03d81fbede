"""KV that is held for somebody who does not come is seen by whoever looks at the engine, until its lease has ended."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_steps import POLICY, ask, load, some
from fake_tensorrt_llm import World
from fake_vllm import FakeVllm
from gyre.proto.common.v1 import status_pb2
from gyre.proto.rollout.v1 import engine_pb2 as pb
from gyre.proto.rollout.v1 import engine_pb2_grpc as pb_grpc
from gyre.rollout.engine_cell import EngineCell
from gyre.rollout.engine_process import status_of
from gyre.rollout.engine_rpc import SERVICE, EngineRpc
from gyre.rollout.engines.base import EventStream
from gyre.rollout.engines.choose import Choice
from gyre.rollout.engines.moving import ExportOf, Reservation
from gyre.rollout.engines.weights import NoWeights
from gyre.runtime import rpc
from gyre.runtime.devices import DeviceLock
from hosted_engines import hosted, make_vllm_over, tensorrt_host
from row_fabric import Fabric
from stepped_engine import Clock, Stepped

torch.set_num_threads(1)
LEASE_S = 1000.0  # longer than any

Hold = Callable[[Any, str], Awaitable[bytes]]


@dataclass(frozen=True)
class NamedProcess:
    """What a status says of the process."""

    name: str = "engine-0"
    run: str = "held"
    index: int = 0
    uptime_s: float = 1.0


@dataclass
class Watched:
    """An engine behind its server. `hold` leaves something under a ticket there and returns it."""

    engine: Any
    clock: Clock
    hold: Hold
    stub: pb_grpc.EngineServiceStub

    async def num_held(self) -> int:
        """What the load report and the status say, and they say the same."""
        report = await self.stub.GetLoad(pb.GetLoadRequest())
        status = await self.stub.GetStatus(status_pb2.StatusRequest())
        assert status.gauges["held"] == report.num_held == self.engine.load_report().num_held
        return report.num_held

    async def release(self, ticket: bytes) -> None:
        await self.stub.ReleaseTicket(pb.ReleaseTicketRequest(ticket=ticket))


async def begun(engine: Any, name: str) -> EventStream:
    stream = engine.submit(ask(name, max_tokens=100, namespace=name))
    if isinstance(engine, Stepped):
        await engine.step(3)
    else:
        await some(stream, 2)
    return stream


async def hold_a_request(engine: Any, name: str) -> bytes:
    await begun(engine, name)
    return await engine.export_ticket(name)


async def hold_a_prefix(engine: Any, name: str) -> bytes:
    async for _ in engine.submit(ask(name, max_tokens=5, namespace=name)):
        pass
    return (await engine.export_prefix(name)).ticket


async def hold_a_frozen_request(engine: Stepped, name: str) -> bytes:
    await begun(engine, name)
    await engine.moves.open_export(name, ExportOf(name), 10.0)
    await engine.moves.freeze(name, 0)
    return name.encode()


async def hold_room(engine: Stepped, name: str) -> bytes:
    version = engine.load_report().version
    await engine.moves.reserve(Reservation(name, 1, engine.capabilities.layout, version, name, 20, 10.0))
    return name.encode()


def vllm(clock: Clock) -> Any:
    server = FakeVllm(POLICY)
    server.step_s = 0.002  # what is to be exported must not be over before
    return make_vllm_over(server, POLICY, clock)


def tensorrt(clock: Clock) -> Any:
    return hosted(tensorrt_host(World(POLICY, step_s=0.002)), POLICY, clock=clock)


def stepped(clock: Clock) -> Any:
    return Stepped(Fabric(), "engine", clock=clock)


CASES = {
    "vllm-request": (vllm, hold_a_request), "vllm-prefix": (vllm, hold_a_prefix),
    "tensorrt-llm-request": (tensorrt, hold_a_request), "tensorrt-llm-prefix": (tensorrt, hold_a_prefix),
    "torch-source": (stepped, hold_a_frozen_request), "torch-destination": (stepped, hold_room),
}  # fmt: skip


@pytest.fixture(params=CASES)
async def watched(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Watched]:
    make, hold = CASES[request.param]
    clock = Clock()
    engine = make(clock)
    await (engine.load(3) if isinstance(engine, Stepped) else load(engine, 3))
    lock = DeviceLock(tmp_path, 0, "engine")
    assert lock.try_take(0)
    cell = EngineCell(engine, lock, NoWeights())
    service = EngineRpc(cell, 0.0, lambda: status_of(NamedProcess(), cell, Choice("some", "a test")))  # type: ignore[arg-type]
    server = rpc.Server("127.0.0.1:0", [(SERVICE, lambda s: pb_grpc.add_EngineServiceServicer_to_server(service, s))])
    await server.start()
    channel = rpc.channel(f"127.0.0.1:{server.port}")
    yield Watched(engine, clock, hold, pb_grpc.EngineServiceStub(channel))
    await channel.close()
    await server.stop(0)
    await cell.close()


async def test_what_is_held_is_shown_until_it_is_released(watched: Watched) -> None:
    assert await watched.num_held() == 0
    tickets = [await watched.hold(watched.engine, name) for name in ("a", "b")]
    assert await watched.num_held() == 2
    await watched.release(tickets[0])
    assert await watched.num_held() == 1
    await watched.release(tickets[0])
    await watched.release(b"never-was")
    assert await watched.num_held() == 1
    await watched.release(tickets[1])
    assert await watched.num_held() == 0


async def test_what_nobody_comes_for_is_shown_until_its_lease_has_ended(watched: Watched) -> None:
    """Also while nothing else is asked of the engine."""
    await watched.hold(watched.engine, "a")
    watched.clock.now += 5.0
    assert await watched.num_held() == 1
    watched.clock.now += LEASE_S
    assert await watched.num_held() == 0


async def test_what_was_held_is_not_shown_once_the_engine_sleeps(watched: Watched) -> None:
    await watched.hold(watched.engine, "a")
    await watched.engine.sleep()
    assert await watched.num_held() == 0
