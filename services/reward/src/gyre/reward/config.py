"""What one evaluator process needs to know, taken from the run's and the deployment's configuration."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gyre.contracts.errors import ConfigError
from gyre.reward.core import Budget
from gyre.reward.graders.base import Grader
from gyre.reward.graders.functions import FunctionsGrader, TimeLimits
from gyre.reward.graders.harbor import HarborGrader
from gyre.reward.graders.pytest import PytestGrader
from gyre.reward.sandbox import Limits, SandboxMode, open_sandbox
from gyre.reward.snapshot import SnapshotLimits
from gyre.runtime.config import Deployment, RunConfig

MAX_TEST_WALL_S = 10.0


@dataclass(frozen=True, slots=True)
class EvaluatorConfig:
    """One evaluator process."""

    listen: str
    tasks_root: Path  # task directories are named relative to it
    grader: Literal["functions", "harbor", "pytest"]
    reward_key: str  # which key of reward.json, if it has several
    timeout_s: float  # for one workspace
    sandbox: SandboxMode
    shipped_example: bool  # may run without a sandbox where there is none
    allow_unsandboxed: bool
    budget: Budget = field(default_factory=Budget)
    snapshot: SnapshotLimits = field(default_factory=SnapshotLimits)
    limits: Limits = field(default_factory=Limits)


def evaluator_config(run: RunConfig, config_dir: Path, deployment: Deployment, index: int) -> EvaluatorConfig:
    """The configuration of evaluator `index`. A relative `tasks.root` is relative to the run's file.

    Raises:
        ConfigError: names the key, its value and what would be right.
    """
    if not 0 <= index < len(deployment.evaluators):
        raise ConfigError(f"--index {index}: the deployment has {len(deployment.evaluators)} evaluators, from 0 on")
    for key, value in {"timeout_s": run.reward.timeout_s, "max_attempts": run.reward.max_attempts}.items():
        if value <= 0:
            raise ConfigError(f"reward.{key} = {value}: must be greater than 0")
    return EvaluatorConfig(
        listen=deployment.evaluators[index].listen, tasks_root=(config_dir / run.tasks.root).resolve(),
        grader=run.reward.grader, reward_key=run.reward.reward_key, timeout_s=run.reward.timeout_s,
        sandbox=run.harness.sandbox, shipped_example=run.harness.shipped_example,
        allow_unsandboxed=deployment.allow_unsandboxed, budget=Budget(max_attempts=run.reward.max_attempts),
        snapshot=SnapshotLimits(total_bytes=run.harness.max_workspace_bytes))


def open_grader(config: EvaluatorConfig, scratch: Path) -> Grader:
    """The configured grader, with its sandbox probed. Raises ConfigError if this machine cannot run it safely."""
    sandbox = open_sandbox(config.sandbox, shipped_example=config.shipped_example,
                           allow_unsandboxed=config.allow_unsandboxed)
    times = TimeLimits(test_wall_s=min(MAX_TEST_WALL_S, config.timeout_s), workspace_s=config.timeout_s)
    if config.grader == "harbor":
        return HarborGrader(sandbox, scratch, config.timeout_s, config.limits, config.reward_key)
    if config.grader == "pytest":
        return PytestGrader(sandbox, scratch, config.timeout_s, times.test_wall_s, config.limits)
    return FunctionsGrader(sandbox, scratch, times, config.limits)
