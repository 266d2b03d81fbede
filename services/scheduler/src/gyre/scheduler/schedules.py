"""Schedules: how cells and steps are arranged in time. One small class each, behind one Protocol; all are pure.

Strictly one transition at a time: a schedule is asked for the next cell only while every cell is settled, and answers with
one cell. Cells enter training in order, so that those that train are always the first ones. A cell that entered stays
until the burst ends.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from gyre.scheduler.transition import CellState
from gyre.scheduler.waterlevel import Waterlevel

Gate = Literal["", "count", "tokens", "supply", "share"]


@dataclass(frozen=True, slots=True)
class Capacity:
    """C_e of one cell: executions that it serves at full speed, and tokens its KV pool holds (0: not limited)."""

    executions: int
    kv_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Supply:
    """What there is to train. Costs are those of the micro-steps.

    groups_waiting: complete and not in a finished step; a step takes `groups_per_step`. unclaimed: cost nobody has claimed.
    join: what one cell gets done in the time that joining takes, plus one micro-step.
    """

    groups_waiting: int
    groups_per_step: int
    unclaimed: float = 0.0
    join: float = 0.0

    @property
    def feeds_core(self) -> bool:
        return self.groups_waiting > 0

    @property
    def fills_step(self) -> bool:
        return self.groups_waiting >= self.groups_per_step

    @property
    def feeds_satellite(self) -> bool:
        return self.unclaimed > self.join


@dataclass(frozen=True, slots=True)
class View:
    """What a schedule decides on: a snapshot inside an open burst, or at its end.

    cells: those that can train, in order; at a burst's end only those that are there. next_in_order: the one whose turn it is
    to train, if any. num_serving: cells that serve now, standalone ones among them. to_dispatch: executions that the next
    burst will add. share_done: terminated of those dispatched since the burst began and carried.
    """

    cells: tuple[CellState, ...]
    next_in_order: CellState | None
    num_serving: int
    num_standalone: int
    water: Waterlevel
    capacity: Capacity
    supply: Supply
    steps_left_in_burst: int
    share_done: float = 0.0
    to_dispatch: int = 0

    def fits(self, num_cells: int, added: int = 0) -> Gate:
        """Which gate forbids that `num_cells` serve what is unfinished and `added` executions more; "" if none does."""
        if self.water.level + added > max(num_cells, 0) * self.capacity.executions:
            return "count"
        if self.capacity.kv_tokens and self.water.kv_tokens(added) > max(num_cells, 0) * self.capacity.kv_tokens:
            return "tokens"
        return ""

    def fits_without(self, cell: CellState, added: int = 0) -> Gate:
        """`fits` for the cells that serve, less `cell`."""
        return self.fits(self.num_serving - cell.serves_any, added)


@dataclass(frozen=True, slots=True)
class Choice:
    """The cell that leaves rollout now, or None and the gate that holds the next one back."""

    cell: int | None = None
    blocked: Gate = ""


class Schedule(Protocol):
    """Decides which cells train."""

    name: str
    streams: bool  # a step is worked on before its last group has joined

    def next_to_train(self, view: View) -> Choice:
        """Which cell leaves rollout now."""
        ...

    def stays(self, cell: CellState, view: View) -> bool:
        """Whether a cell that trains goes on training over the end of a burst."""
        ...


def _go(cell: CellState | None, gate: Gate) -> Choice:
    return Choice(None if cell is None or gate else cell.cell, gate if cell is not None else "")


@dataclass(frozen=True, slots=True)
class Elastic:
    """The next cell leaves as soon as what is unfinished fits what stays and there is something to train."""

    name: str = "elastic"
    streams: bool = True

    def next_to_train(self, view: View) -> Choice:
        cell = view.next_in_order
        if cell is None or view.steps_left_in_burst <= 0:
            return Choice()
        fed = view.supply.feeds_core if cell.cell == 0 else view.supply.feeds_satellite
        return _go(cell, view.fits_without(cell) or ("" if fed else "supply"))

    def stays(self, cell: CellState, view: View) -> bool:
        """The core, if the next step's data is ready and what will be dispatched fits the cells that serve."""
        if cell.cell != 0 or not view.supply.fills_step:
            return False
        others = sum(c.cell != 0 for c in view.cells) + view.num_standalone
        return not view.fits(others, view.to_dispatch)


@dataclass(frozen=True, slots=True)
class Static:
    """The first `num_training` cells train from the first burst to the last, the others never do."""

    name: str
    streams: bool
    num_training: int

    def next_to_train(self, view: View) -> Choice:
        if view.next_in_order is None or view.next_in_order.cell == 0:
            return Choice(None if view.next_in_order is None else 0)
        mine = (c for c in view.cells[1:self.num_training] if c.role == "rollout" and c.settled)
        return Choice(next((c.cell for c in mine), None))  # whatever became of its engine: it will not serve anyway

    def stays(self, cell: CellState, view: View) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Colocate:
    """All cells roll out until the standalone ones can serve what is left (without them: nothing), then all of them train."""

    name: str = "colocate"
    streams: bool = False

    def next_to_train(self, view: View) -> Choice:
        cell = view.next_in_order
        if cell is None or view.steps_left_in_burst <= 0:
            return Choice()
        if cell.cell != 0:
            return Choice(cell.cell)  # the pool switches as a whole
        fed = view.supply.feeds_core if self.streams else view.supply.fills_step
        return _go(cell, view.fits(view.num_standalone) or ("" if fed else "supply"))

    def stays(self, cell: CellState, view: View) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class RollPacker:
    """The first half of the cells flips once `share` of the executions are done, the others when nothing is left."""

    name: str = "rollpacker"
    streams: bool = True
    share: float = 0.4

    def next_to_train(self, view: View) -> Choice:
        cell = view.next_in_order
        if cell is None or view.steps_left_in_burst <= 0:
            return Choice()
        if cell.cell < len(view.cells) // 2:
            gate: Gate = "share" if view.share_done < self.share else ""
        else:
            gate = view.fits(view.num_standalone)
        fed = cell.cell != 0 or view.supply.feeds_core
        return _go(cell, gate or ("" if fed else "supply"))

    def stays(self, cell: CellState, view: View) -> bool:
        return False


def schedule_of(name: str, num_training: int = 1) -> Schedule:
    """The schedule of a configuration that was checked already. `num_training`: cells that train under `async`."""
    streams = name.endswith("+streaming")
    match name.removesuffix("+streaming"):
        case "elastic":
            return Elastic()
        case "async":
            return Static(name, streams, num_training)
        case "rollpacker":
            return RollPacker()
        case _:
            return Colocate(name, streams)
