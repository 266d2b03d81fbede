"""The built-in engine wakes: what it needs before it may serve, and what comes while it serves already."""

from __future__ import annotations

import asyncio
import threading

from gyre.rollout.engines.base import GenerateRequest
from row_fabric import Fabric, Rows
from stepped_engine import Stepped, ids_of, started, tokens_of


async def test_pages_of_the_pool_come_while_the_engine_serves_and_are_gone_when_it_sleeps() -> None:
    """A pool of 500 MB takes seconds to get its pages, several engines at once even longer: a wake does not wait for that."""
    gate, populated = threading.Event(), threading.Event()
    engine: Stepped = await started(Fabric(), "a")
    await engine.sleep()
    register = engine.rows.register_rows

    class Slow(Rows):
        def populate(self) -> None:
            assert gate.wait(20)
            populated.set()

    engine.rows.register_rows = lambda *what: Slow(register(*what).arrays)  # type: ignore[method-assign]
    await engine.wake()
    await engine.load(2)
    stream = engine.submit(GenerateRequest("r", ids_of(10, 1), 5, seed=7))
    await engine.run()
    assert len(tokens_of(stream)) == 5 and not populated.is_set()
    asleep = asyncio.create_task(engine.sleep())
    while not engine.load_report().asleep or engine._runner is not None:
        await asyncio.sleep(0)
    assert not asleep.done(), "its memory is not free before whoever fills it has let go"
    gate.set()
    await asleep
    assert populated.is_set()
    await engine.close()
