"""Do cells of unequal speed end a step together, and how soon does a newcomer help? `make bench NAME=join`.

First the trainer's own core, satellites and claims in virtual time: micro-steps of known cost, cells of known speed that
join one after another while the core is already at work, three steps per run. The spread is that of the cells' last
completions in a step; it cannot be asked to be smaller than about one of the micro-steps that are left for the end.
Then, unless --no-processes, real worker processes on this machine (they share its cores and so are unequal by
themselves), with NATS and gRPC: what is seen of them from outside, every few milliseconds.

    python bench/join.py [--seeds 5] [--micro-steps 120] [--no-processes]

The last line is for scripts; its spread is the largest of the virtual runs, in seconds of a step of about 60; its
first_micro_step_s is from a join to the claim of the first micro-step (weights pulled and verified), role_change_s from the
cell's change to `train` to the end of that micro-step, both of the processes.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gyre.contracts.events import BurstOpened, GroupCompleted, Outcome, StepFinished
from train_parts.processes import measure_processes
from train_parts.virtual import VirtualCells, VirtualLoop

STEPS = 3
GROUPS = 4
STEP_S = 60.0  # what a step takes if everything divides evenly
SPEEDS = {2: (1.0, 0.6), 3: (1.0, 0.8, 0.4), 4: (1.0, 0.7, 0.5, 0.3)}
LATE_S = 5.0  # between one cell's change to `train` and the next one's


@dataclass(frozen=True)
class Ended:
    """One step: between the first and the last cell's end, the largest micro-step at the mean speed, the lost share."""

    spread_s: float
    largest_s: float
    over: float  # makespan over the perfect division, first step left out (cells join in it)


def costs_of(rng: random.Random, num: int, total: float) -> list[float]:
    """Lognormal, as trees of agent executions are; the largest is about a dozenth of what one cell does in a step."""
    raw = [rng.lognormvariate(0.0, 0.7) for _ in range(num)]
    return [cost * total / sum(raw) for cost in raw]


async def one_run(home: Path, num_cells: int, num_micro_steps: int, seed: int) -> list[Ended]:
    rng = random.Random(seed)
    speeds = dict(enumerate(SPEEDS[num_cells]))
    cells = VirtualCells(home, speeds, GROUPS, STEPS)
    for cell in speeds:
        cells.start(cell)
    cells.ledgers[0].hear(BurstOpened(0, 0, STEPS))
    for cell in speeds:
        cells.to_train(cell)
        if cell == 0:
            supply(cells, rng, num_micro_steps)
        await asyncio.sleep(LATE_S)
    while len([f for f in cells.ledgers[0].published if isinstance(f, StepFinished)]) < STEPS:
        assert not any(task.done() for task in cells.tasks), [t for t in cells.tasks if t.done()]
        await asyncio.sleep(0.05)
    for task in cells.tasks:
        task.cancel()
    await asyncio.gather(*cells.tasks, return_exceptions=True)
    return summarise(cells)


def supply(cells: VirtualCells, rng: random.Random, num_micro_steps: int) -> None:
    """All groups of all steps; they join step after step."""
    for step in range(STEPS):
        costs = costs_of(rng, num_micro_steps, STEP_S * sum(cells.speeds.values()))
        for group in range(GROUPS):
            name = f"s{step}g{group}"
            refs = [cells.micro_step(f"{name}-m{i}", cost) for i, cost in enumerate(costs[group::GROUPS])]
            outcome = Outcome(f"{name}-x", "scored", "finished", 1.0, 1.0, 1, 1, 1)
            cells.ledgers[0].hear(GroupCompleted(name, 0, "q", "train", 0, (outcome,), 1, 1.0, 0.0, tuple(refs)))


def summarise(cells: VirtualCells) -> list[Ended]:
    ended = []
    everything = sorted(cells.ends)
    for step in range(STEPS):
        mine = [(at, cell, name) for at, cell, name in everything if name.startswith(f"s{step}g")]
        ends = {cell: max(at for at, c, _ in mine if c == cell) for cell in {c for _, c, _ in mine}}
        largest = max(cells.costs[name] for *_, name in mine)
        before = max((at for at, _, name in everything if name.startswith(f"s{step - 1}g")), default=0.0)
        mean_speed = statistics.mean(cells.speeds.values())
        over = (max(ends.values()) - before) / STEP_S if step else float("nan")
        ended.append(Ended(max(ends.values()) - min(ends.values()), largest / mean_speed, over))
        assert len(mine) == len({name for *_, name in mine}), "a micro-step was computed twice without a loss"
    return ended


def virtual(num_cells: int, num_micro_steps: int, seed: int) -> list[Ended]:
    with tempfile.TemporaryDirectory(prefix="join-") as home:
        loop = VirtualLoop()
        asyncio.set_event_loop(loop)
        try:
            return loop.run_until_complete(one_run(Path(home), num_cells, num_micro_steps, seed))
        finally:
            loop.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--micro-steps", type=int, default=120)
    parser.add_argument("--no-processes", action="store_true")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    print(f"virtual time: {arguments.micro_steps} micro-steps in a step of {STEP_S:.0f} s, {arguments.seeds} seeds")
    print(f"{'cells':>5} {'speeds':>20} {'spread s':>9} {'max':>6} {'max / largest micro-step':>25} {'over perfect':>13}")
    worst, worst_share = 0.0, 0.0
    for num_cells in SPEEDS:
        ended = [e for seed in range(arguments.seeds) for e in virtual(num_cells, arguments.micro_steps, seed)]
        spreads = [e.spread_s for e in ended]
        share = max(e.spread_s / e.largest_s for e in ended)
        over = statistics.median(e.over for e in ended if e.over == e.over)
        worst, worst_share = max(worst, *spreads), max(worst_share, share)
        print(f"{num_cells:>5} {SPEEDS[num_cells]!s:>20} {statistics.median(spreads):>9.2f} {max(spreads):>6.2f} "
              f"{share:>25.2f} {100 * (over - 1):>12.2f}%")  # fmt: skip
    first = role = "-"
    if not arguments.no_processes:
        first, role = (f"{seconds:.2f}" for seconds in measure_processes())
    workers = max(SPEEDS)
    print(f"join spread={worst:.2f} of_largest={worst_share:.2f} workers={workers} "
          f"first_micro_step_s={first} role_change_s={role}")


if __name__ == "__main__":
    main()
