"""An engine that is gone for good does not keep its cell from training."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fakes import FakeLedger, assign, to_train
from gyre.contracts.events import CellRolloutReleased
from gyre.runtime.clock import ManualClock
from gyre.runtime.devices import DeviceLock
from gyre.trainer.core import DevicesTaken, EngineGone, TrainerCore
from gyre.trainer.step import MembershipRules
from gyre.trainer.vacancy import ENGINE_GONE_S, Vacancy

CORE = TrainerCore(0, MembershipRules(2, 8))


class Scene:
    """A cell whose engine may hold the devices."""

    def __init__(self, root: Path) -> None:
        self.clock, self.ledger = ManualClock(), FakeLedger(CORE)
        self.engine, self.mine = (DeviceLock(root, 0, side) for side in ("engine", "trainer"))
        self.vacancy = Vacancy(self.mine, self.clock)

    def look(self, seconds: float) -> EngineGone | None:
        self.clock.advance(seconds)
        return self.vacancy.look(self.ledger.state.cell)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_devices_that_nobody_holds_for_a_while_are_taken(scene: Scene) -> None:
    scene.ledger.hear(assign(0, 1, "train"))
    assert scene.engine.try_take(0)
    assert scene.look(0.0) is scene.look(10 * ENGINE_GONE_S) is None, "it lives, and may take its time"
    scene.engine.give_back()  # as the kernel does it for a process that is gone
    assert scene.look(0.0) is scene.look(ENGINE_GONE_S - 1) is None
    gone = scene.look(1.0)
    assert gone == EngineGone(1)
    scene.ledger.hear(gone)
    assert scene.ledger.state.cell.should_hold
    assert scene.mine.try_take(1)
    assert not scene.engine.try_take(0), "should it come back, its epoch is over"


def test_an_engine_that_starts_again_meanwhile_is_waited_for_anew(scene: Scene) -> None:
    scene.ledger.hear(assign(0, 1, "train"))
    assert scene.look(0.0) is scene.look(ENGINE_GONE_S - 1) is None
    assert scene.engine.try_take(0)
    assert scene.look(2.0) is None
    scene.engine.give_back()
    assert scene.look(0.0) is scene.look(ENGINE_GONE_S - 1) is None
    scene.ledger.hear(CellRolloutReleased(0, 1, 0, 0))
    assert scene.look(1.0) is None, "it has said so itself"


@pytest.mark.parametrize("facts", [
    (), (*to_train(0, 1),), (*to_train(0, 1), DevicesTaken(1, 0, 0)), (assign(0, 1, "train"), assign(0, 2, "rollout"))])
def test_nothing_is_said_while_the_worker_waits_for_no_engine(scene: Scene, facts: tuple) -> None:
    scene.ledger.hear(*facts)
    assert scene.look(0.0) is scene.look(2 * ENGINE_GONE_S) is None


def test_what_was_seen_under_one_epoch_says_nothing_of_the_next(scene: Scene) -> None:
    scene.ledger.hear(assign(0, 1, "train"))
    assert scene.look(0.0) is None
    scene.ledger.hear(assign(0, 2, "rollout"), assign(0, 3, "train"))
    assert scene.look(2 * ENGINE_GONE_S) is None
    scene.ledger.hear(EngineGone(1))
    assert not scene.ledger.state.cell.should_hold
    assert scene.look(ENGINE_GONE_S) == EngineGone(3)


async def test_a_worker_that_waits_looks_again_and_again(scene: Scene) -> None:
    scene.ledger.hear(assign(0, 1, "train"))
    attention = asyncio.Event()
    scene.look(0.0)
    scene.clock.advance(ENGINE_GONE_S)
    await scene.vacancy.wait(attention, scene.ledger)
    assert scene.ledger.state.cell.should_hold
    waits = asyncio.create_task(scene.vacancy.wait(attention, scene.ledger))
    await asyncio.sleep(0)
    assert not waits.done(), "there is nothing to wait for but news"
    attention.set()
    await waits
