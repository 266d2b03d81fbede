"""What the scheduler needs of a run, and the tasks it may dispatch."""

from dataclasses import dataclass
from pathlib import Path

from gyre.contracts.errors import ConfigError
from gyre.runtime.config import RunConfig, TimeoutCalls

LEASE_TTL_S = 5.0
RENEW_EVERY_S = 1.5


@dataclass(frozen=True, slots=True)
class Plan:
    """The run as the core sees it. Task names are relative to the tasks root, e.g. `train/t0001`."""

    num_steps: int
    seed: int
    num_cells: int
    steps_per_burst: int  # mu
    num_outstanding: int  # Q = (phi + mu) * B groups
    executions_per_group: int  # N
    train_tasks: tuple[str, ...]
    held_out_tasks: tuple[str, ...]
    executions_per_held_out: int
    evaluate_at_start: bool
    evaluate_at_end: bool
    timeout_s: float
    overall_timeout_s: float
    timeout_calls: TimeoutCalls
    config_digest: str


def plan_of(config: RunConfig, digest: str, root: Path) -> Plan:
    """Read the task directories and make the plan. Raises ConfigError if there is nothing to train on."""
    train = task_names(root, config.tasks.train)
    if not train:
        raise ConfigError(f"tasks.root = {root}: no task directories in {config.tasks.train}/")
    wanted = config.evaluation.num_tasks
    held_out = task_names(root, config.tasks.held_out)[:wanted] if wanted else ()
    if len(held_out) < wanted:
        raise ConfigError(f"evaluation.num_tasks = {wanted}: {config.tasks.held_out}/ holds only {len(held_out)} tasks")
    return Plan(
        num_steps=config.steps, seed=config.seed, num_cells=config.cells.count,
        steps_per_burst=config.burst.steps_per_burst, num_outstanding=config.burst.num_outstanding,
        executions_per_group=config.burst.executions_per_group, train_tasks=train, held_out_tasks=held_out,
        executions_per_held_out=config.evaluation.executions_per_task, evaluate_at_start=config.evaluation.at_start,
        evaluate_at_end=config.evaluation.at_end, timeout_s=config.harness.timeout_s,
        overall_timeout_s=config.harness.overall_timeout_s, timeout_calls=config.harness.timeout_calls,
        config_digest=digest)


def task_names(root: Path, split: str) -> tuple[str, ...]:
    """Directories of a split that hold an `instruction.md`, in name order."""
    return tuple(f"{split}/{p.parent.name}" for p in sorted((root / split).glob("*/instruction.md")))
