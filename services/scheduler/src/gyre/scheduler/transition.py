"""One cell's role as the facts tell it: assigned by the scheduler, confirmed by rollout or trainer."""

from dataclasses import dataclass
from typing import Literal

from gyre.contracts.events import CellRoleAssigned, CellRolloutReady, CellTrainJoined, Role

Stage = Literal["settled", "leaving", "joining"]


@dataclass(slots=True)
class CellState:
    """`epoch` numbers the assignments; facts of an older epoch change nothing."""

    cell: int
    role: Role = "rollout"
    epoch: int = 0
    confirmed_epoch: int = -1
    ready_version: int = -1

    @property
    def settled(self) -> bool:
        """Whether the cell really is what it was told to be."""
        return self.confirmed_epoch >= self.epoch

    @property
    def stage(self) -> Stage:
        if self.settled:
            return "settled"
        return "leaving" if self.role == "train" else "joining"

    def serves(self, version: int) -> bool:
        """Whether its engine admits requests under weights `version`."""
        return self.role == "rollout" and self.settled and self.ready_version >= version

    def assign(self, fact: CellRoleAssigned) -> None:
        if fact.epoch > self.epoch:
            self.role, self.epoch = fact.role, fact.epoch

    def confirm_train(self, fact: CellTrainJoined) -> None:
        if self.role == "train" and fact.epoch == self.epoch:
            self.confirmed_epoch = fact.epoch

    def confirm_rollout(self, fact: CellRolloutReady) -> None:
        if self.role == "rollout" and fact.epoch >= self.epoch:
            self.confirmed_epoch = max(self.confirmed_epoch, fact.epoch)
            self.ready_version = max(self.ready_version, fact.version)


def next_assignment(cell: CellState, role: Role, version: int) -> CellRoleAssigned:
    """The fact that gives `cell` another role at the next epoch."""
    epoch = cell.epoch + 1
    return CellRoleAssigned(cell.cell, epoch, role, f"cell-{cell.cell}-epoch-{epoch}", version)
