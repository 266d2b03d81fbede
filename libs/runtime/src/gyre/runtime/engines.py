"""Which engines can be configured, and what each can be asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gyre.contracts.errors import ConfigError

if TYPE_CHECKING:
    from gyre.runtime.config import RunConfig, SamplingConfig

BACKENDS = ("auto", "torch", "scripted", "tensorrt_llm", "vllm", "sglang")
ONE_LOGPROB = ("tensorrt_llm", "vllm", "sglang")  # backends that report one log-probability per token


def check_engine(config: RunConfig) -> None:
    """Refuse an engine that is unknown, or cannot be what is asked of it. Raises ConfigError."""
    backend = config.engine.backend
    if backend not in BACKENDS:
        raise ConfigError(f"engine.backend = {backend!r}: unknown; use {' or '.join(BACKENDS)}")
    if backend in ONE_LOGPROB and (problem := one_logprob_problem(config.sampling)):
        raise ConfigError(f"{problem}, or engine.backend = 'torch'")
    check_server(config)


def one_logprob_problem(sampling: SamplingConfig) -> str:
    """Why an engine that reports one log-probability per token cannot sample so; '' if it can.

    That of the policy and that of what was really sampled are both recorded, so they must be the same.
    """
    for key in ("temperature", "eval_temperature"):
        value = getattr(sampling, key)
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
    if server.url and config.cells.count > 1:
        raise ConfigError(f"engine.server.url = {server.url!r}: is one engine, but cells.count = {config.cells.count}; "
                          "use engine.server.python, which starts one for each cell")
