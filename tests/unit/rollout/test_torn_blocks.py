"""What a failed read leaves behind in blocks never reaches a request."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from gyre.rollout.engines.base import GenerateRequest
from gyre.rollout.engines.moving import ExportOf, MoveRefused
from row_fabric import Fabric
from stepped_engine import ids_of, reservation_of, started, tokens_of


@pytest.mark.parametrize("is_deterministic", [False, True])
async def test_bytes_that_are_no_numbers_spoil_nobody(is_deterministic: bool) -> None:
    """They are masked where they are read, but a weight of 0 times NaN is NaN."""
    fabric = Fabric()
    a = await started(fabric, "a", is_deterministic=is_deterministic)
    b = await started(fabric, "b", is_deterministic=is_deterministic)
    a.submit(GenerateRequest("r", ids_of(40, 1), 20, seed=7, namespace="x"))
    await a.step(6)
    offer = await a.moves.open_export("t", ExportOf("r"), 30.0)
    stage = await a.moves.read_stage("t", 0)
    await b.moves.reserve(reservation_of("t", a, "x", 60))

    async def garble() -> None:
        fabric.pools["a", "kv"].view(np.uint8)[stage.rows] = 0xFF

    b.rows.reading = lambda: asyncio.ensure_future(garble())
    with pytest.raises(MoveRefused, match="not as described"):
        await b.moves.pull("t", offer.region, stage, 5.0)
    await b.moves.release("t")
    request = GenerateRequest("other", ids_of(18, 2), 12, seed=3)
    disturbed = b.submit(request)
    await b.run()
    alone = await started(Fabric(), "alone", is_deterministic=is_deterministic)
    undisturbed = alone.submit(request)
    await alone.run()
    assert [e.token_id for e in tokens_of(disturbed)] == [e.token_id for e in tokens_of(undisturbed)]
    for engine in (a, b, alone):
        await engine.close()
