"""What does a decision cost when the run is large? `make bench NAME=scale`: 8 cells with 1,000 executions, then 64 with 10,000.

A run under the elastic schedule is simulated; only the scheduler's own core is timed, in CPU seconds: folding each fact that
it reads and deciding after it. Each size is played with the KV gate open and with the KV gate at work, where every execution's
context is reported every minute (a report's cost is proportional to the executions it tells of, and is listed by itself).

    python bench/scale.py [--rounds 3]

The last line is for scripts; us_per_event: CPU microseconds per fact at the large size, without the reports of contexts, of
the best round; growth: that over the same at the small size, 1 if a fact costs the same however large the run.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace

from gyre.contracts import events as e
from gyre.runtime.config import TimeoutCalls
from gyre.scheduler.config import Plan
from gyre.scheduler.schedules import Capacity, Schedule, schedule_of
from gyre.scheduler.simulation.constants import Constants, LognormalConstants
from gyre.scheduler.simulation.workload import Lognormal
from gyre.scheduler.simulation.world import Leader, Scenario, World

SIZES = ((8, 1_000), (64, 10_000))
NUM_TASKS = 500
GROUP = 8
NUM_BURSTS = 2  # bursts of two steps; each dispatches a quarter of the executions, the first two at once
KV_TOKENS = 12_000_000  # of a cell, where the gate works: less than its executions come to hold


class TimedLeader(Leader):
    """The scheduler with a stopwatch: CPU seconds of folding and deciding, those for reports of contexts apart."""

    def __init__(self, plan: Plan, schedule: Schedule) -> None:
        super().__init__(plan, schedule)
        self.spent_s = 0.0
        self.reports_s = 0.0
        self.num_reports = 0

    def fold(self, fact: e.Fact, now: float) -> None:
        begin = time.process_time()
        super().fold(fact, now)
        spent = time.process_time() - begin
        if isinstance(fact, e.ContextsReported):
            self.reports_s += spent
            self.num_reports += 1
        else:
            self.spent_s += spent

    def decide(self, now: float) -> tuple[e.Fact, ...]:
        begin = time.process_time()
        facts = super().decide(now)
        self.spent_s += time.process_time() - begin
        return facts


@dataclass(frozen=True)
class Measured:
    """us: CPU microseconds per fact, report_us: per report of contexts."""

    us: float
    num_events: int
    report_us: float


def plan_of_size(num_cells: int, num_executions: int, kv_tokens: int) -> Plan:
    """All executions in four steps, half of them outstanding at once, as many as the cells hold."""
    per_step = num_executions // GROUP // (2 * NUM_BURSTS)
    return Plan(num_steps=2 * NUM_BURSTS, seed=0, num_cells=num_cells, steps_per_burst=2, num_outstanding=3 * per_step,
                executions_per_group=GROUP, train_tasks=tuple(f"train/t{i:04d}" for i in range(NUM_TASKS)), held_out_tasks=(),
                executions_per_held_out=0, evaluate_at_start=False, evaluate_at_end=False, timeout_s=1e5,
                overall_timeout_s=1e6, timeout_calls=TimeoutCalls(), config_digest="", groups_per_step=per_step,
                capacity=Capacity(-(-3 * per_step * GROUP // num_cells), kv_tokens))


def measure(num_cells: int, num_executions: int, kv_tokens: int) -> Measured:
    plan, schedule = plan_of_size(num_cells, num_executions, kv_tokens), schedule_of("elastic")
    leader = TimedLeader(plan, schedule)
    scenario = Scenario(plan, schedule, 99, Lognormal(LognormalConstants(), 0.0121, 0), Constants())
    run = World(scenario, leader).run()
    num = leader.num_events - leader.num_reports
    dispatched = plan.num_steps * plan.groups_per_step * GROUP
    assert run.num_executions == dispatched
    return Measured(1e6 * leader.spent_s / num, num, 1e6 * leader.reports_s / max(leader.num_reports, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of which the fastest counts; others use the machine too")
    rounds = parser.parse_args().rounds
    best: dict[tuple[int, bool], Measured] = {}
    for _ in range(rounds):
        for num_cells, num_executions in SIZES:
            for gated in (False, True):
                found = measure(num_cells, num_executions, KV_TOKENS if gated else 0)
                known = best.get((num_cells, gated), replace(found, us=float("inf")))
                best[num_cells, gated] = min(known, found, key=lambda m: m.us)
    for (num_cells, gated), found in sorted(best.items()):
        print(f"{num_cells:3d} cells, {dict(SIZES)[num_cells]:6,} executions, KV gate {'at work' if gated else 'open   '}: "
              f"{found.us:6.1f} us per fact, {found.num_events:,} facts"
              + (f"; {found.report_us:,.0f} us per report of contexts" if gated else ""))
    small, large = SIZES[0][0], SIZES[1][0]
    worst = max((False, True), key=lambda gated: best[large, gated].us)
    growth = {gated: best[large, gated].us / best[small, gated].us for gated in (False, True)}
    print(f"scale us_per_event={best[large, worst].us:.1f} growth={growth[worst]:.2f} growth_open={growth[False]:.2f} "
          f"growth_gated={growth[True]:.2f} cells={large} executions={SIZES[1][1]}")


if __name__ == "__main__":
    main()
