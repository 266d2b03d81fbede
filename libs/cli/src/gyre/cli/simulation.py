"""`gyre simulate`: asks the scheduler's simulator, in a process of its own, and lays side by side what it answers."""

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from gyre.cli.charts import duration
from gyre.contracts.errors import ConfigError, GyreError
from gyre.contracts.simulation import Simulated, SimulationRequest, WorkloadRows
from gyre.runtime.settings import read_toml, to_toml

MIN_CALLS = 20  # of an autonomous stretch of a recorded session that counts as an execution
SHAPE = ("schedule", "steps_per_burst", "phi", "num_standalone", "num_training")
IDLE = ("tail", "data", "end", "update", "move", "lost")
HEADS = ("schedule", "mu", "phi", "cells", "per step", "ratio", "of bound", "busy", *IDLE[:-1], "staleness", "max", "stale",
         "switches", "moved", "preempted", "held back by")
LEFT = (0, 3, len(HEADS) - 1)  # columns of words


# ---------------------------------------------------------------- asking


def ask(request: SimulationRequest) -> Iterator[Simulated]:
    """Simulated runs as they are done. Raises ConfigError with the simulator's reason if it refuses."""
    process = subprocess.Popen([sys.executable, "-m", "gyre.scheduler.simulate"], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin and process.stdout and process.stderr
    try:
        process.stdin.write(msgspec.json.encode(request))
        process.stdin.close()
        for text in process.stdout:
            yield msgspec.json.decode(text, type=Simulated)
        reason = process.stderr.read().decode(errors="replace").strip()
        code = process.wait()
    finally:
        process.kill()
        process.wait()
    if code == 2:
        raise ConfigError(reason)
    if code:
        raise GyreError(f"the simulator ended with code {code}: {reason.splitlines()[-1] if reason else 'it said nothing'}")


def merged_constants(path: Path | None, measured: dict[str, dict[str, float]]) -> str:
    """The constants file as TOML; what it says wins over what was measured. Raises ConfigError."""
    tables: dict[str, Any] = {name: dict(section) for name, section in measured.items()}
    for name, value in (read_toml(path) if path else {}).items():
        tables[name] = tables.get(name, {}) | value if isinstance(value, dict) else value
    return to_toml(tables) if tables else ""


# ---------------------------------------------------------------- workloads


def workload_rows(name: str) -> WorkloadRows | None:
    """`lognormal` (None: nothing is recorded), or a file: a table of executions, or sessions one a line.

    Raises:
        ConfigError: there is no such file, or it is neither.
    """
    if name == "lognormal":
        return None
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"--workload {name}: no such file; give lognormal, a table like cc_segments_ge20.json or sessions "
                          "like cc_agent_sessions.jsonl")
    try:
        if path.suffix == ".jsonl":
            return _stretches(path)
        return msgspec.json.decode(path.read_bytes(), type=WorkloadRows)
    except (msgspec.DecodeError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"--workload {name}: {error}; expected {{\"fields\": [\"seconds\", ...], \"rows\": [[...], ...]}}, "
                          "or a session a line with \"req\": [[t, in, out, api_s, delay_s, stop], ...]") from None


def _stretches(path: Path) -> WorkloadRows:
    """Autonomous stretches of at least MIN_CALLS calls: from a call to the end of the one that ends the turn."""
    rows: list[tuple[float | str, ...]] = []
    for text in path.read_text(encoding="utf-8").splitlines():
        stretch: list[list] = []
        for call in msgspec.json.decode(text)["req"]:
            if not isinstance(call, list):
                continue  # a sub-agent's calls: inside the stretch, not a part of its own length
            stretch.append(call)
            if call[5] == "end_turn":
                rows += _row(stretch)
                stretch = []
        rows += _row(stretch)
    return WorkloadRows(("seconds", "max_context"), tuple(rows), path.name)


def _row(stretch: list[list]) -> list[tuple[float | str, ...]]:
    if len(stretch) < MIN_CALLS:
        return []
    seconds = stretch[-1][0] + (stretch[-1][3] or 0.0) - stretch[0][0]  # of some calls the model's time is not known
    return [(float(seconds), float(max(call[1] + call[2] for call in stretch)))] if seconds > 0 else []


# ---------------------------------------------------------------- comparing


@dataclass(frozen=True, slots=True)
class Line:
    """One schedule in one shape, over all seeds. `ratios`: its time per step over the first line's, seed by seed."""

    runs: tuple[Simulated, ...]
    ratios: tuple[float, ...]

    @property
    def first(self) -> Simulated:
        return self.runs[0]

    @property
    def step_s(self) -> float:
        return statistics.fmean(step_s(run) for run in self.runs)

    def share(self, *uses: str) -> float:
        """Share of all cells' time."""
        return statistics.fmean(sum(run.cell_s[u] for u in uses) / sum(run.cell_s.values()) for run in self.runs)

    @property
    def bound(self) -> float:
        return statistics.fmean(run.makespan_s / run.lower_bound_s for run in self.runs)

    @property
    def staleness(self) -> tuple[float, int]:
        """Mean and largest, in versions, over all groups."""
        found = [s for run in self.runs for step in run.steps for s in step.staleness]
        return statistics.fmean(found), max(found)

    @property
    def spread_s(self) -> float:
        """Between the first and the last cell's end in a step, on average."""
        return statistics.fmean(step.spread_s for run in self.runs for step in run.steps)


def step_s(run: Simulated) -> float:
    """Seconds per step."""
    return run.makespan_s / len(run.steps)


def lines_of(runs: Sequence[Simulated]) -> list[Line]:
    """Runs of one shape together, in the order in which they came."""
    shapes: dict[tuple, list[Simulated]] = {}
    for run in runs:
        shapes.setdefault(tuple(getattr(run, name) for name in SHAPE), []).append(run)
    base = {run.seed: step_s(run) for run in next(iter(shapes.values()))}
    return [Line(tuple(found), tuple(step_s(run) / base[run.seed] for run in found)) for found in shapes.values()]


def best_lines(runs: Sequence[Simulated]) -> list[Line]:
    """Of every schedule its fastest shape; ratios are to the first schedule's."""
    best: dict[str, Line] = {}
    for found in lines_of(runs):
        name = found.first.schedule
        if name not in best or found.step_s < best[name].step_s:
            best[name] = found
    return lines_of([run for found in best.values() for run in found.runs])


def cells(line: Line) -> list[str]:
    """The line as the table shows it, under HEADS."""
    run, (mean, most) = line.first, line.staleness
    low, high = min(line.ratios), max(line.ratios)
    wide = f" [{low:.3f}, {high:.3f}]" if len(line.ratios) > 1 and high - low > 5e-4 else ""
    divided = str(run.num_cells) + (f"+{run.num_standalone}" if run.num_standalone else "")
    divided += f", {run.num_training} train" if run.num_training else ""
    num_steps, totals = sum(len(r.steps) for r in line.runs), _totals(line.runs)
    gates = ", ".join(f"{gate} {num / num_steps:.2g}" for gate, num in sorted(_gates(line.runs).items()))
    return [run.schedule, str(run.steps_per_burst), str(run.phi), divided, duration(line.step_s),
            f"{statistics.fmean(line.ratios):.3f}{wide}", f"{line.bound:.3f}", f"{100 * line.share('roll', 'train'):.1f} %",
            *(f"{100 * line.share(use):.1f}" for use in IDLE[:-1]), f"{mean:.2f}", str(most), str(totals[0]),
            f"{totals[1] / num_steps:.1f}", str(totals[2]), str(totals[3]), gates or "-"]


def _totals(runs: Sequence[Simulated]) -> tuple[int, int, int, int]:
    return (sum(r.num_stale_groups for r in runs), sum(r.num_switches for r in runs), sum(r.num_moved for r in runs),
            sum(r.num_preempted for r in runs))


def _gates(runs: Sequence[Simulated]) -> dict[str, int]:
    names = {gate for run in runs for gate in run.gates}
    return {gate: sum(run.gates.get(gate, 0) for run in runs) for gate in names}


EXPLAINED = """\
per step: time until the run closes, divided by its steps; ratio: to the first line, mean [lowest, highest] over the seeds,
which are paired: equal executions for all. of bound: over what no schedule can beat with that burst. Shares of all cells'
time, in %: busy (filled rollout slots, micro-steps); tail (rollout cells that too little is left to fill); data (training
cells without a complete group); end (waiting for the step's last micro-step); update; move (between roles). staleness:
versions between dispatch and training, mean and max; stale: groups that were too old and not trained. switches, held back
by: per step."""


def collect(request: SimulationRequest, progress: Callable[[int, Simulated], None]) -> list[Simulated]:
    """All runs; `progress` hears of each as it is done, with how many there are by then."""
    runs: list[Simulated] = []
    for run in ask(request):
        runs.append(run)
        progress(len(runs), run)
    return runs
