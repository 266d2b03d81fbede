"""How an SGLang server is started for a policy, and the adapter that stands before it."""

from __future__ import annotations

from pathlib import Path

import torch
from gyre.policy.config import PolicyConfig
from gyre.rollout.engines.choose import Found
from gyre.rollout.engines.engine_probe import Needs, cpu_build_on, probe_environment
from gyre.rollout.engines.hosted import HostedEngine
from gyre.rollout.engines.launched import LaunchedServer, RunningServer, Server
from gyre.rollout.engines.live import HostedConfig
from gyre.rollout.engines.server_process import ServerCommand, ServerPlace, find_python, free_port
from gyre.rollout.engines.sglang import SgLangHost, SgLangSettings
from gyre.rollout.engines.staging import StagedWeights
from gyre.runtime.config import EngineConfig

#: Log-probabilities of the policy itself, before any temperature.
ENVIRONMENT = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1", "HF_HUB_OFFLINE": "1"}


#: `torch_memory_saver` is what `--enable-memory-saver` needs.
NEEDS = Needs(
    ("sglang",), ("sglang.launch_server", "torch_memory_saver"),
    routes={"sglang.srt.entrypoints": (
        "/generate", "/abort_request", "/pause_generation", "/continue_generation", "/update_weights_from_disk",
        "/release_memory_occupation", "/resume_memory_occupation", "/flush_cache", "/health",
    )},
)  # fmt: skip


def found_sglang(config: EngineConfig, config_dir: Path, device: str) -> Found:
    """Whether there is an environment with SGLang that would serve on a `device` ("cpu" or "cuda"), or a server that runs.
    Raises ConfigError if there is no environment."""
    if config.server.url:
        return Found(True)
    environment = probe_environment(find_python("sglang", config.server.python, config_dir), NEEDS)
    version = environment.versions["sglang"]
    if version is None:
        return Found(False)
    return Found(True, version, cpu_build_on(device, not environment.accelerator) or environment.lacking(NEEDS))


def sglang_engine(
    policy: PolicyConfig, dtype: str, longest: int, config: EngineConfig, place: ServerPlace, checkpoint: Path,
    config_dir: Path, tensor_parallel: int = 1,
) -> HostedEngine:  # fmt: skip
    """SGLang as an engine: `longest` is prompt and output together. Raises ConfigError."""
    server: Server
    if config.server.url:
        server = RunningServer(config.server.url)
    else:
        python, port = find_python("sglang", config.server.python, config_dir), free_port(place.host)
        arguments = server_command(str(python), str(checkpoint), place.host, port, dtype, longest, config, tensor_parallel)
        command = ServerCommand(tuple(arguments), ENVIRONMENT, place.log, place.home)
        server = LaunchedServer(f"http://{place.host}:{port}", command)
    # of a server that runs already nothing is known, so its memory stays
    settings = SgLangSettings(start_s=config.server.start_timeout_s, sleeps=not config.server.url)
    host = SgLangHost(server, settings)
    staged = StagedWeights(place.home / "staged", policy, checkpoint, getattr(torch, dtype))
    place.home.mkdir(parents=True, exist_ok=True)
    return HostedEngine(host, policy, staged, HostedConfig(longest, config.kv_tokens, config.max_running, config.max_waiting))


def server_command(
    python: str, model: str, host: str, port: int, dtype: str, longest: int, config: EngineConfig, tensor_parallel: int
) -> list[str]:
    """The command line of a server. It starts with weights of its own making: ours come by an update."""
    options = {
        "--model-path": model,
        "--load-format": "dummy",
        "--host": host,
        "--port": port,
        "--dtype": dtype,
        "--context-length": longest,
        "--max-total-tokens": config.kv_tokens,
        "--max-running-requests": config.max_running,
        "--chunked-prefill-size": config.token_budget,
        "--tp-size": tensor_parallel,
    }
    switches = ["--skip-tokenizer-init", "--skip-server-warmup", "--enable-memory-saver", "--incremental-streaming-output"]
    own = [python, "-m", "sglang.launch_server", *(str(part) for pair in options.items() for part in pair), *switches]
    return [*own, *config.server.arguments]
