"""What a run's facts and logs say of where the time of its cells went."""

from __future__ import annotations

import json
import re
import statistics
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from elastic_parts.runs import Run
from elastic_parts.shapes import constants_of, simulated
from gyre.cli.recorded import Room, recording_of
from gyre.cli.views import cell_timelines, executions, waterlevels
from gyre.contracts import events as e
from gyre.contracts.simulation import CellUse, WorkloadRows
from gyre.runtime.settings import parse
from gyre.scheduler.simulation.bounds import lower_bound
from gyre.scheduler.simulation.constants import Constants
from gyre.scheduler.simulation.scenario import plan_of_shape
from gyre.scheduler.simulation.workload import from_rows

BUSY_LINE = re.compile(r"timed micro-step: (\d+) tokens from ([\d.]+) to ([\d.]+)")
IDLE: tuple[CellUse, ...] = ("tail", "data", "end", "update", "move")
Busy = dict[int, list[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. `shares`: of all cells' time, by use. `stall_p99_s`: of an execution, over its whole life."""

    workload: str
    schedule: str
    seed: int
    num_steps: int
    makespan_s: float
    bound_s: float
    simulated_s: float
    foretold_s: float  # simulated with the constants guessed beforehand and the records as they were written
    shares: dict[CellUse, float]
    num_transitions: int
    transition_s: tuple[float, float]  # median to train, to rollout
    stall_p99_s: float
    spread_s: float
    num_stale: int
    own_share: float
    busy: float
    late_p99_s: float
    stretched: float  # executions' real durations over those of the records
    books: tuple[str, ...]


def measured(run: Run) -> Measured:
    """Read one finished run."""
    ledger, config = run.ledger, run.config
    begin = min(b.time_s for b in ledger.all(e.BurstOpened).values())
    end = max(c.time_s for c in ledger.all(e.RunClosed).values())
    busy = micro_steps(run.directory.logs)
    recording = recording_of(ledger, Room(config.cells.executions_per_cell, config.harness.max_concurrent))
    windows = Windows(run, busy)
    constants = _with_measured(recording.constants, windows.update_s)
    plan, demands = plan_of_shape(config), from_rows(run.rows, 0.0, 0.0, 0)
    groups = [demands.group(i, plan.executions_per_group) for i in range(plan.num_steps * plan.groups_per_step)]
    stale = sum(len(s.fact.stale_groups) for s in ledger.all(e.StepSealed).values())
    stalls = sorted(t.fact.stall_s for t in ledger.all(e.ExecutionTerminated).values())
    return Measured(
        run.workload, run.shape.schedule, run.seed, len(ledger.steps), end - begin,
        lower_bound(plan, constants_of(), groups), simulated(config, run.shape, constants, real_rows(run)).makespan_s,
        simulated(config, run.shape, constants_of(), run.rows).makespan_s, shares(run, windows, begin, end),
        len(ledger.all(e.CellRoleAssigned)), transition_times(run), stalls[int(0.99 * len(stalls))],
        statistics.fmean(spreads(run, busy)), stale, run.load.own_share, run.load.busy, run.load.late_p99_s, stretched(run),
        tuple(check.text for check in ledger.checks() if not check.ok))


def _with_measured(sections: dict[str, dict[str, float]], update_s: float) -> Constants:
    """The recording's stages as the simulator's constants."""
    sections = {name: dict(section) for name, section in sections.items()}
    sections.setdefault("training", {})["update_s"] = update_s
    return parse(sections, Constants, "the recording")


def real_rows(run: Run) -> WorkloadRows:
    """The executions as they really went, what training them costs as the timed trainers take it, in order of dispatch."""
    ended, per_token, rows = executions(run.ledger), run.config.training.timed_s_per_token, []
    for name, dispatched in run.ledger.all(e.GroupDispatched).items():
        completed = run.ledger.get(e.GroupCompleted, name)
        num_tokens = sum(ref.num_tokens for ref in completed.fact.micro_steps) if completed else 0
        specs = dispatched.fact.executions
        for spec in specs:
            fact = ended[spec.execution].terminated.fact
            rows.append((fact.wall_s, float(fact.max_context), num_tokens * per_token / len(specs), name))
    return WorkloadRows(("seconds", "max_context", "train_s", "group"), tuple(rows), run.directory.name)


def micro_steps(logs: Path) -> Busy:
    """When each cell computed, in Unix seconds: the timed trainers wrote it down."""
    found: Busy = defaultdict(list)
    for path in sorted(logs.glob("trainer-*.log")):
        cell = int(path.stem.rpartition("-")[2])
        for line in path.read_text(encoding="utf-8").splitlines():
            if "timed micro-step" in line and (match := BUSY_LINE.search(json.loads(line)["message"])):
                found[cell].append((float(match[2]), float(match[3])))
    return found


def stretched(run: Run) -> float:
    """Mean real duration of an execution, its start-up included, over the mean duration of its record."""
    real = statistics.fmean(x.terminated.fact.wall_s for x in executions(run.ledger).values() if x.terminated is not None)
    return real / statistics.fmean(float(row[0]) for row in run.rows.rows)


def transition_times(run: Run) -> tuple[float, float]:
    """Median seconds from an assignment to its confirmation, to train and to rollout; nan if there was none."""
    found: dict[str, list[float]] = {"to train": [], "to rollout": []}
    for bars in cell_timelines(run.ledger).values():
        for bar in bars:
            if bar.role in found:
                found[bar.role].append(bar.end_s - bar.start_s)
    to_train, to_rollout = (statistics.median(times) if times else float("nan") for times in found.values())
    return to_train, to_rollout


def spreads(run: Run, busy: Busy) -> list[float]:
    """Of each step in which several cells computed: seconds between the first and the last cell's last end."""
    found, before = [], 0.0
    for step in run.ledger.steps:
        lasts = [max(ends) for spans in busy.values()
                 if (ends := [b for a, b in spans if before < b <= step.ended_s])]
        found += [max(lasts) - min(lasts)] if len(lasts) > 1 else []
        before = step.ended_s
    return found or [0.0]


# ---------------------------------------------------------------- where the time went


def shares(run: Run, windows: Windows, begin: float, end: float) -> dict[CellUse, float]:
    """Shares of all cells' time between `begin` and `end`."""
    total: dict[CellUse, float] = dict.fromkeys(("roll", "tail", "train", "data", "end", "update", "move", "lost"), 0.0)
    timelines = cell_timelines(run.ledger)
    serving: list[tuple[float, float]] = []
    for cell, bars in timelines.items():
        for bar in bars:
            a, b = max(bar.start_s, begin), min(bar.end_s, end)
            if b <= a:
                continue
            if bar.role == "rollout":
                serving.append((a, b))
            elif bar.role == "train":
                for use, seconds in windows.training(cell, a, b).items():
                    total[use] += seconds
            else:
                total["move"] += b - a
    total["roll"] = filled(run, serving, begin, end)
    total["tail"] = sum(b - a for a, b in serving) - total["roll"]
    whole = (end - begin) * len(timelines)
    return {use: seconds / whole for use, seconds in total.items()}


def filled(run: Run, serving: list[tuple[float, float]], begin: float, end: float) -> float:
    """Cell-seconds of rollout that executions filled, as if they lay close together."""
    levels = waterlevels(run.ledger)
    edges = sorted({begin, end, *(t for t, _ in levels if begin < t < end),
                    *(t for span in serving for t in span if begin < t < end)})
    capacity, most, at, level, total = run.config.cells.executions_per_cell, run.config.harness.max_concurrent, 0, 0, 0.0
    for low, high in zip(edges, edges[1:], strict=False):
        while at < len(levels) and levels[at][0] <= low:
            level, at = levels[at][1], at + 1
        num = sum(a <= low and b >= high for a, b in serving)
        total += (high - low) * min(min(level, most) / capacity, num)
    return total


class Windows:
    """Which time of a training cell was an update, and which the end of a step."""

    def __init__(self, run: Run, busy: Busy) -> None:
        self._busy = busy
        published = {w.fact.version: w.time_s for w in run.ledger.all(e.WeightsPublished).values()}
        self._updates: list[tuple[float, float]] = []
        self._ends: list[tuple[float, float, float]] = []  # of each step: its begin, seal, last micro-step
        self._took: list[float] = []
        before = 0.0
        sealed = {s.fact.step: s.time_s for s in run.ledger.all(e.StepSealed).values()}
        for step in run.ledger.steps:
            last = max((b for spans in busy.values() for _, b in spans if before < b <= step.ended_s), default=step.ended_s)
            last = max(last, sealed.get(step.finished.step, last))
            self._updates.append((last, max(step.ended_s, published.get(step.finished.version, 0.0))))
            self._ends.append((before, sealed.get(step.finished.step, last), last))
            self._took.append(step.ended_s - last)
            before = step.ended_s

    @property
    def update_s(self) -> float:
        """Mean seconds of an update, publication apart."""
        return statistics.fmean(self._took) if self._took else 0.0

    def training(self, cell: int, begin: float, end: float) -> dict[CellUse, float]:
        """Seconds by use of a cell that trained from `begin` to `end`."""
        mine = [(a, b) for a, b in self._busy.get(cell, []) if b > begin and a < end]
        found: dict[CellUse, float] = {"train": sum(min(b, end) - max(a, begin) for a, b in mine),
                                       "update": _overlap(self._updates, begin, end), "end": 0.0}
        ends = sorted(b for _, b in mine)
        for start, seal, last in self._ends:
            place = bisect_left(ends, last + 1e-3)
            own = ends[place - 1] if place and ends[place - 1] > start else None
            if own is not None:
                found["end"] += max(0.0, min(last, end) - max(own, seal, begin))
        found["data"] = max(0.0, (end - begin) - sum(found.values()))
        return found


def _overlap(windows: list[tuple[float, float]], begin: float, end: float) -> float:
    return sum(max(0.0, min(b, end) - max(a, begin)) for a, b in windows)
