"""The whole trainer in one process, without NATS: joins at every point, losses at random ones, always the same update."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from fakes import FakeLedger, MemoryBlobs, assign, burst, completed, ref_to, to_train
from gyre.contracts.events import CellTrainJoined, CellTrainReleased, MicroStepRef, StepFinished, StepSealed, WeightsPublished
from gyre.policy.checkpoint import load_state, save_checkpoint
from gyre.runtime.clock import SystemClock
from gyre.runtime.config import CheckpointConfig, OptimizerConfig
from gyre.runtime.devices import DeviceLock
from gyre.trainer.backends.torch import TorchBackend
from gyre.trainer.claims import Verdict
from gyre.trainer.config import TrainerConfig
from gyre.trainer.coordinator import Admission, Coordinator
from gyre.trainer.core import TrainerCore
from gyre.trainer.loss import LossConfig
from gyre.trainer.satellite import CoreUnreachable, Satellite
from gyre.trainer.step import MembershipRules
from gyre.transfer import Transfer, TransferConfig
from trees import random_micro_step, tiny_decoder

STEPS = 3
GROUPS_PER_STEP = 2
PER_GROUP = 3
RULES = MembershipRules(GROUPS_PER_STEP, 100)
OPTIMIZER = OptimizerConfig(learning_rate=0.01, claim_lease_s=0.5)
DEADLINE_S = 60.0
PAPER = LossConfig()


class DirectCore:
    """The core as satellites see it, without a wire; unreachable while it is down."""

    def __init__(self) -> None:
        self.coordinator: Coordinator | None = None

    def _up(self) -> Coordinator:
        if self.coordinator is None:
            raise CoreUnreachable("core: down")
        return self.coordinator

    async def join(self, cell: int, epoch: int, worker: str) -> Admission:
        return await self._up().join(cell, worker)

    async def leave(self, cell: int, worker: str) -> None:
        self._up().leave(worker)

    async def claim(
        self, worker: str, step: int, attempt: int, most: int
    ) -> tuple[Verdict, tuple[MicroStepRef, ...]]:
        return await self._up().claim(worker, step, attempt, most)

    async def heartbeat(self, worker: str, step: int, attempt: int) -> bool:
        return self._up().heartbeat(worker, step, attempt)

    async def complete(
        self, worker: str, step: int, attempt: int, micro_step: str, seconds: float, sums: dict[str, float]
    ) -> bool:
        core = self._up()
        accepted = core.complete(worker, step, attempt, micro_step, sums)
        await core.completed()
        return accepted

    async def offer(self, worker: str, step: int, attempt: int, micro_steps: frozenset[str], transfer: str) -> bool:
        core = self._up()
        accepted = core.offer(worker, step, attempt, micro_steps, transfer)
        await core.completed()
        return accepted


@dataclass
class Cluster:
    """Workers as tasks; killing one drops its memory and keeps its ledger, as kill -9 does."""

    home: Path
    loss: LossConfig = PAPER
    blobs: MemoryBlobs = field(default_factory=MemoryBlobs)
    peer: DirectCore = field(default_factory=DirectCore)
    ledgers: dict[int, FakeLedger] = field(default_factory=dict)
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    transfers: dict[int, Transfer] = field(default_factory=dict)
    locks: dict[int, DeviceLock] = field(default_factory=dict)
    facts: list[object] = field(default_factory=list)

    def start(self, cell: int) -> None:
        config = TrainerConfig(
            cell, 3, "r", "cpu", self.home / "policy", self.home / "checkpoints", self.home / "cells", "", STEPS, RULES,
            self.loss.resolved(), OPTIMIZER, CheckpointConfig(),
        )  # fmt: skip
        before = self.ledgers.get(cell)
        ledger = FakeLedger(TrainerCore(cell, RULES)) if before is None else before.crash()
        ledger.published = [] if before is None else before.published
        backend = TorchBackend(tiny_decoder(), self.loss, OPTIMIZER if cell == 0 else None)
        transfer = Transfer(TransferConfig(f"worker-{cell}", self.home / "transfer"))
        lock = DeviceLock(self.home / "cells", cell, "trainer")
        parts = (transfer, self.blobs, lock, SystemClock())
        if cell == 0:
            shell = self.peer.coordinator = Coordinator(config, ledger, backend, backend.decoder.config, *parts)
        else:
            shell = Satellite(config, ledger, backend, self.peer, *parts)
        ledger.wake = shell.attend
        self.ledgers[cell], self.transfers[cell], self.locks[cell] = ledger, transfer, lock
        self.tasks[cell] = asyncio.get_running_loop().create_task(shell.run())

    async def kill(self, cell: int) -> None:
        task = self.tasks.pop(cell)
        if cell == 0:
            self.peer.coordinator = None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.ledgers[cell].wake = lambda: None
        self.transfers[cell].close()
        self.locks[cell].give_back()

    def complete(self, group: str, seeds: list[int]) -> None:
        refs = []
        for seed in seeds:
            micro_step = random_micro_step(seed, name=f"{group}-m{seed}")
            refs.append(ref_to(micro_step, self.blobs.put(micro_step.micro_step, micro_step.to_bytes())))
        self.ledgers[0].hear(completed(group, tuple(refs)))

    def complete_step(self, step: int) -> None:
        for index in range(GROUPS_PER_STEP):
            first = 100 * step + 10 * index
            self.complete(f"s{step}g{index}", list(range(first, first + PER_GROUP)))

    async def until(self, kind: type, num: int) -> list:
        async with asyncio.timeout(DEADLINE_S):
            while len(found := self.ledgers[0].said(kind)) < num:
                for task in self.tasks.values():
                    if task.done():
                        task.result()
                await SystemClock().sleep(0.005)
        return found

    async def weights(self) -> dict[str, torch.Tensor]:
        """Of the burst's end."""
        async with asyncio.timeout(DEADLINE_S):
            while not (found := [f for f in await self.until(WeightsPublished, 1) if f.version == STEPS]):
                await SystemClock().sleep(0.005)
        return load_state(Path(found[-1].checkpoint))


@asynccontextmanager
async def cluster(home: Path, *cells: int, loss: LossConfig = PAPER) -> AsyncIterator[Cluster]:
    decoder = tiny_decoder()
    save_checkpoint(home / "policy", decoder.config, decoder.state_dict())
    made = Cluster(home, loss)
    for cell in cells:
        made.start(cell)
        made.ledgers[cell].hear(burst(0, 0, STEPS), *to_train(cell, cell + 1))
    try:
        yield made
    finally:
        for cell in list(made.tasks):
            await made.kill(cell)


@pytest.fixture(scope="module")
def reference() -> dict[str, torch.Tensor]:
    return trained_alone(PAPER)


def trained_alone(loss: LossConfig) -> dict[str, torch.Tensor]:
    """The updates of the whole run in one backend, with what each is divided by counted from its micro-steps."""
    backend = TorchBackend(tiny_decoder(), loss, OPTIMIZER)
    for step in range(STEPS):
        seeds = [100 * step + 10 * index + m for index in range(GROUPS_PER_STEP) for m in range(PER_GROUP)]
        micro_steps = [random_micro_step(seed) for seed in seeds]
        for micro_step in micro_steps:
            backend.accumulate(micro_step)
        num_targets = sum(m.num_targets for m in micro_steps)
        divisor = {"execution": 8, "token": num_targets, "constant": 8 * loss.constant_length}[loss.resolved().aggregation]
        backend.update(1 / divisor, 0.01, 1.0)
    return backend.weights()


def largest_error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    return max(float((got[n] - want[n]).norm() / want[n].norm()) for n in want)


@pytest.mark.parametrize("cells", [(0,), (0, 1), (0, 1, 2)])
async def test_any_number_of_cells_makes_the_same_update(
    tmp_path: Path, reference: dict[str, torch.Tensor], cells: tuple[int, ...]
) -> None:
    async with cluster(tmp_path, *cells) as run:
        for step in range(STEPS):
            run.complete_step(step)
        assert largest_error(await run.weights(), reference) < 1e-12
        assert [f.version for f in run.ledgers[0].said(WeightsPublished)] == [0, STEPS]


@pytest.mark.parametrize("loss", [
    LossConfig(kind="dapo", kl_coefficient=0.1, entropy_coefficient=0.05), LossConfig(kind="dr_grpo", constant_length=20),
    LossConfig(kind="cispo", aggregation="execution", correction="mask", correction_high=50.0),
], ids=["token", "constant", "mask"])  # fmt: skip
async def test_every_aggregation_is_exact_under_any_number_of_cells(tmp_path: Path, loss: LossConfig) -> None:
    async with cluster(tmp_path, 0, 1, loss=loss) as run:
        for step in range(STEPS):
            run.complete_step(step)
        assert largest_error(await run.weights(), trained_alone(loss)) < 1e-12
        metrics = [f.metrics for f in run.ledgers[0].said(StepFinished)]
        assert [m["staleness"] for m in metrics] == [0.0, 1.0, 2.0]
        assert all(0 < m["ess"] <= 1 for m in metrics)


async def test_a_step_whose_clip_acts_on_most_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loss = LossConfig(kind="cispo", clip_low=0.0, clip_high=0.0)
    async with cluster(tmp_path, 0, loss=loss) as run:
        for step in range(STEPS):
            run.complete_step(step)
        finished = await run.until(StepFinished, STEPS)
    said = [r.getMessage() for r in caplog.records if "loss.clip_low" in r.getMessage()]
    assert [f.metrics["clipped"] for f in finished] == [1.0] * STEPS
    assert [text.split(":")[0] for text in said] == [f"step {step}" for step in range(STEPS)]


@pytest.mark.parametrize("computed_before", range(PER_GROUP * GROUPS_PER_STEP))
async def test_a_satellite_may_join_after_any_number_of_micro_steps(
    tmp_path: Path, reference: dict[str, torch.Tensor], computed_before: int
) -> None:
    async with cluster(tmp_path, 0) as run:
        seeds = [10 * index + m for index in range(GROUPS_PER_STEP) for m in range(PER_GROUP)]
        run.complete("early", seeds[:computed_before])
        core = run.peer.coordinator
        assert core is not None
        async with asyncio.timeout(DEADLINE_S):
            while core.gauges().get("micro_steps_cell_0", 0.0) < computed_before:
                await SystemClock().sleep(0.005)
        run.start(1)
        run.ledgers[1].hear(*to_train(1, 2))
        async with asyncio.timeout(DEADLINE_S):
            while run.ledgers[1].state.cell.joined < 2:
                await SystemClock().sleep(0.005)
        run.complete("late", seeds[computed_before:])
        first = (await run.until(StepFinished, 1))[0]
        assert sum(first.micro_steps_by_cell.values()) == len(seeds)
        for step in range(1, STEPS):
            run.complete_step(step)
        assert largest_error(await run.weights(), reference) < 1e-12


@pytest.mark.parametrize("seed", range(8))
async def test_whoever_is_killed_whenever_the_update_is_the_same(
    tmp_path: Path, reference: dict[str, torch.Tensor], seed: int
) -> None:
    """Three workers; groups arrive while a random one is killed and started again, six times."""
    rng = random.Random(seed)
    async with cluster(tmp_path, 0, 1, 2) as run:
        arrivals = [(step, index) for step in range(STEPS) for index in range(GROUPS_PER_STEP)]
        for step, index in arrivals:
            first = 100 * step + 10 * index
            run.complete(f"s{step}g{index}", list(range(first, first + PER_GROUP)))
            await SystemClock().sleep(rng.random() * 0.06)
            victim = rng.choice((0, 0, 1, 2))
            await run.kill(victim)
            await SystemClock().sleep(rng.random() * 0.02)
            run.start(victim)
        assert largest_error(await run.weights(), reference) < 1e-12
        assert [f.step for f in run.ledgers[0].said(StepSealed)] == list(range(STEPS))


async def test_a_buffer_that_cannot_be_read_costs_its_worker_the_attempt_and_nothing_else(
    tmp_path: Path, reference: dict[str, torch.Tensor]
) -> None:
    """The satellite's memory is corrupted after it was described: its checksum gives it away."""
    async with cluster(tmp_path, 0, 1) as run:
        register = run.transfers[1].register

        def corrupting(name: str, arrays: dict) -> object:
            region = register(name, arrays)
            describe = region.describe_buffers

            def describe_and_damage() -> object:
                buffers = describe()
                next(iter(region.arrays.values()))[...] += 1.0
                return buffers

            region.describe_buffers = describe_and_damage
            return region

        run.transfers[1].register = corrupting  # type: ignore[method-assign]
        for step in range(STEPS):
            run.complete_step(step)
        assert largest_error(await run.weights(), reference) < 1e-12
        assert all(set(f.micro_steps_by_cell) == {"0"} for f in run.ledgers[0].said(StepFinished))


async def test_a_step_with_nothing_to_train_counts_without_an_update(tmp_path: Path) -> None:
    async with cluster(tmp_path, 0) as run:
        for step in range(STEPS):
            run.complete(f"s{step}a", [])
            run.complete(f"s{step}b", [])
        assert largest_error(await run.weights(), dict(tiny_decoder().state_dict())) == 0.0
        assert [(f.version, f.updated) for f in run.ledgers[0].said(StepFinished)] == [(1, False), (2, False), (3, False)]


async def test_a_micro_step_that_cannot_be_read_is_left_out_and_reported(tmp_path: Path) -> None:
    async with cluster(tmp_path, 0) as run:
        run.complete("a", [1, 2])
        name = next(iter(run.blobs.data))
        good = run.blobs.data[name]
        run.blobs.data[name] = good[: len(good) // 2]
        run.complete("b", [])
        (finished,) = await run.until(StepFinished, 1)
        assert finished.metrics["broken_micro_steps"] > 0 and finished.updated


async def test_a_cell_gives_its_devices_back_for_the_epoch_that_asks(tmp_path: Path) -> None:
    async with cluster(tmp_path, 0, 1) as run:
        for step in range(STEPS):
            run.complete_step(step)
        await run.weights()
        for cell in (0, 1):
            run.ledgers[cell].hear(assign(cell, 9, "rollout"))
        await run.until(CellTrainReleased, 1)
        async with asyncio.timeout(DEADLINE_S):
            while not run.ledgers[1].said(CellTrainReleased):
                await SystemClock().sleep(0.005)
        for cell in (0, 1):
            engine = DeviceLock(tmp_path / "cells", cell, "engine")
            assert engine.try_take(9)
            engine.give_back()


async def test_a_core_that_hears_at_once_that_it_was_sent_back_and_told_to_train_again_joins_again(tmp_path: Path) -> None:
    """It was cut off, and still holds the devices from before."""
    async with cluster(tmp_path, 0) as run:
        await run.until(CellTrainJoined, 1)
        run.ledgers[0].hear(assign(0, 5, "rollout"), *to_train(0, 6))
        joined = await run.until(CellTrainJoined, 2)
        assert [(f.cell, f.epoch) for f in joined] == [(0, 1), (0, 6)]
        assert DeviceLock(tmp_path / "cells", 0, "engine").last().epoch == 6


class SilentCore(DirectCore):
    """Answers no join: no step opens."""

    async def join(self, cell: int, epoch: int, worker: str) -> Admission:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


async def test_a_satellite_that_waits_for_a_step_leaves_when_it_is_told_to(tmp_path: Path) -> None:
    decoder = tiny_decoder()
    save_checkpoint(tmp_path / "policy", decoder.config, decoder.state_dict())
    run = Cluster(tmp_path, peer=SilentCore())
    run.start(1)
    run.ledgers[1].hear(burst(0, 0, STEPS), *to_train(1, 2))
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not run.locks[1].held:
                await SystemClock().sleep(0.005)
            run.ledgers[1].hear(assign(1, 9, "rollout"))
            while not run.ledgers[1].said(CellTrainReleased):
                await SystemClock().sleep(0.005)
        assert not run.locks[1].held
    finally:
        await run.kill(1)
