"""The rollout service as real processes: nothing is lost or said twice, whoever is killed."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre.contracts.digest import token_digest
from gyre.contracts.errors import SandboxError
from gyre.contracts.events import (
    CallRecorded,
    CellRolloutReady,
    CellRolloutReleased,
    CellTrainReleased,
    ExecutionStarted,
    ExecutionTerminated,
)
from gyre.rollout.harness.process import find_bwrap
from gyre.runtime.blobs import DirectoryBlobs
from gyre.runtime.bus import Bus
from gyre.runtime.ports import free_ports
from rollout_fakes import wait_until
from rollout_stage import RolloutStage, Witness

Start = Callable[..., Awaitable[tuple[RolloutStage, Witness]]]


@pytest.fixture
async def start(tmp_path: Path, nats_server: Any) -> AsyncIterator[Start]:
    """Starts a run's rollout processes with weights 0 published and every engine ready."""
    stages: list[RolloutStage] = []
    tasks: list[asyncio.Task[None]] = []
    bus = await Bus.connect(nats_server.url, "witness")
    await bus.bootstrap()

    async def begin(num_cells: int = 1, **options: object) -> tuple[RolloutStage, Witness]:
        stage = RolloutStage(tmp_path, nats_server.url, free_ports(num_cells + 2, "127.0.0.1"), **options)
        stage.prepare()
        stage.start()
        stages.append(stage)
        witness = Witness(bus, DirectoryBlobs(tmp_path / "blobs"))
        tasks.append(asyncio.create_task(witness.take_requests()))
        await witness.weights(0)
        await until(witness, lambda facts: len(facts) == num_cells, CellRolloutReady)
        return stage, witness

    yield begin
    for task in tasks:
        task.cancel()
    for stage in stages:
        stage.stop()
    await bus.close()


async def until(witness: Witness, enough: Callable[[list], bool], *records: type, seconds: float = 60.0) -> list:
    """What was said of `records` once it is enough."""
    async with asyncio.timeout(seconds):
        while True:
            facts = await witness.heard(*records)
            if enough(facts):
                return facts
            await asyncio.sleep(0.1)


async def all_ended(witness: Witness, executions: list[str]) -> dict[str, ExecutionTerminated]:
    ends = await until(witness, lambda facts: len(facts) >= len(executions), ExecutionTerminated)
    assert sorted(e.execution for e in ends) == sorted(executions), "each execution ends once"
    return {e.execution: e for e in ends}


async def check_records(witness: Witness, ends: dict[str, ExecutionTerminated]) -> list[CallRecorded]:
    """Every call of every execution is there once, and prompt + output are what the digest says."""
    wanted = sum(e.num_calls for e in ends.values())
    records = await until(witness, lambda facts: len(facts) >= wanted, CallRecorded)
    assert len(records) == wanted
    for execution in ends:
        built: dict[str, np.ndarray] = {}
        mine = sorted((r for r in records if r.execution == execution), key=lambda r: r.index)
        assert [r.index for r in mine] == list(range(ends[execution].num_calls))
        for record in mine:
            base = built[record.base_call][:record.keep_len] if record.base_call else record.prompt_delta[:0]
            built[record.call] = np.concatenate((base, record.prompt_delta, record.output_ids))
            assert token_digest(built[record.call]) == record.digest
    return records


async def check_what_was_heard(stage: RolloutStage, witness: Witness, ends: dict[str, ExecutionTerminated]) -> None:
    """Every execution was preserved, is to be evaluated, and its conversation is complete."""
    async with asyncio.timeout(30):
        while len(witness.requests) < len(ends):
            await asyncio.sleep(0.05)
    assert sorted(a.execution for a in witness.requests) == sorted(ends)
    for end in ends.values():
        assert end.ending == "finished", end
        assert end.num_calls == stage.num_calls
        data = witness.blobs.get(end.snapshot)
        start = data.index(b"[{")
        assert len(json.JSONDecoder().raw_decode(data[start:].decode(errors="replace"))[0]) == 1 + 2 * stage.num_calls


async def test_a_group_from_dispatch_to_evaluation(start: Start) -> None:
    stage, witness = await start(num_cells=2)
    ids = await witness.dispatch("g00000-000", 6)
    ends = await all_ended(witness, ids)
    records = await check_records(witness, ends)
    await check_what_was_heard(stage, witness, ends)
    assert {r.cell for r in records} == {0, 1}
    assert {e.undelivered for e in ends.values()} == {()}
    assert len(await witness.heard(ExecutionStarted)) == 6
    assert all(r.keep_len > 0 for r in records if r.index > 0)
    limited = await witness.dispatch("g00000-001", 2, timeout_calls=3)
    ends = await until(witness, lambda facts: len(facts) == 8, ExecutionTerminated)
    mine = [e for e in ends if e.execution in limited]
    assert {(e.ending, e.limit, e.num_calls, e.undelivered) for e in mine} == {("timed_out", "calls", 2, ())}
    assert all(e.snapshot for e in mine)


async def test_executions_run_in_a_sandbox_where_there_is_one(start: Start) -> None:
    try:
        find_bwrap("bwrap", allow_unsandboxed=False, shipped_example=False)
    except SandboxError:
        pytest.skip("bubblewrap is not installed")
    stage, witness = await start(sandbox="bwrap")
    ids = await witness.dispatch("g00000-000", 3)
    ends = await all_ended(witness, ids)
    await check_records(witness, ends)
    await check_what_was_heard(stage, witness, ends)


async def test_serve_may_be_killed_while_executions_run(start: Start) -> None:
    stage, witness = await start(num_calls=8, token_ms=10.0)
    ids = await witness.dispatch("g00000-000", 4)
    for _ in range(2):
        await until(witness, lambda facts: len(facts) >= 4, CallRecorded)
        stage.kill("serve")
        stage.start("serve")
        await asyncio.sleep(1.0)
    ends = await all_ended(witness, ids)
    await check_records(witness, ends)
    await check_what_was_heard(stage, witness, ends)


async def test_an_engine_may_be_killed_while_executions_run(start: Start) -> None:
    stage, witness = await start(num_cells=2, num_calls=6, token_ms=10.0)
    ids = await witness.dispatch("g00000-000", 4)
    await until(witness, lambda facts: len(facts) >= 3, CallRecorded)
    stage.kill("engine-0")
    await until(witness, lambda facts: len(facts) >= 12, CallRecorded)
    stage.start("engine-0")
    ends = await all_ended(witness, ids)
    await check_records(witness, ends)
    await check_what_was_heard(stage, witness, ends)
    assert all(e.num_harness_errors == 0 for e in ends.values()), "the harness saw a pause and no error"


async def test_the_only_engine_may_be_killed_and_its_calls_wait_for_it(start: Start) -> None:
    stage, witness = await start(num_calls=4, token_ms=20.0)
    ids = await witness.dispatch("g00000-000", 2)
    await until(witness, lambda facts: len(facts) >= 2, CallRecorded)
    stage.kill("engine-0")
    stage.start("engine-0")
    ends = await all_ended(witness, ids)
    await check_records(witness, ends)
    await check_what_was_heard(stage, witness, ends)
    assert all(e.stall_s > 0 for e in ends.values())


async def test_nats_may_be_gone_for_a_while(start: Start, nats_server: Any) -> None:
    stage, witness = await start(num_calls=6, token_ms=10.0)
    ids = await witness.dispatch("g00000-000", 3)
    await until(witness, lambda facts: len(facts) >= 2, CallRecorded)
    nats_server.kill()
    homes = stage.root / "state" / "executions"
    await asyncio.to_thread(wait_until, lambda: not any(homes.iterdir()))
    nats_server.start()
    ends = await all_ended(witness, ids)
    await check_records(witness, ends)
    await check_what_was_heard(stage, witness, ends)
    assert all(e.num_harness_errors == 0 for e in ends.values()), "harnesses went on without NATS"


async def test_calls_move_off_a_cell_that_goes_to_training(start: Start) -> None:
    stage, witness = await start(num_cells=2, num_calls=2, max_tokens=200, token_ms=20.0)
    ids = await witness.dispatch("g00000-000", 6)
    await until(witness, lambda facts: len(facts) >= 2 and any(f.cell == 0 for f in facts), CallRecorded)
    await witness.role(0, 1, "train", 0)
    [released] = await until(witness, lambda facts: bool(facts), CellRolloutReleased)
    assert released.num_moved > 0
    ends = await all_ended(witness, ids)
    await check_records(witness, ends)
    await check_what_was_heard(stage, witness, ends)
    assert all(e.num_harness_errors == 0 for e in ends.values()), "the harness saw a pause and no error"
    stage.stop()  # which writes what is left of the spans
    lines = map(json.loads, (stage.root / "log" / "traces" / "rollout.jsonl").read_text().splitlines())
    spans = [span for span in lines if span["end_time"]]
    drains = {span["context"]["span_id"] for span in spans if span["name"] == "gyre.rollout.drain"}
    moves = [span for span in spans if span["name"] == "gyre.kv.migrate"]
    assert {span["parent_id"] for span in moves} == {f"0x{drain.removeprefix('0x')}" for drain in drains}
    moved = [span["attributes"] for span in moves if span["attributes"]["gyre.outcome"] == "moved"]
    assert len(moved) >= released.num_moved
    assert all(said["gyre.tokens"] > 8 and said["gyre.bytes"] > 0 and said["gyre.cell.to"] == 1 for said in moved)


@pytest.mark.parametrize("victim", ["engine-0", "engine-1"], ids=["source", "destination"])
async def test_harnesses_notice_nothing_when_an_engine_dies_while_calls_move(start: Start, victim: str) -> None:
    stage, witness = await start(num_cells=3, num_calls=3, max_tokens=120, token_ms=15.0)
    ids = await witness.dispatch("g00000-000", 8)
    await until(witness, lambda facts: len(facts) >= 4, CallRecorded)
    await witness.role(0, 1, "train", 0)
    await asyncio.sleep(0.1)  # somewhere in the drain: wherever that is, nothing may be noticed
    stage.kill(victim)
    stage.start(victim)
    ends = await all_ended(witness, ids)
    await check_records(witness, ends)
    await check_what_was_heard(stage, witness, ends)
    assert all(e.num_harness_errors == 0 for e in ends.values())


async def test_a_cell_goes_to_training_and_comes_back_with_new_weights(start: Start) -> None:
    stage, witness = await start(num_cells=2, num_calls=6, token_ms=10.0)
    ids = await witness.dispatch("g00000-000", 4)
    await until(witness, lambda facts: len(facts) >= 3, CallRecorded)
    await witness.role(0, 1, "train", 0)
    [released] = await until(witness, lambda facts: bool(facts), CellRolloutReleased)
    assert (released.cell, released.epoch) == (0, 1)
    ends = await all_ended(witness, ids)
    await check_records(witness, ends)
    assert all(e.num_harness_errors == 0 for e in ends.values())
    await witness.weights(1)
    await witness.role(0, 2, "rollout", 1)
    await witness.say(CellTrainReleased(0, 2, 1))
    ready = await until(witness, lambda facts: len(facts) == 4, CellRolloutReady)
    assert sorted((r.cell, r.epoch, r.version, r.checksum) for r in ready) == [
        (0, 0, 0, "c0"), (0, 2, 1, "c1"), (1, 0, 0, "c0"), (1, 0, 1, "c1")]
    await witness.dispatch("g00000-001", 2)
    await until(witness, lambda facts: len(facts) == 6, ExecutionTerminated)
    later = [r for r in await witness.heard(CallRecorded) if r.group == "g00000-001"]
    assert {s.version for r in later for s in r.spans} == {1}
