"""The built-in engine as a run's configuration asks for it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import torch
from gyre.contracts.errors import ConfigError
from gyre.policy.checkpoint import load_config
from gyre.rollout.engines.torch import TorchEngine, TorchEngineConfig
from gyre.rollout.torch_engine.kv import RowTransfer
from gyre.rollout.torch_engine.policies import GyrePolicy, Policy, TransformersPolicy
from gyre.rollout.torch_engine.scheduler import SchedulerConfig
from gyre.runtime.config import RunConfig


def torch_engine(config: RunConfig, config_dir: Path, transfer: RowTransfer | None) -> TorchEngine:
    """`transfer` must serve memory; without one requests move by their tokens alone. Raises ConfigError."""
    # two threads beside another busy process of the same cores are many times slower than one (barriers spin)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    policy = policy_of(config, config_dir)
    settings = config.engine
    budget = max(settings.token_budget, settings.max_running)
    scheduler = SchedulerConfig(
        kv_tokens=settings.kv_tokens,
        max_position=min(config.sampling.max_context, policy.max_position),
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        max_batch_tokens=budget,
        chunk_tokens=max(1, budget // 4),
        keeps=settings.carry == "keep",
    )
    engine = TorchEngineConfig(
        scheduler,
        dtype=getattr(torch, config.policy.dtype),
        device=torch.device(_device(config.cells.device)),
        min_interval_s=settings.min_interval_ms / 1000,
        is_deterministic=settings.deterministic,
    )
    return TorchEngine(policy, engine, transfer)


def policy_of(config: RunConfig, config_dir: Path) -> Policy:
    """Whose code runs the model. Raises ConfigError if transformers is asked for and missing."""
    checkpoint = config_dir / config.policy.checkpoint
    if config.policy.implementation == "gyre":
        return GyrePolicy(load_config(checkpoint))
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("policy.implementation = 'transformers': it is not installed; install opengyre-policy[transformers]")
    return TransformersPolicy(checkpoint)


def _device(kind: str) -> str:
    if kind == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("cells.device = 'cuda': torch finds no CUDA device here; use auto or cpu, or set up with "
                          "GYRE_TORCH=cuda where there is one")
    return kind
