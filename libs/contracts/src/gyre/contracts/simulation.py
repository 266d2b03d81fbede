"""What goes into the scheduler's simulation and what comes out of it, between the process that simulates and who asks."""

from dataclasses import dataclass, field
from typing import Literal

# What a cell does, or why it does nothing. `roll`: rolling out; of it `tail` is what stands idle because too little is
# left to fill it. `train`: computing micro-steps. `data`: waiting for groups. `end`: waiting for the step's last
# micro-steps. `update`: reduction, optimizer, publication. `move`: between roles. `lost`: answers nothing.
CellUse = Literal["roll", "tail", "train", "data", "end", "update", "move", "lost"]


@dataclass(frozen=True, slots=True)
class WorkloadRows:
    """Executions as a table. Columns: `seconds`; if there, `max_context` (tokens), `train_s` (cell-seconds), `group`.

    With `group` the rows are whole groups in the order of their dispatch; without it they are drawn from.
    """

    fields: tuple[str, ...]
    rows: tuple[tuple[float | str, ...], ...]
    source: str = ""


@dataclass(frozen=True, slots=True)
class CellStretch:
    """What one cell did from `start_s` to `end_s`."""

    cell: int
    use: CellUse
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """`spread_s`: between the first and the last cell's end. `staleness`: of its groups, in versions."""

    finished_s: float
    spread_s: float
    staleness: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Simulated:
    """One simulated run. `cell_s`: seconds by use, summed over all cells; they add up to cells times makespan."""

    schedule: str
    seed: int
    num_cells: int
    num_standalone: int
    steps_per_burst: int
    phi: int
    num_training: int  # cells that train under async, else 0
    makespan_s: float
    lower_bound_s: float
    cell_s: dict[CellUse, float]
    steps: tuple[SimulatedStep, ...]
    num_executions: int
    num_stale_groups: int
    num_switches: int
    num_moved: int
    num_preempted: int
    gates: dict[str, int]
    num_events: int
    stretches: tuple[CellStretch, ...] = ()
    levels: tuple[tuple[float, int], ...] = field(default=())  # (time, waterlevel) after each change
