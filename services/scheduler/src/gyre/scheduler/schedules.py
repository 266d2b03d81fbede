"""Schedules: which cell changes role next. One small class each, behind one Protocol; all are pure.

Strictly one transition at a time: a schedule is asked only while every cell is settled, and answers with one cell.
"""

from dataclasses import dataclass
from typing import Protocol

from gyre.scheduler.transition import CellState


@dataclass(frozen=True, slots=True)
class View:
    """What a schedule decides on: a snapshot inside an open burst."""

    cells: tuple[CellState, ...]
    waterlevel: int
    num_groups_waiting: int  # completed and not in a finished step
    steps_left_in_burst: int


class Schedule(Protocol):
    """Decides the next cell to leave rollout for training."""

    name: str

    def next_to_train(self, view: View) -> int | None:
        """The cell that leaves rollout now, or None."""
        ...


class Colocate:
    """All cells roll out until nothing is left to roll out, then all of them train."""

    name = "colocate"

    def next_to_train(self, view: View) -> int | None:
        if view.waterlevel > 0 or view.steps_left_in_burst <= 0 or view.num_groups_waiting <= 0:
            return None
        return next((c.cell for c in view.cells if c.role == "rollout"), None)


def schedule_of(name: str) -> Schedule:
    """The schedule of a configuration that was checked already."""
    return {"colocate": Colocate}[name]()
