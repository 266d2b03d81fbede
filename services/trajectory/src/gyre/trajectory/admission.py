"""Admission: which paths of a scored execution are trained, and which path owns which target.

Up to `max_paths` times: take the first role class that still has unowned targets, draw one of its leaves with
probability proportional to its unowned targets, and let the path own every unowned target on it. The draw depends on
(run, execution) and on nothing else. A path holds whole segments, so ownership is one number per segment.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from gyre.contracts.events import RoleClass
from gyre.trajectory.targets import Targets
from gyre.trajectory.tree import Tree

_WORD = 1 << 64


@dataclass(frozen=True, slots=True)
class AdmittedPath:
    """`leaf` is the path's last segment; it owns `num_owned` targets, the last of them at depth `last`."""

    leaf: int
    role_class: RoleClass
    num_owned: int
    last: int


@dataclass(frozen=True, slots=True)
class Admission:
    """The admitted paths in the order of their draw.

    owner  [S] number of the admitted path that owns the segment's targets, -1 if none does
    drops  targets that are not trained, by reason: `max_paths`, `role_class`
    """

    paths: tuple[AdmittedPath, ...]
    owner: tuple[int, ...]
    drops: dict[str, int]

    @property
    def num_owned(self) -> int:
        return sum(path.num_owned for path in self.paths)


def draw(run: str, execution: str, number: int, total: int) -> int:
    """Draw `number` of an execution: an integer in [0, total), the same in every process and release."""
    word = hashlib.blake2b(f"{run}\0{execution}\0{number}".encode(), digest_size=8).digest()
    return int.from_bytes(word, "big") * total // _WORD


def admit(tree: Tree, targets: Targets, roles: Mapping[int, RoleClass], order: tuple[RoleClass, ...], max_paths: int,
          seed: tuple[str, str]) -> Admission:
    """Admit up to `max_paths` paths (0: no bound). `roles`: role class of every leaf segment; `seed`: (run, execution)."""
    owner = [-1] * tree.num_segments
    paths: list[AdmittedPath] = []
    while not max_paths or len(paths) < max_paths:
        candidates = _candidates(tree, targets, roles, order, owner)
        if not candidates:
            break
        leaf = _drawn(candidates, draw(*seed, len(paths), sum(candidates.values())))
        paths.append(_own(tree, targets, leaf, roles[leaf], owner, len(paths)))
    left = len(targets) - sum(path.num_owned for path in paths)
    reason = "max_paths" if _candidates(tree, targets, roles, order, owner) else "role_class"
    return Admission(tuple(paths), tuple(owner), {reason: left} if left else {})


def _candidates(tree: Tree, targets: Targets, roles: Mapping[int, RoleClass], order: tuple[RoleClass, ...],
                owner: list[int]) -> dict[int, int]:
    """Leaf -> unowned targets, for the leaves of the first role class that has any."""
    above = [0] * tree.num_segments  # unowned targets from the root through the segment
    for segment, parent in enumerate(tree.parent):
        own = targets.count(segment) if owner[segment] < 0 else 0
        above[segment] = own + (above[parent] if parent >= 0 else 0)
    for role in order:
        found = {leaf: above[leaf] for leaf, its_role in roles.items() if its_role == role and above[leaf]}
        if found:
            return found
    return {}


def _drawn(candidates: dict[int, int], at: int) -> int:
    for leaf, weight in candidates.items():
        if at < weight:
            return leaf
        at -= weight
    raise AssertionError("the draw is below the sum of the weights")


def _own(tree: Tree, targets: Targets, leaf: int, role: RoleClass, owner: list[int], number: int) -> AdmittedPath:
    num_owned, last = 0, 0
    for segment in tree.path(leaf):
        if owner[segment] >= 0 or not targets.count(segment):
            continue
        owner[segment] = number
        num_owned += targets.count(segment)
        last = tree.depth[segment] + int(targets.index[targets.offsets[segment + 1] - 1]) - tree.bounds[segment]
    return AdmittedPath(leaf, role, num_owned, last)
