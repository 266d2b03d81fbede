"""What the trajectory service needs to know of a run."""

from dataclasses import dataclass

from gyre.contracts.events import RoleClass
from gyre.runtime.config import RunConfig
from gyre.trajectory.group import AdvantageKind
from gyre.trajectory.packing import Budget
from gyre.trajectory.roles import ROLE_ORDERS


@dataclass(frozen=True, slots=True)
class TrajectoryConfig:
    """Settings of the core, taken from run.toml."""

    run: str  # run id; with the execution's id it seeds the admission draws
    policy: str  # model name whose outputs are targets
    max_paths: int  # admitted paths per execution; 0: no bound
    role_order: tuple[RoleClass, ...]  # role classes in the order in which paths are admitted
    advantage: AdvantageKind
    budget: Budget  # of one micro-step, and what its work costs
    harness: str = "any"  # whose word on roles counts, beside X-Gyre-*
    keep_zero_advantage: bool = False  # make micro-steps of executions with advantage 0 (a KL or entropy term is on)
    train_unseen: bool = False  # targets are also what the agent never saw: aborted and undelivered answers
    record_timeout_s: float = 600.0  # after termination, how long call records may still be missing
    num_remembered_groups: int = 65_536  # completed groups whose late facts are recognised


def trajectory_config(run: str, config: RunConfig) -> TrajectoryConfig:
    """The service's settings for run id `run`."""
    admission, loss = config.admission, config.loss
    budget = Budget(admission.token_budget, admission.pairs_budget, admission.cost_per_token, admission.cost_per_pair)
    return TrajectoryConfig(
        run, config.policy.name, admission.max_paths, admission.order or ROLE_ORDERS[admission.preset],
        admission.advantage, budget, admission.harness, loss.trains_zero_advantage,
        admission.train_unseen)
