"""The role of one cell as the rollout side sees it, pure: what its engine should be doing, and what was said of it.

The engine serves if the cell's role is `rollout`, its trainer is off the devices and the weights are known. The shell
brings the engine there and keeps it there, so an engine that was killed comes back by itself.
"""

from dataclasses import dataclass, replace

from gyre.contracts.events import (
    CellRoleAssigned,
    CellRolloutLost,
    CellRolloutReady,
    CellRolloutReleased,
    CellTrainReleased,
    Role,
    WeightsPublished,
)
from gyre.rollout.local import EngineAsleep, EngineLost, EngineServing, SettleCell


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell; before any assignment it is in rollout at epoch 0, as the scheduler takes it to be.

    `has_trained`: some epoch gave its devices to the trainer, so the trainer has to release them. `lost_epoch`: the newest at
    which the engine was said to be lost, -1 once it has served or slept since.
    """

    cell: int
    epoch: int = 0
    role: Role = "rollout"
    version: int = 0
    has_trained: bool = False
    train_released: int = -1
    released_epoch: int = -1
    ready_epoch: int = -1
    ready_version: int = -1
    num_lost: int = 0
    lost_epoch: int = -1


def assigned(cell: Cell, fact: CellRoleAssigned) -> Cell | None:
    """The cell under its new role; None for an epoch that is not newer."""
    if fact.epoch <= cell.epoch:
        return None
    return replace(cell, epoch=fact.epoch, role=fact.role, version=fact.version,
                   has_trained=cell.has_trained or fact.role == "train")


def train_released(cell: Cell, fact: CellTrainReleased) -> Cell:
    """The cell's trainer is off the devices since `fact.epoch`."""
    return replace(cell, train_released=max(cell.train_released, fact.epoch))


def target(cell: Cell, weights: WeightsPublished | None) -> SettleCell | None:
    """What the cell's engine should be doing; None while its trainer is still on the devices."""
    if cell.role == "train":
        return SettleCell(cell.cell, cell.epoch, serve=False, is_confirmed=cell.released_epoch == cell.epoch)
    if cell.has_trained and cell.train_released < cell.epoch:
        return None
    usable = weights if weights is not None and weights.version >= cell.version else None
    return SettleCell(cell.cell, cell.epoch, serve=True, weights=usable, is_confirmed=cell.ready_epoch == cell.epoch)


def asleep(cell: Cell, event: EngineAsleep) -> tuple[Cell, CellRolloutReleased | None]:
    """The engine sleeps; the fact is said once for each epoch."""
    if event.epoch != cell.epoch or cell.role != "train" or cell.released_epoch == cell.epoch:
        return cell, None
    fact = CellRolloutReleased(cell.cell, cell.epoch, event.num_moved, event.num_replayed)
    return replace(cell, released_epoch=cell.epoch, lost_epoch=-1), fact


def serving(cell: Cell, event: EngineServing) -> tuple[Cell, CellRolloutReady | None]:
    """The engine serves; the fact is said once for each epoch and version."""
    known = (cell.ready_epoch, cell.ready_version) == (event.epoch, event.version)
    if event.epoch != cell.epoch or cell.role != "rollout" or known:
        return cell, None
    fact = CellRolloutReady(cell.cell, cell.epoch, event.version, event.checksum, cell.num_lost)
    return replace(cell, ready_epoch=event.epoch, ready_version=event.version, lost_epoch=-1), fact


def lost(cell: Cell, event: EngineLost) -> tuple[Cell, CellRolloutLost | None]:
    """The engine does not serve, or does not come back to it from training; once it serves that is said again.

    Before it has served for the first time it is only slow to start. It is said once for each epoch: in between the trainer
    may have had the devices of an engine that is gone.
    """
    if event.epoch != cell.epoch or cell.role != "rollout" or cell.lost_epoch == cell.epoch or cell.ready_version < 0:
        return cell, None
    num = cell.num_lost + 1
    fact = CellRolloutLost(cell.cell, cell.epoch, num, event.reason)
    return replace(cell, num_lost=num, ready_epoch=-1, lost_epoch=cell.epoch), fact
