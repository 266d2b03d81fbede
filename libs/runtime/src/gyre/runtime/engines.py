"""Which engines can be configured, and what each can be asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gyre.contracts.errors import ConfigError

if TYPE_CHECKING:
    from gyre.runtime.config import RunConfig

BACKENDS = ("auto", "torch", "scripted", "tensorrt_llm", "vllm", "sglang")
MIN_TEMPERATURE = 1e-4
DEVICES = ("auto", "cpu", "cuda")


def check_engine(config: RunConfig) -> None:
    """Refuse an engine that is unknown, or cannot be what is asked of it. Raises ConfigError."""
    _check_numbers(config)
    backend = config.engine.backend
    if backend not in BACKENDS:
        raise ConfigError(f"engine.backend = {backend!r}: unknown; use {' or '.join(BACKENDS)}")
    ours = {"auto": "", "torch": "", "scripted": torch_alone(config)}
    if problem := ours[backend] if backend in ours else unsuited(config):
        raise ConfigError(f"{problem}, or engine.backend = 'torch' instead of {backend!r}")
    check_server(config)


def _check_numbers(config: RunConfig) -> None:
    engine = config.engine
    at_least = {"max_running": (engine.max_running, 1), "max_waiting": (engine.max_waiting, 1),
                "token_budget": (engine.token_budget, 1), "min_interval_ms": (engine.min_interval_ms, 0),
                "flush_ms": (engine.flush_ms, 0), "script_token_ms": (engine.script_token_ms, 0),
                "move_min_tokens": (engine.move_min_tokens, 0)}  # fmt: skip
    for name, (value, least) in at_least.items():
        if value < least:
            raise ConfigError(f"engine.{name} = {value}: must be at least {least}")
    if engine.kv_tokens < config.sampling.max_context:
        raise ConfigError(f"engine.kv_tokens = {engine.kv_tokens}: must hold at least one context of sampling.max_context = "
                          f"{config.sampling.max_context} tokens")
    if 0 < config.sampling.temperature < MIN_TEMPERATURE:
        raise ConfigError(f"sampling.temperature = {config.sampling.temperature}: must be at least {MIN_TEMPERATURE}; below it "
                          "log-probabilities leave float32")
    if config.cells.device not in DEVICES:
        raise ConfigError(f"cells.device = {config.cells.device!r}: unknown; use {' or '.join(DEVICES)}")


def unsuited(config: RunConfig) -> str:
    """Why an engine of other people cannot do what is configured; '' if it can. `auto` passes over it then."""
    problem = torch_alone(config) or _beyond_one_logprob(config)
    if not problem and config.policy.implementation == "transformers":
        problem = "policy.implementation = 'transformers': only the torch engine runs it; use 'gyre'"
    return problem


def torch_alone(config: RunConfig) -> str:
    """What is configured that only the torch engine has, and what to use instead; '' if nothing is."""
    if config.engine.carry != "recompute":
        return f"engine.carry = {config.engine.carry!r}: only the torch engine keeps KV under new weights; use recompute"
    return "engine.deterministic = true: only the torch engine has this mode; use false" if config.engine.deterministic else ""


def _beyond_one_logprob(config: RunConfig) -> str:
    """Engines of other people report one log-probability per token. That of the policy and that of what was really
    sampled are both recorded, so they must be the same."""
    for key in ("temperature", "eval_temperature"):
        value = getattr(config.sampling, key)
        if value != 1.0 and not (key == "eval_temperature" and value == 0.0):
            right = "1.0" if key == "temperature" else "1.0 or 0.0"
            return f"sampling.{key} = {value}: this engine reports one log-probability per token; use {right}"
    return ""


def check_server(config: RunConfig) -> None:
    """Refuse a server that cannot be. Raises ConfigError."""
    server = config.engine.server
    if server.start_timeout_s <= 0:
        raise ConfigError(f"engine.server.start_timeout_s = {server.start_timeout_s}: must be greater than 0")
    if server.python and server.url:
        raise ConfigError(f"engine.server.url = {server.url!r}: set either it or engine.server.python, not both")
    if server.url and not server.url.startswith(("http://", "https://")):
        raise ConfigError(f"engine.server.url = {server.url!r}: must start with http:// or https://")
    if server.url and config.engine.backend == "auto":
        raise ConfigError(f"engine.backend = 'auto': engine.server.url = {server.url!r} is of one engine: name that one")
    if server.url and config.cells.count > 1:
        raise ConfigError(f"engine.server.url = {server.url!r}: is one engine, but cells.count = {config.cells.count}; "
                          "use engine.server.python, which starts one for each cell")
