"""Blocks of a device pass through less host memory than a request, or several, may have blocks."""

from __future__ import annotations

import torch
from gyre.rollout.engines.base import GenerateRequest
from gyre.rollout.engines.moving import ExportOf
from gyre.rollout.torch_engine.shipping import Staged
from row_fabric import Fabric
from stepped_engine import BLOCK, ids_of, move_in_stages, replay_of, started, tokens_of

torch.set_num_threads(1)


async def test_a_request_with_more_blocks_than_rows_moves_stage_by_stage() -> None:
    fabric = Fabric()
    a, b = await started(fabric, "a"), await started(fabric, "b")
    for engine in (a, b):
        assert engine._runner is not None
        engine.moves.shipping = Staged(engine._runner.cache, engine.rows, 8)
    request = GenerateRequest("long", ids_of(90, 1), 20, seed=3, namespace="x")
    whole = (await started(Fabric(), "alone"))
    undisturbed = whole.submit(request)
    await whole.run()
    first = a.submit(request)
    while len(tokens_of(first)) < 3:
        await a.step()
    frozen = await move_in_stages(a, b, "t", ExportOf("long"))
    assert frozen.num_computed // BLOCK > 8
    second = b.submit(replay_of(request, tokens_of(first), "t"))
    await b.run()
    assert [e.token_id for e in tokens_of(first) + tokens_of(second)] == [e.token_id for e in tokens_of(undisturbed)]
    await a.moves.release("t")
    for engine in (a, b):
        assert isinstance(engine.moves.shipping, Staged) and len(engine.moves.shipping._free) == 8
        engine.check_blocks(is_idle=True)
