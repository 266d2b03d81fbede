"""Real worker processes on this machine: what a step of a core and two satellites looks like from outside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import numpy as np
from gyre.contracts.events import (
    BurstOpened,
    CellRoleAssigned,
    CellRolloutReleased,
    CellTrainJoined,
    Fact,
    GroupCompleted,
    MicroStepRef,
    Outcome,
    StepFinished,
)
from gyre.contracts.subjects import TRAIN, filter_of, message_id, subject_of
from gyre.policy.checkpoint import save_checkpoint
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from gyre.proto.common.v1.status_pb2 import StatusRequest
from gyre.proto.trainer.v1.service_pb2_grpc import TrainerServiceStub
from gyre.runtime.blobs import DirectoryBlobs
from gyre.runtime.bus import Bus
from gyre.runtime.ports import free_ports
from gyre.runtime.rpc import channel
from gyre.runtime.service import encode_fact
from train_parts.data import make

RUN = "join"
CELLS = 3
STEPS = 2
MICRO_STEPS = 60
LOOK_S = 0.02
DEADLINE_S = 300.0
POLICY = PolicyConfig("qwen3", 512, 64, 192, 2, 4, 4, 16, tie_word_embeddings=True, qk_norm=True, max_position=4096)
RUN_TOML = f"""
name = "join"
steps = {STEPS}
[cells]
count = {CELLS}
[policy]
checkpoint = "policy"
[tasks]
root = "tasks"
[harness]
command = ["true"]
[burst]
steps_per_burst = {STEPS}
groups_per_step = 2
executions_per_group = 1
[optimizer]
learning_rate = 0.001
"""


@dataclass
class Cluster:
    """One run's files and processes; satellites get less of the machine than the core, the last one least."""

    home: Path
    nats: int
    trainers: list[int]
    transfers: list[int]

    def write(self) -> None:
        save_checkpoint(self.home / "policy", POLICY, Decoder.create(POLICY, 0).state_dict())
        (self.home / "run.toml").write_text(RUN_TOML, encoding="utf-8")

        def ends(ports: list[int]) -> str:
            return ", ".join(f'{{listen = "127.0.0.1:{p}", address = "127.0.0.1:{p}"}}' for p in ports)

        lines = [f'run = "{RUN}"', f'nats_url = "nats://127.0.0.1:{self.nats}"', 'gateway_url = "http://nobody"']
        lines += [f'{key} = "{key}"' for key in ("state_dir", "cells_dir", "blobs", "log_dir", "checkpoint_dir")]
        lines += [f"{key} = {ends([1])}" for key in ("gateway", "scheduler", "rollout", "trajectory")]
        lines += ["engines = []", "evaluators = []", 'durability = "process"']
        lines += [f"trainers = [{ends(self.trainers)}]", f"transfers = [{ends(self.transfers)}]"]
        (self.home / "deployment.toml").write_text("\n".join(lines), encoding="utf-8")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        server = shutil.which("nats-server") or str(Path(sys.executable).with_name("nats-server"))
        command = [server, "-a", "127.0.0.1", "-p", str(self.nats), "-js", "-sd", str(self.home / "nats")]
        processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)]
        try:
            for cell in range(CELLS):
                processes.append(subprocess.Popen(
                    ["nice", "-n", str(4 * cell), sys.executable, "-m", "gyre.trainer.main", "worker", "--cell", str(cell),
                     "--config", str(self.home / "run.toml"), "--deployment", str(self.home / "deployment.toml")],
                    env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                ))  # fmt: skip
            yield
        finally:
            for process in processes:
                process.kill()
                process.wait()


class Run:
    """What is said and asked from outside."""

    def __init__(self, cluster: Cluster, bus: Bus) -> None:
        self._cluster, self._bus = cluster, bus
        self._stub = TrainerServiceStub(channel(f"127.0.0.1:{cluster.trainers[0]}"))
        self._blobs = DirectoryBlobs(cluster.home / "blobs")

    async def say(self, *facts: Fact) -> None:
        for fact in facts:
            body = encode_fact(fact, run=RUN, source="bench", blobs=self._blobs)
            await self._bus.publish(subject_of(fact, RUN), body, message_id(fact, RUN))

    async def count(self, kind: type) -> int:
        return len(await self._bus.read_all(TRAIN, [filter_of(RUN, kind)]))

    async def until(self, kind: type, num: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while await self.count(kind) < num:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)

    async def gauges(self) -> dict[str, float]:
        try:
            return dict((await self._stub.GetStatus(StatusRequest())).gauges)
        except grpc.aio.AioRpcError:
            return {}

    async def until_up(self) -> None:
        """Until every worker answers, so that starting Python is no part of what is measured."""
        async with asyncio.timeout(DEADLINE_S):
            for port in self._cluster.trainers:
                stub, is_up = TrainerServiceStub(channel(f"127.0.0.1:{port}")), False
                while not is_up:
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        await stub.GetStatus(StatusRequest())
                        is_up = True
                    await asyncio.sleep(LOOK_S)

    async def to_train(self, cell: int) -> None:
        epoch = cell + 1
        await self.say(CellRoleAssigned(cell, epoch, "train", f"t{cell}", 0), CellRolloutReleased(cell, epoch))

    async def complete_step(self, step: int) -> None:
        rng = np.random.default_rng(step)
        for group in ("a", "b"):
            name, refs = f"s{step}{group}", []
            for number in range(MICRO_STEPS // 2):
                label = f"{name}-m{number:02d}"
                executions, scale = int(rng.integers(1, 5)), 64
                micro_step, _ = make("branching", 100 * step + number, label, executions, scale, POLICY.vocab_size)
                blob = self._blobs.put(f"micro/{label}", micro_step.to_bytes())
                cost = micro_step.num_tokens + 0.002 * micro_step.num_pairs
                refs.append(MicroStepRef(label, blob.digest, cost, micro_step.num_tokens, micro_step.num_targets, 1, blob))
            outcome = Outcome(f"{name}-x", "scored", "finished", 1.0, 1.0, 1, 1, 1)
            await self.say(GroupCompleted(name, 0, "q", "train", 0, (outcome,), 1, 1.0, 0.0, tuple(refs)))

    async def watch_step(self, step: int, since: float) -> tuple[dict[int, float], dict[int, float]]:
        """Seconds from `since` at which each cell's first and last micro-step of `step` was seen to be done."""
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        counts: dict[int, float] = {}
        clock = asyncio.get_running_loop().time
        async with asyncio.timeout(DEADLINE_S):
            while await self.count(StepFinished) <= step:
                gauges = await self.gauges()
                for cell in range(CELLS) if gauges.get("step") == step else ():
                    done = gauges.get(f"micro_steps_cell_{cell}", 0.0)
                    if done > counts.get(cell, 0.0):
                        counts[cell] = done
                        last[cell] = clock() - since
                        first.setdefault(cell, last[cell])
                await asyncio.sleep(LOOK_S)
        return first, last


async def measure(cluster: Cluster) -> tuple[float, float]:
    """Prints both steps; returns the seconds from an admission to the first claim, and from the change of role to the
    first completed micro-step (the slowest satellite's)."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", cluster.nats), 1.0).close()
                break
            await asyncio.sleep(LOOK_S)
    bus = await Bus.connect(f"nats://127.0.0.1:{cluster.nats}", "bench")
    await bus.bootstrap()
    run, clock = Run(cluster, bus), asyncio.get_running_loop().time
    await run.until_up()
    await run.say(BurstOpened(0, 0, STEPS))
    await run.to_train(0)
    await run.until(CellTrainJoined, 1)
    await run.complete_step(0)
    started = clock()
    for cell in range(1, CELLS):
        await run.to_train(cell)
    joined, join_s = {}, 0.0
    for step in range(STEPS):
        first, last = await run.watch_step(step, started)
        gauges = await run.gauges()
        join_s = gauges.get("join_s", 0.0)
        speeds = {cell: round(gauges.get(f"speed_cell_{cell}", 0.0)) for cell in range(CELLS)}
        spread = max(last.values()) - min(last.values())
        ends = [round(last.get(cell, float("nan")), 2) for cell in range(CELLS)]
        print(f"processes, step {step}: ends {ends} s, spread {spread:.2f} s, measured speeds {list(speeds.values())}")
        if step == 0:
            joined = {cell: at for cell, at in first.items() if cell > 0}
        if step + 1 < STEPS:
            started = clock()
            await run.complete_step(step + 1)
    print(f"processes: change of role to first completed micro-step {[round(s, 2) for s in joined.values()]} s, "
          f"admission to first claim {join_s:.3f} s")  # fmt: skip
    await bus.close()
    return join_s, max(joined.values(), default=float("nan"))


def measure_processes() -> tuple[float, float]:
    with tempfile.TemporaryDirectory(prefix="join-") as home:
        ports = free_ports(1 + 2 * CELLS, "127.0.0.1")
        cluster = Cluster(Path(home), ports[0], ports[1 : 1 + CELLS], ports[1 + CELLS :])
        cluster.write()
        with cluster.running():
            return asyncio.run(measure(cluster))
