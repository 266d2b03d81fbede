"""How a cell's trainer worker holds weights, gradients and optimizer state: the section `training` of run.toml."""

from dataclasses import dataclass
from typing import Literal

from gyre.contracts.errors import ConfigError

# backend -> the ZeRO stages it has, the default first
STAGES = {"torch": (0,), "fsdp": (3, 2), "deepspeed": (2, 1, 3), "timed": (0,)}


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """One worker may be several processes (ranks) of its cell, one per accelerator."""

    # torch: whole weights on every rank. timed: no model is run, everything else is as with torch (see timed_s_per_token)
    backend: Literal["torch", "fsdp", "deepspeed", "timed"] = "torch"
    ranks: int = 1
    zero_stage: int = 0  # what is cut between ranks: deepspeed 1, 2, 3; fsdp 2, 3; 0: the backend's default
    # Held for backward by one micro-step on each rank: beyond it layers are made again, then whole paths; 0: no bound.
    # With fsdp and deepspeed the last of these needs whole weights and a whole float32 gradient beside it for that time.
    memory_gib: float = 2.0
    # timed: a micro-step takes this long per token of its trees, an update timed_update_s, both without using a processor.
    # For measuring arrangements in time, as engine.backend = "scripted" is: nothing is learned.
    timed_s_per_token: float = 0.0
    timed_update_s: float = 0.0

    @property
    def stage(self) -> int:
        """The ZeRO stage with the default filled in."""
        return self.zero_stage or STAGES[self.backend][0]


def check_training(config: TrainingConfig, compute_dtype: str) -> None:
    """Raises ConfigError naming the field, its value and what would be right."""
    if config.memory_gib < 0:
        raise ConfigError(f"training.memory_gib = {config.memory_gib}: must not be negative")
    if config.ranks < 1:
        raise ConfigError(f"training.ranks = {config.ranks}: must be at least 1")
    _check_timed(config)
    stages = STAGES[config.backend]
    if config.zero_stage and config.zero_stage not in stages:
        right = "leave it 0" if stages == (0,) else f"use {' or '.join(map(str, sorted(stages)))}"
        raise ConfigError(f"training.zero_stage = {config.zero_stage}: the {config.backend} backend has no such stage; {right}")
    if config.backend != "deepspeed":
        return
    if compute_dtype == "float64":
        raise ConfigError("optimizer.compute_dtype = 'float64': the deepspeed backend takes float32 or bfloat16")
    if compute_dtype == "bfloat16" and config.stage == 1:
        # DeepSpeed then has another optimizer (BF16_Optimizer), whose gradients cannot be set from outside.
        raise ConfigError("training.zero_stage = 1: with bfloat16 the deepspeed backend takes 2 or 3")


def _check_timed(config: TrainingConfig) -> None:
    for key in ("timed_s_per_token", "timed_update_s"):
        value = getattr(config, key)
        if value < 0:
            raise ConfigError(f"training.{key} = {value}: must not be negative")
        if value and config.backend != "timed":
            raise ConfigError(f"training.{key} = {value}: the {config.backend} backend takes the time it needs; use 0, or "
                              "training.backend = 'timed'")
    if config.backend == "timed" and config.ranks != 1:
        raise ConfigError(f"training.ranks = {config.ranks}: the timed backend computes nothing that could be shared; use 1")
