"""What the scheduler needs of a run, and the tasks it may dispatch."""

from dataclasses import dataclass
from pathlib import Path

from gyre.contracts.errors import ConfigError
from gyre.runtime.config import RunConfig, TimeoutCalls
from gyre.scheduler.schedules import Capacity

LEASE_TTL_S = 5.0
RENEW_EVERY_S = 1.5


@dataclass(frozen=True, slots=True)
class Plan:
    """The run as the core sees it. Task names are relative to the tasks root, e.g. `train/t0001`."""

    num_steps: int
    seed: int
    num_cells: int  # K, those that can train
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
    groups_per_step: int  # B
    capacity: Capacity  # of one cell
    num_standalone: int = 0  # cells that never train, numbered after the others
    transition_timeout_s: float = 600.0  # a cell that has not confirmed its role by then is counted out

    def num_groups(self, version: int) -> int:
        """Training groups dispatched in all once the burst that begins at `version` has been dispatched.

        It depends on nothing else, so two leaders that saw facts in another order dispatch the same. The run's last bursts
        dispatch less: no more groups than its steps take.
        """
        return min(version * self.groups_per_step + self.num_outstanding, self.num_steps * self.groups_per_step)


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
        config_digest=digest, groups_per_step=config.burst.groups_per_step,
        capacity=Capacity(config.cells.executions_per_cell or config.engine.max_running, config.engine.kv_tokens),
        num_standalone=config.cells.standalone, transition_timeout_s=config.cells.transition_timeout_s)


def task_names(root: Path, split: str) -> tuple[str, ...]:
    """Directories of a split that hold an `instruction.md`, in name order."""
    return tuple(f"{split}/{p.parent.name}" for p in sorted((root / split).glob("*/instruction.md")))
