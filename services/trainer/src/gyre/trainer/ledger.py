"""The durable state of a worker: the pure core behind the runtime's loop, and what it listens to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from gyre.contracts.events import BurstOpened, CellRoleAssigned, CellRolloutReleased, GroupCompleted, StepSealed
from gyre.contracts.subjects import CTL, EXEC, TRAJ
from gyre.runtime.effects import Effect
from gyre.runtime.process import Process
from gyre.runtime.service import Service, Subscription
from gyre.trainer.config import TrainerConfig
from gyre.trainer.core import Attend, LocalEvent, TrainerCore, TrainerState
from gyre.trainer.restore import rebuild_lost_ledger


class Ledger(Protocol):
    """The durable state and the only way to change it: `gyre.runtime.service.Service`, or a fake in tests."""

    state: TrainerState

    async def submit(self, event: LocalEvent) -> None:
        """Returns once the event and everything it published are durable."""
        ...


Attention = Callable[[Mapping[str, str]], None]


async def open_ledger(process: Process, config: TrainerConfig, attend: Attention) -> Service[TrainerState]:
    """Connect; `attend` is called after every commit that the shell may have to act on. Raises BusError.

    `attend` is given the trace context of the transition when the cell's role changed, an empty map otherwise.
    """

    async def perform(effect: Effect, trace: Mapping[str, str]) -> None:
        attend(trace if isinstance(effect, Attend) and effect.transition else {})

    core, store, bus = TrainerCore(config.cell, config.rules), process.store(), await process.connect()
    await rebuild_lost_ledger(store, bus, process.blobs, config, core)
    control = Subscription(CTL, (CellRoleAssigned, BurstOpened))
    cells = Subscription(EXEC, (CellRolloutReleased,))
    groups = Subscription(TRAJ, (GroupCompleted,))
    return Service(
        name=process.name, run=process.run, core=core, store=store,
        bus=bus, blobs=process.blobs, clock=process.clock, perform=perform,
        subscriptions=(control, cells, groups) if config.is_core else (control, cells),
        single_writer_subjects=(StepSealed,),
    )  # fmt: skip
