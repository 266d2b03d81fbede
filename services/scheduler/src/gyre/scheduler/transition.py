"""One cell's role as the facts tell it: assigned by the scheduler, confirmed by rollout or trainer."""

from dataclasses import dataclass
from typing import Literal

from gyre.contracts.events import CellRoleAssigned, CellRolloutLost, CellRolloutReady, CellTrainJoined, Role

Stage = Literal["settled", "leaving", "joining", "lost"]


@dataclass(slots=True)
class CellState:
    """`epoch` numbers the assignments; facts of an older epoch change nothing.

    assigned_at: when the epoch began, in seconds of the fact's own clock. joined_epoch, ready_epoch: the newest at which the
    trainer joined and the engine served; another stream may say so before the assignment is read. incarnation, lost_epoch: how
    often the engine was lost, and at which epoch the last time, -1 once it serves. `never_trains`: a standalone rollout cell.
    """

    cell: int
    role: Role = "rollout"
    epoch: int = 0
    joined_epoch: int = -1
    ready_epoch: int = -1
    ready_version: int = -1
    assigned_at: float = 0.0
    incarnation: int = 0
    lost_epoch: int = -1
    never_trains: bool = False

    @property
    def confirmed_epoch(self) -> int:
        """The newest epoch at which the cell took on a role like its own."""
        return self.joined_epoch if self.role == "train" else self.ready_epoch

    @property
    def lost(self) -> bool:
        """Whether the engine is lost. It was not any more when it let go of the devices for a trainer that joined since."""
        return self.lost_epoch >= 0 and self.joined_epoch <= self.lost_epoch

    @property
    def settled(self) -> bool:
        """Whether the cell really became what it was told to be."""
        return self.confirmed_epoch >= self.epoch

    @property
    def stage(self) -> Stage:
        if self.lost and self.role == "rollout":
            return "lost"
        if self.settled:
            return "settled"
        return "leaving" if self.role == "train" else "joining"

    @property
    def serves_any(self) -> bool:
        """Whether its engine admits requests, under whatever version."""
        return self.role == "rollout" and self.settled and not self.lost

    @property
    def trains(self) -> bool:
        return self.role == "train" and self.settled

    def serves(self, version: int) -> bool:
        """Whether its engine admits requests under weights `version`."""
        return self.serves_any and self.ready_version >= version

    def assign(self, fact: CellRoleAssigned, at: float) -> None:
        if fact.epoch > self.epoch:
            self.role, self.epoch, self.assigned_at = fact.role, fact.epoch, at

    def confirm_train(self, fact: CellTrainJoined) -> bool:
        """Returns whether this fact was the one that settled it."""
        was_settled = self.settled
        self.joined_epoch = max(self.joined_epoch, fact.epoch)
        return self.settled and not was_settled

    def confirm_rollout(self, fact: CellRolloutReady) -> None:
        if fact.incarnation >= self.incarnation:
            self.incarnation, self.lost_epoch = fact.incarnation, -1
        self.ready_epoch = max(self.ready_epoch, fact.epoch)
        self.ready_version = max(self.ready_version, fact.version)

    def lose(self, fact: CellRolloutLost) -> None:
        if fact.incarnation > self.incarnation:
            self.incarnation, self.lost_epoch = fact.incarnation, fact.epoch


@dataclass(frozen=True, slots=True)
class Roster:
    """All cells at a glance. It changes only when a fact is about a cell, which is seldom, and every decision looks at it.

    elastic: cells that can train, in order. is_calm: every cell became what it was told to be, and none is lost.
    """

    elastic: tuple[CellState, ...]
    next_in_order: CellState | None
    num_serving: int
    num_standalone: int
    num_rolling: int
    is_calm: bool

    @classmethod
    def of(cls, cells: list[CellState]) -> "Roster":
        elastic = tuple(c for c in cells if not c.never_trains)
        return cls(elastic=elastic, next_in_order=_next_in_order(elastic), num_serving=sum(c.serves_any for c in cells),
                   num_standalone=sum(c.never_trains and c.serves_any for c in cells),
                   num_rolling=sum(c.role == "rollout" for c in cells), is_calm=all(c.settled and not c.lost for c in cells))


def _next_in_order(elastic: tuple[CellState, ...]) -> CellState | None:
    """The first cell that is not in training; the core first. Cells that answer nothing are passed over.

    A satellite whose engine is lost comes last: its trainer may be as well as ever, but if the whole cell is dead, every
    cell behind it waits until it is given up.
    """
    core = elastic[0]
    if not core.trains:
        return core if core.role == "rollout" and core.settled else None
    return min((c for c in elastic if c.role == "rollout" and c.settled), key=lambda c: (c.lost, c.cell), default=None)


def next_assignment(cell: CellState, role: Role, version: int, reason: str = "") -> CellRoleAssigned:
    """The fact that gives `cell` another role at the next epoch."""
    epoch = cell.epoch + 1
    return CellRoleAssigned(cell.cell, epoch, role, f"cell-{cell.cell}-epoch-{epoch}", version, reason)
