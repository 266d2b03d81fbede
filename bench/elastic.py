"""How much sooner is a run done when cells are lent between rollout and training? `make bench NAME=elastic`.

Real processes, every one of the system: scheduler, gateway, executor, four engines, four trainers, evaluator, NATS. Only two
things are not real: engines answer random tokens at a fixed speed (`engine.backend = "scripted"`) and trainers wait instead
of computing (`training.backend = "timed"`), so that four cells fit two processors and time is what the arrangement makes
of it. Every schedule gets the same executions (`elastic_parts/records.py`: durations of the published system's shape, or of
recorded coding-agent sessions), the same number of cells, and the same mean staleness d = phi + (mu - 1) / 2 = 2; how each
uses them best was chosen with the simulator (`--choose`, `elastic_parts/shapes.py`) and committed, with the workload and all
constants, before any schedule was measured: the last commit "bench(elastic): workload, constants and arrangements, before any
schedule is measured". Two earlier ones were given up after elastic alone had run: with six cells and five calls an execution
the processors, shared with other work, made executions 1.4 times longer; with a second's flush each move waited for it.
Seeds are paired, schedules interleaved.

    python bench/elastic.py [--workload paper|sessions] [--seeds 3] [--schedules elastic,async] [--steps N] [--set KEY=VALUE]

A run takes 3 to 5 minutes. of bound: what no schedule can beat with that burst, over the run. simulated: the run again in the
simulator, with its real durations and measured stages; foretold: with the guesses made beforehand. Shares are of all cells'
time: roll (filled slots) and train (micro-steps) are work, the others idle: tail (rollout cells that too little is left to
fill), data (training cells without a complete group), end (waiting for the step's last micro-step), update, move (between
roles). late: how much later than asked a sleeping process woke, 99th percentile: what the load of the machine does to times.
The last line is for scripts: makespans over elastic's, means over the seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from elastic_parts.choose import candidates
from elastic_parts.reading import IDLE, Measured, measured
from elastic_parts.records import WORKLOADS
from elastic_parts.runs import run_once
from elastic_parts.shapes import CHOSEN, SCHEDULES, STEPS
from gyre.contracts.errors import GyreError

HEADS = ("schedule", "seed", "makespan", "ratio", "of bound", "simulated", "foretold", "roll", "train", *IDLE, "moves",
         "to train", "to rollout", "stall p99", "spread", "stale", "longer", "own cpu", "machine", "late")
TIMEOUT_S = 900.0


def say(text: str) -> None:
    print(text, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, default="paper")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--steps", type=int, default=0, help="instead of the workload's; a multiple of every burst")
    parser.add_argument("--set", action="append", default=[], help="override of the run's configuration")
    parser.add_argument("--choose", action="store_true", help="simulate every arrangement and stop")
    parser.add_argument("--out", type=Path, help="append each run's figures to this file, a line of JSON each")
    parser.add_argument("--read", type=Path, help="print the table of such a file and stop")
    parser.add_argument("--keep", type=Path, help="leave the runs' directories here")
    return parser.parse_args()


async def measure(options: argparse.Namespace, home: Path) -> list[Measured]:
    """Every schedule of every seed, one after another; a seed's schedules follow each other."""
    overrides = [*([f"steps={options.steps}"] if options.steps else []), *options.set]
    found: list[Measured] = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for schedule in options.schedules.split(","):
            began = time.monotonic()
            shape = CHOSEN[options.workload][schedule]
            run = await run_once(home, options.workload, seed, shape, overrides, TIMEOUT_S, say)
            found.append(measured(run))
            say(told(found[-1], time.monotonic() - began))
            for problem in found[-1].books:
                say(f"  NOT EXACT: {problem}")
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(found[-1])) + "\n")
    return found


def told(m: Measured, wall_s: float) -> str:
    """One run as soon as it is done."""
    idle = ", ".join(f"{use} {100 * m.shares[use]:.1f} %" for use in IDLE)
    return (f"seed {m.seed} {m.schedule}: {m.makespan_s:.1f} s for {m.num_steps} steps (simulated {m.simulated_s:.1f}), idle: "
            f"{idle}; {m.num_transitions} transitions; own processors {100 * m.own_share:.0f} %, machine {100 * m.busy:.0f} %, "
            f"late {1000 * m.late_p99_s:.0f} ms; {wall_s:.0f} s with starting and stopping")


def row(m: Measured, base: float) -> list[str]:
    shares = [f"{100 * m.shares[use]:.1f}" for use in ("roll", "train", *IDLE)]
    return [m.schedule, str(m.seed), f"{m.makespan_s:.1f} s", f"{m.makespan_s / base:.3f}", f"{m.bound_s / m.makespan_s:.3f}",
            f"{m.simulated_s / m.makespan_s:.3f}", f"{m.foretold_s / m.makespan_s:.3f}", *shares, str(m.num_transitions),
            f"{m.transition_s[0]:.2f}", f"{m.transition_s[1]:.2f}", f"{m.stall_p99_s:.2f}", f"{m.spread_s:.2f}",
            str(m.num_stale), f"{m.stretched:.3f}",
            f"{100 * m.own_share:.0f} %", f"{100 * m.busy:.0f} %", f"{1000 * m.late_p99_s:.0f} ms"]


def table(found: list[Measured]) -> None:
    """Every run; then each schedule's ratio to elastic over the seeds they share."""
    base = {m.seed: m.makespan_s for m in found if m.schedule == "elastic"}
    rows = [list(HEADS), *(row(m, base.get(m.seed, float("nan"))) for m in found)]
    widths = [max(len(r[i]) for r in rows) for i in range(len(HEADS))]
    for each in rows:
        say("  ".join(t.rjust(w) if i else t.ljust(w) for i, (t, w) in enumerate(zip(each, widths, strict=True))))
    for schedule in dict.fromkeys(m.schedule for m in found):
        if ratios := over_elastic(found, schedule):
            say(f"{schedule}: {statistics.fmean(ratios):.3f} of elastic's time [{min(ratios):.3f}, {max(ratios):.3f}], "
                f"{len(ratios)} seeds")


def over_elastic(found: list[Measured], schedule: str) -> list[float]:
    base = {m.seed: m.makespan_s for m in found if m.schedule == "elastic"}
    return [m.makespan_s / base[m.seed] for m in found if m.schedule == schedule and m.seed in base]


def last_line(found: list[Measured]) -> str:
    def mean(values: list[float]) -> str:
        return f"{statistics.fmean(values):.3f}" if values else "nan"

    elastic = [m for m in found if m.schedule == "elastic"]
    names = {"async": "async", "async_streaming": "async+streaming", "colocate": "colocate", "streamed": SCHEDULES[-1]}
    ratios = [f"vs_{name}={mean(over_elastic(found, schedule))}" for name, schedule in names.items()]
    return " ".join(("elastic", *ratios, f"of_bound={mean([m.bound_s / m.makespan_s for m in elastic])}",
                     f"of_simulated={mean([m.simulated_s / m.makespan_s for m in elastic])}"))


def read(path: Path) -> list[Measured]:
    return [Measured(**json.loads(line)) for line in path.read_text().splitlines()]


def main() -> int:
    options = arguments()
    unknown = set(options.schedules.split(",")) - set(SCHEDULES)
    if unknown:
        say(f"--schedules {options.schedules}: unknown: {', '.join(sorted(unknown))}; use {', '.join(SCHEDULES)}")
        return 2
    if options.choose:
        candidates(options.workload, say)
        return 0
    say(f"{options.workload}: {options.steps or STEPS[options.workload]} steps")
    try:
        if options.read:
            found = read(options.read)
        elif options.keep:
            found = asyncio.run(measure(options, options.keep.resolve()))
        else:
            with tempfile.TemporaryDirectory(prefix="gyre-elastic-") as home:
                found = asyncio.run(measure(options, Path(home)))
    except GyreError as error:
        say(f"elastic: {error}")
        return 1
    table(found)
    say(last_line(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
