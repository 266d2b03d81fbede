"""An execution that waits on a tool has no call, only a cached prefix; that goes where its next call will look for it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gyre.rollout import placement
from gyre.rollout.engines.moving import ExportOf, MoveRefused, Reservation, TicketUnknown
from gyre.rollout.engines.scripted import ScriptedConfig
from gyre.rollout.placement import Candidate
from move_stage import QUICK, Pace, Stage, lose_it, make_engine

Open = Callable[..., Awaitable[Stage]]


@pytest.fixture
async def idle_stage(tmp_path: Path) -> AsyncIterator[Open]:
    """Opens a stage on which the executions `x` and `y` have had a call each on engine 0 and wait on a tool now."""
    stages: list[Stage] = []

    async def begin(num: int = 2, **options: object) -> Stage:
        stage = await Stage.open(tmp_path, num, **options)
        stages.append(stage)
        for node in stage.nodes:
            node.pace.free()
        for name in ("x", "y"):
            await stage.begin_on(0, name)
            await stage.calls[name]
        return stage

    yield begin
    for stage in stages:
        await stage.close()


async def next_call(stage: Stage, name: str = "x") -> int:
    """The execution asks again, its context grown by the first answer; returns how many tokens were computed for it."""
    before = [node.engine.load_report().num_tokens_prefilled for node in stage.nodes]
    stage.heard.pop(name)
    async with asyncio.timeout(10):
        await stage.call(name, 60)
    return sum(node.engine.load_report().num_tokens_prefilled - b for node, b in zip(stage.nodes, before, strict=True))


async def test_the_cached_prefix_moves_and_the_next_call_finds_it(idle_stage: Open) -> None:
    stage = await idle_stage(3)
    assert await stage.drain() == (0, 0)
    assert stage.router.counts.num_prefixes_moved == 2
    assert await next_call(stage) < 20
    assert stage.outputs["x"].cell == 2
    await stage.is_empty()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["open_export", "reserve", "read_stage", "pull", "freeze", "commit"])
@pytest.mark.parametrize("victim", [0, 1], ids=["source", "destination"])
async def test_a_side_that_dies_costs_the_prefix_and_nothing_else(idle_stage: Open, step: str, when: str,
                                                                  victim: int) -> None:
    stage = await idle_stage(2, last=ScriptedConfig())
    side = 0 if step in ("open_export", "read_stage", "freeze") else 1
    getattr(stage.nodes[side].client, when)(step, stage.nodes[victim].kill)
    assert await stage.drain() == (0, 0)
    if victim == 0:
        await next_call(stage)
        assert stage.outputs["x"].cell == 1


async def test_a_call_that_comes_while_its_prefix_is_on_its_way_waits_for_it(idle_stage: Open) -> None:
    stage = await idle_stage(3)
    computed: list[asyncio.Task[int]] = []

    async def ask() -> None:
        computed.append(asyncio.create_task(next_call(stage)))
        await asyncio.sleep(0)

    stage.nodes[2].client.after("pull", ask)
    await stage.drain()
    assert await computed[0] < 20
    assert stage.outputs["x"].cell == 2


async def test_a_prefix_whose_execution_has_asked_elsewhere_stays(idle_stage: Open) -> None:
    stage = await idle_stage(2)
    for cell in (0, 1):
        stage.router.set_admitting(cell, cell == 1)
    for name in ("x", "y"):
        await next_call(stage, name)
    assert await stage.drain() == (0, 0)
    assert stage.nodes[0].client.asked == []


async def test_moving_prefixes_ends_at_its_deadline(idle_stage: Open) -> None:
    stage = await idle_stage(2, limits=replace(QUICK, prefixes_s=0.2))
    never = asyncio.Event()
    stage.nodes[1].client.before("pull", never.wait)
    stage.nodes[1].client.before("pull", never.wait, 2)
    assert await stage.drain() == (0, 0)
    assert stage.router.counts.num_prefixes_moved == 0
    await next_call(stage)
    await stage.is_empty()


async def test_an_answer_that_is_lost_costs_nothing(idle_stage: Open) -> None:
    stage = await idle_stage(2)
    stage.nodes[1].client.after("commit", lose_it)
    stage.nodes[0].client.after("freeze", lose_it)
    await stage.drain()
    assert stage.router.counts.num_prefixes_moved == 2
    assert await next_call(stage) < 20


@pytest.mark.parametrize("options", [{"config": ScriptedConfig(migration="replay")},
                                     {"limits": replace(QUICK, min_tokens=10_000)}], ids=["replay", "small"])
async def test_small_prefixes_and_those_of_engines_that_only_replay_stay(idle_stage: Open, options: dict[str, Any]) -> None:
    stage = await idle_stage(2, **options)
    await stage.drain()
    assert stage.nodes[0].client.asked == []


# ---------------------------------------------------------------- engines that move by ticket

TICKET = ScriptedConfig(migration="ticket")


async def test_a_prefix_whose_ticket_a_call_for_one_token_shows_is_found_by_the_next_call(idle_stage: Open) -> None:
    stage = await idle_stage(3, config=TICKET)
    source, _, destination = stage.nodes
    assert await stage.drain() == (0, 0)
    assert source.client.asked.count("freeze") == 2 and "open_export" not in source.client.asked
    asked = sorted((a.namespace, a.max_tokens, a.num_emitted) for a in destination.client.attempts)
    assert asked == [("x", 1, 0), ("y", 1, 0)], "beside each other, in whatever order"
    assert stage.router.counts.num_prefixes_moved == 2
    assert stage.outputs["x"].cell == 0 and len(stage.heard["x"]) == 60, "nobody hears the token"
    assert await next_call(stage) < 20
    assert stage.outputs["x"].cell == 2
    await stage.is_empty()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["freeze", "generate"])
@pytest.mark.parametrize("victim", [0, 1], ids=["source", "destination"])
async def test_such_a_prefix_is_given_up_when_a_side_dies(idle_stage: Open, step: str, when: str, victim: int) -> None:
    stage = await idle_stage(2, config=TICKET)
    getattr(stage.nodes[0 if step == "freeze" else 1].client, when)(step, stage.nodes[victim].kill)
    assert await stage.drain() == (0, 0)
    if victim == 0:
        await next_call(stage)
        assert stage.outputs["x"].cell == 1


async def test_such_a_prefix_that_does_not_arrive_in_time_is_computed_again(idle_stage: Open) -> None:
    stage = await idle_stage(2, config=TICKET, limits=replace(QUICK, prefixes_s=0.2))
    never = asyncio.Event()
    for number in (1, 2):
        stage.nodes[1].client.before("generate", never.wait, number)
    assert await stage.drain() == (0, 0)
    assert stage.router.counts.num_prefixes_moved == 0
    assert await next_call(stage) >= 400
    await stage.is_empty()


async def test_such_a_prefix_whose_kv_is_gone_is_not_said_to_have_moved(idle_stage: Open) -> None:
    stage = await idle_stage(2, config=TICKET)

    async def other_weights() -> None:
        await stage.nodes[1].engine.load_weights(1, "c1", {})  # the ticket is for those before
        await stage.nodes[1].engine.probe()

    stage.nodes[1].client.before("generate", other_weights)
    await stage.drain()
    assert stage.router.counts.num_prefixes_moved == 0
    await stage.is_empty()


async def test_a_call_that_comes_meanwhile_waits_for_such_a_prefix_too(idle_stage: Open) -> None:
    stage = await idle_stage(3, config=TICKET)
    computed: list[asyncio.Task[int]] = []

    async def ask() -> None:
        computed.append(asyncio.create_task(next_call(stage)))
        await asyncio.sleep(0)

    stage.nodes[2].client.before("generate", ask)
    await stage.drain()
    assert await computed[0] < 20
    assert stage.outputs["x"].cell == 2


# ---------------------------------------------------------------- where to


def test_what_leaves_goes_where_it_may_stay_longest_then_to_its_prefix_then_to_the_most_room() -> None:
    assert placement.destinations([Candidate(1, 1.0), Candidate(2, 2.0, 0, 10), Candidate(3, 2.0, 5, 10),
                                   Candidate(4, 2.0, 0, 99)], 10) == [3, 4, 2, 1]


def test_what_is_full_comes_last() -> None:
    full, empty = Candidate(2, 2.0, 500, kv_free=9), Candidate(1, 1.0, 0, kv_free=10)
    assert placement.destinations([full, empty], 10) == [1, 2]
    assert placement.destinations([Candidate(2, 2.0, num_live=4, max_live=4), empty], 10) == [1, 2]


def test_a_call_without_a_home_goes_to_its_prefix_else_to_the_least_loaded() -> None:
    assert placement.home([Candidate(0, num_live=3), Candidate(1, num_live=1), Candidate(2, num_live=1)]) == 1
    assert placement.home([Candidate(0, num_live=3, num_prefix=7), Candidate(1)]) == 0


# ---------------------------------------------------------------- leases


async def test_what_nobody_asks_for_any_more_is_freed_by_its_lease_alone() -> None:
    now = [0.0]
    pace = Pace()
    engine = make_engine(pace, ScriptedConfig(kv_tokens=1000), lambda: now[0])
    await engine.load_weights(0, "c0", {})
    await engine.probe()
    engine.resume()
    await engine.mover.reserve(Reservation("t", 1, "scripted/16", 0, "x", 600, 10.0))
    assert (engine.load_report().kv_tokens_free, engine.load_report().num_held) == (400, 1)
    with pytest.raises(MoveRefused, match="there is room for 400"):
        await engine.mover.reserve(Reservation("u", 1, "scripted/16", 0, "x", 600, 10.0))
    with pytest.raises(MoveRefused, match="epoch 1"):
        await engine.mover.reserve(Reservation("t", 2, "scripted/16", 0, "x", 600, 10.0))
    now[0] = 10.5
    assert (engine.load_report().kv_tokens_free, engine.load_report().num_held) == (1000, 0)
    with pytest.raises(TicketUnknown):
        await engine.mover.read_stage("t", 0)
    with pytest.raises(MoveRefused, match="not running"):
        await engine.mover.open_export("v", ExportOf("nobody"), 10.0)
    await engine.close()
