"""What the trainer takes from the run's and the deployment's configuration."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from gyre.contracts.errors import ConfigError
from gyre.runtime.config import CheckpointConfig, Deployment, OptimizerConfig, RunConfig
from gyre.runtime.training import TrainingConfig
from gyre.trainer.loss import LossConfig
from gyre.trainer.step import MembershipRules

POLL_S = 0.05  # between looks at a queue that was empty
RPC_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 300.0  # one-sided read of a whole weight or gradient buffer
DEVICE_POLL_S = 0.05  # between tries at a device lock that the engine still holds


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """Everything one worker is told.

    cell: its number; cell 0 is the core. cells: K. total_steps: for the learning-rate schedule.
    policy: HF directory of version 0. checkpoints: where versions become durable.
    """

    cell: int
    cells: int
    run: str
    device: str
    policy: Path
    checkpoints: Path
    cells_dir: Path
    blobs: str
    total_steps: int
    rules: MembershipRules
    loss: LossConfig
    optimizer: OptimizerConfig
    retention: CheckpointConfig
    training: TrainingConfig = TrainingConfig()
    reference: Path | None = None  # HF directory of the policy that a KL is taken to; None: version 0
    implementation: Literal["gyre", "transformers"] = "gyre"
    streams: bool = True  # work on a step before its last group has joined it

    @property
    def memory_bytes(self) -> float:
        """What backward may hold for one micro-step."""
        return self.training.memory_gib * 2**30 or math.inf

    @property
    def is_core(self) -> bool:
        return self.cell == 0

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights in forward and backward; gradients add up in float32 (float64 if this is)."""
        return getattr(torch, self.optimizer.compute_dtype)


def trainer_config(run: RunConfig, deployment: Deployment, cell: int) -> TrainerConfig:
    """Resolve one worker's configuration; `run.policy.checkpoint` is taken as given (absolute, or from the cwd)."""
    loss = LossConfig(**asdict(run.loss), temperature=run.sampling.temperature)
    return TrainerConfig(
        cell=cell,
        cells=run.cells.count,
        run=deployment.run,
        device=resolve_device(run.cells.device),
        policy=Path(run.policy.checkpoint),
        checkpoints=Path(deployment.checkpoint_dir),
        cells_dir=Path(deployment.cells_dir),
        blobs=deployment.blobs,
        total_steps=run.steps,
        rules=MembershipRules(run.burst.groups_per_step, run.burst.staleness_limit),
        loss=loss.resolved(),
        optimizer=run.optimizer,
        retention=run.checkpoints,
        training=run.training,
        implementation=run.policy.implementation,
        streams=run.cells.streams,
    )


def resolve_device(device: str) -> str:
    """`auto` is cuda where there is one. Raises ConfigError for what torch cannot use here."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"cells.device = {device!r}: use auto, cpu, or cuda on a machine that has it")
    return device


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """The rate of update `step` (from 0): linear warm-up, then constant, linear or cosine decay to `final_ratio`."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    span = max(total_steps - config.warmup_steps - 1, 1)
    progress = min((step - config.warmup_steps) / span, 1.0)
    kept = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[config.schedule]
    if config.schedule == "constant":
        return config.learning_rate
    return config.learning_rate * (config.final_ratio + (1.0 - config.final_ratio) * kept)
