"""An engine of kind `ticket` takes its time to export a request."""

import asyncio
from pathlib import Path

from gyre.rollout.engines.moving import ExportOf
from gyre.rollout.engines.scripted import ScriptedConfig
from move_stage import Stage


async def test_a_freeze_that_is_asked_again_while_it_is_carried_out_has_one_answer(tmp_path: Path) -> None:
    """To export may take longer than the caller waits; what it asks next must not lose what is being exported."""
    stage = await Stage.open(tmp_path, 2, ScriptedConfig(migration="ticket"))
    await stage.begin_on(0, "x")
    stage.nodes[0].pace.allow(9)
    await stage.until_said("x", 9)
    engine, client = stage.nodes[0].engine, stage.nodes[0].client
    export, gate, has_begun = engine.export_ticket, asyncio.Event(), asyncio.Event()

    async def slow(request_id: str) -> bytes:
        ticket = await export(request_id)
        has_begun.set()
        await gate.wait()
        return ticket

    engine.export_ticket = slow  # type: ignore[method-assign]
    request_id = client.attempts[-1].request_id
    first = asyncio.create_task(client.freeze("t", 0, ExportOf(request_id), 1, 5.0))
    await has_begun.wait()
    again = asyncio.create_task(client.freeze("t", 0, ExportOf(request_id), 1, 5.0))
    dropped = asyncio.create_task(client.release(b"t", 5.0))
    for _ in range(50):
        await client.observe()
    assert not again.done()
    gate.set()
    assert (await first).opaque == (await again).opaque != b""
    assert await dropped
    assert engine.load_report().num_held == 0
    await stage.finish()
    await stage.close()
