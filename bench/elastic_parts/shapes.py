"""How each schedule uses the four cells and a mean staleness of two versions, and the run's configuration for it.

Chosen with the simulator before anything was measured: `python bench/elastic.py --choose` prints what it was chosen from.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gyre.contracts.simulation import Simulated, WorkloadRows
from gyre.runtime.config import RunConfig, check_run, load_run
from gyre.runtime.settings import parse, read_toml
from gyre.scheduler.simulation.constants import Constants
from gyre.scheduler.simulation.scenario import Shape, configured, scenario_of
from gyre.scheduler.simulation.world import World

HERE = Path(__file__).parent
SCHEDULES = ("elastic", "async+streaming", "async", "colocate", "colocate+standalone+streaming")
STEPS = {"paper": 15, "sessions": 10}
STALENESS = (5, 0)  # (steps_per_burst, phi) on the line of d = 2

C2 = "colocate+standalone+streaming"
CHOSEN: dict[str, dict[str, Shape]] = {
    "paper": {"elastic": Shape("elastic", 5, 0), "async+streaming": Shape("async+streaming", 1, 2, num_training=2),
              "async": Shape("async", 1, 2, num_training=2), "colocate": Shape("colocate", 5, 0),
              C2: Shape(C2, 5, 0, num_standalone=1)},
    "sessions": {"elastic": Shape("elastic", 5, 0), "async+streaming": Shape("async+streaming", 5, 0, num_training=1),
                 "async": Shape("async", 5, 0, num_training=1), "colocate": Shape("colocate", 5, 0),
                 C2: Shape(C2, 5, 0, num_standalone=1)},
}


def base_config(workload: str, overrides: list[str] | None = None) -> RunConfig:
    """The cluster's configuration with that workload's steps."""
    burst = [f"burst.steps_per_burst={STALENESS[0]}", f"burst.phi={STALENESS[1]}", "cells.schedule=elastic"]
    config = load_run(HERE / "cluster.toml", [f"steps={STEPS[workload]}", *burst, *(overrides or [])])
    return replace(config, harness=replace(config.harness, command=_filled(config.harness.command)))


def _filled(command: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part.replace("{config_dir}", str(HERE)) for part in command)


def config_of(base: RunConfig, shape: Shape) -> RunConfig:
    """`base` arranged as `shape`. As many executions run as the cells that ever roll out serve at full speed."""
    changed = configured(base, shape)
    rolling = changed.cells.count + changed.cells.standalone - shape.num_training
    slots = rolling * changed.cells.executions_per_cell
    steps = -(-base.steps // shape.steps_per_burst) * shape.steps_per_burst
    changed = replace(changed, steps=steps, harness=replace(changed.harness, max_concurrent=slots))
    check_run(changed)
    return changed


def constants_of(path: Path = HERE / "constants.toml") -> Constants:
    return parse(read_toml(path), Constants, str(path))


def simulated(config: RunConfig, shape: Shape, constants: Constants, rows: WorkloadRows) -> Simulated:
    """One simulated run of `rows` in their order."""
    return World(scenario_of(config, shape, constants, rows, 0)).run()
