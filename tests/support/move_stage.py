"""Scripted engines behind real gRPC servers in this process, a router over them, and faults at any call between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gyre.contracts.events import Sampling, WeightsPublished
from gyre.proto.common.v1 import status_pb2
from gyre.proto.rollout.v1 import engine_pb2_grpc as pb_grpc
from gyre.rollout.attempt import Attempt, Chunk, EngineGone, Job, Output
from gyre.rollout.engine_cell import EngineCell
from gyre.rollout.engine_client import GrpcEngine
from gyre.rollout.engine_rpc import SERVICE, EngineRpc
from gyre.rollout.engines.base import GenerateRequest
from gyre.rollout.engines.scripted import ScriptedConfig, ScriptedEngine, seeded_script
from gyre.rollout.engines.weights import NoWeights
from gyre.rollout.gateway.session import StallMeter
from gyre.rollout.migration import MoveLimits
from gyre.rollout.router import Router, RouterLimits
from gyre.runtime import rpc
from gyre.runtime.clock import Clock, SystemClock
from gyre.runtime.devices import DeviceLock

VOCAB = 5000
PROMPT_TOKENS = 400
QUICK = MoveLimits(min_tokens=32, last_blocks=2, step_s=1.0, pull_s=1.0, total_s=5.0, stop_s=2.0, stream_s=2.0,
                   land_s=0.5, fetch_s=0.5, prefixes_s=5.0)
STEPS = ("open_export", "reserve", "read_stage", "pull", "freeze", "commit", "release")

Act = Callable[[], Awaitable[None]]


class Pace:
    """Lets a scripted engine say so many tokens and no more, until it is told otherwise."""

    def __init__(self) -> None:
        self._left = asyncio.Semaphore(0)
        self._is_free = False

    def allow(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            self._left.release()

    def free(self) -> None:
        """As many as it likes."""
        self._is_free = True
        self.allow(64)

    async def sleep(self, _: float) -> None:
        await asyncio.sleep(0)  # everybody gets a turn
        if not self._is_free:
            await self._left.acquire()


async def lose_it() -> None:
    """The question, or its answer, is lost."""
    raise EngineGone("lost on the way")


class FaultyEngine(GrpcEngine):
    """A client of one engine; `before` and `after` act on the n-th call of a method, the first being 1."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.asked: list[str] = []
        self.attempts: list[Attempt] = []
        self._acts: dict[tuple[str, str, int], Act] = {}

    def forget(self) -> None:
        """Nothing was asked and nothing is to happen."""
        self.asked.clear()
        self.attempts.clear()
        self._acts.clear()

    def before(self, method: str, act: Act, number: int = 1) -> None:
        self._acts[(method, "before", number)] = act

    def after(self, method: str, act: Act, number: int = 1) -> None:
        self._acts[(method, "after", number)] = act

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return self._watched(name, found) if name in STEPS else found

    def _watched(self, name: str, ask: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def watched(*arguments: Any) -> Any:
            self.asked.append(name)
            number = self.asked.count(name)
            await self._act(name, "before", number)
            answer = await ask(*arguments)
            await self._act(name, "after", number)
            return answer

        return watched

    async def _act(self, name: str, when: str, number: int) -> None:
        if act := self._acts.get((name, when, number)):
            await act()

    async def generate(self, attempt: Attempt) -> AsyncIterator[Chunk]:
        self.attempts.append(attempt)
        number = len(self.attempts)
        await self._act("generate", "before", number)
        has_spoken = False
        async for chunk in super().generate(attempt):
            yield chunk
            if len(chunk.ids) and not has_spoken:
                has_spoken = True
                await self._act("generate", "after", number)


@dataclass
class Node:
    """One engine, its server and the router's client to it."""

    cell: EngineCell
    engine: ScriptedEngine
    pace: Pace
    server: rpc.Server
    client: FaultyEngine
    death: asyncio.Task[None] | None = None

    async def kill(self) -> None:
        """The process is gone: no connection lives, no answer comes. Whoever kills it may be cancelled by that."""
        self.death = self.death or asyncio.create_task(self._die())
        await asyncio.shield(self.death)

    async def _die(self) -> None:
        await self.server.stop(0)
        await self.engine.close()


def make_engine(pace: Pace, config: ScriptedConfig, now: Callable[[], float] | None = None) -> ScriptedEngine:
    return ScriptedEngine(seeded_script(VOCAB), config, pace.sleep, **({"now": now} if now else {}))


@dataclass
class Stage:
    """Some engines and a router over them. `started` calls run as tasks."""

    nodes: list[Node]
    router: Router
    clock: Clock
    calls: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    outputs: dict[str, Output] = field(default_factory=dict)
    heard: dict[str, list[int]] = field(default_factory=dict)
    stalls: dict[str, StallMeter] = field(default_factory=dict)

    @classmethod
    async def open(cls, root: Path, num: int = 2, config: ScriptedConfig | None = None, limits: MoveLimits = QUICK,
                   clock: Clock | None = None, last: ScriptedConfig | None = None) -> Stage:
        """`num` engines of one kind; the last one may be of another."""
        configs = [config or ScriptedConfig()] * num
        configs[-1] = last or configs[-1]
        nodes = [await _node(root, number, config) for number, config in enumerate(configs)]
        clock = clock or SystemClock()
        router = Router({n: node.client for n, node in enumerate(nodes)}, RouterLimits(moves=limits), clock)
        stage = cls(nodes, router, clock)
        await stage.look()
        for cell in range(num):
            router.set_admitting(cell, True)
        return stage

    async def look(self) -> None:
        """What the keeper does: tell the router what the engines say of themselves."""
        for cell, node in enumerate(self.nodes):
            self.router.observe(cell, await node.client.observe())

    def call(self, name: str = "x", max_tokens: int = 60, prompt_tokens: int = PROMPT_TOKENS) -> asyncio.Task[None]:
        """Start a call of execution `name`."""
        job = job_of(name, max_tokens, prompt_tokens)
        heard = self.heard.setdefault(name, [])
        self.outputs[name] = Output(heard.extend)
        self.stalls[name] = StallMeter()
        self.calls[name] = asyncio.create_task(self.router.generate(job, self.outputs[name], self.stalls[name]))
        return self.calls[name]

    async def begin_on(self, cell: int, name: str) -> None:
        """Start a call of execution `name` on that engine."""
        for other in range(len(self.nodes)):
            self.router.set_admitting(other, other == cell)
        engine = self.nodes[cell].engine
        before = _num_submitted(engine)
        self.call(name)
        async with asyncio.timeout(10):
            while _num_submitted(engine) == before:
                await asyncio.sleep(0.001)
        for other in range(len(self.nodes)):
            self.router.set_admitting(other, True)

    async def until_said(self, name: str, num_tokens: int) -> None:
        """Until so many tokens of the call have arrived."""
        async with asyncio.timeout(10):
            while len(self.heard[name]) < num_tokens:
                await asyncio.sleep(0.001)

    async def drain(self, cell: int = 0, epoch: int = 1) -> tuple[int, int]:
        """As the keeper does it: the engine stops admitting, then it is emptied."""
        await self.nodes[cell].client.set_admission(False)
        async with asyncio.timeout(20):
            return await self.router.drain(cell, 10.0, epoch)

    async def finish(self, name: str = "x", max_tokens: int = 60, prompt_tokens: int = PROMPT_TOKENS) -> None:
        """Let the call end and check that what was heard is what an undisturbed engine would have said, once."""
        for node in self.nodes:
            node.pace.free()
        async with asyncio.timeout(10):
            await self.calls[name]
        expected = await undisturbed(job_of(name, max_tokens, prompt_tokens))
        output = self.outputs[name]
        assert self.heard[name] == output.ids == expected
        assert output.finish == "length"
        assert len(output.arrays()[1]) == len(expected) == output.spans()[-1].end

    async def is_empty(self) -> None:
        """Nobody holds anything of any move, and no call is anywhere."""
        async with asyncio.timeout(5):
            for cell, node in enumerate(self.nodes):
                while _holds_something(node.engine) or self.router.num_live(cell):
                    await asyncio.sleep(0.001)

    async def close(self) -> None:
        for task in self.calls.values():
            task.cancel()
        if self.calls:
            await asyncio.wait(self.calls.values())
        for node in self.nodes:
            await node.kill()


def job_of(name: str, max_tokens: int = 60, prompt_tokens: int = PROMPT_TOKENS) -> Job:
    prompt = ((np.arange(prompt_tokens) * 7 + len(name)) % VOCAB).astype(np.int32)
    return Job(f"{name}-0", name, prompt, max_tokens, Sampling(seed=5), (VOCAB + 1,))


async def undisturbed(job: Job) -> list[int]:
    """What one engine would say if nothing happened."""
    script = seeded_script(VOCAB)
    request = GenerateRequest("alone", job.prompt, job.max_tokens, seed=job.sampling.seed)
    return [token.token_id for token, _ in zip(script(request), range(job.max_tokens), strict=False)]


def _num_submitted(engine: ScriptedEngine) -> int:
    """Tokens of all prompts so far."""
    report = engine.load_report()
    return report.num_tokens_prefilled + report.num_tokens_reused


def _holds_something(engine: ScriptedEngine) -> bool:
    report = engine.load_report()
    return report.num_held + report.num_running + report.num_waiting > 0


async def _node(root: Path, number: int, config: ScriptedConfig) -> Node:
    pace = Pace()
    engine = make_engine(pace, config)
    cell = EngineCell(engine, DeviceLock(root / "cells", number, "engine"), NoWeights())
    service = EngineRpc(cell, 0.0, lambda: status_pb2.Status())
    server = rpc.Server("127.0.0.1:0", [(SERVICE, lambda s: pb_grpc.add_EngineServiceServicer_to_server(service, s))])
    await server.start()
    channel = rpc.channel(f"127.0.0.1:{server.port}")
    async with asyncio.timeout(30):
        await channel.channel_ready()
    client = FaultyEngine(channel)
    await client.wake(0, WeightsPublished(0, "c0", 0, "checkpoints/0"))
    return Node(cell, engine, pace, server, client)
