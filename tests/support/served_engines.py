"""Engines of any backend as two cells of a run: each behind a real gRPC server in this process, a router over them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_conformance import Lab
from gyre.contracts.events import Sampling, WeightsPublished
from gyre.policy.checkpoint import state_digest
from gyre.proto.common.v1 import status_pb2
from gyre.proto.rollout.v1 import engine_pb2_grpc as pb_grpc
from gyre.rollout.attempt import Attempt, Job, Output
from gyre.rollout.engine_cell import EngineCell
from gyre.rollout.engine_client import GrpcEngine
from gyre.rollout.engine_rpc import SERVICE, EngineRpc
from gyre.rollout.engines.weights import WeightsSource
from gyre.rollout.gateway.session import StallMeter
from gyre.rollout.keeper import Keeper
from gyre.rollout.local import EngineAsleep, SettleCell
from gyre.rollout.migration import MoveLimits
from gyre.rollout.router import Router, RouterLimits
from gyre.runtime import rpc
from gyre.runtime.clock import SystemClock
from gyre.runtime.devices import DeviceLock

#: No deadline here says anything of speed: two servers that share two cores are slow to begin with each other.
PATIENT = MoveLimits(min_tokens=32, step_s=120.0, pull_s=240.0, total_s=240.0, stream_s=120.0, land_s=240.0, fetch_s=240.0,
                     prefixes_s=240.0, max_pair_moves=8)


@dataclass(frozen=True)
class Given:
    """A `WeightsLoader` that has them."""

    state: Mapping[str, torch.Tensor]

    async def fetch(self, source: WeightsSource) -> Mapping[str, torch.Tensor]:
        return self.state


class Noted(GrpcEngine):
    """Remembers how each try began and ended: [attempt, finish, tokens that were reused]."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.tries: list[tuple[Attempt, str, int]] = []

    async def generate(self, attempt: Attempt) -> Any:
        async for chunk in super().generate(attempt):
            if chunk.finish:
                self.tries.append((attempt, chunk.finish, chunk.num_reused))
            yield chunk


@dataclass
class Cell:
    """One engine, its server and the router's client to it."""

    lab: Lab
    held: EngineCell
    server: rpc.Server
    client: Noted
    lock: DeviceLock


@dataclass
class Cells:
    """All cells serve weights 0 under one version; `keepers` bring them to what is wanted, when they are asked to look."""

    cells: list[Cell]
    router: Router
    said: list[Any] = field(default_factory=list)
    keepers: list[Keeper] = field(default_factory=list)

    @classmethod
    async def open(cls, root: Path, labs: Sequence[Lab], limits: MoveLimits = PATIENT) -> Cells:
        """Over engines that are made already; `close` leaves them as they are then."""
        version, state = max(lab.version for lab in labs) + 1, labs[0].weights(0)
        weights = WeightsPublished(version, state_digest(state), 0, "")
        cells = [await _serve(root, number, lab, state) for number, lab in enumerate(labs)]
        router = Router({n: cell.client for n, cell in enumerate(cells)}, RouterLimits(moves=limits), SystemClock())
        opened = cls(cells, router)
        opened.keepers = [Keeper(n, c.client, router, opened._post, SystemClock(), 1.0, 240.0) for n, c in enumerate(cells)]
        for number, keeper in enumerate(opened.keepers):
            keeper.settle(SettleCell(number, 0, True, weights))
            await keeper.check()
            labs[number].version, labs[number].loaded = version, 0
        return opened

    async def _post(self, event: Any) -> None:
        self.said.append(event)

    async def leaves(self, cell: int, epoch: int = 1) -> tuple[int, int]:
        """The cell leaves rollout: its calls move, its engine sleeps. Returns what was said of it: (moved, replayed)."""
        self.keepers[cell].settle(SettleCell(cell, epoch, False))
        await self.keepers[cell].check()
        last = self.said[-1]
        assert isinstance(last, EngineAsleep) and last.cell == cell
        return last.num_moved, last.num_replayed

    async def close(self) -> None:
        for cell in self.cells:
            await cell.server.stop(0)
            cell.lock.give_back()


@dataclass
class Caller:
    """A harness that has a call of execution `name` answered. One that does not stream hears nothing before the end."""

    name: str
    prompt: np.ndarray
    max_tokens: int
    streams: bool = True
    heard: list[int] = field(default_factory=list)

    def start(self, router: Router) -> asyncio.Task[None]:
        job = Job(f"{self.name}-{len(self.prompt)}", self.name, self.prompt, self.max_tokens, Sampling(temperature=0.0), ())
        self.output = Output(self.heard.extend if self.streams else None)
        self.task = asyncio.create_task(router.generate(job, self.output, StallMeter()))
        return self.task

    async def until(self, num_tokens: int) -> None:
        """Until so many tokens were said."""
        while len(self.output.ids) < num_tokens and not self.task.done():
            await asyncio.sleep(0.005)


async def _serve(root: Path, number: int, lab: Lab, state: Mapping[str, torch.Tensor]) -> Cell:
    lock = DeviceLock(root / "cells", number, "engine")
    held = EngineCell(lab.engine, lock, Given(state))
    service = EngineRpc(held, 0.01, lambda: status_pb2.Status())
    server = rpc.Server("127.0.0.1:0", [(SERVICE, lambda s: pb_grpc.add_EngineServiceServicer_to_server(service, s))])
    await server.start()
    channel = rpc.channel(f"127.0.0.1:{server.port}")
    async with asyncio.timeout(30):
        await channel.channel_ready()
    return Cell(lab, held, server, Noted(channel), lock)
