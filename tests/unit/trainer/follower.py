"""The second rank of the tests of several ranks: makes the backend it is told to, follows, and waits for the next."""

from __future__ import annotations

import json
import math
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gyre.runtime.config import CheckpointConfig, OptimizerConfig
from gyre.runtime.training import TrainingConfig
from gyre.trainer.backends.launch import Place, rank_backend
from gyre.trainer.backends.ranks import GlooChannel, RankBackend, follow
from gyre.trainer.config import TrainerConfig
from gyre.trainer.loss import LossConfig
from gyre.trainer.step import MembershipRules
from trees import tiny_decoder

TIMEOUT = timedelta(seconds=120)


def make(kind: str, dtype: str, stage: int, tied: bool = True, core: bool = True, policy: str = "",
         loss: dict[str, float] | None = None, memory_bytes: float = math.inf, memory_gib: float = -1.0) -> RankBackend:
    """One rank's backend over the tiny decoder, or over the model of transformers in the directory `policy`; with
    `memory_gib` that directory holds a decoder, and a configuration says so."""
    if memory_gib >= 0:
        return configured(Path(policy), kind, stage, dtype, memory_gib)
    decoder: Any = tiny_decoder(tied=tied).to(getattr(torch, dtype))
    if policy:
        from gyre.policy.hf import TransformersModel

        decoder = TransformersModel.load(Path(policy), getattr(torch, dtype))
    optimizer = OptimizerConfig(learning_rate=0.01, weight_decay=0.1) if core else None
    losses = LossConfig(**(loss or {}))
    if kind == "fsdp":
        from gyre.trainer.backends.fsdp import FsdpBackend

        return FsdpBackend(decoder, losses, optimizer, "cpu", stage, memory_bytes=memory_bytes)
    if kind == "deepspeed":
        from gyre.trainer.backends.deepspeed import DeepSpeedBackend

        return DeepSpeedBackend(decoder, losses, optimizer, "cpu", stage, memory_bytes=memory_bytes)
    from gyre.trainer.backends.replicas import ReplicatedBackend

    return ReplicatedBackend(decoder, losses, optimizer, "cpu", memory_bytes=memory_bytes)


def configured(policy: Path, kind: str, stage: int, dtype: str, memory_gib: float) -> RankBackend:
    """One rank's backend as a worker makes it from its configuration."""
    rank, training = dist.get_rank(), TrainingConfig(kind, dist.get_world_size(), stage, memory_gib)  # type: ignore[arg-type]
    config = TrainerConfig(
        0, 1, "r", "cpu", policy, policy, policy, "", 1, MembershipRules(1, 0), LossConfig(),
        OptimizerConfig(learning_rate=0.01, compute_dtype=dtype), CheckpointConfig(), training)  # type: ignore[arg-type]
    return rank_backend(config, Place(rank, dist.get_world_size(), rank, ""))


def join(rank: int, num_ranks: int, store: Path) -> GlooChannel:
    """Meet the other ranks of a test through a file."""
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=TIMEOUT)
    return GlooChannel()


def main(rank: int, num_ranks: int, store: Path) -> None:
    torch.set_num_threads(1)
    channel = join(rank, num_ranks, store)
    while told := json.loads(channel.receive(0)):
        follow(make(**told), channel)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
