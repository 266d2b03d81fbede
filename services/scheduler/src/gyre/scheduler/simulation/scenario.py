"""From a run's configuration to what is simulated."""

from dataclasses import dataclass, replace

from gyre.contracts.errors import ConfigError
from gyre.contracts.simulation import WorkloadRows
from gyre.runtime.config import RunConfig, check_run
from gyre.scheduler.config import Plan
from gyre.scheduler.schedules import Capacity, schedule_of
from gyre.scheduler.simulation.constants import Constants, check_constants
from gyre.scheduler.simulation.workload import Capped, Lognormal, Workload, from_rows
from gyre.scheduler.simulation.world import Scenario

NUM_TASKS = 64  # which task a group works on does not matter here


@dataclass(frozen=True, slots=True)
class Shape:
    """How one budget of cells and one staleness is used: schedule, burst, and how the cells are divided."""

    schedule: str
    steps_per_burst: int
    phi: int
    num_standalone: int = 0
    num_training: int = 0


def shape_of(config: RunConfig, schedule: str) -> Shape:
    """The configured burst under `schedule`. The number of cells, standalone ones among them, stays what it is configured
    to be: a schedule with standalone cells has the configured number, else a quarter; one without has none."""
    cells, burst = config.cells, config.burst
    total = cells.count + cells.standalone
    standalone = cells.standalone
    if "standalone" in schedule:
        standalone = standalone or max(1, total // 4)
    elif schedule in ("colocate", "rollpacker"):
        standalone = 0
    training = (cells.training or (total - standalone) // 2) if schedule.startswith("async") else 0
    return Shape(schedule, burst.steps_per_burst, burst.phi, standalone, training)


def configured(config: RunConfig, shape: Shape) -> RunConfig:
    """The configuration with that shape, on the same number of cells. Raises ConfigError if a run could not have it."""
    total = config.cells.count + config.cells.standalone
    if shape.num_standalone >= total:
        raise ConfigError(f"{shape.schedule}: of {total} cells at least one has to train and one to roll out alone")
    cells = replace(config.cells, schedule=shape.schedule, standalone=shape.num_standalone,
                    count=total - shape.num_standalone, training=shape.num_training)
    changed = replace(config, cells=cells, burst=replace(config.burst, steps_per_burst=shape.steps_per_burst, phi=shape.phi))
    check_run(changed)
    return changed


def plan_of_shape(config: RunConfig) -> Plan:
    """The scheduler's plan without the held-out evaluations: they are the same under every schedule."""
    return Plan(
        num_steps=config.steps, seed=config.seed, num_cells=config.cells.count,
        steps_per_burst=config.burst.steps_per_burst, num_outstanding=config.burst.num_outstanding,
        executions_per_group=config.burst.executions_per_group,
        train_tasks=tuple(f"train/t{i:04d}" for i in range(NUM_TASKS)), held_out_tasks=(), executions_per_held_out=0,
        evaluate_at_start=False, evaluate_at_end=False, timeout_s=config.harness.timeout_s,
        overall_timeout_s=config.harness.overall_timeout_s, timeout_calls=replace(config.harness.timeout_calls, share=0.0),
        config_digest="", groups_per_step=config.burst.groups_per_step,
        capacity=Capacity(config.cells.executions_per_cell or config.engine.max_running, config.engine.kv_tokens),
        num_standalone=config.cells.standalone, transition_timeout_s=config.cells.transition_timeout_s)


def workload_of(config: RunConfig, constants: Constants, rows: WorkloadRows | None, seed: int) -> Workload:
    """The executions, in the run's limits: the harness's timeout and the longest context. `rows`: recorded ones instead of
    the distribution."""
    rate, drawn = constants.training.seconds_per_second, constants.lognormal
    asked = Lognormal(drawn, rate, seed) if rows is None else from_rows(rows, rate, drawn.correlation, seed)
    return Capped(asked, config.harness.timeout_s, config.sampling.max_context)


def scenario_of(config: RunConfig, shape: Shape, constants: Constants, rows: WorkloadRows | None, seed: int) -> Scenario:
    """What to simulate. Raises ConfigError for what no run could have."""
    config = configured(config, shape)
    check_constants(constants, config.cells.num_engines)
    plan = plan_of_shape(config)
    if plan.num_steps * plan.groups_per_step * plan.executions_per_group > MAX_EXECUTIONS:
        raise ConfigError(f"steps = {plan.num_steps}: more than {MAX_EXECUTIONS:,} executions; simulate fewer steps")
    return Scenario(plan, schedule_of(shape.schedule, shape.num_training), config.burst.staleness_limit,
                    workload_of(config, constants, rows, seed), constants,
                    constants.max_concurrent or config.harness.max_concurrent, seed, shape.phi, shape.num_training)


MAX_EXECUTIONS = 1_000_000
