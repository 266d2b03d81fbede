"""A call moves between engines, over real gRPC: whatever is lost or dies on the way, its stream is what it would have been."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from gyre.rollout.engines.moving import Offer
from gyre.rollout.migration import Expected, MoveFailed, MoveLimits, Progress, is_last, misfit, verdict
from move_stage import PROMPT_TOKENS, STEPS, Stage, lose_it

Open = Callable[..., Awaitable[Stage]]
SOURCE_STEPS = ("open_export", "read_stage", "freeze", "release")
COPIES = (*STEPS, "generate")


def side_of(step: str) -> int:
    """The engine that is asked for a step of a move from 0 to the last one."""
    return 0 if step in SOURCE_STEPS else -1


@pytest.fixture
async def stage_of(tmp_path: Path) -> AsyncIterator[Open]:
    """Opens a stage; the call `x` of execution `x` has said 9 tokens on engine 0 then, the others may say 5 more."""
    stages: list[Stage] = []

    async def begin(num: int = 2, **options: object) -> Stage:
        stage = await Stage.open(tmp_path, num, **options)
        stages.append(stage)
        stage.call("x")
        stage.nodes[0].pace.allow(9)
        await stage.until_said("x", 9)
        for node in stage.nodes[1:]:
            node.pace.allow(5)
        return stage

    yield begin
    for stage in stages:
        await stage.close()


async def test_a_live_call_moves_and_nothing_is_computed_again(stage_of: Open) -> None:
    stage = await stage_of()
    source, destination = stage.nodes
    assert await stage.drain() == (1, 0)
    await stage.finish()
    assert stage.outputs["x"].cell == 1
    assert len(source.client.attempts) == len(destination.client.attempts) == 1
    assert destination.client.attempts[0].num_emitted == 9
    assert destination.engine.load_report().num_tokens_prefilled == 1, "the token whose KV nobody had"
    assert (stage.router.counts.num_moved, stage.router.num_replayed) == (1, 0)
    assert stage.router.counts.num_tokens_recomputed == 0
    assert stage.router.counts.num_tokens_moved == 409
    await stage.is_empty()


async def test_it_goes_on_decoding_while_its_blocks_are_copied(stage_of: Open) -> None:
    stage = await stage_of()
    source, destination = stage.nodes

    async def say_more() -> None:
        source.pace.allow(16)
        await stage.until_said("x", len(stage.heard["x"]) + 16)

    source.client.after("read_stage", say_more)
    assert await stage.drain() == (1, 0)
    assert destination.client.attempts[0].num_emitted == 25
    assert destination.client.asked.count("pull") == 2, "all full blocks at once, then the tail"
    await stage.finish()
    await stage.is_empty()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
async def test_a_lost_question_or_answer_is_asked_again(stage_of: Open, step: str, when: str) -> None:
    stage = await stage_of()
    client = stage.nodes[side_of(step)].client
    getattr(client, when)(step, lose_it)
    assert await stage.drain() == (1, 0)
    await stage.finish()
    assert stage.nodes[1].engine.load_report().num_tokens_prefilled == 1
    if step != "release":
        await stage.is_empty()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", [s for s in STEPS if s != "release"])
async def test_a_side_that_does_not_answer_again_is_given_up(stage_of: Open, step: str, when: str) -> None:
    stage = await stage_of(3)
    client = stage.nodes[side_of(step)].client
    for number in (1, 2):
        getattr(client, when)(step, lose_it, number)
    moved, replayed = await stage.drain()
    assert moved + replayed == 1
    await stage.finish()
    await stage.is_empty()


@pytest.mark.parametrize("victim", [0, 2], ids=["source", "destination"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", COPIES)
async def test_either_side_may_be_killed_at_any_step(stage_of: Open, step: str, when: str, victim: int) -> None:
    stage = await stage_of(3)
    getattr(stage.nodes[side_of(step)].client, when)(step, stage.nodes[victim].kill)
    moved, replayed = await stage.drain()
    assert moved + replayed == 1
    await stage.finish()
    # A release comes after everything, and so does the death; and who was heard may have said all before it died.
    if step != "release" and (step, when) != ("generate", "after"):
        assert stage.outputs["x"].cell in {1, 2} - {victim}


async def test_the_source_goes_on_with_its_own_ticket_when_the_destination_dies_after_its_commit(stage_of: Open) -> None:
    stage = await stage_of(2)
    source, destination = stage.nodes
    destination.client.before("generate", destination.kill)
    drained = asyncio.create_task(stage.drain())
    while len(source.client.attempts) < 2:
        await asyncio.sleep(0.001)
    assert source.client.attempts[1].ticket == destination.client.attempts[0].ticket
    await stage.finish()
    assert await drained == (0, 0), "it ended where it was: nobody else was left"
    assert source.engine.load_report().num_tokens_prefilled == PROMPT_TOKENS + 1
    assert stage.router.num_replayed == 0
    assert stage.outputs["x"].cell == 0


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", COPIES)
async def test_the_harness_may_disconnect_at_any_step(stage_of: Open, step: str, when: str) -> None:
    stage = await stage_of()

    async def disconnect() -> None:
        stage.calls["x"].cancel()

    getattr(stage.nodes[side_of(step)].client, when)(step, disconnect)
    await stage.drain()
    with pytest.raises(asyncio.CancelledError):
        await stage.calls["x"]
    await stage.is_empty()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["open_export", "reserve", "read_stage", "pull"])
async def test_the_call_may_end_while_it_is_copied(stage_of: Open, step: str, when: str) -> None:
    stage = await stage_of()

    async def end() -> None:
        stage.nodes[0].pace.free()
        await asyncio.shield(stage.calls["x"])

    getattr(stage.nodes[side_of(step)].client, when)(step, end)
    assert await stage.drain() == (0, 0)
    await stage.finish()
    assert stage.outputs["x"].cell == 0
    await stage.is_empty()


async def test_a_call_that_ends_just_before_it_is_frozen_has_ended(stage_of: Open) -> None:
    stage = await stage_of()
    engine = stage.nodes[0].engine

    async def end() -> None:
        stage.nodes[0].pace.free()
        while engine.load_report().num_running:
            await asyncio.sleep(0)

    stage.nodes[0].client.before("freeze", end)
    assert await stage.drain() == (0, 0)
    await stage.finish()
    await stage.is_empty()


@pytest.mark.parametrize("step", ["open_export", "reserve", "read_stage", "pull", "freeze", "commit"])
async def test_a_step_that_hangs_costs_its_deadline_and_no_more(stage_of: Open, step: str) -> None:
    limits = MoveLimits(min_tokens=1, last_blocks=2, step_s=0.2, pull_s=0.2, total_s=0.6, stop_s=0.2, stream_s=1.0, land_s=1.0)
    stage = await stage_of(3, limits=limits)
    never = asyncio.Event()
    stage.nodes[side_of(step)].client.before(step, never.wait)
    moved, replayed = await stage.drain()
    assert moved + replayed == 1
    await stage.finish()
    await stage.is_empty()


def test_where_a_call_goes_on_follows_from_how_far_the_move_came() -> None:
    late = MoveFailed("destination", "late", "")
    frozen = object()
    assert verdict(Progress(failed=late)) == "stays"
    assert verdict(Progress(failed=late, may_be_frozen=True)) == "anywhere"
    assert verdict(Progress(failed=late, may_be_frozen=True, frozen=frozen)) == "source"
    assert verdict(Progress(may_be_frozen=True, frozen=frozen, has_committed=True)) == "destination"


def test_it_is_frozen_when_little_is_left_or_it_was_chased_long_enough() -> None:
    limits = MoveLimits(last_blocks=16, max_stages=3)
    assert [is_last(n, 0, limits) for n in (0, 16, 17)] == [True, True, False]
    assert [is_last(1000, n, limits) for n in (0, 2, 3)] == [False, False, True]


def test_what_two_engines_must_have_in_common() -> None:
    def offer(layout: str, version: int) -> Offer:
        return Offer("t", layout, version, "x", 1, 2, "")

    expected = Expected("staged", "a", 3)
    assert misfit(offer("a", 3), expected) == ""
    assert misfit(offer("b", 3), expected) == "layout"
    assert misfit(offer("", 3), Expected("staged", "", 3)) == "layout"
    assert misfit(offer("a", 4), expected) == "version"
