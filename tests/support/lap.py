"""The whole system on this machine for a test: real NATS, every process, an example's tasks, an untrained policy."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from gyre.cli.prepare import prepare
from gyre.cli.run_dir import RunDir, create, read_pids, resolve_paths
from gyre.cli.session import start_run
from gyre.cli.train import Options, Watcher, launched
from gyre.policy.checkpoint import save_checkpoint
from gyre.policy.decoder import Decoder
from gyre.runtime.config import RunConfig, config_digest, load_deployment, load_run

CLINIC = Path(__file__).resolve().parents[2] / "examples" / "clinic"
AGENTS = CLINIC.with_name("clinic-agents")
SMALL = ["cells.count=2", "cells.schedule=colocate", "cells.executions_per_cell=0", "steps=2",
         "burst.groups_per_step=2", "burst.executions_per_group=4", "evaluation.num_tasks=2", "reward.evaluators=2"]


def untrained_checkpoint(directory: Path) -> Path:
    """The clinic's policy with random weights and its tokenizer, as a Hugging Face directory."""
    sys.path.insert(0, str(CLINIC))
    try:
        from policy import POLICY, build_tokenizer
    finally:
        sys.path.remove(str(CLINIC))
    save_checkpoint(directory, POLICY, Decoder.create(POLICY, seed=0).state_dict())
    build_tokenizer().save(directory)
    return directory


def clinic_config(tmp_path: Path, *overrides: str) -> RunConfig:
    """The clinic's configuration on tasks and a checkpoint below `tmp_path`."""
    checkpoint = untrained_checkpoint(tmp_path / "policy")
    places = [f"policy.checkpoint={checkpoint}", f"tasks.root={tmp_path / 'tasks'}"]
    return resolve_paths(load_run(CLINIC / "clinic.toml", [*SMALL, *places, *overrides]), CLINIC)


def agents_config(tmp_path: Path, *overrides: str) -> RunConfig:
    """The configuration of the clinic with sub-agents, on a policy that has just learned what a tool call looks like."""
    checkpoint = tmp_path / "policy"
    sys.path.insert(0, str(AGENTS))
    try:
        import agents_warmstart
        import warmstart
    finally:
        sys.path.remove(str(AGENTS))
    # Which word a random turn holds counts in full here: that is noise, but how a tool call looks is learned in seconds.
    settings = warmstart.Settings(num_updates=100, sessions_per_update=16, kind_weight=1.0, module_weight=1.0)
    warmstart.build(checkpoint, agents_warmstart.course(), settings)
    places = [f"policy.checkpoint={checkpoint}", f"tasks.root={tmp_path / 'tasks'}"]
    return resolve_paths(load_run(AGENTS / "clinic-agents.toml", [*SMALL, *places, *overrides]), AGENTS)


class Lap:
    """One run; `chaos` may kill processes meanwhile."""

    def __init__(self, tmp_path: Path, config: RunConfig) -> None:
        self.config = config
        self.said: list[str] = []
        prepare(config, self.said.append)
        self.run: RunDir = create(tmp_path / "runs", config, ["test"])
        self.watcher = Watcher(self.run, config, Options(durability="process"), self.said.append)

    async def to_the_end(self, chaos: Callable[["Lap"], Awaitable[None]] | None = None, timeout_s: float = 300) -> str:
        """Run until the scheduler closes the run; returns its reason."""
        async with asyncio.timeout(timeout_s), launched(self.run, self.config, self.watcher.options, self.said.append):
            deployment = load_deployment(self.run.deployment)
            opening, _ = await start_run(deployment, config_digest(self.config))
            disturbing = asyncio.create_task(chaos(self)) if chaos else None
            reason = await self.watcher.until_closed(deployment, opening)
            if disturbing is not None:
                assert disturbing.done(), "the run ended before everything was disturbed"
                disturbing.result()
            return reason

    async def interrupted(self, when: Callable[[], bool], timeout_s: float = 200) -> None:
        """Run until `when` holds, then stop everything as Ctrl-C does; a fresh watcher is ready to go on."""
        async with asyncio.timeout(timeout_s), launched(self.run, self.config, self.watcher.options, self.said.append):
            deployment = load_deployment(self.run.deployment)
            opening, _ = await start_run(deployment, config_digest(self.config))
            watching = asyncio.create_task(self.watcher.until_closed(deployment, opening))
            await self.until(when)
            watching.cancel()
        self.watcher = Watcher(self.run, self.config, Options(durability="process"), self.said.append)

    def kill(self, name: str) -> None:
        """kill -9 of one process; the launcher starts it again."""
        os.kill(read_pids(self.run)[name], signal.SIGKILL)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.02)

    def assert_books_balance(self) -> None:
        broken = [check.text for check in self.watcher.ledger.checks() if not check.ok]
        assert not broken, broken


def left_running(run: RunDir) -> dict[str, int]:
    """Processes of the run that are still alive."""
    with contextlib.suppress(FileNotFoundError):
        return read_pids(run)
    return {}
