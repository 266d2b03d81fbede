"""Packing: admitted paths of one group become immutable micro-steps under a token and a pairs budget.

A tree that fits stays whole. One that does not is split between paths, never inside one, at the price of encoding the
shared prefix once more. A path that is longer than the budget is a micro-step of its own. The result depends on the
group's contents alone. Rows end at the last target of each path: tokens behind it score nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from gyre.contracts.ids import micro_step_id
from gyre.contracts.microstep import MicroStep
from gyre.trajectory.admission import Admission
from gyre.trajectory.targets import Targets
from gyre.trajectory.tree import Tree


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One execution to be trained."""

    execution: str
    advantage: float
    tree: Tree
    targets: Targets
    admission: Admission

    def needs(self, paths: Iterable[int]) -> dict[int, int]:
        """Segment -> tokens of it that the union of admitted `paths` needs, depth-first."""
        needed: dict[int, int] = {}
        for number in paths:
            path = self.admission.paths[number]
            for segment in self.tree.path(path.leaf):
                size = min(self.tree.size(segment), path.last + 1 - self.tree.depth[segment])
                if size > needed.get(segment, 0):
                    needed[segment] = size
        return dict(sorted(needed.items()))

    def extent(self, paths: Iterable[int]) -> "Extent":
        """Tokens and visible pairs of the union of admitted `paths`."""
        return self.growth({}, self.needs(paths))

    def growth(self, needed: dict[int, int], more: dict[int, int]) -> "Extent":
        """What `more` adds to `needed`, both as `needs` gives them."""
        total = Extent()
        for segment, size in more.items():
            had = needed.get(segment, 0)
            if size > had:
                total += self._head(segment, size) - self._head(segment, had)
        return total

    def _head(self, segment: int, size: int) -> "Extent":
        """The first `size` tokens of a segment."""
        return Extent(size, size * self.tree.depth[segment] + size * (size + 1) // 2)


@dataclass(frozen=True, slots=True)
class Extent:
    """Size of a piece of work: tokens, and visible (query, key) pairs."""

    tokens: int = 0
    pairs: int = 0

    def __add__(self, other: "Extent") -> "Extent":
        return Extent(self.tokens + other.tokens, self.pairs + other.pairs)

    def __sub__(self, other: "Extent") -> "Extent":
        return Extent(self.tokens - other.tokens, self.pairs - other.pairs)


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one micro-step, and what its work costs: cost = per_token * tokens + per_pair * pairs."""

    tokens: int
    pairs: int
    per_token: float = 1.0
    per_pair: float = 0.0

    def holds(self, extent: Extent) -> bool:
        return extent.tokens <= self.tokens and extent.pairs <= self.pairs

    def cost(self, extent: Extent) -> float:
        return self.per_token * extent.tokens + self.per_pair * extent.pairs


@dataclass(slots=True)
class Pack:
    """A micro-step in the making: admitted path numbers of each member (by its index in the group)."""

    paths: dict[int, tuple[int, ...]] = field(default_factory=dict)
    extent: Extent = Extent()


def pack(members: Sequence[Member], budget: Budget) -> list[Pack]:
    """Cut and pack the members of one group: first fit, largest unit first, ties in the order of the group."""
    units = [(budget.cost(member.extent(paths)), index, paths)
             for index, member in enumerate(members) for paths in _units(member, budget)]
    packs: list[Pack] = []
    for _, index, paths in sorted(units, key=lambda unit: (-unit[0], unit[1], unit[2])):
        for candidate in packs:
            if _put(candidate, members[index], index, paths, budget):
                break
        else:
            packs.append(Pack({index: paths}, members[index].extent(paths)))
    return packs


def _units(member: Member, budget: Budget) -> list[tuple[int, ...]]:
    """Runs of neighbouring paths whose union fits: neighbours share the longest prefixes."""
    numbers = sorted(range(len(member.admission.paths)), key=lambda n: member.admission.paths[n].leaf)
    units: list[list[int]] = []
    needed: dict[int, int] = {}
    extent = Extent()
    for number in numbers:
        path = member.needs((number,))
        wider = extent + member.growth(needed, path)
        if units and budget.holds(wider):
            units[-1].append(number)
            needed |= {s: max(size, needed.get(s, 0)) for s, size in path.items()}
            extent = wider
        else:
            units.append([number])
            needed, extent = path, member.extent((number,))
    return [tuple(unit) for unit in units]


def _put(pack_: Pack, member: Member, index: int, paths: tuple[int, ...], budget: Budget) -> bool:
    held = pack_.paths.get(index, ())
    union = (*held, *paths)
    extent = pack_.extent - member.extent(held) + member.extent(union)
    if not budget.holds(extent):
        return False
    pack_.paths[index], pack_.extent = union, extent
    return True


def micro_step(group: str, number: int, pack_: Pack, members: Sequence[Member]) -> MicroStep:
    """The micro-step of a pack: its members in the order of the group, one tree after another."""
    rows: list[_Rows] = []
    first_row = first_path = 0
    for tree_index, index in enumerate(sorted(pack_.paths)):
        rows.append(_rows(members[index], sorted(pack_.paths[index]), tree_index, first_row, first_path))
        first_row += len(rows[-1].ids)
        first_path += len(pack_.paths[index])
    chosen = [members[index] for index in sorted(pack_.paths)]

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(r, name) for r in rows])

    return MicroStep(micro_step_id(group, number), group, tuple(m.execution for m in chosen),
                     np.array([m.advantage for m in chosen], np.float32),
                     **{name: joined(name) for name in _Rows.__dataclass_fields__})


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """One tree's part of a micro-step; the fields are those of MicroStep."""

    ids: np.ndarray
    parent: np.ndarray
    position: np.ndarray
    exit: np.ndarray
    tree: np.ndarray
    target: np.ndarray
    path: np.ndarray
    logprob: np.ndarray
    version: np.ndarray
    weight: np.ndarray


def _rows(member: Member, paths: list[int], tree_index: int, first_row: int, first_path: int) -> _Rows:
    tree, targets = member.tree, member.targets
    needed = member.needs(paths)
    segments, sizes = np.array(list(needed), np.int64), np.array(list(needed.values()), np.int64)
    starts = first_row + np.cumsum(sizes) - sizes  # new index of each segment's first token
    total = int(sizes.sum())
    within = first_row + np.arange(total, dtype=np.int64)  # new index of every token
    old = within + np.repeat(np.take(tree.bounds, segments) - starts, sizes)
    parent = (within - 1).astype(np.int32)
    parent[starts - first_row] = _parents(tree, segments, starts, sizes)
    behind = np.searchsorted(segments, np.take(tree.exit, segments))  # first needed segment behind the subtree
    exits = np.append(starts, first_row + total)[behind]
    picked, numbers = _picked(member, paths, needed)
    target = np.searchsorted(old, targets.index[picked])
    return _Rows(
        ids=tree.ids[old], parent=parent, exit=np.repeat(exits, sizes).astype(np.int32),
        position=(within + np.repeat(np.take(tree.depth, segments) - starts, sizes)).astype(np.int32),
        tree=np.full(total, tree_index, np.int32), target=(target + first_row).astype(np.int32),
        path=(numbers + first_path).astype(np.int32), logprob=targets.logprob[picked], version=targets.version[picked],
        weight=np.full(len(picked), 1.0 / member.admission.num_owned, np.float32))


def _parents(tree: Tree, segments: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """New index of the token before each segment's first one, -1 at a root."""
    above = np.take(tree.parent, segments)
    at = np.searchsorted(segments, np.maximum(above, 0))
    last = (starts + sizes - 1)[np.minimum(at, len(segments) - 1)]
    return np.where(above >= 0, last, -1)


def _picked(member: Member, paths: list[int], needed: dict[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Targets owned by `paths`, ascending, and for each the rank of its path in `paths`."""
    rank = {number: i for i, number in enumerate(paths)}
    picked: list[np.ndarray] = []
    numbers: list[np.ndarray] = []
    for segment in needed:
        owner = member.admission.owner[segment]
        if owner in rank and member.targets.count(segment):
            low, high = member.targets.offsets[segment:segment + 2]
            picked.append(np.arange(low, high))
            numbers.append(np.full(high - low, rank[owner]))
    return np.concatenate(picked), np.concatenate(numbers)
