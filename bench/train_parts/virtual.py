"""The trainer's real core and satellites in time that only jumps: computing takes as long as it is said to.

An event loop whose clock moves to the next timer when nothing is ready. What would run on a worker thread runs at once,
and its result arrives after the seconds it charged.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gyre.contracts.codec import pack
from gyre.contracts.digest import bytes_digest
from gyre.contracts.events import BlobRef, CellRoleAssigned, CellRolloutReleased, Fact, MicroStepRef
from gyre.contracts.microstep import MicroStep
from gyre.policy.checkpoint import save_checkpoint
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from gyre.runtime.config import CheckpointConfig, OptimizerConfig
from gyre.runtime.devices import DeviceLock
from gyre.runtime.effects import Publish
from gyre.trainer.backends.torch import TorchBackend
from gyre.trainer.claims import Verdict
from gyre.trainer.config import TrainerConfig
from gyre.trainer.coordinator import Admission, Coordinator
from gyre.trainer.core import TrainerCore
from gyre.trainer.loss import LossConfig
from gyre.trainer.satellite import CoreUnreachable, Satellite
from gyre.trainer.step import MembershipRules
from gyre.transfer import Transfer, TransferConfig

POLICY = PolicyConfig("qwen3", 32, 16, 24, 1, 2, 2, 8, tie_word_embeddings=True, qk_norm=True)
OPTIMIZER = OptimizerConfig(learning_rate=0.01, claim_lease_s=60.0)
RPC_S = 0.002


class VirtualLoop(asyncio.SelectorEventLoop):
    """`charged`: seconds that the function on the "thread" has asked for so far."""

    def __init__(self) -> None:
        super().__init__(_Jumping(self))
        self.now = 0.0
        self.charged = 0.0

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future:
        future = self.create_future()
        self.charged = 0.0
        try:
            result = func(*args)
        except Exception as error:
            future.set_exception(error)
        else:
            self.call_later(self.charged, lambda: future.done() or future.set_result(result))
        return future


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "every task waits for something that never happens"
            self._loop.now += timeout
        return ready


class VirtualClock:
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class MemoryLedger:
    """The real pure core, without a journal."""

    def __init__(self, core: TrainerCore) -> None:
        self._core = core
        self.state = core.initial()
        self.published: list[Fact] = []
        self.wake: Callable[[], None] = lambda: None

    async def submit(self, event: object) -> None:
        self.hear(event)

    def hear(self, *events: object) -> None:
        for event in events:
            self.state, effects = self._core.step(self.state, event, 0.0)
            self.published += [e.fact for e in effects if isinstance(e, Publish)]
            self.wake()


class MemoryBlobs:
    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}

    def put(self, path: str, data: bytes) -> BlobRef:
        self.data[path] = data
        return BlobRef(path, bytes_digest(data), len(data))

    def get(self, ref: BlobRef) -> bytes:
        return self.data[ref.path]


class TimedBackend(TorchBackend):
    """Computes nothing, and takes (cost / speed) seconds for it; notes (time, cell, micro-step) of the end in `ends`."""

    def of(self, cell: int, speed: float, costs: Mapping[str, float], ends: list[tuple[float, int, str]]) -> TimedBackend:
        self._cell, self._speed, self._costs, self._ends = cell, speed, costs, ends
        return self

    def accumulate(self, micro_step: MicroStep) -> dict[str, float]:
        loop = _loop()
        loop.charged += self._costs[micro_step.micro_step] / self._speed
        self._ends.append((loop.time() + loop.charged, self._cell, micro_step.micro_step))
        return {"num_targets": 1.0, "num_tokens": 1.0, "loss": 0.0}


def _loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


class NearCore:
    """The core as satellites see it, `RPC_S` away."""

    def __init__(self) -> None:
        self.core: Coordinator | None = None

    async def _up(self) -> Coordinator:
        await asyncio.sleep(RPC_S)
        if self.core is None:
            raise CoreUnreachable("core: down")
        return self.core

    async def join(self, cell: int, epoch: int, worker: str) -> Admission:
        return await (await self._up()).join(cell, worker)

    async def leave(self, cell: int, worker: str) -> None:
        (await self._up()).leave(worker)

    async def claim(self, worker: str, step: int, attempt: int, most: int) -> tuple[Verdict, tuple[MicroStepRef, ...]]:
        return await (await self._up()).claim(worker, step, attempt, most)

    async def heartbeat(self, worker: str, step: int, attempt: int) -> bool:
        return (await self._up()).heartbeat(worker, step, attempt)

    async def complete(
        self, worker: str, step: int, attempt: int, micro_step: str, seconds: float, sums: dict[str, float]
    ) -> bool:
        core = await self._up()
        accepted = core.complete(worker, step, attempt, micro_step, sums)
        await core.completed()
        return accepted

    async def offer(self, worker: str, step: int, attempt: int, micro_steps: frozenset[str], transfer: str) -> bool:
        core = await self._up()
        accepted = core.offer(worker, step, attempt, micro_steps, transfer)
        await core.completed()
        return accepted


class VirtualCells:
    """One run's workers: cell -> speed in cost per second. `costs` grows as micro-steps are made."""

    def __init__(self, home: Path, speeds: dict[int, float], groups_per_step: int, num_steps: int) -> None:
        self.home, self.speeds, self.num_steps = home, speeds, num_steps
        self.rules = MembershipRules(groups_per_step, 1000)
        self.peer, self.blobs = NearCore(), MemoryBlobs()
        self.costs: dict[str, float] = {}
        self.ends: list[tuple[float, int, str]] = []
        self.ledgers: dict[int, MemoryLedger] = {}
        self.tasks: list[asyncio.Task] = []
        save_checkpoint(home / "policy", POLICY, Decoder.create(POLICY, 0).state_dict())

    def start(self, cell: int) -> None:
        config = TrainerConfig(
            cell, len(self.speeds), "r", "cpu", self.home / "policy", self.home / "checkpoints", self.home / "cells", "",
            self.num_steps, self.rules, LossConfig(), OPTIMIZER, CheckpointConfig(),
        )  # fmt: skip
        ledger = self.ledgers[cell] = MemoryLedger(TrainerCore(cell, self.rules))
        backend = TimedBackend(Decoder.create(POLICY, 0), LossConfig(), OPTIMIZER if cell == 0 else None)
        backend.of(cell, self.speeds[cell], self.costs, self.ends)
        transfer = Transfer(TransferConfig(f"worker-{cell}", self.home / "transfer"))
        parts = (transfer, self.blobs, DeviceLock(self.home / "cells", cell, "trainer"), VirtualClock())
        if cell == 0:
            shell = self.peer.core = Coordinator(config, ledger, backend, POLICY, *parts)
        else:
            shell = Satellite(config, ledger, backend, self.peer, *parts)
        ledger.wake = shell.attend
        self.tasks.append(asyncio.get_running_loop().create_task(shell.run()))

    def to_train(self, cell: int) -> None:
        epoch = cell + 1
        self.ledgers[cell].hear(CellRoleAssigned(cell, epoch, "train", f"t{cell}", 0), CellRolloutReleased(cell, epoch))

    def micro_step(self, name: str, cost: float) -> MicroStepRef:
        self.costs[name] = cost
        blob = self.blobs.put(name, pack(_smallest(name)))
        return MicroStepRef(name, blob.digest, cost, max(int(cost), 1), 1, 1, blob)


def _smallest(name: str) -> MicroStep:
    """A root and one target: what it is does not matter, what it is said to cost does."""
    whole, one = np.array([0, 1], np.int32), np.zeros(1, np.int32)
    return MicroStep(
        name, "g", ("x",), np.ones(1, np.float32), whole, whole - 1, whole, np.full(2, 2, np.int32), np.zeros(2, np.int32),
        np.ones(1, np.int32), one, np.zeros(1, np.float32), one, np.ones(1, np.float32),
    )  # fmt: skip
