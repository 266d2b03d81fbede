"""A ledger without NATS or disk, and the facts a trainer hears."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gyre.contracts.codec import pack, unpack
from gyre.contracts.digest import bytes_digest
from gyre.contracts.events import (
    BlobRef,
    BurstOpened,
    CellRoleAssigned,
    CellRolloutReleased,
    Fact,
    GroupCompleted,
    MicroStepRef,
    Outcome,
)
from gyre.contracts.microstep import MicroStep
from gyre.runtime.effects import Effect, Publish
from gyre.trainer.core import TrainerCore, TrainerState


class FakeLedger:
    """Steps the real core at once. `crash` keeps what a journal would keep: the state, through its own snapshot."""

    def __init__(self, core: TrainerCore, state: TrainerState | None = None) -> None:
        self._core = core
        self.state = core.initial() if state is None else state
        self.published: list[Fact] = []
        self.wake: Callable[[], None] = lambda: None

    async def submit(self, event: object) -> None:
        self.hear(event)

    def hear(self, *events: object) -> None:
        for event in events:
            self.state, effects = self._core.step(self.state, event, 0.0)
            self._perform(effects)

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Publish):
                self.published.append(effect.fact)
        self.wake()

    def crash(self) -> FakeLedger:
        return FakeLedger(self._core, self._core.restore(self._core.snapshot(self.state)))

    def said(self, kind: type) -> list[Fact]:
        return [fact for fact in self.published if isinstance(fact, kind)]


class MemoryBlobs:
    """Blobs in a dict."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}

    def put(self, path: str, data: bytes) -> BlobRef:
        self.data[path] = data
        return BlobRef(path, bytes_digest(data), len(data))

    def get(self, ref: BlobRef) -> bytes:
        return self.data[ref.path]

    def read(self, path: str) -> bytes:
        return self.data[path]

    def names(self, folder: str) -> list[str]:
        return [path.rpartition("/")[2] for path in self.data if path.rpartition("/")[0] == folder]


def ref_to(micro_step: MicroStep, blob: BlobRef) -> MicroStepRef:
    cost = micro_step.num_tokens + 0.001 * micro_step.num_pairs
    num_executions = len(micro_step.executions)
    return MicroStepRef(
        micro_step.micro_step, blob.digest, cost, micro_step.num_tokens, micro_step.num_targets, num_executions, blob
    )


def completed(
    group: str, refs: tuple[MicroStepRef, ...] = (), num_scored: int = 4, version: int = 0, purpose: str = "train"
) -> GroupCompleted:
    outcomes = tuple(
        Outcome(f"{group}-x{i:02d}", "scored", "finished", 1.0, 0.5, 3, 10, 10) for i in range(num_scored)
    )
    return GroupCompleted(group, 0, "q", purpose, version, outcomes, num_scored, 0.5, 0.5, refs)  # type: ignore[arg-type]


def assign(cell: int, epoch: int, role: str = "train") -> CellRoleAssigned:
    return CellRoleAssigned(cell, epoch, role, f"t{epoch}", 0)  # type: ignore[arg-type]


def burst(number: int, version: int, num_steps: int) -> BurstOpened:
    return BurstOpened(number, version, num_steps)


def to_train(cell: int, epoch: int) -> tuple[CellRoleAssigned, CellRolloutReleased]:
    """Everything that has to be heard before a worker takes its devices."""
    return assign(cell, epoch), CellRolloutReleased(cell, epoch)


def same(a: object, b: object) -> bool:
    return pack(a) == pack(b)


__all__ = [
    "FakeLedger", "MemoryBlobs", "assign", "burst", "completed", "ref_to", "same", "to_train", "unpack", "np",
]  # fmt: skip
