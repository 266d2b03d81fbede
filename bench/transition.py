"""What does it take a cell to change its role, stage by stage? `make bench NAME=transition`.

A real run of every process with the torch engine and the torch trainer: three cells, a policy of 25 million parameters (100 MB
in float32), replayed harnesses (`elastic_parts/replay.py`) whose calls are answered while cells leave. The schedule is elastic
with one step carried over each boundary, so that cells leave under load and come back in each of the run's steps. Times are
those of the transitions' traces (`gyre trace`); the table gives each stage's median and longest time, the bytes it is about,
and its time as a multiple of what a plain copy of these bytes in memory takes, measured in this process while the run goes on.

    python bench/transition.py [--steps 6] [--hidden 512] [--layers 8] [--keep DIRECTORY]

Stages overlap and lie in each other: `drain` holds `kv.migrate` (of a cell, from the first move's begin to the last one's
end), `release` holds drain and sleep, `join` holds wake and pull, `restore` holds pull, verify, probe and admit; `publish`
(checkpoint and offer) comes before the way back is decided. The last line is for scripts: medians of whole transitions, and
of_bytes, the median over transitions that moved weights of their time over the copy's.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from elastic_parts.records import Record, write_tasks
from elastic_parts.runs import Load, play
from elastic_parts.shapes import base_config
from elastic_parts.tiny_policy import write_policy
from gyre.cli.run_dir import RunDir
from gyre.cli.trace_view.spans import Span, read_spans
from gyre.cli.trace_view.tree import Transition, transitions
from gyre.contracts.errors import GyreError
from gyre.policy.checkpoint import load_state
from gyre.runtime.telemetry import TRACES

STAGES = {
    "train": {"decide": "gyre.scheduler.decide", "assign": "gyre.scheduler.assign", "release": "gyre.rollout.release",
              "drain": "gyre.rollout.drain", "kv.migrate": "gyre.kv.migrate", "sleep": "gyre.engine.sleep",
              "join": "gyre.train.join", "wake": "gyre.train.wake", "pull": "gyre.weights.pull"},
    "rollout": {"publish": "gyre.weights.publish", "decide": "gyre.scheduler.decide", "assign": "gyre.scheduler.assign",
                "leave": "gyre.train.release", "devices": "gyre.engine.devices", "restore": "gyre.engine.restore",
                "pull": "gyre.weights.pull", "verify": "gyre.weights.verify", "probe": "gyre.engine.probe",
                "admit": "gyre.engine.admit"},
}
COPY_EVERY_S = 3.0
TIMEOUT_S = 900.0
OVERRIDES = ["cells.count=3", "cells.executions_per_cell=6", "burst.steps_per_burst=1", "burst.phi=1",
             "burst.groups_per_step=2", "engine.backend=torch", "engine.kv_tokens=16384",
             "engine.script_token_ms=1.0", "engine.flush_ms=20.0",
             "training={backend='torch', memory_gib=0.0}", "admission.token_budget=256"]
CALLS = ((0.3, 96),) * 3 + ((0.6, 128),) * 2  # of every execution, most of whose time is spent in calls


@dataclass(slots=True)
class Stage:
    """One stage over all transitions of one direction: seconds and bytes of each."""

    seconds: list[float] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)

    def row(self, bandwidth: float) -> tuple[str, str, str, str, str]:
        """num, median, longest, bytes, multiple."""
        median, size = statistics.median(self.seconds), statistics.median(self.num_bytes)
        times = [s / (b / bandwidth) for s, b in zip(self.seconds, self.num_bytes, strict=True) if b]
        return (str(len(self.seconds)), f"{1000 * median:.1f} ms", f"{1000 * max(self.seconds):.1f} ms",
                f"{size / 1e6:.2f} MB" if size else "-", f"{statistics.median(times):.1f}" if times else "-")


def records(num: int, size: int) -> list[list[Record]]:
    """`num` groups of `size` executions, each longer than the one before it."""
    return [[Record(tuple((wait * (1 + 0.5 * i), tokens) for wait, tokens in CALLS)) for i in range(size)] for _ in range(num)]


def stages_of(found: Sequence[Transition], role: str, sizes: dict[str, int]) -> dict[str, Stage]:
    """Every stage of the completed transitions to `role`. `sizes`: bytes of stages whose spans do not say."""
    stages: dict[str, Stage] = defaultdict(Stage)
    for transition in found:
        if transition.says("gyre.role.to") != role or transition.outcome != "completed":
            continue
        spans = [node.span for _, node in transition.root.walk() if node.span.end_ns is not None]
        for name, wanted in STAGES[role].items():
            if mine := [span for span in spans if span.name == wanted]:
                stages[name].seconds.append((max(s.end_ns or 0 for s in mine) - min(s.start_ns for s in mine)) / 1e9)
                said = sum(int(span.attributes.get("gyre.bytes", 0)) for span in mine)
                stages[name].num_bytes.append(said or sizes.get(name, 0))
        stages["whole"].seconds.append(transition.duration_ns / 1e9)
        stages["whole"].num_bytes.append(transition.num_bytes)
    return {name: stages[name] for name in (*STAGES[role], "whole") if name in stages}


async def copy_meanwhile(num_bytes: int, speeds: list[float]) -> None:
    """Until cancelled, copy so many bytes in memory now and then; bytes per second go to `speeds`."""
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    while True:
        began = time.perf_counter()
        np.copyto(target, source)
        speeds.append(num_bytes / (time.perf_counter() - began))
        await asyncio.sleep(COPY_EVERY_S)


async def measure(options: argparse.Namespace, home: Path) -> tuple[RunDir, Load, float, int]:
    """The run's directory, its load, bytes per second of a plain copy, bytes of the weights."""
    checkpoint = write_policy(home / "policy", options.hidden, options.layers, options.heads)
    base = base_config("paper", [f"steps={options.steps}", "name=bench-transition", *OVERRIDES])
    write_tasks(home / "tasks", records(options.steps * base.burst.groups_per_step, base.burst.executions_per_group))
    config = replace(base, tasks=replace(base.tasks, root=str(home / "tasks")),
                     policy=replace(base.policy, checkpoint=str(checkpoint)))
    num_bytes = sum(t.nbytes for t in load_state(checkpoint).values())
    speeds: list[float] = []
    copying = asyncio.create_task(copy_meanwhile(num_bytes, speeds))
    try:
        directory, ledger, load, reason = await play(home, config, TIMEOUT_S, say)
    finally:
        copying.cancel()
    say(f"{reason}: {len(ledger.steps)} steps, {ledger.num_executions} executions")
    for check in ledger.checks():
        if not check.ok:
            say(f"NOT EXACT: {check.text}")
    return directory, load, statistics.median(speeds), num_bytes


def report(found: Sequence[Transition], bandwidth: float, weights: int, checkpoint: int) -> str:
    """Prints a table for each direction; returns the last line."""
    wholes: dict[str, Stage] = {}
    for role in STAGES:
        stages = stages_of(found, role, {"verify": weights, "publish": checkpoint})
        rows = [("to " + role, "num", "median", "longest", "bytes", "of a copy"),
                *((name, *stage.row(bandwidth)) for name, stage in stages.items())]
        widths = [max(len(r[i]) for r in rows) for i in range(6)]
        for row in rows:
            say("  ".join(t.rjust(w) if i else t.ljust(w) for i, (t, w) in enumerate(zip(row, widths, strict=True))))
        wholes[role] = stages.get("whole", Stage([float("nan")], [0]))
    moved = [s / (b / bandwidth) for stage in wholes.values() for s, b in zip(stage.seconds, stage.num_bytes, strict=True)
             if b >= weights]
    return (f"transition to_train_s={statistics.median(wholes['train'].seconds):.3f} "
            f"to_rollout_s={statistics.median(wholes['rollout'].seconds):.3f} "
            f"of_bytes={statistics.median(moved) if moved else float('nan'):.1f}")


def calls_moved(found: Sequence[Transition]) -> str:
    """How many live calls and idle prefixes were moved, how many calls replayed."""
    spans: list[Span] = [node.span for t in found for _, node in t.root.walk() if node.span.name == "gyre.kv.migrate"]
    idle = sum(bool(s.attributes.get("gyre.idle")) for s in spans)
    replayed = sum(s.attributes.get("gyre.outcome") == "replayed" for s in spans)
    return f"{len(spans) - idle - replayed} live calls moved, {replayed} replayed, {idle} prefixes of waiting sessions moved"


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--keep", type=Path, help="leave the run's directory here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gyre-transition-") as temporary:
        home = options.keep.resolve() if options.keep else Path(temporary)
        try:
            directory, load, bandwidth, weights = asyncio.run(measure(options, home))
        except GyreError as error:
            say(f"transition: {error}")
            return 1
        found = transitions(read_spans(directory.logs / TRACES))
        newest = max((directory.path / "checkpoints").glob("version-*"))
        checkpoint = sum(file.stat().st_size for file in newest.iterdir())
    say(f"{len(found)} transitions, weights {weights / 1e6:.0f} MB, a checkpoint {checkpoint / 1e6:.0f} MB, a plain copy "
        f"{bandwidth / 1e9:.2f} GB/s; {calls_moved(found)}; machine {100 * load.busy:.0f} % busy, late "
        f"{1000 * load.late_p99_s:.0f} ms")
    say(report(found, bandwidth, weights, checkpoint))
    return 0


if __name__ == "__main__":
    sys.exit(main())
