"""The table of engines: how each is looked for, and how it is built. Nothing here imports an engine before it is asked for."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gyre.contracts.errors import ConfigError
from gyre.rollout.engines.base import Engine
from gyre.rollout.engines.choose import Choice, Found, agree, decide
from gyre.rollout.engines.scripted import ScriptedConfig, ScriptedEngine, seeded_script
from gyre.rollout.engines.server_process import ServerPlace
from gyre.rollout.engines.weights import NoWeights, PulledWeights, WeightsLoader
from gyre.runtime.config import RunConfig
from gyre.runtime.engines import unsuited

if TYPE_CHECKING:
    from gyre.policy.config import PolicyConfig
    from gyre.transfer import Transfer

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 300.0  # one-sided read of all weights


@dataclass(frozen=True)
class Site:
    """Where an engine is built. `cells`: a directory that all cells of the run can see."""

    config: RunConfig
    config_dir: Path
    transfer: Transfer
    place: ServerPlace
    cells: Path

    @property
    def checkpoint(self) -> Path:
        return self.config_dir / self.config.policy.checkpoint

    @property
    def device(self) -> str:
        """cpu | cuda, with `auto` decided."""
        kind = self.config.cells.device
        if kind != "auto":
            return kind
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Built:
    """An engine, where its weights come from, and why it is this one."""

    engine: Engine
    loader: WeightsLoader
    choice: Choice


Builder = Callable[[Site], Engine]
Finder = Callable[[Site], Found]


def build(site: Site) -> Built:
    """The configured engine. Raises ConfigError for one that cannot be had; the message says how it can."""
    choice = choose(site)
    engine = BUILDERS[choice.backend](site)
    loader = NoWeights() if choice.backend == "scripted" else PulledWeights(site.transfer, READ_TIMEOUT_S)
    return Built(engine, loader, choice)


def choose(site: Site) -> Choice:
    """Decides, says so in the log, and makes sure that all cells of the run decide alike."""
    wanted = site.config.engine.backend
    if wanted == "scripted":
        return Choice(wanted, "named in the configuration")
    choice = decide(wanted, site.device, lambda backend: look(backend, site))
    log.info("engine %s: %s", choice.backend, choice.why)
    if wanted == "auto":
        agree(site.cells / "engine.json", choice)
    return choice


def look(backend: str, site: Site) -> Found:
    """What there is of a backend, without starting it."""
    if problem := unsuited(site.config):
        return Found(True, problem=problem)
    return FINDERS[backend](site)


def find_tensorrt_llm(site: Site) -> Found:
    """In our own environment, because it runs in our own process."""
    if importlib.util.find_spec("tensorrt_llm") is None:
        return Found(False)
    from gyre.rollout.engines.tensorrt_llm_surface import surface_of

    try:
        package = importlib.import_module("tensorrt_llm")
    except (ImportError, OSError, RuntimeError) as error:  # a missing library of CUDA or MPI
        return Found(True, problem=f"tensorrt_llm cannot be imported: {error}")
    return Found(True, str(getattr(package, "__version__", "")), surface_of(package).problem)


def build_scripted(site: Site) -> Engine:
    from gyre.policy.config import PolicyConfig

    settings = site.config.engine
    policy = PolicyConfig.from_hf(json.loads((site.checkpoint / "config.json").read_text()))
    script = seeded_script(policy.vocab_size, settings.script_token_ms / 1000)
    return ScriptedEngine(script, ScriptedConfig(settings.kv_tokens, settings.max_running, settings.max_waiting))


def build_torch(site: Site) -> Engine:
    from gyre.rollout.torch_engine.build import torch_engine

    return torch_engine(site.config, site.config_dir, site.transfer)


def build_tensorrt_llm(site: Site) -> Engine:
    import torch
    from gyre.rollout.engines.hosted import HostedEngine
    from gyre.rollout.engines.live import HostedConfig
    from gyre.rollout.engines.staging import StagedWeights
    from gyre.rollout.engines.tensorrt_llm import TensorRtHost
    from gyre.rollout.engines.tensorrt_llm_surface import TensorRtSettings

    policy, longest = policy_of(site)
    settings, dtype = site.config.engine, site.config.policy.dtype
    host = TensorRtHost(importlib.import_module("tensorrt_llm"), TensorRtSettings(
        model=str(site.checkpoint), max_position=longest, kv_tokens=settings.kv_tokens, max_running=settings.max_running,
        token_budget=settings.token_budget, dtype=dtype,
        tensor_parallel=site.config.cells.tensor_parallel,
    ))  # fmt: skip
    bounds = HostedConfig(longest, settings.kv_tokens, settings.max_running, settings.max_waiting)
    staged = StagedWeights(site.place.home / "staged", policy, site.checkpoint, getattr(torch, dtype))
    return HostedEngine(host, policy, staged, bounds)


def find_vllm(site: Site) -> Found:
    from gyre.rollout.engines.vllm_server import found_vllm

    try:
        return found_vllm(site.config.engine, site.config_dir, site.device)
    except ConfigError as error:
        return Found(False, problem=str(error))


def build_vllm(site: Site) -> Engine:
    from gyre.rollout.engines.vllm_server import vllm_engine

    policy, longest = policy_of(site)
    config = site.config
    return vllm_engine(policy, config.policy.dtype, longest, config.engine, site.place, site.config_dir)


def find_sglang(site: Site) -> Found:
    from gyre.rollout.engines.sglang_server import found_sglang

    try:
        return found_sglang(site.config.engine, site.config_dir, site.device)
    except ConfigError as error:
        return Found(False, problem=str(error))


def build_sglang(site: Site) -> Engine:
    from gyre.rollout.engines.sglang_server import sglang_engine

    policy, longest = policy_of(site)
    config = site.config
    return sglang_engine(policy, config.policy.dtype, longest, config.engine, site.place, site.checkpoint, site.config_dir,
                         config.cells.tensor_parallel)  # fmt: skip


def policy_of(site: Site) -> tuple[PolicyConfig, int]:
    """The policy, and the longest context: prompt and output together."""
    from gyre.policy.checkpoint import load_config

    policy = load_config(site.checkpoint)
    return policy, min(site.config.sampling.max_context, policy.max_position)


#: Engines that are not always there, and how they are looked for.
FINDERS: dict[str, Finder] = {"tensorrt_llm": find_tensorrt_llm, "vllm": find_vllm, "sglang": find_sglang}

BUILDERS: dict[str, Builder] = {
    "torch": build_torch,
    "scripted": build_scripted,
    "tensorrt_llm": build_tensorrt_llm,
    "vllm": build_vllm,
    "sglang": build_sglang,
}

