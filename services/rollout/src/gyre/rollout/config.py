"""What `gyre-rollout serve` takes out of the run's configuration and its deployment, typed by who uses it."""

import sys
from pathlib import Path

from gyre.contracts.errors import ConfigError
from gyre.contracts.events import Sampling
from gyre.rollout.executor import ExecutorSettings
from gyre.rollout.gateway.calls import CallSettings
from gyre.rollout.harness.process import SandboxSettings, find_bwrap
from gyre.rollout.migration import MoveLimits
from gyre.rollout.router import RouterLimits
from gyre.rollout.workspace import WorkspaceLimits
from gyre.runtime.config import Deployment, RunConfig


def call_settings(config: RunConfig) -> CallSettings:
    """What the run fixes for every call."""
    sampling = config.sampling
    return CallSettings(config.policy.name, sampling.max_tokens, sampling.max_context, config.harness.tool_format,
                        config.telemetry.trace_calls)


def router_limits(config: RunConfig) -> RouterLimits:
    """Bounds of calls and of moves between engines."""
    return RouterLimits(max_live=config.engine.max_running, moves=MoveLimits(config.engine.move_min_tokens))


def executor_settings(config: RunConfig, deployment: Deployment, config_dir: Path) -> ExecutorSettings:
    """Where executions live and how their harness is started."""
    sampling = config.sampling
    return ExecutorSettings(
        root=Path(deployment.state_dir) / "executions",
        tasks_root=(config_dir / config.tasks.root).resolve(),
        config_dir=config_dir,
        gateway_url=deployment.gateway_url,
        command=config.harness.command,
        environment=config.harness.environment,
        train_sampling=Sampling(sampling.temperature, sampling.top_p, sampling.top_k),
        eval_sampling=Sampling(sampling.eval_temperature, sampling.top_p, sampling.top_k),
        workspace=WorkspaceLimits(config.harness.max_workspace_bytes),
    )


def sandbox_settings(config: RunConfig, deployment: Deployment, config_dir: Path) -> SandboxSettings:
    """The sandbox around the harness, probed once.

    Raises:
        SandboxError: a sandbox is needed and there is none.
    """
    bwrap = find_bwrap(config.harness.sandbox, deployment.allow_unsandboxed, config.harness.shipped_example)
    local = (deployment.state_dir, deployment.cells_dir, deployment.log_dir, deployment.checkpoint_dir,
             deployment.blobs)
    hidden = [Path(place) for place in local if "://" not in place] + [(config_dir / config.tasks.root).resolve()]
    # What the command names lies anywhere, also below the temporary directory, which the sandbox replaces by an empty one.
    named = {Path(part).parent for part in config.harness.command if part.startswith("/") and Path(part).exists()}
    visible = {config_dir.resolve(), Path(sys.prefix), Path(sys.base_prefix), *named}
    return SandboxSettings(bwrap, tuple(sorted(visible)), tuple(p for p in hidden if p.is_dir()))


def split_listen(listen: str) -> tuple[str, int]:
    """Host and port of `host:port`. Raises ConfigError."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"gateway.listen = {listen!r}: must be host:port")
    return host.strip("[]"), int(port)
