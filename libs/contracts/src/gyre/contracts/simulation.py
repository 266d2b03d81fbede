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
    num_cut: int = 0  # executions that were ended at the harness's timeout


@dataclass(frozen=True, slots=True)
class SimulationRequest:
    """What to simulate. Every schedule is simulated with every seed, on equal executions.

    config: run.toml, resolved. constants: the constants file, TOML too; empty for the defaults. rows: recorded executions
    instead of drawn ones. sweep: for every schedule all (steps_per_burst, phi) of the configured one's mean staleness, and
    all divisions of the cells that the schedule knows. with_lanes: also say what each cell did when, for the first seed.
    """

    config: str
    schedules: tuple[str, ...]
    constants: str = ""
    rows: WorkloadRows | None = None
    first_seed: int = 0
    num_seeds: int = 1
    sweep: bool = False
    with_lanes: bool = False
