"""What no schedule can beat, given the executions, the cells, and that dispatch happens only between bursts."""

import heapq
from collections.abc import Sequence

from gyre.scheduler.config import Plan
from gyre.scheduler.simulation.constants import Constants
from gyre.scheduler.simulation.workload import Demand


def lower_bound(plan: Plan, constants: Constants, groups: Sequence[tuple[Demand, ...]], num_untrained: int = 0) -> float:
    """Seconds. `groups` in the order of dispatch; up to `num_untrained` of them were too old to be trained.

    Two arguments: all cells together cannot do the work faster; and a burst cannot end before as many groups are complete
    as its steps take, each at the earliest its longest execution after its dispatch. Without groups carried over bursts
    both hold for each burst by itself.
    """
    num_cells = plan.num_cells + plan.num_standalone
    update, publish = constants.training.update_s, constants.training.publish_s
    full = plan.capacity.executions if constants.rollout.overload >= 1 else float("inf")  # else more load does more work
    slots = [sum(d.duration_s for d in g) / full for g in groups]
    trains = [sum(d.train_s for d in g) for g in groups]
    least = sorted(trains)[:len(trains) - num_untrained]
    work = (sum(slots) + sum(least) + plan.num_steps * update) / num_cells
    carries = plan.num_outstanding > plan.steps_per_burst * plan.groups_per_step
    at, version, first, waiting = 0.0, 0, 0, list[float]()
    while version < plan.num_steps:
        steps = min(plan.steps_per_burst, plan.num_steps - version)
        last = min(plan.num_groups(version), len(groups))
        for group in groups[first:last]:
            heapq.heappush(waiting, at + max(d.duration_s for d in group) + constants.rollout.evaluation_s)
        taken = [heapq.heappop(waiting) for _ in range(min(steps * plan.groups_per_step, len(waiting)))]
        ready = max(taken, default=at)
        end = max(ready + update, at + steps * update) + publish
        if not carries and not num_untrained:
            mine = sum(slots[first:last]) + sum(trains[first:last]) + steps * update
            end = max(end, at + mine / num_cells)
        at, version, first = end, version + steps, last
    return max(at, work)
