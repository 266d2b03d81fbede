"""A recorded run as the simulator takes it: its executions group by group, and what its stages took.

What is measured: durations of the executions, from their dispatch where none had to wait for another to end, and their
contexts; where more ran than the serving cells hold, what they would have taken by themselves, since the simulation slows them
down again; the time from an execution's end to its score; the cost of its micro-steps in seconds of one cell (steps from their
seal to their end, all cells that trained in them thought busy), the update inside it; transitions by stage, new weights in
engines that stayed; the time from a burst's last step to its publication. A move is taken to be over when its cell is.
"""

import asyncio
import shutil
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from gyre.cli.facts import Stamped
from gyre.cli.launcher import HOST, connect_patiently, nats_binary
from gyre.cli.ledger import RunLedger, load_ledger
from gyre.cli.run_dir import open_existing, read_pids
from gyre.cli.views import cell_timelines, executions, level_at, roles_at, waterlevels
from gyre.contracts import events as e
from gyre.contracts.errors import ConfigError
from gyre.contracts.simulation import WorkloadRows
from gyre.runtime.blobs import open_blobs
from gyre.runtime.config import Deployment, load_deployment
from gyre.runtime.ports import free_ports

STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class Recording:
    """constants: sections of the constants file, as measured. makespan_s: from the first training dispatch to the last step's
    end, as it really was. num_steps: finished ones."""

    rows: WorkloadRows
    constants: dict[str, dict[str, float]] = field(default_factory=dict)
    makespan_s: float = 0.0
    num_steps: int = 0


@dataclass(frozen=True, slots=True)
class Room:
    """Executions that one cell serves at full speed, and that ran at once at most."""

    per_cell: int
    max_concurrent: int


def recording_of(ledger: RunLedger, room: Room) -> Recording:
    """Raises ConfigError if no training group is complete."""
    levels, pace = waterlevels(ledger), Pace.of(ledger, room)
    cost_s = _seconds_per_cost(ledger)
    ended, rows = executions(ledger), []
    for name, dispatched in ledger.all(e.GroupDispatched).items():
        completed = ledger.get(e.GroupCompleted, name)
        if dispatched.fact.purpose != "train" or completed is None:
            continue
        specs = dispatched.fact.executions
        waits = level_at(levels, dispatched.time_s) > room.max_concurrent
        train_s = cost_s * sum(ref.cost for ref in completed.fact.micro_steps) / len(specs)
        for spec in specs:
            terminated = ended[spec.execution].terminated
            if terminated is not None:
                took_s = terminated.fact.wall_s if waits else max(0.0, terminated.time_s - dispatched.time_s)
                seconds = pace.between(terminated.time_s - took_s, terminated.time_s)
                rows.append((seconds, terminated.fact.max_context, train_s, name))
    if not rows:
        raise ConfigError(f"{ledger.run}: no training group is complete, so there is nothing to simulate from")
    begin = min(d.time_s for d in ledger.all(e.GroupDispatched).values() if d.fact.purpose == "train")
    finished = ledger.all(e.StepFinished)
    end = max((s.time_s for s in finished.values()), default=begin)
    return Recording(WorkloadRows(("seconds", "max_context", "train_s", "group"), tuple(rows), ledger.run),
                     _constants(ledger), end - begin, len(finished))




@dataclass(frozen=True, slots=True)
class Pace:
    """How far executions came: from `times[i]` on they advance `rates[i]` seconds a second, having come `reached[i]`."""

    times: tuple[float, ...]
    rates: tuple[float, ...]
    reached: tuple[float, ...]

    @classmethod
    def of(cls, ledger: RunLedger, room: Room) -> "Pace":
        """As the simulation has it: at a load above what the serving cells hold everything is that much slower."""
        levels, timelines = waterlevels(ledger), cell_timelines(ledger)
        times = sorted({t for t, _ in levels} | {b.start_s for bars in timelines.values() for b in bars})
        rates, reached = [], [0.0]
        for time in times:
            load = min(level_at(levels, time), room.max_concurrent)
            serving = sum(role == "rollout" for role in roles_at(timelines, time).values())
            rates.append(min(1.0, serving * room.per_cell / load) if load else 1.0)
        for start, end, rate in zip(times, times[1:], rates, strict=False):
            reached.append(reached[-1] + (end - start) * rate)
        return cls(tuple(times), tuple(rates), tuple(reached[:len(times)]))

    def _at(self, time_s: float) -> float:
        place = bisect_right(self.times, time_s) - 1
        if place < 0:
            return time_s - self.times[0] if self.times else time_s
        return self.reached[place] + (time_s - self.times[place]) * self.rates[place]

    def between(self, start_s: float, end_s: float) -> float:
        """Seconds at full speed."""
        return self._at(end_s) - self._at(start_s)


def _seconds_per_cost(ledger: RunLedger) -> float:
    """Cell-seconds per unit of cost over all steps; 0 if none was finished."""
    timelines = cell_timelines(ledger)
    spent = cost = 0.0
    before = 0.0
    for step in ledger.steps:
        sealed = ledger.get(e.StepSealed, str(step.finished.step))
        start = max(before, sealed.time_s) if sealed else step.started_s
        before = step.ended_s
        spent += sum(max(0.0, min(b.end_s, step.ended_s) - max(b.start_s, start))
                     for bars in timelines.values() for b in bars if b.role == "train")
        cost += sum(ref.cost for group in step.groups for ref in group.micro_steps)
    return spent / cost if cost else 0.0


def _constants(ledger: RunLedger) -> dict[str, dict[str, float]]:
    ended, scored = ledger.all(e.ExecutionTerminated), ledger.all(e.ExecutionScored)
    finished = {s.fact.version: s.time_s for s in ledger.all(e.StepFinished).values()}
    sections: dict[str, dict[str, float]] = defaultdict(dict)
    _mean_into(sections, "rollout.evaluation_s", (s.time_s - ended[n].time_s for n, s in scored.items() if n in ended))
    _mean_into(sections, "training.publish_s", (w.time_s - finished[w.fact.version]
                                                for w in ledger.all(e.WeightsPublished).values() if w.fact.version in finished))
    sections["training"]["update_s"] = 0.0
    given = {(a.fact.cell, a.fact.epoch): a for a in ledger.all(e.CellRoleAssigned).values()}
    released = {(r.fact.cell, r.fact.epoch): r.time_s for r in ledger.all(e.CellRolloutReleased).values()}
    left = {(r.fact.cell, r.fact.epoch): r.time_s for r in ledger.all(e.CellTrainReleased).values()}
    joined = {(j.fact.cell, j.fact.epoch): j.time_s for j in ledger.all(e.CellTrainJoined).values()}
    ready: dict[tuple[int, int], float] = {}
    for r in ledger.all(e.CellRolloutReady).values():
        ready.setdefault((r.fact.cell, r.fact.epoch), r.time_s)
    began = {key: a.time_s for key, a in given.items()}
    for name, starts, ends in (("release_s", began, released), ("join_s", released, joined), ("leave_s", began, left),
                               ("ready_s", left, ready)):
        _mean_into(sections, f"transition.{name}", (ends[k] - starts[k] for k in given if k in starts and k in ends))
    published = {w.fact.version: w.time_s for w in ledger.all(e.WeightsPublished).values()}
    swaps = [r.time_s - published[r.fact.version] for (key, r) in _ready_again(ledger, ready) if r.fact.version in published]
    _mean_into(sections, "transition.swap_s", swaps or [sections["transition"].get("ready_s", 0.0)])
    sections["rollout"]["move_stall_s"] = sections["transition"].get("release_s", 0.0)
    return dict(sections)


def _ready_again(ledger: RunLedger, first: dict[tuple[int, int], float]) -> list[tuple[tuple[int, int], Stamped]]:
    """What engines said that took new weights without having left rollout."""
    said = [((r.fact.cell, r.fact.epoch), r) for r in ledger.all(e.CellRolloutReady).values()]
    return [(key, r) for key, r in said if r.time_s > first[key]]


def _mean_into(sections: dict[str, dict[str, float]], key: str, values: Iterable[float]) -> None:
    """The mean, if there is anything to average; clocks of different processes may disagree, so never less than 0."""
    found = [max(0.0, v) for v in values]
    if found:
        section, _, name = key.partition(".")
        sections[section][name] = sum(found) / len(found)


# ---------------------------------------------------------------- reading


def read_recording(run: Path, room: Room) -> Recording:
    """Read a run's facts, from its NATS server if it is up, else from a copy of what the server left on disk.

    Raises:
        ConfigError: there is no run, or nothing of it can be simulated.
    """
    found = open_existing(run)
    if not found.deployment.exists():
        raise ConfigError(f"{run}: deployment.toml is missing, so there are no facts to read")
    deployment = load_deployment(found.deployment)
    if read_pids(found):
        return recording_of(asyncio.run(_load(deployment.nats_url, deployment)), room)
    store = found.path / "nats"
    if not store.is_dir():
        raise ConfigError(f"{store}: no such directory; the run's facts are not on this machine")
    with tempfile.TemporaryDirectory(prefix="gyre-simulate-") as home:
        copy = Path(home) / "nats"
        shutil.copytree(store, copy)
        return recording_of(asyncio.run(_load_stored(copy, deployment)), room)


async def _load(url: str, deployment: Deployment) -> RunLedger:
    bus = await connect_patiently(url)
    try:
        return await load_ledger(bus, deployment.run, open_blobs(deployment.blobs), with_calls=False)
    finally:
        await bus.close()


async def _load_stored(store: Path, deployment: Deployment) -> RunLedger:
    port = free_ports(1, HOST)[0]
    server = await asyncio.create_subprocess_exec(
        nats_binary(), "-a", HOST, "-p", str(port), "-js", "-sd", str(store), stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL)
    try:
        return await _load(f"nats://{HOST}:{port}", deployment)
    finally:
        server.terminate()
        try:
            await asyncio.wait_for(server.wait(), STOP_S)
        except TimeoutError:
            server.kill()
            await server.wait()
