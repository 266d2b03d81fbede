"""Engines that are not ours, before their fakes, as the cells of a run: what the router moves from one to the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_conformance import Lab
from engine_steps import POLICY, VOCAB
from fake_tensorrt_llm import World
from fake_vllm import Fabric, FakeVllm
from gyre.policy.decoder import Decoder
from gyre.rollout.engines.hosted import HostedEngine
from gyre.rollout.engines.moving import MoveRefused
from hosted_engines import hosted, make_vllm_over, tensorrt_host
from served_engines import Caller, Cells

torch.set_num_threads(1)
LONGEST, PROMPT, ANSWER, BLOCK = 256, 70, 100, 8


def vllm_pair() -> list[HostedEngine]:
    fabric, engines = Fabric(), []
    for _ in range(2):
        server = FakeVllm(POLICY, fabric)
        server.step_s = 0.002  # what is to be moved must not be over before
        engines.append(make_vllm_over(server, POLICY))
    return engines


def tensorrt_pair() -> list[HostedEngine]:
    world = World(POLICY, step_s=0.002)
    return [hosted(tensorrt_host(world), POLICY) for _ in range(2)]


@pytest.fixture(params=[vllm_pair, tensorrt_pair], ids=["vllm", "tensorrt-llm"])
async def cells(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Cells]:
    engines = request.param()
    labs = [Lab(e, lambda n: Decoder.create(POLICY, n).state_dict(), VOCAB, LONGEST, 4, 4) for e in engines]
    opened = await Cells.open(tmp_path, labs)
    yield opened
    await opened.close()
    for engine in engines:
        await engine.close()


def caller(cells: Cells, name: str, number: int, streams: bool = True) -> Caller:
    return Caller(name, cells.cells[0].lab.prompt(PROMPT, number), ANSWER, streams)


async def test_a_cell_that_leaves_rollout_is_emptied_and_no_call_notices(cells: Cells) -> None:
    stay = [caller(cells, f"stays-{i}", i) for i in range(3)]
    await asyncio.gather(*(c.start(cells.router) for c in stay))
    go = [caller(cells, f"moves-{i}", i, streams=i != 1) for i in range(3)]
    cells.router.set_admitting(1, False)
    for one in go:
        one.start(cells.router)
    await asyncio.gather(*(one.until(5) for one in go))
    cells.router.set_admitting(1, True)
    assert await cells.leaves(0) == (3, 0)
    await asyncio.gather(*(one.task for one in go))
    for one, other in zip(go, stay, strict=True):
        assert one.output.ids == other.output.ids and one.output.finish == "length" and one.output.cell == 1
        assert one.heard == (one.output.ids if one.streams else [])
    tries = [(attempt, reused) for attempt, _, reused in cells.cells[1].client.tries if attempt.num_emitted]
    assert len(tries) == 3 and all(reused >= len(attempt.prompt) - 2 for attempt, reused in tries)
    assert cells.cells[0].lab.engine.load_report().num_held == 0


async def test_an_execution_that_waits_on_a_tool_finds_its_context_where_it_asks_next(cells: Cells) -> None:
    cells.router.set_admitting(1, False)
    first = caller(cells, "waits", 0)
    await first.start(cells.router)
    cells.router.set_admitting(1, True)
    before = cells.cells[1].lab.engine.load_report()
    assert await cells.leaves(0) == (0, 0)
    assert cells.router.counts.num_prefixes_moved == 1
    context = np.concatenate((first.prompt, np.array(first.output.ids, np.int32)))
    assert len(first.heard) == len(first.output.ids) == ANSWER, "nobody hears the token that brought it over"
    after = cells.cells[1].lab.engine.load_report()
    assert after.num_tokens_prefilled - before.num_tokens_prefilled <= 2
    again = Caller("waits", np.concatenate((context, cells.cells[0].lab.prompt(9, 3))), 20)
    await again.start(cells.router)
    ((_, finish, reused),) = [t for t in cells.cells[1].client.tries if len(t[0].prompt) == len(again.prompt)]
    assert finish == "length" and reused >= len(context) - BLOCK
    fresh = Caller("other", again.prompt, 20)
    await fresh.start(cells.router)
    assert again.output.ids == fresh.output.ids


async def test_a_prefix_that_cannot_be_exported_is_left_where_it_is(cells: Cells) -> None:
    engine = cells.cells[0].lab.engine
    with pytest.raises(MoveRefused, match="nothing that could be moved is cached for 'nobody'"):
        await engine.export_prefix("nobody")
    cells.router.set_admitting(1, False)
    first = caller(cells, "waits", 0)
    await first.start(cells.router)
    await cells.cells[0].lab.load(1)
    with pytest.raises(MoveRefused, match="nothing that could be moved"):
        await engine.export_prefix("waits")
    cells.router.set_admitting(1, True)
    assert await cells.leaves(0) == (0, 0)
    assert cells.router.counts.num_prefixes_moved == 0
    again = Caller("waits", np.concatenate((first.prompt, first.prompt)), 20)
    await again.start(cells.router)
    assert again.output.finish == "length" and again.output.cell == 1
