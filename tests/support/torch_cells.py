"""Real engine processes with the torch engine and a router over them, and faults by kill -9 at any step of a move."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from gyre.contracts.events import Sampling, WeightsPublished
from gyre.policy.checkpoint import save_checkpoint, state_digest
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from gyre.rollout.attempt import Job, Output
from gyre.rollout.gateway.session import StallMeter
from gyre.rollout.migration import MoveLimits
from gyre.rollout.router import Router, RouterLimits
from gyre.runtime import rpc
from gyre.runtime.clock import SystemClock
from gyre.runtime.ports import free_ports
from move_stage import FaultyEngine
from rollout_stage import endpoint

POLICY = PolicyConfig("qwen3", 512, 32, 64, 2, 4, 2, 8, tie_word_embeddings=True, qk_norm=True, max_position=4096)
LIMITS = MoveLimits(min_tokens=32, last_blocks=2, step_s=5.0, pull_s=5.0, total_s=20.0, stop_s=8.0)


@dataclass
class TorchCells:
    """Engines 0..num - 1 of one run. `policy` is saved as weights 0."""

    root: Path
    num: int = 3
    policy: PolicyConfig = POLICY
    engine: str = "deterministic = true\nmin_interval_ms = 2.0"
    kv_tokens: int = 16384
    transfer: str = "auto"
    processes: dict[int, subprocess.Popen] = field(default_factory=dict)
    clients: dict[int, FaultyEngine] = field(default_factory=dict)

    def prepare(self, seed: int = 0) -> None:
        """Write checkpoint, run.toml and deployment.toml."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.ports = free_ports(self.num, "127.0.0.1")
        state = Decoder.create(self.policy, seed).state_dict()
        self.digest = state_digest(state)
        save_checkpoint(self.root / "checkpoint", self.policy, state)
        (self.root / "run.toml").write_text(f"""
name = "moves"
[policy]
checkpoint = "checkpoint"
[tasks]
root = "tasks"
[cells]
count = {self.num}
device = "{os.environ.get("GYRE_TEST_DEVICE", "cpu")}"
[engine]
backend = "torch"
kv_tokens = {self.kv_tokens}
flush_ms = 10.0
{self.engine}
[sampling]
max_context = {self.policy.max_position}
[harness]
command = ["true"]
""")
        (self.root / "deployment.toml").write_text(f"""
run = "moves"
nats_url = "nats://127.0.0.1:1"
state_dir = "state"
cells_dir = "cells"
blobs = "blobs"
log_dir = "log"
checkpoint_dir = "checkpoints"
gateway_url = "http://127.0.0.1:1"
transfer = "{self.transfer}"
engines = [{", ".join(endpoint(port) for port in self.ports)}]
trainers = []
evaluators = []
transfers = []
gateway = {endpoint(1)}
rollout = {endpoint(1)}
scheduler = {endpoint(1)}
trajectory = {endpoint(1)}
""")

    @property
    def weights(self) -> WeightsPublished:
        return WeightsPublished(0, self.digest, 0, str(self.root / "checkpoint"))

    def launch(self, *cells: int) -> None:
        """Start processes; with no argument all."""
        for cell in cells or range(self.num):
            command = [sys.executable, "-m", "gyre.rollout.main", "engine", "--cell", str(cell), "--config",
                       str(self.root / "run.toml"), "--deployment", str(self.root / "deployment.toml")]
            self.processes[cell] = subprocess.Popen(command, env=os.environ | {"PYTHONUNBUFFERED": "1"})

    async def connect(self, *cells: int) -> None:
        """Reach engines and wake them; with no argument all."""
        for cell in cells or range(self.num):
            channel = rpc.channel(f"127.0.0.1:{self.ports[cell]}")
            async with asyncio.timeout(120):
                await channel.channel_ready()
            self.clients[cell] = FaultyEngine(channel)
            await self.clients[cell].wake(0, self.weights)

    async def router(self, limits: MoveLimits = LIMITS) -> Router:
        """A new router over the engines as they are now, all of which admit."""
        router = Router(self.clients, RouterLimits(moves=limits), SystemClock())
        for cell, client in self.clients.items():
            await client.set_admission(True)
            router.observe(cell, await client.observe())
            router.set_admitting(cell, True)
        return router

    def kill(self, cell: int) -> None:
        """kill -9."""
        self.processes[cell].kill()
        self.processes[cell].wait()

    def stop(self) -> None:
        """Kill them all."""
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait(20)


def job(name: str, prompt_tokens: int, max_tokens: int, vocab: int = POLICY.vocab_size) -> Job:
    """A call whose prompt and seed follow from its name; no token stops it."""
    seed = int.from_bytes(name.encode(), "little") % 2**31
    prompt = np.random.default_rng(seed).integers(0, vocab, prompt_tokens, dtype=np.int32)
    return Job(f"{name}-0", name, prompt, max_tokens, Sampling(seed=seed), ())


@dataclass
class Listener:
    """A harness: what it heard of its call, token by token, and when."""

    job: Job
    heard: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    stall: StallMeter = field(default_factory=StallMeter)
    task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.output = Output(self._hear)

    def _hear(self, ids: list[int]) -> None:
        self.heard.extend(ids)
        self.times.append(asyncio.get_running_loop().time())

    def start(self, router: Router) -> None:
        self.task = asyncio.create_task(router.generate(self.job, self.output, self.stall))

    async def until(self, num_tokens: int, timeout_s: float = 60.0) -> None:
        """Until so many tokens were heard."""
        assert self.task is not None
        async with asyncio.timeout(timeout_s):
            while len(self.heard) < num_tokens and not self.task.done():
                await asyncio.sleep(0.002)

    def longest_pause_s(self) -> float:
        return max(np.diff(self.times), default=0.0)


async def undisturbed(cells: TorchCells, jobs: list[Job], cell: int = 1) -> list[list[int]]:
    """What one engine says to each job while nothing moves."""
    router = Router({cell: cells.clients[cell]}, RouterLimits(), SystemClock())
    router.set_admitting(cell, True)
    listeners = [Listener(replace(j, request_id=f"{j.request_id}-alone")) for j in jobs]
    for listener in listeners:
        listener.start(router)
    await asyncio.gather(*(listener.task for listener in listeners if listener.task))
    return [listener.heard for listener in listeners]


