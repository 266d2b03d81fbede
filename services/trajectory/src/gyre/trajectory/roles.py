"""Which role class a call has. The record says it today; a classifier that reads the tree takes the same place."""

from collections.abc import Sequence
from typing import Protocol

from gyre.contracts.events import RoleClass
from gyre.trajectory.record import Call
from gyre.trajectory.tree import Tree

ROLE_ORDERS: dict[str, tuple[RoleClass, ...]] = {
    "paper": ("main", "main-summary", "sub-agent", "sub-agent-summary"),
    "announcement": ("main", "sub-agent", "main-summary", "sub-agent-summary"),
}


class RoleClassifier(Protocol):
    """Gives every call of one execution its role class."""

    def classify(self, calls: Sequence[Call]) -> tuple[RoleClass, ...]: ...


class RecordedRoles:
    """The role class the gateway wrote into the record."""

    def classify(self, calls: Sequence[Call]) -> tuple[RoleClass, ...]:
        return tuple(call.record.role_class for call in calls)


def leaf_calls(tree: Tree) -> dict[int, int]:
    """Leaf segment -> number of the first call whose sequence ends where the leaf ends."""
    found: dict[int, int] = {}
    for number, (call, segment) in enumerate(zip(tree.calls, tree.end, strict=True)):
        is_leaf = segment >= 0 and tree.exit[segment] == segment + 1
        if is_leaf and call.length == tree.depth[segment] + tree.size(segment):
            found.setdefault(segment, number)
    return found


def leaf_roles(tree: Tree, roles: Sequence[RoleClass]) -> dict[int, RoleClass]:
    """Leaf segment -> role class of its path: that of the first call that ends there."""
    return {segment: roles[number] for segment, number in sorted(leaf_calls(tree).items())}
