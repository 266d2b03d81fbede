"""What `gyre-rollout serve` remembers of executions ends with them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from gyre.contracts.events import Sampling
from gyre.policy.tokenizer import ChatTokenizer
from gyre.rollout.attempt import Attempt, Chunk, Job, Output
from gyre.rollout.gateway.session import SessionSpec, StallMeter
from gyre.rollout.serve import Rollout
from gyre.runtime.blobs import DirectoryBlobs
from gyre.runtime.clock import SystemClock
from gyre.runtime.config import load_deployment, load_run
from gyre.runtime.process import Process
from rollout_stage import RolloutStage


class Saying:
    """An engine that answers one token."""

    async def generate(self, _: Attempt) -> AsyncIterator[Chunk]:
        one = np.full(1, -1.0, np.float32)
        yield Chunk(0, np.full(1, 7, np.int32), one, one, (0,), "length")


async def test_the_router_forgets_executions_that_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it grows with each, and whoever drains an engine tries to move the prefixes of all that ever ran there."""
    RolloutStage(tmp_path, "nats://nowhere", [1, 2, 3]).prepare()
    monkeypatch.chdir(tmp_path)
    config = load_run(tmp_path / "run.toml")
    process = Process("serve", "rollout", config, tmp_path, load_deployment(tmp_path / "deployment.toml"), None,
                      DirectoryBlobs(tmp_path / "blobs"), SystemClock(), asyncio.Event(), 0.0)
    rollout = Rollout(process, ChatTokenizer.load(tmp_path / "checkpoint"))
    routes = rollout.router._routes
    routes.engines[0].peer = Saying()  # type: ignore[assignment]
    rollout.router.set_admitting(0, True)
    for name in ("x", "y"):
        rollout.sessions.open(SessionSpec(name, "g", 0, Sampling()))
        job = Job(f"{name}-0", name, np.arange(5, dtype=np.int32), 1, Sampling(), ())
        await rollout.router.generate(job, Output(), StallMeter())
    assert routes.idle_on(0) == ["x", "y"] and routes.num_held("x", 0) == 6
    rollout.sessions.close("x")
    rollout.sessions.forget("y")
    assert routes.idle_on(0) == [] and routes.num_held("x", 0) == routes.num_held("y", 0) == 0
    rollout.archive.close()
