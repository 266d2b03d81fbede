"""One real run: every process of the system on this machine, watched for how busy the processors are meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
from elastic_parts.records import groups_of, rows_of, write_tasks
from elastic_parts.shapes import base_config, config_of
from elastic_parts.tiny_policy import write_policy
from gyre.cli.ledger import RunLedger
from gyre.cli.prepare import prepare
from gyre.cli.run_dir import RunDir, create, read_pids
from gyre.cli.session import start_run
from gyre.cli.train import Options, Watcher, launched
from gyre.contracts.simulation import WorkloadRows
from gyre.runtime.config import RunConfig, config_digest, load_deployment
from gyre.scheduler.simulation.scenario import Shape

LOOK_S = 0.25


@dataclass(slots=True)
class Load:
    """own: processor seconds of the run's processes. busy: share of the machine's processors that worked, whoever for.
    late_s: how much later than asked this process woke up, look by look."""

    own_s: float = 0.0
    busy: float = 0.0
    wall_s: float = 0.0
    late_s: list[float] = field(default_factory=list)

    @property
    def own_share(self) -> float:
        """Of all processors."""
        return self.own_s / (self.wall_s * (psutil.cpu_count() or 1)) if self.wall_s else 0.0

    @property
    def late_p99_s(self) -> float:
        return sorted(self.late_s)[int(0.99 * len(self.late_s))] if self.late_s else 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """What is left of a run: its facts, its logs, its load, and the same executions as the simulator takes them."""

    workload: str
    seed: int
    shape: Shape
    config: RunConfig
    directory: RunDir
    ledger: RunLedger
    load: Load
    rows: WorkloadRows
    reason: str


def prepared(home: Path, workload: str, seed: int, shape: Shape, overrides: list[str]) -> tuple[RunConfig, WorkloadRows]:
    """The configuration of a run whose tasks and policy lie below `home`, and its executions as a table."""
    base = config_of(base_config(workload, [f"seed={seed}", *overrides]), shape)
    root = home / f"{workload}-{seed}-{base.steps}" / "tasks"
    token_s = base.engine.script_token_ms / 1000
    groups = groups_of(workload, seed, base.steps * base.burst.groups_per_step, base.burst.executions_per_group, token_s)
    if not root.exists():
        write_tasks(root, groups)
    checkpoint = home / "policy"
    if not checkpoint.exists():
        write_policy(checkpoint)
    config = replace(base, tasks=replace(base.tasks, root=str(root)), policy=replace(base.policy, checkpoint=str(checkpoint)))
    return config, rows_of(config, groups)


async def run_once(home: Path, workload: str, seed: int, shape: Shape, overrides: list[str], timeout_s: float,
                   say: Callable[[str], None]) -> Run:
    """One run of a workload. Raises GyreError or TimeoutError."""
    config, rows = prepared(home, workload, seed, shape, overrides)
    config = replace(config, name=f"{workload}-{shape.schedule.replace('+', '-')}-s{seed}")
    directory, ledger, load, reason = await play(home, config, timeout_s, say)
    return Run(workload, seed, shape, config, directory, ledger, load, rows, reason)


async def play(home: Path, config: RunConfig, timeout_s: float,
               say: Callable[[str], None]) -> tuple[RunDir, RunLedger, Load, str]:
    """Start everything, run to the end, stop everything; also the reason of the end. Raises GyreError or TimeoutError."""
    prepare(config, say)
    directory = create(home / "runs", config, ["bench"])
    options = Options(allow_unsandboxed=True, durability="process")
    watcher, load = Watcher(directory, config, options, _silent), Load()
    async with asyncio.timeout(timeout_s), launched(directory, config, options, say):
        deployment = load_deployment(directory.deployment)
        opening, _ = await start_run(deployment, config_digest(config))
        watching = asyncio.create_task(watch(load, directory))
        try:
            reason = await watcher.until_closed(deployment, opening)
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
    return directory, watcher.ledger, load, reason


def _silent(text: str) -> None:
    """Steps are not worth a line here."""


async def watch(load: Load, directory: RunDir) -> None:
    """Until cancelled: how late a sleep ends, and in the end what the processors did meanwhile."""
    began, machine, own = time.monotonic(), psutil.cpu_times(), processor_s(directory)
    try:
        while True:
            asked = time.monotonic() + LOOK_S
            await asyncio.sleep(LOOK_S)
            load.late_s.append(time.monotonic() - asked)
    finally:
        after = psutil.cpu_times()
        load.wall_s, load.own_s = time.monotonic() - began, processor_s(directory) - own
        total, idle = sum(after) - sum(machine), after.idle + after.iowait - machine.idle - machine.iowait
        load.busy = 1.0 - idle / total if total else 0.0


def processor_s(directory: RunDir) -> float:
    """Of every process of the run, what they started and has ended included."""
    total, seen = 0.0, set()
    for pid in read_pids(directory).values():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            for each in (process, *process.children(recursive=True)):
                if each.pid in seen or each.pid == psutil.Process().pid:
                    continue
                seen.add(each.pid)
                with contextlib.suppress(psutil.Error):
                    times = each.cpu_times()
                    total += times.user + times.system + times.children_user + times.children_system
    return total
