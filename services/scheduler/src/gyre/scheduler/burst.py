"""What is dispatched: the groups of a burst and of a held-out evaluation, drawn from the plan and its seed alone."""

import functools
import hashlib

from gyre.contracts.events import ExecutionSpec, GroupDispatched
from gyre.contracts.ids import evaluation_group_id, execution_id, group_id
from gyre.scheduler.config import Plan


def draw(seed: int, *what: str | int) -> int:
    """A 63-bit number that depends on the run's seed and on what it is for."""
    text = "/".join(map(str, (seed, *what)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def uniform(seed: int, *what: str | int) -> float:
    """A number in [0, 1) drawn the same way."""
    return draw(seed, *what) / 2**63


def train_task(plan: Plan, cursor: int) -> str:
    """The task of the cursor-th group: each pass over the tasks has its own order."""
    num = len(plan.train_tasks)
    epoch, place = divmod(cursor, num)
    return plan.train_tasks[_order(plan.seed, num, epoch)[place]]


@functools.lru_cache(maxsize=4)
def _order(seed: int, num: int, epoch: int) -> tuple[int, ...]:
    """Places of the tasks in one pass; kept, because every group of the pass asks for it."""
    return tuple(sorted(range(num), key=lambda i: draw(seed, "order", epoch, i)))


def train_group(plan: Plan, burst: int, index: int, cursor: int, version: int) -> GroupDispatched:
    """Group `index` of a burst, of N executions on the cursor-th task."""
    group = group_id(burst, index)
    task = train_task(plan, cursor)
    specs = tuple(_training_execution(plan, execution_id(group, i)) for i in range(plan.executions_per_group))
    return GroupDispatched(group=group, burst=burst, query=task.replace("/", "-"), task=task, purpose="train",
                           version=version, executions=specs)


def _training_execution(plan: Plan, execution: str) -> ExecutionSpec:
    limit = plan.timeout_calls
    calls = None
    if uniform(plan.seed, "limited", execution) < limit.share:
        calls = limit.min + draw(plan.seed, "calls", execution) % (limit.max - limit.min + 1)
    return ExecutionSpec(execution, draw(plan.seed, "sampling", execution), plan.timeout_s, plan.overall_timeout_s,
                         calls)


def evaluation_group(plan: Plan, label: str, index: int, burst: int, version: int) -> GroupDispatched:
    """Group `index` of the held-out evaluation `label`; no limit by calls, the same seeds under every label."""
    group = evaluation_group_id(label, index)
    task = plan.held_out_tasks[index]
    specs = tuple(
        ExecutionSpec(execution_id(group, i), draw(plan.seed, "evaluation", index, i), plan.timeout_s,
                      plan.overall_timeout_s)
        for i in range(plan.executions_per_held_out))
    return GroupDispatched(group=group, burst=burst, query=task.replace("/", "-"), task=task, purpose="eval",
                           version=version, executions=specs, label=label)
