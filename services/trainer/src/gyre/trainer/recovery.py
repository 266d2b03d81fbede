"""A worker's ledger from what is left when its SQLite file is lost: the newest checkpoint's copy, and the streams.

The copy is the state at the time of the checkpoint. On it comes what was published since: sealed steps (their members are
final), attempts, published versions, epochs. Everything else is read again from the first message on and known groups are
known, so a group that is in a sealed step is in no other, and one that is in none joins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gyre.contracts.errors import CheckpointError
from gyre.contracts.events import (
    BacklogReported,
    CellTrainJoined,
    CellTrainReleased,
    Fact,
    GroupCompleted,
    StepFinished,
    StepSealed,
    WeightsPublished,
)
from gyre.trainer.core import TrainerState
from gyre.trainer.step import Group, Membership, Plan


def rebuild(state: TrainerState, cell: int, said: Iterable[Fact], completed: Mapping[str, GroupCompleted]) -> TrainerState:
    """`state` (a checkpoint's, or the initial one) brought up to what this run's trainers have said, in order.

    completed: every group that was completed for training, by name, in order of arrival.

    Raises:
        CheckpointError: a sealed step names a group that nobody has completed.
    """
    orders = {name: order for order, name in enumerate(completed)}
    for fact in said:
        match fact:
            case CellTrainJoined() if fact.cell == cell:
                state.cell.joined = max(state.cell.joined, fact.epoch)
            case CellTrainReleased() if fact.cell == cell:
                state.cell.let_go(fact.epoch)
            case StepSealed() if cell == 0 and fact.step >= min(state.membership.plans):
                _seal(state.membership, fact, completed, orders)
            case StepFinished() if cell == 0 and fact.step >= state.position:
                state.attempts[fact.step] = max(state.attempts.get(fact.step, 0), fact.attempt + 1)
            case WeightsPublished() if cell == 0 and fact.version >= state.published:
                state.published, state.checksum, state.begun = fact.version, fact.checksum, True
            case BacklogReported() if cell == 0:
                state.backlog_serial = max(state.backlog_serial, fact.serial)
    return state


def _seal(
    membership: Membership, fact: StepSealed, completed: Mapping[str, GroupCompleted], orders: Mapping[str, int]
) -> None:
    missing = [name for name in fact.groups if name not in completed]
    if missing:
        raise CheckpointError(
            f"step {fact.step} was sealed with group {missing[0]}, which is not in the stream of completed groups any more: "
            "the ledger cannot be rebuilt"
        )
    stale = set(fact.stale_groups)
    members = [Group.of(completed[name], orders[name]) for name in fact.groups if name not in stale]
    membership.plans[fact.step] = Plan(fact.step, members, list(fact.stale_groups), sealed=True)
    membership.known.update(fact.groups)
    membership.waiting = [g for g in membership.waiting if g.group not in fact.groups]
    for plan in membership.plans.values():
        if not plan.sealed:
            plan.groups = [g for g in plan.groups if g.group not in fact.groups]
