"""Small runs to simulate: a configuration, workloads by hand, and what their books have to hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gyre.contracts import events as e
from gyre.contracts.simulation import Simulated
from gyre.runtime.config import TimeoutCalls
from gyre.scheduler.config import Plan
from gyre.scheduler.schedules import Capacity, schedule_of
from gyre.scheduler.simulation.constants import Constants
from gyre.scheduler.simulation.workload import Demand
from gyre.scheduler.simulation.world import Scenario, World

PLAN = Plan(num_steps=4, seed=0, num_cells=4, steps_per_burst=2, num_outstanding=4, executions_per_group=2,
            train_tasks=("train/a",), held_out_tasks=(), executions_per_held_out=0, evaluate_at_start=False,
            evaluate_at_end=False, timeout_s=1e6, overall_timeout_s=1e7, timeout_calls=TimeoutCalls(), config_digest="",
            groups_per_step=2, capacity=Capacity(4))
NAMES = ("elastic", "async", "async+streaming", "colocate", "colocate+standalone", "colocate+standalone+streaming",
         "rollpacker")


@dataclass(frozen=True)
class Given:
    """A workload by hand: (seconds, training cell-seconds) of each execution, over and over."""

    demands: Sequence[tuple[float, float]]
    max_context: int = 1000

    def group(self, cursor: int, num: int) -> tuple[Demand, ...]:
        at = [(cursor * num + i) % len(self.demands) for i in range(num)]
        return tuple(Demand(self.demands[i][0], self.max_context, self.demands[i][1]) for i in at)


def plan_for(name: str, plan: Plan = PLAN, phi: int = 0) -> Plan:
    """`plan` with what the schedule needs: a standalone cell instead of one that can train, the groups carried over."""
    plan = replace(plan, num_outstanding=(phi + plan.steps_per_burst) * plan.groups_per_step)
    if "standalone" in name and plan.num_cells > 1:
        return replace(plan, num_cells=plan.num_cells - 1, num_standalone=1)
    return plan


def world_of(name: str, demands: Sequence[tuple[float, float]], plan: Plan = PLAN, constants: Constants | None = None,
             phi: int = 0, staleness_limit: int = 99, max_concurrent: int = 0) -> World:
    plan = plan_for(name, plan, phi)
    return World(Scenario(plan, schedule_of(name, max(1, plan.num_cells // 2)), staleness_limit, Given(demands),
                          constants or Constants(), max_concurrent, 0, phi))


def check_books(world: World, run: Simulated) -> None:
    """Every execution ran once and to its end, every group was trained once, every cell's time is accounted for."""
    plan = world.scenario.plan
    num_groups = plan.num_steps * plan.groups_per_step
    assert len(world.ended) == len(set(world.ended)) == run.num_executions == num_groups * plan.executions_per_group
    members = [*world.trainer.trained, *world.trainer.stale]
    assert len(members) == len(set(members)) == num_groups
    assert len(run.steps) == plan.num_steps
    assert world.engines.num_running == 0
    cells = plan.num_cells + plan.num_standalone
    assert abs(sum(run.cell_s.values()) - cells * run.makespan_s) < 1e-6 * cells * run.makespan_s
    assert all(seconds > -1e-6 * run.makespan_s for seconds in run.cell_s.values()), run.cell_s
    rolling = [s for s in run.stretches if s.use in ("roll", "tail")]
    assert abs(sum(s.end_s - s.start_s for s in rolling) - run.cell_s["roll"] - run.cell_s["tail"]) < 1e-3


def facts_of(world: World) -> list[e.Fact]:
    """Plays the world; every fact in the order in which the scheduler read it."""
    facts: list[e.Fact] = []
    world.said = facts.append
    world.run()
    return facts
