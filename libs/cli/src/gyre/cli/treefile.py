"""The tree of one execution as trajectory leaves it in the blob store, read for showing.

Only what is shown is read; fields that another release adds are ignored. Decoding needs the run's tokenizer and no
model.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from gyre.contracts.codec import unpack
from gyre.contracts.events import VersionSpan
from gyre.runtime.blobs import BlobStore

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Call:
    """One call: the first `length` tokens of the path to `segment`, of which `prompt_len` are its prompt."""

    call: str
    index: int
    base_call: str | None
    segment: int
    prompt_len: int
    length: int
    role_class: str
    lineage: str
    finish_reason: str
    spans: tuple[VersionSpan, ...]


@dataclass(frozen=True, slots=True)
class Path:
    """One admitted path, in the order of its draw."""

    leaf: int
    role_class: str
    num_owned: int


@dataclass(frozen=True, slots=True, eq=False)
class TreeView:
    """U tokens in S segments, depth-first.

    ids int32 [U]; bounds int32 [S + 1]; parent, depth, owner int32 [S], owner -1: nothing trained there; target int32
    [Y] token index; call int32 [Y] place of the call that sampled it in `calls`; version int32 [Y]
    """

    ids: np.ndarray
    bounds: np.ndarray
    parent: np.ndarray
    depth: np.ndarray
    owner: np.ndarray
    calls: tuple[Call, ...]
    paths: tuple[Path, ...]
    target: np.ndarray
    call: np.ndarray
    version: np.ndarray

    def sequence(self, call: Call) -> np.ndarray:
        """Prompt plus output of a call: int32 [length]."""
        pieces: list[np.ndarray] = []
        segment = call.segment
        while segment >= 0:
            pieces.append(self.ids[self.bounds[segment]:self.bounds[segment + 1]])
            segment = int(self.parent[segment])
        joined = np.concatenate(pieces[::-1]) if pieces else np.empty(0, np.int32)
        return joined[:call.length]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens of a segment that are all context (`call` -1) or all sampled by one call."""

    ids: tuple[int, ...]
    call: int = -1


@dataclass(frozen=True, slots=True)
class Turn:
    """One call as it is read: what was new in its prompt, and its output. `is_fresh`: it continues no earlier call."""

    call: Call
    is_fresh: bool
    added: tuple[int, ...]
    output: tuple[int, ...]


def tree_path(execution: str) -> str:
    """Where trajectory keeps the tree of an execution in the blob store."""
    return f"trees/{execution}.msgpack"


def read_tree(blobs: BlobStore, execution: str) -> TreeView:
    """The tree of an execution. Raises FileNotFoundError, or BrokenBody if it is no tree."""
    return unpack(blobs.read(tree_path(execution)), TreeView)


def turns(tree: TreeView) -> Iterator[Turn]:
    """The calls of an execution in order; each shows the part of its prompt that its base call did not have."""
    by_name = {call.call: call for call in tree.calls}
    for call in sorted(tree.calls, key=lambda c: c.index):
        ids = tree.sequence(call)
        base = by_name.get(call.base_call or "")
        kept = _common(tree.sequence(base), ids[:call.prompt_len]) if base else 0
        yield Turn(call, kept == 0, tuple(ids[kept:call.prompt_len].tolist()), tuple(ids[call.prompt_len:].tolist()))


def _common(one: np.ndarray, other: np.ndarray) -> int:
    num = min(len(one), len(other))
    different = np.flatnonzero(one[:num] != other[:num])
    return int(different[0]) if len(different) else num


def runs(tree: TreeView, segment: int) -> Iterator[Run]:
    """A segment divided where context ends and a call's output begins."""
    low, high = int(tree.bounds[segment]), int(tree.bounds[segment + 1])
    first, last = np.searchsorted(tree.target, (low, high))
    sampler = np.full(high - low, -1, np.int32)
    sampler[tree.target[first:last] - low] = tree.call[first:last]
    cuts = [0, *(np.flatnonzero(np.diff(sampler)) + 1).tolist(), high - low]
    for start, stop in zip(cuts, cuts[1:], strict=False):
        if stop > start:
            yield Run(tuple(tree.ids[low + start:low + stop].tolist()), int(sampler[start]))


def children(tree: TreeView) -> dict[int, list[int]]:
    """Segment -> the segments that continue it; -1 -> the roots."""
    found: dict[int, list[int]] = {}
    for segment, parent in enumerate(tree.parent.tolist()):
        found.setdefault(parent, []).append(segment)
    return found


def spelled(ids: Sequence[int], decode: Decode | None, stop_ids: frozenset[int] = frozenset()) -> str:
    """Ids as text with a line break after every stop token inside; as numbers where there is no tokenizer."""
    if decode is None:
        return " ".join(map(str, ids))
    lines: list[list[int]] = [[]]
    for index in ids:
        lines[-1].append(index)
        if index in stop_ids:
            lines.append([])
    return "\n".join(decode(line) for line in lines if line)
