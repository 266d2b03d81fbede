"""What the core keeps up from fact to fact is what it would make anew."""

import random

import pytest
from gyre.scheduler import core
from gyre.scheduler.schedules import schedule_of
from gyre.scheduler.simulation.constants import Constants, Loss
from gyre.scheduler.transition import Roster
from gyre.scheduler.waterlevel import RENEWED, Waterlevel
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_runs import NAMES, plan_for, world_of
from small_world import play


def anew(water: Waterlevel) -> int:
    """Every live execution forecast from what has ended so far."""
    return sum(water._grown(water.contexts.get(x, 0)) for x in water.live)


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6))
def test_the_token_forecast_is_right_at_every_report_and_near_it_between_them(seed):
    dice, water = random.Random(seed), Waterlevel()
    names = [f"x{i}" for i in range(200)]
    for serial in range(20):
        water.dispatch(names[serial * 10:serial * 10 + 10])
        running = {x: dice.randint(1, 1000) for x in sorted(water.live) if dice.random() < 0.8}
        water.observe(serial, running)
        assert water.kv_tokens() == anew(water)
        for execution in dice.sample(sorted(water.live), min(5, water.level)):
            water.terminate(execution, dice.randint(1, 2000))
            assert water._known == sum(water._forecasts.values())
            assert water._forecasts.keys() <= water.live
            assert water._num_since * RENEWED <= max(len(water._forecasts), RENEWED)
    for execution in sorted(water.live):
        water.terminate(execution, 10)
    assert (water.level, water.kv_tokens()) == (0, 0)


def test_a_context_that_is_reported_before_its_dispatch_is_seen_counts_from_its_dispatch_on():
    water = Waterlevel()
    water.observe(0, {"a": 70})
    assert water.kv_tokens() == 0
    water.dispatch(["a", "b"])
    assert water.kv_tokens() == 70


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_the_roster_is_that_of_the_cells_whenever_it_is_looked_at(name, seed):
    def check(state: core.State, fact: object) -> None:
        assert state.roster == Roster.of(state.cells)

    play(plan_for(name), schedule_of(name, 2), seed, duplicate=0.2, forget=0.02, check=check)


@pytest.mark.parametrize("name", NAMES)
def test_the_roster_follows_cells_that_are_lost_and_come_back(name):
    world = world_of(name, [(1000.0, 100.0), (3000.0, 10.0)],
                     constants=Constants(losses=(Loss(1, 700.0, 400.0), Loss(2, 1500.0, 800.0), Loss(0, 3100.0, 50.0))))

    def check(fact: object) -> None:
        assert world.leader.state.roster == Roster.of(world.leader.state.cells)

    world.said = check
    world.run()
