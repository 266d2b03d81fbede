"""Reading and adding offers: exact in a fixed order, and anything that is not exactly what it should be is void."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import MemoryBlobs, ref_to
from gyre.contracts.microstep import MicroStep
from gyre.trainer.backends.torch import TorchBackend
from gyre.trainer.claims import ClaimTable
from gyre.trainer.loss import LossConfig
from gyre.trainer.reduce import GRADIENTS, STAMP, add_offers, export_sum, staging_for, stamp_of, withdraw_sum
from gyre.trainer.weights import descriptor_text
from gyre.transfer import Transfer, TransferConfig
from trees import random_micro_step, tiny_decoder

STEP, ATTEMPT = 5, 2
MICRO_STEPS = [random_micro_step(seed, name=f"m{seed}") for seed in range(6)]


def backend() -> TorchBackend:
    return TorchBackend(tiny_decoder(), LossConfig(), None)


def sums(of: TorchBackend) -> dict[str, np.ndarray]:
    into = {n: np.zeros(s, d) for n, (s, d) in of.gradient_shapes().items()}
    of.export_gradients(into)
    return into


@dataclass
class Worker:
    """One satellite's part: its buffer, and what it says of it."""

    name: str
    cell: int
    transfer: Transfer
    backend: TorchBackend

    def compute(self, table: ClaimTable, micro_steps: list[MicroStep]) -> None:
        for micro_step in micro_steps:
            claimed = table.claim(self.name, 0.0)[1]
            assert claimed is not None and claimed.micro_step == micro_step.micro_step
            self.backend.accumulate(micro_step)
            assert table.complete(self.name, claimed.micro_step, {}, 0.0)

    def offer(self, table: ClaimTable, text: str | None = None) -> bool:
        done = table.done_by(self.name)
        text = export_sum(self.transfer, self.backend, STEP, ATTEMPT, done) if text is None else text
        return table.offer(self.name, done, text, 0.0)


@dataclass
class Stage:
    """A core that computed m0 and m1, and two satellites with two micro-steps each; nothing is offered yet."""

    table: ClaimTable
    core: TorchBackend
    transfer: Transfer
    workers: list[Worker]

    async def reduce(self) -> bool:
        return await add_offers(self.table, self.transfer, self.core, staging_for(self.core), 10.0)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    table = ClaimTable(STEP, ATTEMPT, "core", 100.0)
    blobs = MemoryBlobs()
    workers = [Worker(f"w{c}", c, Transfer(TransferConfig(f"w{c}", tmp_path)), backend()) for c in (1, 2)]
    core = Worker("core", 0, Transfer(TransferConfig("core", tmp_path)), backend())
    for worker, first in zip([core, *workers], (0, 2, 4), strict=True):
        if worker is not core:
            table.join(worker.name, worker.cell, 0.0)
        for micro_step in MICRO_STEPS[first : first + 2]:
            table.add((ref_to(micro_step, blobs.put(micro_step.micro_step, micro_step.to_bytes())),))
            worker.compute(table, [micro_step])
    table.seal()
    yield Stage(table, core.backend, core.transfer, workers)
    for worker in [core, *workers]:
        worker.transfer.close()


async def test_the_sum_is_the_same_to_the_last_bit_whoever_offers_first(stage: Stage) -> None:
    """The order of addition is that of the cells, whatever the order of the offers."""
    alone = [backend(), backend(), backend()]
    for part, first in zip(alone, (0, 2, 4), strict=True):
        for micro_step in MICRO_STEPS[first : first + 2]:
            part.accumulate(micro_step)
    for part in alone[1:]:
        alone[0].add_gradients(sums(part))
    for worker in reversed(stage.workers):
        assert worker.offer(stage.table)
    assert await stage.reduce() and stage.table.complete_sum
    assert all(np.array_equal(total, sums(alone[0])[n]) for n, total in sums(stage.core).items())


async def test_any_partition_is_the_same_up_to_the_order_of_addition(stage: Stage) -> None:
    whole = backend()
    for micro_step in MICRO_STEPS:
        whole.accumulate(micro_step)
    for worker in stage.workers:
        worker.offer(stage.table)
    assert await stage.reduce()
    for name, total in sums(stage.core).items():
        wanted = sums(whole)[name]
        assert np.linalg.norm(total - wanted) <= 1e-12 * np.linalg.norm(wanted)


def damage(stage: Stage, kind: str) -> str | None:
    """Let the first satellite offer something it should not; returns the text to offer instead of its own."""
    worker = stage.workers[0]
    done = stage.table.done_by(worker.name)
    others = stage.table.done_by(stage.workers[1].name)
    said = {
        "another step": (STEP + 1, ATTEMPT, done), "an earlier attempt": (STEP, ATTEMPT - 1, done),
        "other micro-steps": (STEP, ATTEMPT, others), "fewer micro-steps": (STEP, ATTEMPT, sorted(done)[:1]),
    }  # fmt: skip
    if kind in said:
        return export_sum(worker.transfer, worker.backend, *said[kind])
    text = export_sum(worker.transfer, worker.backend, STEP, ATTEMPT, done)
    region = worker.transfer.find(GRADIENTS)
    assert region is not None
    if kind == "a wrong checksum":
        next(a for n, a in region.arrays.items() if n != STAMP)[...] += 1.0
    elif kind == "an earlier generation":
        export_sum(worker.transfer, worker.backend, STEP, ATTEMPT, done)
    elif kind == "withdrawn":
        withdraw_sum(worker.transfer)
    elif kind == "gone":
        worker.transfer.close()
    elif kind == "another layout":
        worker.transfer.register("weights", {"w": np.zeros(3)})
        return descriptor_text(worker.transfer.describe("weights"))
    elif kind == "nonsense":
        return "[]}"
    elif kind == "a number":
        return "5"
    elif kind == "half a descriptor":
        return json.dumps({"region": GRADIENTS})
    return text


@pytest.mark.parametrize("kind", [
    "a wrong checksum", "another step", "an earlier attempt", "other micro-steps", "fewer micro-steps",
    "an earlier generation", "withdrawn", "gone", "another layout", "nonsense", "a number", "half a descriptor",
])  # fmt: skip
async def test_a_buffer_that_is_not_exactly_the_sum_is_void_with_all_its_worker_did(stage: Stage, kind: str) -> None:
    before = sums(stage.core)
    lost = stage.table.done_by("w1")
    assert stage.workers[0].offer(stage.table, damage(stage, kind))
    assert not await stage.reduce()
    assert all(np.array_equal(total, before[n]) for n, total in sums(stage.core).items()), "nothing was added"
    assert {m for m, where in stage.table.places().items() if where == ["pending"]} == lost
    assert not stage.table.window_closed, "somebody else may join and compute them"
    for _ in lost:
        claimed = stage.table.claim("core", 1.0)[1]
        assert claimed is not None
        stage.core.accumulate(next(m for m in MICRO_STEPS if m.micro_step == claimed.micro_step))
        stage.table.complete("core", claimed.micro_step, {}, 1.0)
    assert stage.workers[1].offer(stage.table)
    assert await stage.reduce() and stage.table.complete_sum
    whole = backend()
    for micro_step in MICRO_STEPS:
        whole.accumulate(micro_step)
    assert all(torch.allclose(torch.tensor(t), torch.tensor(sums(whole)[n])) for n, t in sums(stage.core).items())


def test_a_stamp_tells_steps_attempts_and_sets_apart() -> None:
    made = [
        stamp_of(step, attempt, names).tobytes()
        for step, attempt in itertools.product((0, 1, 11), (0, 1, 11)) for names in ((), ("a",), ("b",), ("a", "b"))
    ]  # fmt: skip
    assert len(set(made)) == len(made)
    assert np.array_equal(stamp_of(1, 2, ["b", "a"]), stamp_of(1, 2, ("a", "b")))
