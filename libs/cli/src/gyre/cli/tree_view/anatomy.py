"""What lies where in a tree: who sampled each token, what is a target, which way is the trunk.

Arrays over all tokens are filled by slices, one per call and segment; nothing walks over single tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from gyre.cli.treefile import TreeView

# Reasons for which sampled tokens are no targets; older releases have them among the reasons why targets are not trained.
_BESIDE = ("unseen", "untrainable", "no_context")


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens [start, stop) of a segment that are all context (`call` -1), or all sampled by one call.

    `fate`: what became of them: `context`, `path N`, or why they are not trained.
    """

    segment: int
    start: int
    stop: int
    call: int
    fate: str

    @property
    def num(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Branch:
    """A chain of segments down to a leaf: at every fork it goes on where the tree reaches deepest.

    It hangs off segment `fork` of branch `parent`, -1: it begins with a root. `sides` are the branches that hang off it.
    `num_below` counts its sides and theirs, `calls` are those that end on the branch itself, ascending.
    """

    number: int
    parent: int
    fork: int
    segments: tuple[int, ...]
    sides: tuple[int, ...]
    calls: tuple[int, ...]
    num_below: int
    first_call: int  # the first that ends on it or below


@dataclass(frozen=True, slots=True, eq=False)
class Anatomy:
    """A tree with what follows from it.

    sampler int32 [U] number of the first call that sampled the token, -1: context; is_target bool [U];
    version int32 [U] weights it was sampled under, -1: context; children [S] segments that continue one, first taken
    first; runs of every segment in order: `runs[run_bounds[s]:run_bounds[s + 1]]`; `reason`: why targets that no path
    owns are not trained
    """

    view: TreeView
    sampler: np.ndarray
    is_target: np.ndarray
    version: np.ndarray
    runs: tuple[Run, ...]
    run_bounds: tuple[int, ...]
    branches: tuple[Branch, ...]
    branch_of: tuple[int, ...]
    reason: str

    @property
    def roots(self) -> list[Branch]:
        return [b for b in self.branches if b.fork < 0]

    def runs_of(self, segment: int) -> tuple[Run, ...]:
        return self.runs[self.run_bounds[segment]:self.run_bounds[segment + 1]]

    def extent(self, branch: Branch) -> tuple[int, int]:
        """Depth in tokens at which the branch begins and ends."""
        return int(self.view.depth[branch.segments[0]]), self.end(branch.segments[-1])

    def end(self, segment: int) -> int:
        """Depth in tokens behind the last token of a segment."""
        return int(self.view.depth[segment] + self.view.bounds[segment + 1] - self.view.bounds[segment])

    def path(self, segment: int) -> list[int]:
        """Segments from the root to `segment`."""
        found: list[int] = []
        while segment >= 0:
            found.append(segment)
            segment = int(self.view.parent[segment])
        return found[::-1]


def anatomy(view: TreeView) -> Anatomy:
    """Take a tree apart."""
    sampler, is_target, version = samplers(view)
    if view.has_tokens:  # the file's own word; without it what follows from the calls
        is_target = np.zeros(view.num_tokens, bool)
        is_target[view.target] = True
        sampler[view.target], version[view.target] = view.call, view.version
    branches, branch_of = _branches(view)
    reason = _reason(view)
    runs = tuple(_runs(view, sampler, is_target, reason))
    segments = np.array([run.segment for run in runs], np.int64)
    bounds = tuple(np.searchsorted(segments, np.arange(len(view.parent) + 1)).tolist())
    return Anatomy(view, sampler, is_target, version, runs, bounds, branches, branch_of, reason)


def samplers(view: TreeView) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(sampler, is_target, version), each [U], from the calls alone: of two that sampled a token the first counts."""
    sampler, version = (np.full(view.num_tokens, -1, np.int32) for _ in range(2))
    is_target = np.zeros(view.num_tokens, bool)
    order = sorted(range(len(view.calls)), key=lambda n: (not view.calls[n].excluded, -n))
    for number in order:
        call = view.calls[number]
        edges = [(call.prompt_len + s.start, call.prompt_len + s.end, s.version) for s in call.spans]
        for start, stop, its_version in edges:
            for _, low, high in view.spans(call.segment, start, stop):
                sampler[low:high], version[low:high], is_target[low:high] = number, its_version, not call.excluded
    is_target[view.bounds[:-1][view.parent < 0]] = False  # nothing can score the first token of a root
    return sampler, is_target, version


def _reason(view: TreeView) -> str:
    if view.header is None:
        return "not trained"
    outcome = view.header.outcome
    return next((name for name in outcome.drops if name not in _BESIDE), "not trained")


def _runs(view: TreeView, sampler: np.ndarray, is_target: np.ndarray, reason: str) -> Iterator[Run]:
    if not view.num_tokens:
        return
    changed = (np.diff(sampler) != 0) | np.diff(is_target)
    cuts = np.union1d(np.flatnonzero(changed) + 1, view.bounds)
    segments = np.searchsorted(view.bounds, cuts[:-1], side="right") - 1
    callers, targets = sampler[cuts[:-1]].tolist(), is_target[cuts[:-1]].tolist()
    owners = view.owner[segments].tolist()
    edges = cuts.tolist()
    for place, segment in enumerate(segments.tolist()):
        call = callers[place]
        fate = "context" if call < 0 else _fate(view, call, targets[place], owners[place], reason)
        yield Run(segment, edges[place], edges[place + 1], call, fate)


def _fate(view: TreeView, call: int, is_target: bool, owner: int, reason: str) -> str:
    if is_target:
        return f"path {owner}" if owner >= 0 else reason
    return {"model": "other model", "": "no_context"}.get(view.calls[call].excluded, view.calls[call].excluded)


def _branches(view: TreeView) -> tuple[tuple[Branch, ...], tuple[int, ...]]:
    num = len(view.parent)
    parent = view.parent.tolist()
    reach = (view.depth + np.diff(view.bounds)).tolist()
    for segment in range(num - 1, -1, -1):
        if parent[segment] >= 0:
            reach[parent[segment]] = max(reach[parent[segment]], reach[segment])
    heavy: dict[int, int] = {}
    for segment in range(num):
        above = parent[segment]
        if above >= 0 and (above not in heavy or reach[segment] > reach[heavy[above]]):
            heavy[above] = segment
    branch_of, chains = [0] * num, []
    for segment in range(num):
        above = parent[segment]
        if above >= 0 and heavy[above] == segment:
            branch_of[segment] = branch_of[above]
            chains[branch_of[above]].append(segment)
        else:
            branch_of[segment] = len(chains)
            chains.append([segment])
    return _linked(view, chains, branch_of, parent), tuple(branch_of)


def _linked(view: TreeView, chains: list[list[int]], branch_of: list[int], parent: list[int]) -> tuple[Branch, ...]:
    calls: list[list[int]] = [[] for _ in chains]
    for number, call in enumerate(view.calls):
        if call.segment >= 0:
            calls[branch_of[call.segment]].append(number)
    forks = [parent[chain[0]] for chain in chains]
    sides: list[list[int]] = [[] for _ in chains]
    below = [0] * len(chains)
    first = [min(own, default=len(view.calls)) for own in calls]
    for number in range(len(chains) - 1, -1, -1):  # a branch stands behind the one it hangs off
        if forks[number] >= 0:
            above = branch_of[forks[number]]
            sides[above].append(number)
            below[above] += 1 + below[number]
            first[above] = min(first[above], first[number])
    return tuple(
        Branch(n, branch_of[forks[n]] if forks[n] >= 0 else -1, forks[n], tuple(chain),
               tuple(sorted(sides[n], key=lambda s: (int(view.depth[chains[s][0]]), first[s]))), tuple(calls[n]),
               below[n], first[n])
        for n, chain in enumerate(chains))
