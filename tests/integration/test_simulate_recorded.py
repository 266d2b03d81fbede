"""`gyre simulate --from`: the facts of a run that is over are read from what its NATS server left on disk."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from gyre.cli.ledger import RunLedger
from gyre.cli.main import app
from gyre.cli.recorded import Room, recording_of
from gyre.contracts import codec
from gyre.contracts.subjects import message_id, subject_of
from gyre.runtime.bus import Bus
from recorded_facts import recorded_facts
from typer.testing import CliRunner

RUN = """
name = "r"
[policy]
checkpoint = "policy"
[tasks]
root = "tasks"
[harness]
command = ["agent"]
[burst]
groups_per_step = 2
executions_per_group = 2
"""
DEPLOYMENT = """
run = "r"
nats_url = "nats://nowhere.invalid:1"
state_dir = "state"
cells_dir = "cells"
blobs = "blobs"
log_dir = "logs"
checkpoint_dir = "checkpoints"
gateway = {listen = "a", address = "a"}
gateway_url = "http://a"
scheduler = {listen = "a", address = "a"}
rollout = {listen = "a", address = "a"}
trajectory = {listen = "a", address = "a"}
engines = []
trainers = []
evaluators = []
transfers = []
"""


async def leave_behind(run: Path, nats_server) -> None:
    """What is on disk of a run once everything has been stopped."""
    bus = await Bus.connect(nats_server.url, "test")
    await bus.bootstrap()
    for fact, time_s in recorded_facts():
        body = codec.encode(fact, id="x", run="r", source="test", time_ns=int(time_s * 1e9))
        await bus.publish(subject_of(fact, "r"), body, message_id(fact, "r"))
    await bus.close()
    assert nats_server.process is not None
    nats_server.process.terminate()
    nats_server.process.wait()
    run.mkdir()
    shutil.move(nats_server.directory, run / "nats")
    (run / "run.toml").write_text(RUN)
    (run / "deployment.toml").write_text(DEPLOYMENT)


def test_a_run_that_is_over_is_simulated_from_its_facts(tmp_path, nats_server):
    run = tmp_path / "r"
    asyncio.run(leave_behind(run, nats_server))
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    done = CliRunner().invoke(app, ["simulate", "--from", str(run), "--seeds", "1", "--schedule", "colocate"])
    assert done.exit_code == 0, done.output
    ledger = RunLedger("r")
    for fact, time_s in recorded_facts():
        ledger.fold(fact, time_s)
    took = recording_of(ledger, Room(128, 128)).makespan_s
    assert f"the recorded run took {took:.3g}\u00a0s per step" in done.output
    simulated = float(done.output.split("simulated under its own schedule ")[1].split("\u00a0")[0])
    assert abs(simulated - took) < 0.1 * took
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before, "the run's own files are only read"
