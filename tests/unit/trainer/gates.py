"""A cluster whose workers stop at a chosen micro-step, so that a test can do its worst at exactly that moment."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import torch
from fakes import MemoryBlobs, burst, to_train
from gyre.contracts.events import BlobRef
from gyre.policy.checkpoint import save_checkpoint
from gyre.runtime.clock import SystemClock
from gyre.trainer.backends.torch import TorchBackend
from gyre.trainer.coordinator import Admission
from gyre.trainer.loss import LossConfig
from test_mid_step import DEADLINE_S, GROUPS_PER_STEP, OPTIMIZER, STEPS, Cluster, DirectCore
from trees import random_micro_step, tiny_decoder

PER_GROUP = 4
NUM_MICRO_STEPS = GROUPS_PER_STEP * PER_GROUP
CELL: ContextVar[int] = ContextVar("CELL", default=-1)


def seeds_of(step: int, index: int) -> list[int]:
    return [100 * step + 10 * index + m for m in range(PER_GROUP)]


def updated_alone() -> dict[str, torch.Tensor]:
    """All steps in one backend, the micro-steps in the order they are numbered."""
    backend = TorchBackend(tiny_decoder(), LossConfig(), OPTIMIZER)
    for step in range(STEPS):
        for index in range(GROUPS_PER_STEP):
            for seed in seeds_of(step, index):
                backend.accumulate(random_micro_step(seed))
        backend.update(1 / 8, 0.01, 1.0)
    return backend.weights()


class GatedBlobs(MemoryBlobs):
    """A cell that is held has fetched its last micro-step: the next fetch waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self._left: dict[int, int] = {}
        self._open = threading.Event()
        self.waiting: set[int] = set()

    def hold(self, cell: int, after: int) -> None:
        self._left[cell] = after

    def let_go(self) -> None:
        """Everyone, for good."""
        self._open.set()

    def get(self, ref: BlobRef) -> bytes:
        cell = CELL.get()
        if cell in self._left and not self._open.is_set():
            if self._left[cell] == 0:
                self.waiting.add(cell)
                self._open.wait(DEADLINE_S)
            self._left[cell] -= 1
        return super().get(ref)


class WatchedCore(DirectCore):
    """Notes who was admitted where, and can have something done to a worker whose offer was just accepted."""

    def __init__(self) -> None:
        super().__init__()
        self.admitted: list[tuple[int, int, int]] = []  # cell, step, version
        self.refused: list[str] = []
        self.heartbeats = 0
        self.after_offer = lambda worker: None

    async def join(self, cell: int, epoch: int, worker: str) -> Admission:
        answer = await super().join(cell, epoch, worker)
        if answer.ticket is not None:
            self.admitted.append((cell, answer.step, answer.ticket.version))
        else:
            self.refused.append(answer.reason)
        return answer

    async def heartbeat(self, worker: str, step: int, attempt: int) -> bool:
        self.heartbeats += 1
        return await super().heartbeat(worker, step, attempt)

    async def offer(self, worker: str, step: int, attempt: int, micro_steps: frozenset[str], transfer: str) -> bool:
        core = self._up()
        accepted = core.offer(worker, step, attempt, micro_steps, transfer)
        if accepted:
            self.after_offer(worker)
        await core.completed()
        return accepted


@dataclass
class GatedCluster(Cluster):
    """Groups of four micro-steps, two in a step."""

    blobs: GatedBlobs = field(default_factory=GatedBlobs)
    peer: WatchedCore = field(default_factory=WatchedCore)

    def start(self, cell: int) -> None:
        token = CELL.set(cell)  # threads of this worker's task carry it on
        super().start(cell)
        CELL.reset(token)

    def enlist(self, cell: int) -> None:
        """Start a satellite whose cell has just changed to `train`."""
        self.start(cell)
        self.ledgers[cell].hear(*to_train(cell, cell + 1))

    def complete_group(self, step: int, index: int) -> None:
        self.complete(f"s{step}g{index}", seeds_of(step, index))

    def complete_step(self, step: int) -> None:
        for index in range(GROUPS_PER_STEP):
            self.complete_group(step, index)

    def computed_by(self, cell: int) -> int:
        """How many micro-steps of the running attempt a cell has completed."""
        assert self.peer.coordinator is not None
        return int(self.peer.coordinator.gauges().get(f"micro_steps_cell_{cell}", 0))

    async def reach(self, cell: int, num: int, waiting: bool = True) -> None:
        """Until a cell has completed `num` micro-steps, and waits at its gate if it is to."""
        async with asyncio.timeout(DEADLINE_S):
            while self.computed_by(cell) < num or (waiting and cell not in self.blobs.waiting):
                await SystemClock().sleep(0.005)

    async def joined(self, cell: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not any(admitted[0] == cell for admitted in self.peer.admitted):
                await SystemClock().sleep(0.005)


@asynccontextmanager
async def gated(home: Path, *cells: int) -> AsyncIterator[GatedCluster]:
    decoder = tiny_decoder()
    save_checkpoint(home / "policy", decoder.config, decoder.state_dict())
    made = GatedCluster(home)
    for cell in cells:
        made.start(cell)
        made.ledgers[cell].hear(burst(0, 0, STEPS), *to_train(cell, cell + 1))
    try:
        yield made
    finally:
        made.blobs.let_go()
        for cell in list(made.tasks):
            await made.kill(cell)
