"""The real process on a real NATS server: killed at awkward moments, it says each group once; it can be asked."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc.aio
import numpy as np
import pytest
from gyre.contracts import codec
from gyre.contracts.digest import token_digest
from gyre.contracts.events import (
    BlobRef,
    CallRecorded,
    ExecutionScored,
    ExecutionSpec,
    ExecutionTerminated,
    Fact,
    GroupCompleted,
    GroupDispatched,
    VersionSpan,
)
from gyre.contracts.microstep import micro_step_from_bytes
from gyre.contracts.subjects import TRAJ, filter_of, message_id, subject_of
from gyre.proto.common.v1 import status_pb2
from gyre.proto.trajectory.v1 import service_pb2, service_pb2_grpc
from gyre.runtime import rpc
from gyre.runtime.blobs import DirectoryBlobs
from gyre.runtime.bus import Bus
from gyre.runtime.ports import free_ports
from gyre.runtime.service import encode_fact

RUN = "test-run"
RUN_TOML = """
name = "test"
policy = { checkpoint = "none" }
tasks = { root = "none" }
harness = { command = ["none"] }
"""
DEPLOYMENT = """
run = "test-run"
nats_url = "{nats}"
state_dir = "state"
cells_dir = "cells"
blobs = "blobs"
log_dir = "log"
checkpoint_dir = "checkpoints"
gateway_url = "http://none"
durability = "process"
engines = []
trainers = []
evaluators = []
transfers = []
gateway = {{ listen = "none:1", address = "none:1" }}
scheduler = {{ listen = "none:1", address = "none:1" }}
rollout = {{ listen = "none:1", address = "none:1" }}
trajectory = {{ listen = "127.0.0.1:{port}", address = "127.0.0.1:{port}" }}
"""


class World:
    """NATS, a state directory, and the process under test."""

    def __init__(self, directory: Path, nats: str, port: int, bus: Bus) -> None:
        self.directory, self.bus, self.address = directory, bus, f"127.0.0.1:{port}"
        self.blobs = DirectoryBlobs(directory / "blobs")
        (directory / "run.toml").write_text(RUN_TOML)
        (directory / "deployment.toml").write_text(DEPLOYMENT.format(nats=nats, port=port))
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        arguments = ["--config", self.directory / "run.toml", "--deployment", self.directory / "deployment.toml"]
        self.process = subprocess.Popen([sys.executable, "-m", "gyre.trajectory.main", *map(str, arguments)])

    def end(self, number: int) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(30)

    async def say(self, facts: Sequence[Fact]) -> None:
        for fact in facts:
            body = encode_fact(fact, run=RUN, source="test", blobs=self.blobs)
            await self.bus.publish(subject_of(fact, RUN), body, message_id(fact, RUN))

    async def completed(self, num: int) -> list[GroupCompleted]:
        """The groups said so far, once there are `num`."""
        async with asyncio.timeout(60):
            while True:
                received = await self.bus.read_all(TRAJ, [filter_of(RUN, GroupCompleted)])
                if len(received) >= num:
                    return [codec.decode(r.data)[1] for r in received]
                await asyncio.sleep(0.05)

    def stub(self) -> service_pb2_grpc.TrajectoryServiceStub:
        self.channel: grpc.aio.Channel = rpc.channel(self.address, 20.0)
        return service_pb2_grpc.TrajectoryServiceStub(self.channel)


@pytest.fixture
async def world(nats_server, tmp_path: Path) -> AsyncIterator[World]:
    [port] = free_ports(1, "127.0.0.1")
    bus = await Bus.connect(nats_server.url, "test")
    await bus.bootstrap()
    world = World(tmp_path, nats_server.url, port, bus)
    yield world
    if world.process is not None and world.process.poll() is None:
        world.process.kill()
        world.process.wait()
    await bus.client.close()


def record(group: str, execution: str, index: int, sequence: list[int], keep: int, output: list[int]) -> CallRecorded:
    ids, out = np.array(sequence, np.int32), np.array(output, np.int32)
    logprobs = np.full(len(out), -0.5, np.float32)
    base = f"{execution}-c{index - 1:04d}" if index else None
    return CallRecorded(execution, group, f"{execution}-c{index:04d}", index, base, keep, len(ids), ids[keep:], out,
                        logprobs, logprobs, (VersionSpan(0, len(out), 0),), "stop", token_digest(np.append(ids, out)))


def facts_of(group: str) -> list[Fact]:
    """Two executions of three calls with rewards 1 and 0."""
    names = [f"{group}-x00", f"{group}-x01"]
    facts: list[Fact] = [GroupDispatched(group, 0, "q", "task", "train", 0,
                                         tuple(ExecutionSpec(n, 0, 1.0, 2.0) for n in names))]
    for number, name in enumerate(names):
        sequence = [1, 2, 3]
        for index in range(3):
            keep = len(sequence) if index else 0
            prompt = [*sequence, 50 + index] if index else sequence
            facts.append(record(group, name, index, prompt, keep, [10 + number, 20]))
            sequence = [*prompt, 10 + number, 20]
        facts.append(ExecutionTerminated(name, group, "q", "train", "finished", 3, 1.0, BlobRef("w", "0" * 32, 1)))
        facts.append(ExecutionScored(name, group, float(number == 0), 1, 1, "evaluator-0"))
    return facts


async def test_groups_are_said_once_across_kills_and_facts_said_twice(world: World) -> None:
    groups = [f"g00000-{n:03d}" for n in range(6)]
    world.start()
    for number, group in enumerate(groups):
        facts = facts_of(group)
        await world.say(facts[: 3 + number])
        if number % 2:
            world.end(signal.SIGKILL)
            world.start()
        await world.say(facts)
    done = await world.completed(len(groups))
    assert sorted(f.group for f in done) == groups
    assert world.end(signal.SIGTERM) == 0
    world.start()
    await world.say(facts_of("g00000-100"))
    done = await world.completed(len(groups) + 1)
    assert [f.group for f in done].count("g00000-000") == 1
    assert len(done) == len(groups) + 1
    for fact in done:
        assert (fact.num_scored, sum(ref.num_targets for ref in fact.micro_steps)) == (2, 12)
        for ref in fact.micro_steps:
            step = micro_step_from_bytes(world.blobs.get(ref.blob), ref.digest)
            assert step.executions == tuple(o.execution for o in fact.outcomes)


async def test_a_process_that_lost_its_disk_is_rebuilt_from_the_streams(world: World) -> None:
    """What was said before is not said again; what was open goes on."""
    done, open_group = "g00000-000", "g00000-001"
    world.start()
    await world.say(facts_of(done))
    await world.say(facts_of(open_group)[:-1])
    first = await world.completed(1)
    world.end(signal.SIGKILL)
    lost = list((world.directory / "state").rglob("*.sqlite*"))
    assert lost
    for path in lost:
        path.unlink()
    world.start()
    await world.say(facts_of(open_group)[-1:])
    facts = await world.completed(2)
    assert [f.group for f in facts] == [done, open_group]
    assert codec.pack(facts[0]) == codec.pack(first[0])
    assert world.end(signal.SIGTERM) == 0
    assert len(await world.completed(2)) == 2


async def test_trees_and_groups_can_be_looked_at(world: World) -> None:
    world.start()
    open_group, full_group = "g00000-000", "g00000-001"
    await world.say(facts_of(open_group)[:-1])
    await world.say(facts_of(full_group))
    await world.completed(1)
    stub = world.stub()
    status = await stub.GetStatus(status_pb2.StatusRequest(), wait_for_ready=True)
    assert (status.service, status.run, status.gauges["completed_groups"]) == ("trajectory", RUN, 1)
    group = await stub.InspectGroup(service_pb2.InspectGroupRequest(group=open_group))
    assert (group.completed, group.num_executions, group.num_settled) == (False, 2, 1)
    assert group.detail == "g00000-000-x01 waits for its score"
    group = await stub.InspectGroup(service_pb2.InspectGroupRequest(group=full_group))
    assert (group.completed, group.num_executions, group.num_settled) == (True, 2, 2)
    assert group.detail == "2 scored; reward mean 0.5, std 0.7071, compared; 1 micro-steps, 12 targets"
    for execution, kind in ((f"{open_group}-x00", "open"), (f"{full_group}-x01", "")):
        answer = await stub.InspectTree(service_pb2.InspectTreeRequest(execution=execution))
        tree = json.loads(answer.json)
        assert len(tree["ids"]) == tree["header"]["outcome"]["num_unique_tokens"] == 11
        assert tree["header"]["outcome"]["reason"].startswith(kind)
    for execution, code in (("nobody", grpc.StatusCode.NOT_FOUND), ("no/body", grpc.StatusCode.INVALID_ARGUMENT)):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.InspectTree(service_pb2.InspectTreeRequest(execution=execution))
        assert refused.value.code() == code
    await world.channel.close()
    assert (world.directory / "state" / "trajectory.sqlite").exists()
