"""A third-party harness through one execution: everything is real but the policy, which says what it is told.

The gateway's HTTP endpoint, the harness process, the Harbor task, the preserved workspace and the evaluator are the
product's own.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import uvicorn
from executor_stage import ExecutorStage, X
from gyre.contracts.digest import token_digest
from gyre.contracts.events import CallRecorded, EvaluationRequested, ExecutionScored
from gyre.reward.core import Budget
from gyre.reward.evaluation import Evaluation, TasksRoot
from gyre.reward.graders.pytest import PytestGrader
from gyre.reward.sandbox import Limits as BoxLimits
from gyre.reward.sandbox import find_bubblewrap
from gyre.reward.snapshot import SnapshotLimits
from gyre.rollout.gateway.archive import ArchivedCall
from gyre.rollout.gateway.calls import Calls, CallSettings
from gyre.rollout.gateway.dialects.base import Limits
from gyre.rollout.gateway.render import Renderer
from gyre.rollout.gateway.server import GatewayApp
from gyre.rollout.local import CallFinished
from gyre.rollout.router import Router, RouterLimits
from gyre.runtime.clock import SystemClock
from rollout_fakes import FakeEngine, chatml_tokenizer, says

TASKS = Path(__file__).parents[1] / "data" / "tasks"
TASK = "harbor-simple-task"  # write "Hello, world!" into hello.txt


@asynccontextmanager
async def harness_stage(root: Path, script: str, turns: Sequence[str], environment: dict[str, str]
                        ) -> AsyncIterator[ExecutorStage]:
    """An executor whose harness is `script` (for a shell), and a gateway on a port for it whose policy says `turns`."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    stage = ExecutorStage(root, "/bin/sh", "-c", script, gateway_url=url, tasks_root=TASKS, environment=environment)
    tokenizer = chatml_tokenizer()
    router = Router({0: FakeEngine(says(tokenizer, *turns), chunk=16)}, RouterLimits(), SystemClock())
    router.set_admitting(0, True)

    async def commit(call: ArchivedCall) -> bool:
        await stage.tell(CallFinished(call.record, call.stall_s))
        return True

    async def never(execution: str) -> None:
        raise AssertionError(execution)

    settings = CallSettings(max_tokens=2048, max_context=400_000)  # of bytes: each is a token here
    calls = Calls(settings, Renderer(tokenizer), router, stage.archive, commit, never, SystemClock())
    app = GatewayApp(stage.sessions, calls, Limits())
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="warning", timeout_graceful_shutdown=1))
    task = asyncio.create_task(server.serve([listener]))
    yield stage
    server.should_exit = True
    await task


async def run_to_its_end(stage: ExecutorStage) -> str:
    """Dispatch the task and wait until its execution has ended. Returns what the harness wrote."""
    await stage.dispatch(timeout_s=120.0, overall_timeout_s=150.0, task=TASK)
    log = stage.executor.home(X) / "run" / "harness.log"
    said = ""
    while not stage.ends():
        await stage.until(lambda: log.exists() or stage.ends(), 150.0)
        said = log.read_text(errors="replace") if log.exists() else said
        await stage.executor.look()
        await asyncio.sleep(0.05)
    return said


def records_of(stage: ExecutorStage) -> list[CallRecorded]:
    return [f for f in stage.facts if isinstance(f, CallRecorded)]


def check_records(records: list[CallRecorded]) -> None:
    """Every turn continues the one before it on exact ids; deltas and digests agree."""
    built: dict[str, np.ndarray] = {}
    for record in records:
        base = built[record.base_call][:record.keep_len] if record.base_call else record.prompt_delta[:0]
        built[record.call] = np.concatenate((base, record.prompt_delta, record.output_ids))
        assert token_digest(built[record.call]) == record.digest
    for earlier, later in zip(records, records[1:], strict=False):
        assert later.base_call == earlier.call
        assert later.keep_len == earlier.prompt_len + len(earlier.output_ids), "the harness's JSON did not fork it"


async def score(stage: ExecutorStage, scratch: Path) -> ExecutionScored:
    """What an evaluator says of the preserved workspace."""
    sandbox, why_not = find_bubblewrap()
    if sandbox is None:
        pytest.skip(f"the execution is fine, but its task's tests need a sandbox to run in: {why_not}")
    grader = PytestGrader(sandbox, scratch, 60.0, 30.0, BoxLimits())
    evaluation = Evaluation(grader, stage.blobs, TasksRoot(TASKS), SnapshotLimits(), Budget(), SystemClock(), "test")
    [request] = [f for f in stage.facts if isinstance(f, EvaluationRequested)]
    said = await evaluation.evaluate(request)
    assert isinstance(said, ExecutionScored), said
    return said


async def check_solved(stage: ExecutorStage, said: str, num_calls: int, scratch: Path) -> list[CallRecorded]:
    """The execution ended well in so many calls, each on the exact ids of the one before, and its workspace is worth 1.0."""
    [end] = stage.ends()
    assert (end.ending, end.num_calls, end.num_harness_errors) == ("finished", num_calls, 0), said[-3000:]
    assert stage.preserved()["hello.txt"] == b"Hello, world!"
    records = records_of(stage)
    check_records(records)
    scored = await score(stage, scratch)
    assert (scored.reward, scored.num_passed, scored.num_checks) == (1.0, 2, 2)
    return records
