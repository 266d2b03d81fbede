"""The simulator: its books balance, no schedule beats the bound, elastic is not slower than colocate, seeds repeat."""

from dataclasses import replace

import pytest
from gyre.contracts import events as e
from gyre.contracts.errors import ConfigError
from gyre.scheduler.schedules import Capacity
from gyre.scheduler.simulation.constants import (
    Constants,
    LognormalConstants,
    Loss,
    RolloutConstants,
    TrainingConstants,
    TransitionConstants,
    check_constants,
)
from gyre.scheduler.simulation.workload import Capped, Demand, Lognormal, Replayed
from gyre.scheduler.simulation.world import World
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_runs import NAMES, PLAN, check_books, facts_of, world_of

FREE = Constants(rollout=RolloutConstants(move_stall_s=0.0, evaluation_s=0.0),
                 training=TrainingConstants(update_s=1.0, publish_s=0.0),
                 transition=TransitionConstants(0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
DEMANDS = st.lists(st.tuples(st.floats(10, 10_000), st.floats(0, 600)), min_size=1, max_size=40)
PLANS = st.builds(lambda k, mu, n, b, steps: replace(PLAN, num_cells=k, steps_per_burst=mu, executions_per_group=n,
                                                     groups_per_step=b, num_steps=mu * steps),
                  st.integers(2, 6), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))


def played(world: World) -> float:
    run = world.run()
    check_books(world, run)
    return run.makespan_s


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(demands=DEMANDS, plan=PLANS, phi=st.integers(0, 2), limit=st.sampled_from([0, 1, 99]))
def test_books_balance_and_no_schedule_beats_the_bound(name, demands, plan, phi, limit):
    phi = 0 if name in ("colocate", "rollpacker") else phi
    world = world_of(name, demands, plan, phi=phi, staleness_limit=limit)
    run = world.run()
    check_books(world, run)
    assert run.makespan_s >= run.lower_bound_s * (1 - 1e-9)
    assert all(s >= 0 for step in run.steps for s in step.staleness)
    assert run.num_stale_groups == sum(s > limit for step in run.steps for s in step.staleness)


@settings(max_examples=60, deadline=None)
@given(demands=DEMANDS, plan=PLANS)
def test_elastic_is_not_slower_than_colocate_beyond_its_transitions_and_one_micro_step_a_step(demands, plan):
    elastic, colocate = (played(world_of(name, demands, plan)) for name in ("elastic", "colocate"))
    t, r = TransitionConstants(), RolloutConstants()
    num_bursts = plan.num_steps // plan.steps_per_burst
    switching = t.release_s + t.join_s + t.leave_s + t.ready_s + r.move_stall_s + 4 * t.fact_s
    longest = max(train for _, train in demands)
    assert elastic <= colocate + num_bursts * plan.num_cells * switching + plan.num_steps * longest


@settings(max_examples=60, deadline=None)
@given(demands=DEMANDS, plan=PLANS)
def test_elastic_with_free_transitions_is_not_slower_than_colocate_by_more_than_one_micro_step_a_step(demands, plan):
    elastic, colocate = (played(world_of(name, demands, plan, FREE)) for name in ("elastic", "colocate"))
    assert elastic <= colocate + plan.num_steps * max(train for _, train in demands) + 1e-6


@settings(max_examples=40, deadline=None)
@given(demands=DEMANDS, plan=PLANS)
def test_one_cell_is_colocate_whatever_the_schedule(demands, plan):
    plan = replace(plan, num_cells=1)
    elastic, colocate = (played(world_of(name, demands, plan)) for name in ("elastic", "colocate"))
    assert elastic <= colocate + 1e-6
    assert elastic >= colocate - plan.num_steps * (RolloutConstants().evaluation_s + 10)


@pytest.mark.parametrize("name", NAMES)
def test_one_seed_is_one_run(name):
    def one(seed: int) -> list[e.Fact]:
        world = world_of(name, [(1.0, 1.0)])
        world.scenario = replace(world.scenario, workload=Lognormal(LognormalConstants(), 0.01, seed))
        return facts_of(world)

    assert one(3) == one(3)
    assert one(3) != one(4)


def test_the_default_durations_are_the_published_ones():
    drawn = Lognormal(LognormalConstants(), 0.0, 0)
    groups = [[d.duration_s / 3600 for d in drawn.group(i, 8)] for i in range(4000)]
    mean = sum(map(sum, groups)) / 32_000
    assert mean == pytest.approx(1.93, rel=0.01)
    assert sum(map(max, groups)) / 4000 == pytest.approx(2.96, rel=0.01)


def test_executions_of_a_group_resemble_each_other_as_far_as_they_correlate():
    def between(correlation: float) -> float:
        drawn = Lognormal(LognormalConstants(correlation=correlation), 0.0, 0)
        groups = [[d.duration_s for d in drawn.group(i, 8)] for i in range(300)]
        spreads = [max(g) / min(g) for g in groups]
        return sum(spreads) / len(spreads)

    assert between(1.0) == pytest.approx(1.0)
    assert between(0.8) < between(0.3) < between(0.0)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(demands=DEMANDS, losses=st.lists(st.builds(Loss, st.integers(0, 3), st.floats(0, 20_000), st.floats(1, 2_000)),
                                        max_size=6))
def test_cells_that_are_lost_and_come_back_cost_time_and_nothing_else(name, demands, losses):
    world = world_of(name, demands, constants=Constants(losses=tuple(losses)))
    check_books(world, world.run())


def test_a_core_that_is_lost_in_training_trains_the_step_again():
    demands = [(1000.0, 300.0)]
    once = world_of("colocate", demands, replace(PLAN, num_steps=1, steps_per_burst=1))
    lost = world_of("colocate", demands, replace(PLAN, num_steps=1, steps_per_burst=1),
                    Constants(losses=(Loss(0, 1300.0, 100.0),)))
    run = lost.run()
    check_books(lost, run)
    assert run.cell_s["lost"] == pytest.approx(100.0)
    assert once.run().makespan_s + 100.0 < run.makespan_s


def test_a_cell_that_is_lost_for_longer_than_transitions_may_take_is_not_waited_for():
    plan = replace(PLAN, transition_timeout_s=600.0)
    world = world_of("elastic", [(1000.0, 10.0), (5000.0, 10.0)], plan, Constants(losses=(Loss(3, 500.0, 50_000.0),)))
    run = world.run()
    check_books(world, run)
    assert run.makespan_s < 30_000


def test_more_executions_than_slots_slow_each_other_down():
    plan = replace(PLAN, num_cells=1, num_steps=1, steps_per_burst=1, executions_per_group=4)
    once = world_of("colocate", [(1000.0, 0.0)], replace(plan, capacity=Capacity(8))).run()
    twice = world_of("colocate", [(1000.0, 0.0)], plan).run()
    assert twice.makespan_s - once.makespan_s == pytest.approx(1000.0)


def test_an_executor_with_room_for_fewer_starts_them_as_others_end():
    plan = replace(PLAN, num_cells=1, num_steps=1, steps_per_burst=1, executions_per_group=4, capacity=Capacity(8))
    once = world_of("colocate", [(1000.0, 0.0)], plan).run()
    queued = world_of("colocate", [(1000.0, 0.0)], plan, max_concurrent=2).run()
    assert queued.makespan_s - once.makespan_s == pytest.approx(3000.0)


def test_contexts_that_outgrow_the_pool_preempt_and_are_counted():
    plan = replace(PLAN, num_cells=2, capacity=Capacity(8, 3000))
    world = world_of("elastic", [(1000.0, 10.0)], plan)
    run = world.run()
    check_books(world, run)
    assert run.num_preempted > 0
    roomy = world_of("elastic", [(1000.0, 10.0)], replace(plan, capacity=Capacity(8, 100_000))).run()
    assert roomy.num_preempted == 0 and roomy.makespan_s < run.makespan_s


def test_old_groups_are_counted_as_stale_and_not_trained():
    demands = [(100.0, 1.0)] * 14 + [(90_000.0, 1.0)] * 2
    plan = replace(PLAN, steps_per_burst=1, num_steps=8)
    run = world_of("elastic", demands, plan, phi=2, staleness_limit=2).run()
    assert max(s for step in run.steps for s in step.staleness) > 2
    assert run.num_stale_groups > 0


def test_without_streaming_a_step_begins_when_it_is_sealed():
    demands = [(float(100 * i), 500.0) for i in range(1, 9)]
    plan = replace(PLAN, num_steps=2, num_cells=3)
    one, other = (world_of(name, demands, plan).run() for name in ("async", "async+streaming"))
    assert other.makespan_s < one.makespan_s


def test_a_run_that_stands_still_because_a_cell_is_lost_nearly_for_good_is_refused():
    """The scheduler asks the core again and again and contexts are reported: there is always something that comes next."""
    constants = Constants(losses=(Loss(0, 10.0, 1e12),))
    with pytest.raises(ConfigError, match=r"elastic stands still .* cells 0:train"):
        world_of("elastic", [(100.0, 1.0)], replace(PLAN, capacity=Capacity(4, 8000)), constants=constants).run()


def test_no_execution_is_longer_and_no_context_larger_than_the_run_allows():
    given = (Demand(100.0, 5000, 10.0), Demand(400.0, 8000, 40.0), Demand(400.0, 800, 40.0), Demand(0.0, 10, 1.0))
    capped = Capped(Replayed([given], 0), 200.0, 3000).group(0, 4)
    assert capped == (Demand(100.0, 3000, 10.0), Demand(200.0, 3000, 20.0), Demand(200.0, 400, 20.0), Demand(0.0, 10, 1.0))


@pytest.mark.parametrize(("constants", "said"), [
    (Constants(rollout=RolloutConstants(overload=-1.0)), r"rollout.overload = -1: must not be negative"),
    (Constants(lognormal=LognormalConstants(correlation=2.0)), r"lognormal.correlation = 2: must be in \[0, 1\]"),
    (Constants(lognormal=LognormalConstants(mean_s=9.0, cap_s=8.0)), r"mean_s = 9: must be less than lognormal.cap_s = 8"),
    (Constants(losses=(Loss(7, 1.0, 1.0),)), r"losses\[0\].*cell must be in \[0, 4\)"),
])
def test_constants_that_cannot_be_are_refused_by_name(constants, said):
    with pytest.raises(ConfigError, match=said):
        check_constants(constants, 4)
