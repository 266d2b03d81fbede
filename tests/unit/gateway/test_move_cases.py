"""What can happen to a call or a cached prefix on its way between engines, one test for each case."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gyre.contracts.events import WeightsPublished
from gyre.rollout.attempt import Attempt, Chunk, EngineRefused, Output
from gyre.rollout.engine_client import GrpcEngine
from gyre.rollout.engines.base import GenerateRequest
from gyre.rollout.engines.moving import ExportOf, MoveRefused, TicketUnknown
from gyre.rollout.engines.scripted import ScriptedConfig
from gyre.rollout.gateway.session import StallMeter
from gyre.rollout.live_call import LiveCall, Route
from gyre.rollout.routes import Engine
from gyre.runtime.clock import ManualClock, SystemClock
from move_stage import PROMPT_TOKENS, QUICK, Stage, job_of, lose_it, undisturbed

Open = Callable[..., Awaitable[Stage]]


@pytest.fixture
async def open_stage(tmp_path: Path) -> AsyncIterator[Open]:
    stages: list[Stage] = []

    async def begin(num: int = 2, home: str = "stage", **options: object) -> Stage:
        stages.append(await Stage.open(tmp_path / home, num, **options))
        return stages[-1]

    yield begin
    for stage in stages:
        await stage.close()


async def begun(stage: Stage, name: str = "x", num_tokens: int = 9) -> None:
    """The call has said that many tokens on engine 0; every other engine may say five."""
    await stage.begin_on(0, name)
    stage.nodes[0].pace.allow(num_tokens)
    await stage.until_said(name, num_tokens)
    for node in stage.nodes[1:]:
        node.pace.allow(5)


def fill(stage: Stage, cell: int, num_tokens: int) -> None:
    """Take room on an engine that the router does not know of yet."""
    stage.nodes[cell].engine.submit(GenerateRequest("filler", np.ones(16, np.int32), num_tokens - 16))


# ---------------------------------------------------------------- the destination


async def test_a_full_destination_is_passed_over_for_the_next_one(open_stage: Open) -> None:
    stage = await open_stage(3, config=ScriptedConfig(kv_tokens=1000))
    await begun(stage)
    fill(stage, 2, 800)
    assert await stage.drain() == (1, 0)
    await stage.finish()
    assert stage.outputs["x"].cell == 1
    assert stage.nodes[2].client.asked == ["reserve", "release"], "it was believed to have room, and said that it has none"


async def test_a_destination_known_to_be_full_is_not_asked(open_stage: Open) -> None:
    stage = await open_stage(3, config=ScriptedConfig(kv_tokens=1000))
    await begun(stage)
    fill(stage, 2, 800)
    await stage.look()
    assert await stage.drain() == (1, 0)
    assert stage.nodes[2].client.asked == []
    await stage.finish()


async def test_when_every_destination_is_full_the_call_is_replayed(open_stage: Open) -> None:
    stage = await open_stage(2, config=ScriptedConfig(kv_tokens=1000))
    await begun(stage)
    fill(stage, 1, 800)
    assert await stage.drain() == (0, 1)
    assert stage.router.counts.replayed == {"refused": 1}
    await stage.finish()


async def test_room_promised_to_one_call_is_not_promised_to_the_next(open_stage: Open) -> None:
    stage = await open_stage(3, config=ScriptedConfig(kv_tokens=900))
    await begun(stage)
    await stage.begin_on(0, "y")
    stage.nodes[0].pace.allow(20)
    await stage.until_said("y", 9)
    assert await stage.drain() == (2, 0)
    assert {stage.router.num_live(cell) for cell in (1, 2)} == {1}
    assert "refused" not in stage.router.counts.replayed
    for name in ("x", "y"):
        await stage.finish(name)


async def test_other_weights_at_the_destination_mean_a_replay(open_stage: Open) -> None:
    stage = await open_stage(2)
    await begun(stage)
    await stage.nodes[1].client.load(WeightsPublished(1, "c1", 0, "checkpoints/1"))
    await stage.look()
    assert await stage.drain() == (0, 1)
    assert stage.router.counts.replayed == {"version": 1}
    assert stage.nodes[1].client.asked == []
    await stage.finish()
    assert [(s.start, s.version) for s in stage.outputs["x"].spans()] == [(0, 0), (9, 1)]


async def test_weights_that_change_at_the_destination_while_blocks_come_are_noticed(open_stage: Open) -> None:
    stage = await open_stage(2)
    await begun(stage)

    async def swap() -> None:
        await stage.nodes[1].client.load(WeightsPublished(1, "c1", 0, "checkpoints/1"))

    stage.nodes[1].client.before("commit", swap)
    assert sum(await stage.drain()) == 1
    await stage.finish()
    assert stage.nodes[1].engine.load_report().num_tokens_reused == 0, "no KV of other weights"


async def test_weights_that_change_at_the_source_while_blocks_go_are_noticed(open_stage: Open) -> None:
    stage = await open_stage(2)
    await begun(stage)

    async def swap() -> None:
        await stage.nodes[0].client.load(WeightsPublished(1, "c1", 0, "checkpoints/1"))

    stage.nodes[0].client.before("freeze", swap)
    assert await stage.drain() == (0, 1)
    await stage.finish()


async def test_another_layout_means_a_replay(open_stage: Open) -> None:
    stage = await open_stage(2, last=ScriptedConfig(block_tokens=32))
    await begun(stage)
    assert await stage.drain() == (0, 1)
    assert stage.router.counts.replayed == {"layout": 1}
    await stage.finish()


async def test_a_short_context_is_replayed_at_once(open_stage: Open) -> None:
    stage = await open_stage(2)
    stage.call("s", 60, prompt_tokens=8)
    stage.nodes[0].pace.allow(9)
    await stage.until_said("s", 9)
    assert await stage.drain() == (0, 1)
    assert stage.router.counts.replayed == {"short": 1}
    assert stage.nodes[0].client.asked == []
    await stage.finish("s", 60, 8)


@pytest.mark.parametrize("kind", ["ticket", "replay"])
async def test_engines_of_other_kinds(open_stage: Open, kind: str) -> None:
    stage = await open_stage(2, config=ScriptedConfig(migration=kind))
    await begun(stage)
    assert await stage.drain() == ((1, 0) if kind == "ticket" else (0, 1))
    await stage.finish()
    assert stage.nodes[0].client.asked == (["freeze", "release"] if kind == "ticket" else [])
    assert stage.nodes[1].client.asked == []
    assert stage.nodes[1].engine.load_report().num_tokens_prefilled == (1 if kind == "ticket" else PROMPT_TOKENS + 9)
    await stage.is_empty()


@pytest.mark.parametrize("when", ["before", "after"])
async def test_an_engine_of_kind_ticket_whose_answer_is_lost_gives_it_again(open_stage: Open, when: str) -> None:
    stage = await open_stage(2, config=ScriptedConfig(migration="ticket"))
    await begun(stage)
    getattr(stage.nodes[0].client, when)("freeze", lose_it)
    assert await stage.drain() == (1, 0)
    await stage.finish()
    await stage.is_empty()


async def test_a_ticket_is_kept_until_its_kv_has_been_fetched(open_stage: Open) -> None:
    """Two vLLM servers that had never met took 24 s for the first fetch; after 10 s its source was released."""
    limits = replace(QUICK, land_s=0.05, fetch_s=8.0)
    stage = await open_stage(2, config=ScriptedConfig(migration="ticket"), limits=limits)
    await begun(stage)
    fetched, fetches = asyncio.Event(), asyncio.Event()

    async def fetch() -> None:
        fetches.set()
        await fetched.wait()

    stage.nodes[1].client.before("generate", fetch)
    drain = asyncio.create_task(stage.drain())
    await fetches.wait()
    await asyncio.sleep(6 * limits.land_s)
    assert "release" not in stage.nodes[0].client.asked and not drain.done()
    fetched.set()
    assert await drain == (1, 0)
    await stage.finish()
    await stage.is_empty()
    assert stage.nodes[0].client.asked == ["freeze", "release"]


# ---------------------------------------------------------------- twice


async def test_a_call_may_move_again_and_again(open_stage: Open) -> None:
    stage = await open_stage(3)
    await begun(stage)
    assert await stage.drain(0) == (1, 0)
    assert stage.router.num_live(2) == 1
    assert await stage.drain(2) == (1, 0)
    assert stage.router.num_live(1) == 1
    await stage.finish()
    assert stage.router.counts.num_tokens_recomputed == 0
    await stage.is_empty()


async def test_the_destination_may_be_drained_while_the_call_is_on_its_way(open_stage: Open) -> None:
    stage = await open_stage(3)
    await begun(stage)
    drains: list[asyncio.Task[tuple[int, int]]] = []

    async def drain_it() -> None:
        drains.append(asyncio.create_task(stage.drain(2)))
        while stage.router.is_admitting(2):
            await asyncio.sleep(0)

    stage.nodes[2].client.after("commit", drain_it)
    assert await stage.drain(0) == (1, 0)
    await drains[0]
    assert stage.router.num_live(1) == 1, "it did not stay where everybody leaves"
    await stage.finish()
    await stage.is_empty()


async def test_what_an_engine_says_after_the_call_has_left_it_is_dropped() -> None:
    output = Output()
    call = LiveCall(job_of("x"), output, StallMeter(), SystemClock())
    source, destination = Engine(0, None), Engine(1, None)
    logprobs = np.full(1, -1.0, np.float32)

    def chunk(index: int) -> Chunk:
        return Chunk(index, np.full(1, 7, np.int32), logprobs, logprobs, (0,))

    async def nothing() -> str:
        return ""

    call.begin(Route(source), "x-0", asyncio.ensure_future(nothing()))
    assert call.take(0, chunk(0))
    assert call.stop(0)
    assert call.go_on(0, [Route(destination, b"t")])
    call.end()
    call.number = 1
    call.begin(Route(destination, b"t"), "x-0.1", asyncio.ensure_future(nothing()))
    assert not call.take(0, chunk(1)), "of the try before"
    assert call.take(1, chunk(1))
    assert output.ids == [7, 7]
    assert not call.stop(0) and not call.go_on(0, [Route(source, b"t")]), "another move of the try before comes too late"
    call.over()
    assert not call.take(1, chunk(2))


async def test_an_export_under_an_epoch_that_is_over_is_refused(open_stage: Open) -> None:
    stage = await open_stage(2)
    client = stage.nodes[0].client
    await client.wake(5, WeightsPublished(0, "c0", 0, "checkpoints/0"))
    await begun(stage)
    with pytest.raises(MoveRefused, match="epoch 4 is over"):
        await client.open_export("t", ExportOf("x-0"), 4, 5.0, 1.0)
    with pytest.raises(MoveRefused, match="epoch 4 is over"):
        await client.freeze("t", 0, ExportOf("x-0"), 4, 1.0)
    assert await stage.drain(0, epoch=4) == (0, 1)
    await stage.finish()


# ---------------------------------------------------------------- the call itself


async def test_siblings_that_share_a_prefix_move_each_for_itself(open_stage: Open) -> None:
    stage = await open_stage(2)
    jobs = [job_of("x"), job_of("x", 40)]
    heard: list[list[int]] = [[], []]
    tasks = [asyncio.create_task(stage.router.generate(
        type(job)(f"x-{n}", job.execution, job.prompt, job.max_tokens, job.sampling, job.stop_ids),
        Output(heard[n].extend), StallMeter())) for n, job in enumerate(jobs)]
    stage.nodes[0].pace.allow(10)
    async with asyncio.timeout(5):
        while sum(map(len, heard)) < 10:
            await asyncio.sleep(0.001)
    stage.nodes[1].pace.free()
    assert await stage.drain() == (2, 0)
    await asyncio.gather(*tasks)
    assert heard == [await undisturbed(job) for job in jobs]
    assert stage.nodes[1].engine.load_report().num_tokens_prefilled == 2
    await stage.is_empty()


async def test_the_pause_is_counted_from_the_freeze_to_the_first_token_elsewhere(open_stage: Open) -> None:
    clock = ManualClock(100.0)
    stage = await open_stage(2, clock=clock)
    await begun(stage)

    async def take_time() -> None:
        clock.advance(3.0)

    stage.nodes[0].client.before("read_stage", take_time)  # it decodes meanwhile: no pause
    stage.nodes[0].client.after("freeze", take_time)
    stage.nodes[1].client.before("generate", take_time)
    assert await stage.drain() == (1, 0)
    clock.advance(50.0)
    assert stage.stalls["x"].untaken_s(clock.now()) == 6.0
    await stage.finish()


async def test_a_pause_for_a_move_that_did_not_happen_ends_with_it(open_stage: Open) -> None:
    clock = ManualClock(100.0)
    stage = await open_stage(2, clock=clock)
    await begun(stage)

    async def end() -> None:
        stage.nodes[0].pace.free()
        await asyncio.sleep(0)

    stage.nodes[0].client.before("freeze", end)
    await stage.drain()
    await stage.finish()
    clock.advance(50.0)
    assert stage.stalls["x"].untaken_s(clock.now()) == 0.0


async def test_a_destination_that_will_not_take_it_is_no_refusal_of_the_call(open_stage: Open) -> None:
    stage = await open_stage(3)
    await begun(stage)

    async def refuse() -> None:
        raise EngineRefused("INVALID_ARGUMENT: exceeds the longest context")

    stage.nodes[2].client.before("generate", refuse)
    stage.nodes[0].pace.allow(3)
    assert sum(await stage.drain()) == 1
    await stage.finish()


async def test_many_calls_leave_at_once(open_stage: Open) -> None:
    stage = await open_stage(3)
    names = [f"x{n:02d}" for n in range(12)]
    for name in names:
        await stage.begin_on(0, name)
    stage.nodes[0].pace.allow(12)
    for name in names:
        await stage.until_said(name, 1)
    for node in stage.nodes[1:]:
        node.pace.free()
    assert await stage.drain() == (12, 0)
    for name in names:
        await stage.finish(name)
    await stage.is_empty()
    assert stage.router.counts.num_tokens_recomputed == 0


async def test_a_pair_of_engines_moves_a_few_calls_at_once(open_stage: Open) -> None:
    stage = await open_stage(2, limits=replace(QUICK, max_pair_moves=1))
    for name in ("x", "y", "z"):
        await stage.begin_on(0, name)
    stage.nodes[0].pace.allow(9)
    for name in ("x", "y", "z"):
        await stage.until_said(name, 1)
    stage.nodes[1].pace.free()
    assert await stage.drain() == (3, 0)
    asked = [step for step in stage.nodes[1].client.asked if step in ("reserve", "commit")]
    assert asked == ["reserve", "commit"] * 3
    for name in ("x", "y", "z"):
        await stage.finish(name)


async def test_what_the_wire_says_of_moves_that_cannot_be(open_stage: Open) -> None:
    client = (await open_stage(1)).nodes[0].client
    for ask in (client.read_stage("t", 0, 1.0), client.freeze("t", 0, ExportOf("x"), 0, 1.0)):
        with pytest.raises(TicketUnknown):
            await ask
    with pytest.raises(MoveRefused, match="not running"):
        await client.open_export("t", ExportOf("x"), 0, 5.0, 1.0)
    assert not await client.release(b"t", 1.0)
    other = (await open_stage(1, config=ScriptedConfig(migration="replay"), home="other")).nodes[0].client
    with pytest.raises(MoveRefused, match="does not move requests in stages"):
        await other.open_export("t", ExportOf("x"), 0, 5.0, 1.0)
    with pytest.raises(MoveRefused, match="by ticket"):
        await other.freeze("t", 0, ExportOf("x"), 0, 1.0)


# ---------------------------------------------------------------- tickets


async def generate(stage: Stage, cell: int, attempt: Attempt) -> list[int]:
    stage.nodes[cell].pace.free()
    return await _collect(stage.nodes[cell].client, attempt)


async def _collect(client: GrpcEngine, attempt: Attempt) -> list[int]:
    return [i async for chunk in client.generate(attempt) for i in chunk.ids.tolist()]


def attempt_with(ticket: bytes, name: str = "y", emitted: list[int] | None = None) -> Attempt:
    job, emitted = job_of("x"), emitted or []
    prompt = np.concatenate((job.prompt, np.asarray(emitted, np.int32)))
    return Attempt(name, "x", prompt, 60 - len(emitted), job.sampling, job.stop_ids, len(emitted), 10.0, ticket)


@pytest.mark.parametrize("ticket", [b"", b"never given", b"\xff\xfe", b"[1, 2]"])
async def test_a_ticket_of_no_use_is_ignored(open_stage: Open, ticket: bytes) -> None:
    stage = await open_stage(1)
    assert await generate(stage, 0, attempt_with(ticket)) == await undisturbed(job_of("x"))
    assert stage.nodes[0].engine.load_report().num_tokens_reused == 0


async def test_a_ticket_is_good_once_and_for_its_own_tokens_only(open_stage: Open) -> None:
    stage = await open_stage(1)
    client, whole = stage.nodes[0].client, await undisturbed(job_of("x"))
    frozen = asyncio.create_task(_collect(client, attempt_with(b"", "x-0")))
    stage.nodes[0].pace.allow(9)
    async with asyncio.timeout(5):
        while stage.nodes[0].engine.load_report().num_tokens_sampled < 9:
            await asyncio.sleep(0.001)
    await client.open_export("t", ExportOf("x-0"), 0, 60.0, 1.0)
    await client.freeze("t", 0, ExportOf("x-0"), 0, 1.0)
    assert await frozen == whole[:9]
    reused = [stage.nodes[0].engine.load_report().num_tokens_reused]
    for name, num_emitted in (("a", 8), ("b", 9), ("c", 9)):
        said = await generate(stage, 0, attempt_with(b"t", name, whole[:num_emitted]))
        assert said == whole[num_emitted:], "whatever the ticket is worth, the answer is the same"
        reused.append(stage.nodes[0].engine.load_report().num_tokens_reused)
    worth = np.diff(reused).tolist()
    assert worth[1] == PROMPT_TOKENS + 9 - 1
    assert max(worth[0], worth[2]) < PROMPT_TOKENS + 8, "of another length, or used before: no more than the prefix cache"
