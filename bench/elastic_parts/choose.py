"""Every burst of the wanted mean staleness and every division of the cells, simulated: what the bench's shapes are from."""

from __future__ import annotations

import heapq
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from elastic_parts.records import groups_of, rows_of, write_tasks
from elastic_parts.shapes import SCHEDULES, base_config, config_of, constants_of, simulated
from gyre.contracts.errors import ConfigError
from gyre.contracts.simulation import Simulated
from gyre.runtime.config import RunConfig
from gyre.scheduler.simulation.scenario import Shape
from gyre.scheduler.simulation.sweep import line

SEEDS = range(100, 104)  # not those that are measured
SHOWN = 3


def candidates(workload: str, say: Callable[[str], None]) -> dict[str, Shape]:
    """Prints the best shapes of every schedule; returns the best one of each."""
    base, best = base_config(workload), {}
    with tempfile.TemporaryDirectory(prefix="gyre-choose-") as home:
        root = Path(home) / "tasks"
        write_tasks(root, groups_of(workload, 0, base.steps * base.burst.groups_per_step,
                                    base.burst.executions_per_group, base.engine.script_token_ms / 1000))
        base = replace(base, tasks=replace(base.tasks, root=str(root)))
        say(_least_tail(base, workload))
        for schedule in SCHEDULES:
            tried = sorted(((mean(runs), shape, runs) for shape in line(base, schedule)
                            if (runs := _runs(base, workload, shape))), key=lambda found: found[0])
            best[schedule] = tried[0][1]
            for seconds, shape, runs in tried[:SHOWN]:
                say(_row(shape, seconds, runs))
    return best


def mean(runs: list[Simulated]) -> float:
    """Seconds per step."""
    return statistics.fmean(r.makespan_s / len(r.steps) for r in runs)


def _runs(base: RunConfig, workload: str, shape: Shape) -> list[Simulated]:
    found = []
    try:
        config = config_of(base, shape)
    except ConfigError:
        return []
    num = config.steps * config.burst.groups_per_step
    for seed in SEEDS:
        groups = groups_of(workload, seed, num, config.burst.executions_per_group, config.engine.script_token_ms / 1000)
        write_tasks_once(Path(config.tasks.root), len(groups))
        found.append(simulated(config, shape, constants_of(), rows_of(replace(config, seed=seed), groups)))
    return found


def _least_tail(config: RunConfig, workload: str) -> str:
    """What the elastic tail cannot be less than, however soon cells leave: as many serve as it takes, whole ones."""
    burst, cells, token_s = config.burst, config.cells, config.engine.script_token_ms / 1000
    num = burst.steps_per_burst * burst.groups_per_step
    found = []
    for seed in SEEDS:
        groups = groups_of(workload, seed, num, burst.executions_per_group, token_s)
        durations = [record.duration_s(token_s) for group in groups for record in group]
        found.append(empty_slots_s(durations, cells.count, cells.executions_per_cell))
    return (f"{num * burst.executions_per_group} executions of a burst on {cells.count} cells of {cells.executions_per_cell}: "
            f"slots of cells that still serve are empty for at least {statistics.fmean(found):.1f} s of a cell's time")


def empty_slots_s(durations: Sequence[float], num_cells: int, slots: int) -> float:
    """Seconds of a whole cell's time that slots are empty of cells which cannot leave yet, if executions are started in their
    order, run on full speed, and a cell leaves at the moment at which the others hold what is unfinished."""
    free = [0.0] * (num_cells * slots)
    ends = []
    for duration in durations:
        ends.append(heapq.heappop(free) + duration)
        heapq.heappush(free, ends[-1])
    empty, before = 0.0, 0.0
    for left, end in zip(range(len(ends), 0, -1), sorted(ends), strict=True):
        serving = min(num_cells, -(-left // slots))
        empty += max(0, serving * slots - left) * (end - before) / slots
        before = end
    return empty


def write_tasks_once(root: Path, num: int) -> None:
    """As many task directories as groups: only their names matter here."""
    for number in range(num):
        (root / "train" / f"t{number:04d}").mkdir(parents=True, exist_ok=True)
        (root / "train" / f"t{number:04d}" / "instruction.md").touch()


def _row(shape: Shape, seconds: float, runs: list[Simulated]) -> str:
    share = {use: sum(r.cell_s[use] for r in runs) / sum(sum(r.cell_s.values()) for r in runs) for use in runs[0].cell_s}
    idle = " ".join(f"{use} {100 * share[use]:.0f}" for use in ("tail", "data", "end", "update", "move"))
    bound = statistics.fmean(r.lower_bound_s / r.makespan_s for r in runs)
    return (f"{shape.schedule:31} mu {shape.steps_per_burst} phi {shape.phi} standalone {shape.num_standalone} train "
            f"{shape.num_training}  {seconds:6.2f} s per step, {bound:.3f} of bound, idle % {idle}, stale "
            f"{sum(r.num_stale_groups for r in runs)}")
