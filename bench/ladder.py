"""The published system's ladder of schedules, in our simulator: `make bench NAME=ladder`.

arXiv 2609.33848 compares schedules on a 122B model and NL2RepoBench, 8 cells of 4 nodes. Its ablation, from the ratios it
states with the whole system as 1: async 1.556, async+streaming 1.375, colocate 1.438, + standalone cells 1.397, + streaming
1.190, elastic with one step a burst 1.109, elastic with 4 cells of twice the size 1.022, elastic 1.

From the paper: cells (8, and 4 of twice the size), mean execution 1.93 h and mean longest of a group 2.96 h, transitions of
8.52 s and 3.46 s, about 48 steps, dispatch at burst boundaries alone, equal staleness for all.
Fitted once, for all rows together, to the shape of the ladder: 48 executions per cell; 3.0 cell-hours of training per step.
Fitted to the paper's two durations: lognormal with sigma 0.335 (with the cap).
Guessed: 8 executions per group and 16 groups per step; a cap of 4 h; no correlation inside a group; training in proportion to
duration; 60 s for evaluation, 60 s per update; the stages of a transition; no KV limit, no slowing with load; that staleness is
the mean of FIFO, phi + (mu - 1)/2 = 2; nothing is too old to be trained. Every row has the burst and the division of the cells
that are best for it on that line of equal staleness (--search finds them again); the row of one step a burst has mu = 1.

What does not come out: the rivals with streaming or standalone cells are better here than the paper's, since they too have the
burst that is best for them (the paper does not say which they had), and the split of async is the best one.

    python bench/ladder.py [--seeds 3] [--steps 45] [--search]

The last line is for scripts; max_deviation: the largest of |ours - the paper's| over the rows; order_holds: whether sorting our
rows gives the paper's order; pairs: how many of the pairs of rows are in the paper's order.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from gyre.contracts.simulation import Simulated
from gyre.runtime.config import BurstConfig, CellsConfig, EngineConfig, HarnessConfig, PolicyConfigRef, RunConfig, TasksConfig
from gyre.scheduler.schedules import Capacity
from gyre.scheduler.simulation.constants import Constants, TrainingConstants
from gyre.scheduler.simulation.scenario import Shape, scenario_of
from gyre.scheduler.simulation.sweep import fitting, line
from gyre.scheduler.simulation.world import World

HOUR = 3600.0
CELLS = 8
SLOTS = 48  # of one of the 8 cells
GROUPS, EXECUTIONS = 16, 8
TRAIN_CELL_HOURS = 3.0  # of the 8 cells, per step
MEAN_HOURS = 1.93


@dataclass(frozen=True)
class Row:
    """`paper`: its time over that of the whole system. `only_mu`: of the sweep, bursts of so many steps alone (0: any)."""

    name: str
    paper: float
    shape: Shape
    num_cells: int = CELLS
    only_mu: int = 0


ROWS = (
    Row("async", 1.556, Shape("async", 1, 2, 0, 4)),
    Row("async+streaming", 1.375, Shape("async+streaming", 1, 2, 0, 3)),
    Row("colocate", 1.438, Shape("colocate", 5, 0)),
    Row("colocate+standalone", 1.397, Shape("colocate+standalone", 5, 0, 2)),
    Row("colocate+standalone+streaming", 1.190, Shape("colocate+standalone+streaming", 5, 0, 2)),
    Row("elastic, one step a burst", 1.109, Shape("elastic", 1, 2), only_mu=1),
    Row("elastic, 4 cells", 1.022, Shape("elastic", 5, 0), num_cells=4),
    Row("elastic", 1.000, Shape("elastic", 5, 0)),
)


def config_of(row: Row, steps: int) -> RunConfig:
    """The run; the hardware is the same whatever it is cut into."""
    return RunConfig(
        name="ladder", policy=PolicyConfigRef("none"), tasks=TasksConfig("none"), steps=steps,
        harness=HarnessConfig(("none",), timeout_s=5 * HOUR, overall_timeout_s=6 * HOUR, max_concurrent=1_000_000),
        cells=CellsConfig(count=row.num_cells, executions_per_cell=SLOTS * CELLS // row.num_cells), engine=EngineConfig(),
        burst=BurstConfig(5, 0, GROUPS, EXECUTIONS, max_staleness=1_000))


def constants_of(row: Row) -> Constants:
    rate = TRAIN_CELL_HOURS / (GROUPS * EXECUTIONS * MEAN_HOURS)
    return Constants(training=TrainingConstants(seconds_per_second=rate * row.num_cells / CELLS))


def simulated(row: Row, shape: Shape, steps: int, seed: int) -> Simulated:
    config = fitting(config_of(row, steps), shape)
    scenario = scenario_of(config, shape, constants_of(row), None, seed)
    return World(replace(scenario, plan=replace(scenario.plan, capacity=Capacity(scenario.plan.capacity.executions)))).run()


def step_hours(run: Simulated) -> float:
    return run.makespan_s / len(run.steps) / HOUR


def searched(row: Row, steps: int) -> Row:
    """The row with its best shape on the line of equal staleness, for seed 0."""
    def shapes() -> Iterator[Shape]:
        yield from (s for s in line(config_of(row, steps), row.shape.schedule) if row.only_mu in (0, s.steps_per_burst))

    best = min(shapes(), key=lambda shape: step_hours(simulated(row, shape, steps, 0)))
    print(f"  {row.name}: {best}", flush=True)
    return replace(row, shape=best)


def told(row: Row, runs: list[Simulated], ratios: list[float]) -> str:
    shares = {use: statistics.fmean(r.cell_s[use] / sum(r.cell_s.values()) for r in runs) for use in runs[0].cell_s}
    staleness = [s for r in runs for step in r.steps for s in step.staleness]
    bound = statistics.fmean(r.makespan_s / r.lower_bound_s for r in runs)
    shape = f"mu {row.shape.steps_per_burst} phi {row.shape.phi}"
    shape += f" train {row.shape.num_training}" if row.shape.num_training else ""
    shape += f" alone {row.shape.num_standalone}" if row.shape.num_standalone else ""
    return (f"{row.name:30s} {row.paper:5.3f}  {statistics.fmean(ratios):5.3f} [{min(ratios):.3f}, {max(ratios):.3f}]  "
            f"{statistics.fmean(map(step_hours, runs)):5.3f}  {bound:5.3f}  {100 * (shares['roll'] + shares['train']):4.1f}  "
            f"{100 * shares['tail']:4.1f}  {100 * shares['data']:4.1f}  {100 * shares['update']:4.1f}  "
            f"{100 * shares['move']:4.2f}  {statistics.fmean(staleness):4.2f} {max(staleness):3d}  {shape}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="the same executions for every row")
    parser.add_argument("--steps", type=int, default=45, help="a multiple of 15, so that whole bursts fit")
    parser.add_argument("--search", action="store_true", help="find each row's best burst and division first (minutes)")
    options = parser.parse_args()
    rows = [searched(row, 30) for row in ROWS] if options.search else list(ROWS)
    print("\n\n".join(__doc__.split("\n\n")[2:4]), end="\n\n")
    print(f"{'':30s} paper  ours, range over seeds  h/step  of bound  busy%  tail  data  update  move  staleness mean, max")
    base = [simulated(rows[-1], rows[-1].shape, options.steps, seed) for seed in range(options.seeds)]
    ours: dict[str, float] = {}
    for row in rows:
        runs = base if row is rows[-1] else [simulated(row, row.shape, options.steps, s) for s in range(options.seeds)]
        ratios = [step_hours(run) / step_hours(whole) for run, whole in zip(runs, base, strict=True)]
        ours[row.name] = statistics.fmean(ratios)
        print(told(row, runs, ratios), flush=True)
    pairs = [(a, b) for a, b in combinations(rows, 2) if a.paper != b.paper]
    kept = [(ours[a.name] - ours[b.name]) * (a.paper - b.paper) > 0 for a, b in pairs]
    for (a, b), right in zip(pairs, kept, strict=True):
        if not right:
            print(f"not in the paper's order: {a.name} {ours[a.name]:.3f} ({a.paper}), {b.name} {ours[b.name]:.3f} ({b.paper})")
    deviation = max(abs(ours[row.name] - row.paper) for row in rows)
    print(f"ladder rows={len(rows)} max_deviation={deviation:.3f} order_holds={'yes' if all(kept) else 'no'} "
          f"pairs={sum(kept)}/{len(kept)} seeds={options.seeds} steps={options.steps}")


if __name__ == "__main__":
    main()
