"""The same update, whatever happens at whichever micro-step of an eight micro-step step."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from gates import DEADLINE_S, NUM_MICRO_STEPS, GatedCluster, gated, updated_alone
from gyre.contracts.events import StepFinished, StepSealed, WeightsPublished
from gyre.runtime.clock import SystemClock
from gyre.trainer.core import StepTrained
from gyre.trainer.satellite import HEARTBEATS_PER_LEASE
from test_mid_step import STEPS, largest_error

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def reference() -> Weights:
    return updated_alone()


async def ends_like(run: GatedCluster, reference: Weights) -> list[StepFinished]:
    """Complete the other steps; the burst's weights are the reference's. Returns what was said of the steps."""
    for step in range(1, STEPS):
        run.complete_step(step)
    assert largest_error(await run.weights(), reference) < 1e-12
    assert [f.step for f in run.ledgers[0].said(StepSealed)] == list(range(STEPS))
    finished = run.ledgers[0].said(StepFinished)
    assert all(sum(f.micro_steps_by_cell.values()) == NUM_MICRO_STEPS for f in finished)
    return finished


@pytest.mark.parametrize("num_cells", [1, 2, 3, 4])
async def test_any_number_of_cells(tmp_path: Path, reference: Weights, num_cells: int) -> None:
    async with gated(tmp_path, *range(num_cells)) as run:
        run.complete_step(0)
        await ends_like(run, reference)
        assert [f.version for f in run.ledgers[0].said(WeightsPublished)] == [0, STEPS]


async def test_one_cell_alone_is_repeatable_to_the_last_bit(tmp_path: Path) -> None:
    ends = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        async with gated(tmp_path / name, 0) as run:
            for step in range(STEPS):
                run.complete_step(step)
            ends.append(await run.weights())
    assert all(torch.equal(ends[0][n], ends[1][n]) for n in ends[0])


@pytest.mark.parametrize("index", range(NUM_MICRO_STEPS))
async def test_a_satellite_joins_when_the_core_is_at(tmp_path: Path, reference: Weights, index: int) -> None:
    """Everything the core has not begun is the newcomer's."""
    async with gated(tmp_path, 0) as run:
        run.blobs.hold(0, after=index)
        run.complete_step(0)
        await run.reach(0, index)
        run.enlist(1)
        await run.joined(1)
        await run.reach(1, NUM_MICRO_STEPS - index - 1, waiting=False)
        run.blobs.let_go()
        first, *_ = await run.until(StepFinished, 1)
        counts = {"0": index + 1, "1": NUM_MICRO_STEPS - index - 1}
        assert first.micro_steps_by_cell == {cell: num for cell, num in counts.items() if num}
        await ends_like(run, reference)


@pytest.mark.parametrize("index", range(NUM_MICRO_STEPS))
async def test_a_satellite_is_killed_when_it_is_at(tmp_path: Path, reference: Weights, index: int) -> None:
    """Also what it had completed is computed again; the core holds one micro-step meanwhile."""
    async with gated(tmp_path, 0, 1) as run:
        await run.joined(1)
        run.blobs.hold(0, after=0)
        run.blobs.hold(1, after=index)
        run.complete_step(0)
        await run.reach(0, 0)
        await run.reach(1, index, waiting=index < NUM_MICRO_STEPS - 1)
        await run.kill(1)
        run.blobs.let_go()
        first, *_ = await run.until(StepFinished, 1)
        assert (first.micro_steps_by_cell, first.attempt) == ({"0": NUM_MICRO_STEPS}, 0)
        await ends_like(run, reference)


async def test_a_satellite_is_killed_after_its_offer_was_accepted(tmp_path: Path, reference: Weights) -> None:
    async with gated(tmp_path, 0, 1) as run:
        await run.joined(1)
        run.blobs.hold(0, after=0)
        run.complete_step(0)
        await run.reach(0, 0)
        await run.reach(1, NUM_MICRO_STEPS - 1, waiting=False)
        run.peer.after_offer = lambda worker: run.transfers[1].close()
        run.blobs.let_go()
        first, *_ = await run.until(StepFinished, 1)
        assert first.micro_steps_by_cell == {"0": NUM_MICRO_STEPS}
        await run.kill(1)
        await ends_like(run, reference)


@pytest.mark.parametrize("with_satellite", [False, True], ids=["alone", "helped"])
@pytest.mark.parametrize("index", range(NUM_MICRO_STEPS))
async def test_the_core_is_lost_when_it_is_at(
    tmp_path: Path, reference: Weights, index: int, with_satellite: bool
) -> None:
    """A new attempt, from nothing; whoever worked in the old one joins again."""
    async with gated(tmp_path, *((0, 1) if with_satellite else (0,))) as run:
        if with_satellite:
            await run.joined(1)
            run.blobs.hold(1, after=1)
        run.blobs.hold(0, after=min(index, NUM_MICRO_STEPS - 3) if with_satellite else index)
        run.complete_step(0)
        async with asyncio.timeout(DEADLINE_S):
            while 0 not in run.blobs.waiting:
                await SystemClock().sleep(0.005)
        await run.kill(0)
        run.blobs.let_go()
        run.start(0)
        first, *_ = await run.until(StepFinished, 1)
        assert (first.step, first.attempt) == (0, 1)
        assert [f.attempt for f in await ends_like(run, reference)] == [1, 0, 0]


async def test_the_core_is_lost_while_it_reads_an_offer(tmp_path: Path, reference: Weights) -> None:
    async with gated(tmp_path, 0, 1) as run:
        await run.joined(1)
        reading = asyncio.Event()

        async def never(*_: object, **__: object) -> None:
            reading.set()
            await asyncio.Event().wait()

        run.transfers[0].read = never  # type: ignore[method-assign]
        run.blobs.hold(0, after=0)
        run.complete_step(0)
        await run.reach(0, 0)
        await run.reach(1, NUM_MICRO_STEPS - 1, waiting=False)
        run.blobs.let_go()
        async with asyncio.timeout(DEADLINE_S):
            await reading.wait()
        await run.kill(0)
        run.start(0)
        first, *_ = await run.until(StepFinished, 1)
        assert first.attempt == 1
        await ends_like(run, reference)


@pytest.mark.parametrize("step", range(STEPS))
async def test_the_core_is_lost_between_an_update_and_its_fact(tmp_path: Path, reference: Weights, step: int) -> None:
    """The update is in its memory alone; everything since the last checkpoint is trained again, once."""
    async with gated(tmp_path, 0) as run:
        submit, updated = run.ledgers[0].submit, asyncio.Event()

        async def lose(event: object) -> None:
            if isinstance(event, StepTrained) and event.step == step:
                updated.set()
                await asyncio.Event().wait()
            await submit(event)

        run.ledgers[0].submit = lose  # type: ignore[method-assign]
        for number in range(STEPS):
            run.complete_step(number)
        async with asyncio.timeout(DEADLINE_S):
            await updated.wait()
        await run.kill(0)
        run.start(0)
        await run.until(StepFinished, step + STEPS)
        assert largest_error(await run.weights(), reference) < 1e-12
        said = [(f.step, f.attempt) for f in run.ledgers[0].said(StepFinished)]
        assert said == [(s, 0) for s in range(step)] + [(s, int(s <= step)) for s in range(STEPS)]


async def test_a_step_is_worked_on_while_its_executions_still_run_and_seals_with_the_last_group(
    tmp_path: Path, reference: Weights
) -> None:
    async with gated(tmp_path, 0) as run:
        run.complete_group(0, 0)
        await run.reach(0, NUM_MICRO_STEPS // 2, waiting=False)
        assert run.ledgers[0].said(StepSealed) == [] and run.ledgers[0].said(StepFinished) == []
        run.complete_group(0, 1)
        await run.until(StepFinished, 1)
        (sealed,) = run.ledgers[0].said(StepSealed)
        assert (sealed.groups, len(sealed.micro_steps)) == (("s0g0", "s0g1"), NUM_MICRO_STEPS)
        await ends_like(run, reference)


async def test_a_late_satellite_is_refused_once_the_window_has_closed(tmp_path: Path, reference: Weights) -> None:
    """Everything is computed and the reduction goes on: the newcomer waits for the next step, and joins that."""
    async with gated(tmp_path, 0, 1) as run:
        await run.joined(1)
        reading, go_on = asyncio.Event(), asyncio.Event()
        read = run.transfers[0].read

        async def slow(*args: object, **options: object) -> object:
            reading.set()
            await go_on.wait()
            return await read(*args, **options)  # type: ignore[arg-type]

        run.transfers[0].read = slow  # type: ignore[method-assign]
        run.blobs.hold(0, after=1)
        run.complete_step(0)
        await run.reach(0, 1)
        await run.reach(1, NUM_MICRO_STEPS - 2, waiting=False)
        run.blobs.let_go()
        async with asyncio.timeout(DEADLINE_S):
            await reading.wait()
            run.enlist(2)
            while not run.peer.refused:
                await SystemClock().sleep(0.005)
        assert run.peer.refused[0] == "no step is open for joining"
        go_on.set()
        await run.until(StepFinished, 1)
        await run.joined(2)
        assert {step for cell, step, _ in run.peer.admitted if cell == 2} == {1}
        await ends_like(run, reference)


async def test_a_micro_step_longer_than_its_lease_is_kept_by_heartbeats(tmp_path: Path, reference: Weights) -> None:
    async with gated(tmp_path, 0, 1) as run:
        await run.joined(1)
        run.blobs.hold(0, after=0)
        run.blobs.hold(1, after=2)
        run.complete_step(0)
        await run.reach(1, 2)
        async with asyncio.timeout(DEADLINE_S):
            while run.peer.heartbeats < 3 * HEARTBEATS_PER_LEASE:
                await SystemClock().sleep(0.005)
        run.blobs.let_go()
        first, *_ = await run.until(StepFinished, 1)
        assert first.micro_steps_by_cell["1"] >= 3, "what it computed before and in those three leases counts"
        await ends_like(run, reference)


async def test_satellites_pull_the_new_version_after_every_update(tmp_path: Path, reference: Weights) -> None:
    async with gated(tmp_path, 0, 1) as run:
        for step in range(STEPS):
            async with asyncio.timeout(DEADLINE_S):
                while (1, step, step) not in run.peer.admitted:
                    await SystemClock().sleep(0.005)
            run.complete_step(step)
        assert largest_error(await run.weights(), reference) < 1e-12
        assert all(step == version for _, step, version in run.peer.admitted)
