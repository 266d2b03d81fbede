"""The exact mid-step join with real worker processes: whoever computes what, the update is the same.

Core and satellite are `gyre-trainer worker` processes on a real NATS server, talking gRPC and reading each other's
buffers one-sided. The policy is a tiny float64 decoder, so that the order of addition is all that may differ.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from gyre.runtime.ports import free_ports
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "trainer"))
from fakes import assign, burst, completed, ref_to, to_train  # noqa: E402
from gyre.contracts.codec import decode  # noqa: E402
from gyre.contracts.events import (  # noqa: E402
    CellTrainJoined,
    CellTrainReleased,
    Fact,
    StepFinished,
    StepSealed,
    WeightsPublished,
)
from gyre.contracts.subjects import TRAIN, filter_of, message_id, subject_of  # noqa: E402
from gyre.policy.checkpoint import load_state, save_checkpoint, state_digest  # noqa: E402
from gyre.proto.common.v1.status_pb2 import StatusRequest  # noqa: E402
from gyre.proto.trainer.v1.service_pb2_grpc import TrainerServiceStub  # noqa: E402
from gyre.runtime.blobs import DirectoryBlobs  # noqa: E402
from gyre.runtime.bus import Bus  # noqa: E402
from gyre.runtime.clock import SystemClock  # noqa: E402
from gyre.runtime.rpc import channel  # noqa: E402
from gyre.runtime.service import encode_fact  # noqa: E402
from gyre.transfer.nixl_agent import installed  # noqa: E402
from trees import random_micro_step, tiny_decoder  # noqa: E402

pytestmark = pytest.mark.slow

RUN = "join"
STEPS = 2
GROUPS_PER_STEP = 2
MICRO_STEPS_PER_GROUP = 6
DEADLINE_S = 120.0

RUN_TOML = """
name = "join"
steps = 2
[cells]
schedule = "elastic"
count = 2
[policy]
checkpoint = "policy"
dtype = "float64"
[tasks]
root = "tasks"
[harness]
command = ["true"]
[burst]
steps_per_burst = 2
groups_per_step = 2
executions_per_group = 4
[loss]
kind = "grpo"
[optimizer]
learning_rate = 0.01
compute_dtype = "float64"
claim_lease_s = 2.0
"""


@dataclass
class Cluster:
    """One run's files, processes and bus."""

    home: Path
    nats_url: str
    ports: list[int]
    bus: Bus | None = None
    processes: dict[int, subprocess.Popen] = field(default_factory=dict)

    def write(self, tree_tokens: int, transfer: str = "auto") -> None:
        decoder = tiny_decoder()
        save_checkpoint(self.home / "policy", decoder.config, decoder.state_dict())
        (self.home / "run.toml").write_text(RUN_TOML, encoding="utf-8")
        ends = [f'{{listen = "127.0.0.1:{p}", address = "127.0.0.1:{p}"}}' for p in self.ports]
        nobody = '{listen = "127.0.0.1:1", address = "127.0.0.1:1"}'
        lines = [f'run = "{RUN}"', f'nats_url = "{self.nats_url}"', 'gateway_url = "http://nobody"']
        lines += [f'{key} = "{key}"' for key in ("state_dir", "cells_dir", "blobs", "log_dir", "checkpoint_dir")]
        lines += [f"{key} = {nobody}" for key in ("gateway", "scheduler", "rollout", "trajectory")]
        lines += ["engines = []", "evaluators = []", f"trainers = [{ends[0]}, {ends[1]}]"]
        lines += [f"transfers = [{ends[2]}, {ends[3]}]", 'durability = "process"', f'transfer = "{transfer}"']
        (self.home / "deployment.toml").write_text("\n".join(lines), encoding="utf-8")
        self.tree_tokens = tree_tokens

    def start(self, cell: int) -> None:
        command = [sys.executable, "-m", "gyre.trainer.main", "worker", "--cell", str(cell)]
        command += ["--config", str(self.home / "run.toml"), "--deployment", str(self.home / "deployment.toml")]
        self.processes[cell] = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def kill(self, cell: int) -> None:
        process = self.processes.pop(cell)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        for cell in list(self.processes):
            self.kill(cell)

    async def connect(self) -> None:
        self.bus = await Bus.connect(self.nats_url, "test")
        await self.bus.bootstrap()

    async def say(self, *facts: Fact) -> None:
        assert self.bus is not None
        for fact in facts:
            body = encode_fact(fact, run=RUN, source="test", blobs=DirectoryBlobs(self.home / "blobs"))
            await self.bus.publish(subject_of(fact, RUN), body, message_id(fact, RUN))

    async def said(self, kind: type) -> list[Fact]:
        assert self.bus is not None
        messages = await self.bus.read_all(TRAIN, [filter_of(RUN, kind)])
        return [decode(m.data)[1] for m in messages]

    async def until(self, kind: type, num: int = 1) -> list[Fact]:
        """Wait for `num` facts; a worker that died meanwhile fails the test."""
        async with asyncio.timeout(DEADLINE_S):
            while len(found := await self.said(kind)) < num:
                assert all(p.poll() is None for p in self.processes.values()), "a worker died"
                await SystemClock().sleep(0.05)
        return found

    async def until_gauge(self, name: str, at_least: float) -> None:
        """Wait until the core says that one of its gauges has reached a value."""
        stub = TrainerServiceStub(channel(f"127.0.0.1:{self.ports[0]}"))
        async with asyncio.timeout(DEADLINE_S):
            while (await stub.GetStatus(StatusRequest())).gauges[name] < at_least:
                await SystemClock().sleep(0.02)

    async def complete_group(self, step: int, index: int) -> None:
        """A group whose micro-steps are in the blob store."""
        blobs = DirectoryBlobs(self.home / "blobs")
        name = f"s{step}g{index}"
        refs = []
        for m in range(MICRO_STEPS_PER_GROUP):
            seed = 100 * step + 10 * index + m
            micro_step = random_micro_step(seed, num_trees=4, tree_tokens=self.tree_tokens, name=f"{name}-m{m:03d}")
            refs.append(ref_to(micro_step, blobs.put(f"micro/{name}-{m}", micro_step.to_bytes())))
        await self.say(completed(name, tuple(refs)))


@pytest.fixture
def cluster(tmp_path: Path, nats_server: object) -> Iterator[Cluster]:
    made = new_cluster(tmp_path / "run", nats_server)
    yield made
    made.stop()


def new_cluster(home: Path, nats_server: object) -> Cluster:
    home.mkdir(parents=True)
    return Cluster(home, nats_server.url, free_ports(4, "127.0.0.1"))  # type: ignore[attr-defined]


def reference() -> dict[str, torch.Tensor]:
    """The two updates computed here, in one process, with torch alone."""
    from gyre.runtime.config import OptimizerConfig
    from gyre.trainer.backends.torch import TorchBackend
    from gyre.trainer.loss import LossConfig

    backend = TorchBackend(tiny_decoder(), LossConfig(kind="grpo"), OptimizerConfig(learning_rate=0.01))
    for step in range(STEPS):
        for index in range(GROUPS_PER_STEP):
            for m in range(MICRO_STEPS_PER_GROUP):
                seed = 100 * step + 10 * index + m
                backend.accumulate(random_micro_step(seed, num_trees=4, tree_tokens=40))
        backend.update(1.0 / 8, 0.01, 1.0)
    return backend.weights()


async def published(cluster: Cluster) -> dict[str, torch.Tensor]:
    """Weights of the burst's end, whose checkpoint must have the published checksum."""
    initial, fact = await cluster.until(WeightsPublished, 2)
    assert (initial.version, fact.version) == (0, STEPS)
    state = load_state(Path(fact.checkpoint))
    assert state_digest(state) == fact.checksum
    assert load_file(Path(fact.checkpoint) / "optimizer.safetensors")
    return state


def largest_error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    return max(float((got[n] - want[n]).norm() / want[n].norm()) for n in want)


async def test_one_worker_trains_the_reference(cluster: Cluster) -> None:
    cluster.write(40)
    await cluster.connect()
    cluster.start(0)
    await cluster.say(burst(0, 0, STEPS), *to_train(0, 1))
    for step in range(STEPS):
        for index in range(GROUPS_PER_STEP):
            await cluster.complete_group(step, index)
    assert largest_error(await published(cluster), reference()) < 1e-12
    assert [f.step for f in await cluster.said(StepSealed)] == [0, 1]


async def both_join(cluster: Cluster) -> None:
    """Core and satellite hold their devices and take part in step 0, which has no group yet."""
    await cluster.connect()
    cluster.start(0)
    cluster.start(1)
    await cluster.say(burst(0, 0, STEPS), *to_train(0, 1), *to_train(1, 2))
    joined = await cluster.until(CellTrainJoined, 2)
    assert {(f.cell, f.step, f.version) for f in joined} == {(0, 0, 0), (1, 0, 0)}


@pytest.mark.parametrize("transfer", [
    "auto", "tcp",
    pytest.param("nixl", marks=pytest.mark.skipif(not installed(), reason="nixl-cu12 is not installed here")),
])  # fmt: skip
async def test_two_workers_train_the_reference(cluster: Cluster, transfer: str) -> None:
    cluster.write(40, transfer)
    await both_join(cluster)
    for step in range(STEPS):
        for index in range(GROUPS_PER_STEP):
            await cluster.complete_group(step, index)
    assert largest_error(await published(cluster), reference()) < 1e-12
    for finished in await cluster.said(StepFinished):
        assert sum(finished.micro_steps_by_cell.values()) == GROUPS_PER_STEP * MICRO_STEPS_PER_GROUP
    assert any("1" in f.micro_steps_by_cell for f in await cluster.said(StepFinished))
    await cluster.say(assign(1, 3, "rollout"), assign(0, 4, "rollout"))
    released = await cluster.until(CellTrainReleased, 2)
    assert {(f.cell, f.epoch) for f in released} == {(1, 3), (0, 4)}


async def test_a_satellite_killed_in_the_middle_of_a_step_changes_nothing(cluster: Cluster) -> None:
    cluster.write(40)
    await both_join(cluster)
    await cluster.complete_group(0, 0)
    await cluster.until_gauge("micro_steps_cell_1", 1)
    cluster.kill(1)
    for step, index in ((0, 1), (1, 0), (1, 1)):
        await cluster.complete_group(step, index)
    assert largest_error(await published(cluster), reference()) < 1e-12
    first, *_ = await cluster.said(StepFinished)
    assert first.micro_steps_by_cell == {"0": GROUPS_PER_STEP * MICRO_STEPS_PER_GROUP}


async def test_a_core_killed_in_the_middle_of_a_burst_trains_the_same_members_again(cluster: Cluster) -> None:
    cluster.write(40)
    await both_join(cluster)
    for index in range(GROUPS_PER_STEP):
        await cluster.complete_group(0, index)
    await cluster.until(StepFinished)
    await cluster.complete_group(1, 0)
    cluster.kill(0)
    cluster.start(0)
    await cluster.complete_group(1, 1)
    assert largest_error(await published(cluster), reference()) < 1e-12
    assert [(f.step, f.num_scored) for f in await cluster.said(StepSealed)] == [(0, 8), (1, 8)]


async def test_a_worker_killed_after_publishing_trains_nothing_twice(cluster: Cluster) -> None:
    cluster.write(40)
    await cluster.connect()
    cluster.start(0)
    await cluster.say(burst(0, 0, STEPS), *to_train(0, 1))
    for step in range(STEPS):
        for index in range(GROUPS_PER_STEP):
            await cluster.complete_group(step, index)
    before = await published(cluster)
    cluster.kill(0)
    cluster.start(0)
    await cluster.say(assign(0, 2, "rollout"))
    (released,) = await cluster.until(CellTrainReleased)
    assert (released.epoch, released.version) == (2, STEPS)
    assert largest_error(await published(cluster), before) == 0.0
