"""Calls move between real engine processes with a real model: what a harness hears is what one engine alone would say."""

import asyncio
from collections.abc import Iterator

import pytest
from gyre.rollout.router import Router
from torch_cells import Listener, TorchCells, job, undisturbed

NUM_CALLS = 4
PROMPT_TOKENS, MAX_TOKENS = 200, 120


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchCells]:
    """Three engine processes, for all tests: what takes longest is to start them."""
    cells = TorchCells(tmp_path_factory.mktemp("cells"))
    cells.prepare()
    cells.launch()
    yield cells
    cells.stop()


@pytest.fixture
async def cells(running: TorchCells) -> TorchCells:
    await running.connect()
    return running


async def begin(router: Router, names: list[str]) -> list[Listener]:
    """Calls that are in the middle of their answer on engine 0."""
    for cell in (1, 2):
        router.set_admitting(cell, False)
    listeners = [Listener(job(name, PROMPT_TOKENS, MAX_TOKENS)) for name in names]
    for listener in listeners:
        listener.start(router)
    await asyncio.gather(*(listener.until(10) for listener in listeners))
    for cell in (1, 2):
        router.set_admitting(cell, True)
    return listeners


async def drain(cells: TorchCells, router: Router, cell: int = 0) -> tuple[int, int]:
    await cells.clients[cell].set_admission(False)
    return await router.drain(cell, 30.0, epoch=1)


async def test_a_drain_under_load_changes_no_token(cells: TorchCells) -> None:
    names = [f"a{n}" for n in range(NUM_CALLS)]
    expected = await undisturbed(cells, [job(name, PROMPT_TOKENS, MAX_TOKENS) for name in names])
    router = await cells.router()
    listeners = await begin(router, names)
    moved, replayed = await drain(cells, router)
    await asyncio.gather(*(listener.task for listener in listeners if listener.task))
    assert (moved, replayed) == (NUM_CALLS, 0)
    assert [listener.heard for listener in listeners] == expected
    assert {listener.output.cell for listener in listeners} == {2}
    assert router.counts.num_tokens_recomputed == 0
    assert router.counts.num_bytes_moved > 0


async def test_an_idle_prefix_moves_and_is_found(cells: TorchCells) -> None:
    router = await cells.router()
    [listener] = await begin(router, ["idle"])
    assert listener.task
    await listener.task
    assert await drain(cells, router) == (0, 0)
    assert router.counts.num_prefixes_moved == 1
    again = Listener(job("idle", PROMPT_TOKENS, 4))
    again.start(router)
    assert again.task
    await again.task
    assert again.output.cell == 2
    assert again.heard == listener.heard[:4]


KILLS = [(step, when, victim) for step, when in (
    ("reserve", "after"), ("pull", "before"), ("pull", "after"), ("freeze", "after"), ("commit", "after"),
    ("generate", "before")) for victim in (0, 2)]


async def test_either_process_may_be_killed_at_any_step(cells: TorchCells) -> None:
    names = ["k0", "k1"]
    expected = await undisturbed(cells, [job(name, PROMPT_TOKENS, MAX_TOKENS) for name in names])
    for step, when, victim in KILLS:
        router = await cells.router()
        listeners = await begin(router, names)
        asked = cells.clients[0 if step in ("open_export", "read_stage", "freeze") else 2]
        for client in cells.clients.values():
            client.forget()

        async def kill(cell: int = victim) -> None:
            cells.kill(cell)

        getattr(asked, when)(step, kill)
        moved, replayed = await drain(cells, router)
        await asyncio.gather(*(listener.task for listener in listeners if listener.task))
        what = f"{victim} was killed {when} {step}: moved {moved}, replayed {replayed}"
        assert [listener.heard for listener in listeners] == expected, what
        assert cells.processes[victim].poll() is not None, what
        cells.launch(victim)
        await cells.connect(victim)
