"""A cell's engine sleeps while its cell trains and serves the right weights otherwise, whoever dies in between."""

import asyncio

import pytest
from gyre.contracts import events as e
from gyre.contracts.errors import EngineError
from gyre.contracts.subjects import message_id
from gyre.rollout import local as lo
from gyre.rollout.attempt import EngineGone
from gyre.rollout.core import RolloutCore
from gyre.rollout.engine_client import Observed
from gyre.rollout.keeper import Keeper
from gyre.rollout.router import Router, RouterLimits
from gyre.runtime.clock import Clock, ManualClock, SystemClock
from gyre.runtime.effects import Publish
from rollout_fakes import FakeEngine

V0 = e.WeightsPublished(0, "c0", 0, "checkpoints/0")
V1 = e.WeightsPublished(1, "c1", 0, "checkpoints/1")


def assigned(epoch: int, role: str, version: int = 0) -> e.CellRoleAssigned:
    return e.CellRoleAssigned(0, epoch, role, f"t{epoch}", version)


class Core:
    def __init__(self) -> None:
        self.core = RolloutCore(8, 1)
        self.state = self.core.initial()
        self.facts: list[object] = []

    def tell(self, event: object) -> list[lo.SettleCell]:
        self.state, effects = self.core.step(self.state, event, 0.0)
        self.facts += [f.fact for f in effects if isinstance(f, Publish)]
        return [f for f in effects if isinstance(f, lo.SettleCell)]


def test_the_story_of_a_burst() -> None:
    core = Core()
    assert core.core.resume(core.state, 0.0) == [
        lo.SettleCell(0, 0, True, None), lo.OpenGateway(0.0, (), False)]
    assert core.tell(V0) == [lo.SettleCell(0, 0, True, V0)]
    core.tell(lo.EngineServing(0, 0, 0, "c0"))
    assert core.tell(assigned(1, "train")) == [lo.SettleCell(0, 1, False)]
    core.tell(lo.EngineAsleep(0, 1, 0, 2))
    core.tell(lo.EngineAsleep(0, 1, 0, 0))
    assert core.tell(V1) == [lo.SettleCell(0, 1, False)]
    assert core.tell(assigned(2, "rollout", 1)) == [], "the trainer still holds the devices"
    assert core.tell(e.CellTrainReleased(0, 2, 1)) == [lo.SettleCell(0, 2, True, V1)]
    core.tell(lo.EngineServing(0, 2, 1, "c1"))
    core.tell(lo.EngineServing(0, 2, 1, "c1"))
    assert core.facts == [e.CellRolloutReady(0, 0, 0, "c0"), e.CellRolloutReleased(0, 1, 0, 2),
                          e.CellRolloutReady(0, 2, 1, "c1")]


def test_a_release_that_comes_before_the_role_is_not_lost() -> None:
    core = Core()
    core.tell(V1)
    core.tell(assigned(1, "train"))
    core.tell(e.CellTrainReleased(0, 2, 1))
    assert core.tell(assigned(2, "rollout", 1)) == [lo.SettleCell(0, 2, True, V1)]


def test_an_epoch_that_is_not_newer_is_ignored() -> None:
    core = Core()
    core.tell(assigned(3, "train"))
    assert core.tell(assigned(3, "rollout")) == core.tell(assigned(2, "rollout")) == []
    core.tell(lo.EngineAsleep(0, 2, 0, 0))
    assert core.facts == []


def test_a_cell_that_stayed_takes_new_weights() -> None:
    core = Core()
    core.tell(V0)
    assert core.tell(V1) == [lo.SettleCell(0, 0, True, V1)]
    assert core.tell(V0) == [], "an older version is no news"


def test_a_restart_settles_every_cell_again() -> None:
    core = Core()
    core.tell(V0)
    state = core.core.restore(core.core.snapshot(core.state))
    assert core.core.resume(state, 0.0) == [lo.SettleCell(0, 0, True, V0), lo.OpenGateway(0.0, (), False)]


class FakeControl:
    """An engine's commands; `did` lists them. `restart` makes it what a fresh process is: asleep without weights."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.is_gone = False
        self.restart()

    def restart(self) -> None:
        self.version, self.asleep, self.admitting = -1, True, False

    async def observe(self) -> Observed:
        if self.is_gone:
            raise EngineGone("unreachable")
        return Observed(self.version, self.asleep, self.admitting)

    async def set_admission(self, open_: bool) -> None:
        self.did.append(f"admission {open_}")
        self.admitting = open_

    async def sleep(self, epoch: int) -> None:
        self.did.append(f"sleep {epoch}")
        self.asleep, self.admitting = True, False

    async def wake(self, epoch: int, weights: e.WeightsPublished) -> tuple[int, str]:
        self.did.append(f"wake {epoch} v{weights.version}")
        self.version, self.asleep, self.admitting = weights.version, False, True
        return weights.version, weights.checksum

    async def load(self, weights: e.WeightsPublished) -> tuple[int, str]:
        self.did.append(f"load v{weights.version}")
        self.version = weights.version
        return weights.version, weights.checksum

    async def probe(self) -> tuple[int, str, bool]:
        return self.version, "", True


def make_keeper(clock: Clock | None = None) -> tuple[Keeper, FakeControl, Router, list[object]]:
    control, said = FakeControl(), []
    router = Router({0: FakeEngine(lambda attempt: [1])}, RouterLimits(), SystemClock())

    async def post(event: object) -> None:
        said.append(event)

    return Keeper(0, control, router, post, clock or SystemClock()), control, router, said


async def test_the_keeper_wakes_an_engine_says_so_once_and_opens_the_route() -> None:
    keeper, control, router, said = make_keeper()
    keeper.settle(lo.SettleCell(0, 0, True, None))
    await keeper.check()
    assert not control.did, "there are no weights yet"
    keeper.settle(lo.SettleCell(0, 0, True, V0))
    for _ in range(3):
        await keeper.check()
    assert control.did == ["wake 0 v0"]
    assert said == [lo.EngineServing(0, 0, 0, "c0")]
    assert router.is_admitting(0)


async def test_the_keeper_brings_back_an_engine_that_was_killed() -> None:
    keeper, control, router, said = make_keeper()
    keeper.settle(lo.SettleCell(0, 0, True, V0))
    await keeper.check()
    control.is_gone = True
    task = asyncio.create_task(keeper.run())
    while router.is_admitting(0):
        await asyncio.sleep(0)
    task.cancel()
    control.is_gone = False
    control.restart()
    await keeper.check()
    assert router.is_admitting(0)
    assert control.did == ["wake 0 v0", "wake 0 v0"]
    assert len(said) == 1


async def test_new_weights_are_loaded_into_an_engine_that_serves() -> None:
    keeper, control, _, said = make_keeper()
    keeper.settle(lo.SettleCell(0, 0, True, V0))
    await keeper.check()
    keeper.settle(lo.SettleCell(0, 0, True, V1))
    await keeper.check()
    assert control.did == ["wake 0 v0", "load v1"]
    assert said[-1] == lo.EngineServing(0, 0, 1, "c1")


async def test_what_an_engine_serves_is_known_as_soon_as_it_serves_it() -> None:
    """Calls that leave an engine right then are moved only between engines that are known to fit."""
    keeper, _, router, _ = make_keeper()
    for weights in (V0, V1):
        keeper.settle(lo.SettleCell(0, 0, True, weights))
        await keeper.check()
        assert router.said(0) == Observed(weights.version, False, True)


async def test_sleeping_stops_admission_first_and_reports_once() -> None:
    keeper, control, router, said = make_keeper()
    keeper.settle(lo.SettleCell(0, 0, True, V0))
    await keeper.check()
    keeper.settle(lo.SettleCell(0, 1, False))
    assert not router.is_admitting(0), "at once, before the engine was asked anything"
    await keeper.check()
    await keeper.check()
    assert control.did[1:] == ["admission False", "sleep 1"]
    assert said[1:] == [lo.EngineAsleep(0, 1, 0, 0)]


async def test_weights_that_are_not_the_announced_ones_are_not_served() -> None:
    keeper, control, router, said = make_keeper()

    async def wrong(epoch: int, weights: e.WeightsPublished) -> tuple[int, str]:
        return weights.version, "other"

    control.wake = wrong
    keeper.settle(lo.SettleCell(0, 0, True, V0))
    with pytest.raises(EngineError, match="other"):
        await keeper.check()
    assert not router.is_admitting(0)
    assert not said


def test_an_engine_that_is_lost_is_said_to_be_and_said_to_serve_again() -> None:
    core = Core()
    core.tell(V0)
    core.tell(lo.EngineServing(0, 0, 0, "c0"))
    core.tell(lo.EngineLost(0, 0, "away"))
    core.tell(lo.EngineLost(0, 0, "away"))
    core.tell(lo.EngineServing(0, 0, 0, "c0"))
    core.tell(lo.EngineLost(0, 0, "away"))
    lost = [e.CellRolloutLost(0, 0, number, "away") for number in (1, 2)]
    assert core.facts == [e.CellRolloutReady(0, 0, 0, "c0"), lost[0], e.CellRolloutReady(0, 0, 0, "c0", 1), lost[1]]
    assert len({message_id(fact, "r") for fact in core.facts}) == 4, "none of them is a duplicate of another"


def test_an_engine_is_not_lost_while_its_cell_trains_or_under_an_epoch_that_is_over() -> None:
    core = Core()
    core.tell(V0)
    core.tell(lo.EngineLost(0, 0, "away"))
    core.tell(lo.EngineServing(0, 0, 0, "c0"))
    core.tell(assigned(1, "train"))
    core.tell(lo.EngineLost(0, 0, "away"))
    core.tell(lo.EngineLost(0, 1, "away"))
    assert not [fact for fact in core.facts if isinstance(fact, e.CellRolloutLost)]


def test_an_engine_that_does_not_come_back_from_training_is_lost_too() -> None:
    core = Core()
    core.tell(V0)
    core.tell(lo.EngineServing(0, 0, 0, "c0"))
    core.tell(assigned(1, "train"))
    core.tell(lo.EngineAsleep(0, 1, 0, 0))
    core.tell(V1)
    core.tell(assigned(2, "rollout", 1))
    core.tell(e.CellTrainReleased(0, 2, 1))
    core.tell(lo.EngineLost(0, 2, "away"))
    core.tell(lo.EngineLost(0, 2, "away"))
    core.tell(lo.EngineServing(0, 2, 1, "c1"))
    assert core.facts[-2:] == [e.CellRolloutLost(0, 2, 1, "away"), e.CellRolloutReady(0, 2, 1, "c1", 1)]


def test_an_engine_that_is_gone_is_said_to_be_lost_each_time_its_cell_is_to_serve() -> None:
    """In between its trainer had the devices; whoever reads that takes the engine to have let go of them."""
    core = Core()
    core.tell(V0)
    core.tell(lo.EngineServing(0, 0, 0, "c0"))
    for number, epoch in enumerate((0, 2, 4), 1):
        core.tell(lo.EngineLost(0, epoch, "away"))
        core.tell(lo.EngineLost(0, epoch, "away"))
        assert core.facts[-1] == e.CellRolloutLost(0, epoch, number, "away")
        core.tell(assigned(epoch + 1, "train"))
        core.tell(assigned(epoch + 2, "rollout"))
        core.tell(e.CellTrainReleased(0, epoch + 2, 0))
    assert len([fact for fact in core.facts if isinstance(fact, e.CellRolloutLost)]) == 3


async def test_the_keeper_calls_an_engine_lost_only_after_the_time_a_restart_takes() -> None:
    clock = ManualClock()
    keeper, control, _, said = make_keeper(clock)
    keeper.settle(lo.SettleCell(0, 0, True, V0))
    await keeper.check()
    control.is_gone = True
    for seconds, num_said in ((0.0, 1), (14.0, 1), (1.5, 2), (60.0, 2)):
        clock.advance(seconds)
        await keeper.look()
        assert len(said) == num_said
    assert isinstance(said[1], lo.EngineLost)
    control.is_gone = False
    control.restart()
    await keeper.look()
    assert said[2] == lo.EngineServing(0, 0, 0, "c0"), "it is said again, because it had been said to be lost"


async def test_an_engine_that_a_restarted_service_never_saw_serve_is_lost_all_the_same() -> None:
    clock = ManualClock()
    keeper, control, _, said = make_keeper(clock)
    control.is_gone = True
    keeper.settle(lo.SettleCell(0, 3, True, V0, is_confirmed=True))
    for seconds in (0.0, 14.0, 1.5, 60.0):
        clock.advance(seconds)
        await keeper.look()
    assert [type(event) for event in said] == [lo.EngineLost]


async def test_an_engine_that_answers_and_does_not_serve_is_lost_after_the_same_time() -> None:
    clock = ManualClock()
    keeper, control, router, said = make_keeper(clock)
    keeper.settle(lo.SettleCell(0, 0, True, V0))
    await keeper.look()

    async def refuse(weights: e.WeightsPublished) -> tuple[int, str]:
        raise EngineError("no room for them")

    takes, control.load = control.load, refuse
    keeper.settle(lo.SettleCell(0, 0, True, V1))
    for seconds, num_said in ((0.0, 1), (14.0, 1), (1.5, 2), (60.0, 2)):
        clock.advance(seconds)
        control.wake = lambda epoch, weights: refuse(weights)
        await keeper.look()
        assert len(said) == num_said
    assert said[1] == lo.EngineLost(0, 0, "does not serve for 15 s: no room for them")
    assert not router.is_admitting(0), "the scheduler does not count on it"
    control.wake = lambda epoch, weights: takes(weights)
    await keeper.look()
    assert said[2] == lo.EngineServing(0, 0, 1, "c1")
    assert router.is_admitting(0)
