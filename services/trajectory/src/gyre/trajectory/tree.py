"""The trajectory tree: all calls of one execution, prefix-shared over exact token ids.

Built from slices of the records' own arrays (no object per token, no recursion), then frozen into one array of ids in
depth-first order. Children stand in the order in which calls first took them, so the frozen tree depends on the calls
and on nothing else. Several roots are one forest.
"""

from dataclasses import dataclass, field

import numpy as np
from gyre.trajectory.record import Call


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """A frozen tree of U tokens in S segments; a segment is a run of tokens without a fork.

    calls   the C calls, in gateway order
    ids     int32 [U] token ids, depth-first
    bounds  [S + 1] segment s holds tokens [bounds[s], bounds[s + 1])
    parent  [S] segment before this one on its paths, -1 at a root
    depth   [S] ancestors of the segment's first token
    exit    [S] first segment behind the subtree of s; s is a leaf iff exit[s] == s + 1
    end     [C] segment in which the call's sequence ends, -1 for an empty sequence
    """

    calls: tuple[Call, ...]
    ids: np.ndarray
    bounds: tuple[int, ...]
    parent: tuple[int, ...]
    depth: tuple[int, ...]
    exit: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_segments(self) -> int:
        return len(self.parent)

    @property
    def num_flat_tokens(self) -> int:
        """Tokens of all calls, each written out: prompt plus output."""
        return sum(c.length for c in self.calls)

    def size(self, segment: int) -> int:
        return self.bounds[segment + 1] - self.bounds[segment]

    def leaves(self) -> list[int]:
        """Segments without children, depth-first: one path each."""
        return [s for s in range(self.num_segments) if self.exit[s] == s + 1]

    def path(self, segment: int) -> list[int]:
        """Segments from the root to `segment`."""
        segments: list[int] = []
        while segment >= 0:
            segments.append(segment)
            segment = self.parent[segment]
        return segments[::-1]

    def spans(self, call: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Where tokens [start, stop) of call number `call` lie: depth-first ranges [from, to), in path order."""
        ranges: list[tuple[int, int]] = []
        segment = self.end[call]
        while segment >= 0:
            depth = self.depth[segment]
            low, high = max(start, depth), min(stop, depth + self.size(segment))
            if low < high:
                shift = self.bounds[segment] - depth
                ranges.append((low + shift, high + shift))
            if depth <= start:
                break
            segment = self.parent[segment]
        return ranges[::-1]

    def tokens(self, call: int) -> np.ndarray:
        """Prompt plus output of call number `call` as the tree spells them: int32 [length]."""
        pieces = [self.ids[a:b] for a, b in self.spans(call, 0, self.calls[call].length)]
        return np.concatenate(pieces) if pieces else np.empty(0, np.int32)

    def token_parents(self) -> np.ndarray:
        """int32 [U]: path predecessor of every token, -1 at a root."""
        parents = np.arange(-1, self.num_tokens - 1, dtype=np.int32)
        for segment, parent in enumerate(self.parent):
            parents[self.bounds[segment]] = self.bounds[parent + 1] - 1 if parent >= 0 else -1
        return parents

    def token_depths(self) -> np.ndarray:
        """int32 [U]: number of ancestors of every token."""
        shift = np.subtract(self.depth, self.bounds[:-1]) if self.depth else np.empty(0, np.int64)
        return (np.arange(self.num_tokens) + np.repeat(shift, np.diff(self.bounds))).astype(np.int32)

    def token_exits(self) -> np.ndarray:
        """int32 [U]: end of every token's subtree; q sees k iff k <= q < exit[k]."""
        ends = np.take(self.bounds, self.exit) if self.exit else np.empty(0, np.int64)
        return np.repeat(ends, np.diff(self.bounds)).astype(np.int32)


@dataclass(slots=True)
class _Forest:
    """A radix tree under construction. Node 0 is above all roots and holds no token.

    Node n is tokens [low[n], high[n]) of source[n], the first of them at depth start[n]. A split leaves the id of a
    node with its lower half, so "the sequence ends at or above n" stays true however often n is split.
    """

    source: list[np.ndarray] = field(default_factory=lambda: [np.empty(0, np.int32)])
    low: list[int] = field(default_factory=lambda: [0])
    high: list[int] = field(default_factory=lambda: [0])
    start: list[int] = field(default_factory=lambda: [0])
    parent: list[int] = field(default_factory=lambda: [-1])
    children: list[dict[int, int]] = field(default_factory=lambda: [{}])
    end: dict[str, int] = field(default_factory=dict)

    def insert(self, call: Call) -> None:
        """Put the call's sequence into the tree; its base is in it."""
        node, keep = 0, call.record.keep_len
        if call.base is not None:
            node = self.end[call.base.record.call]
            while node and self.start[node] >= keep:
                node = self.parent[node]
        for ids in (call.record.prompt_delta, call.record.output_ids):  # as they were recorded: nothing is copied
            node, keep = self._descend(node, keep, ids), keep + len(ids)
        self.end[call.record.call] = node

    def _descend(self, node: int, depth: int, ids: np.ndarray) -> int:
        at = 0
        while at < len(ids):
            offset = self.low[node] + depth - self.start[node]
            same = common_prefix(self.source[node][offset:self.high[node]], ids[at:])
            at, depth = at + same, depth + same
            if at == len(ids):
                break
            if offset + same < self.high[node]:
                node = self._split(node, offset + same)
            child = self.children[node].get(int(ids[at]))
            if child is None:
                return self._append(node, ids, at, len(ids), depth)
            node = child
        return node

    def _append(self, parent: int, source: np.ndarray, low: int, high: int, start: int) -> int:
        node = len(self.source)
        self.source.append(source)
        self.low.append(low)
        self.high.append(high)
        self.start.append(start)
        self.parent.append(parent)
        self.children.append({})
        self.children[parent][int(source[low])] = node
        return node

    def _split(self, node: int, cut: int) -> int:
        """Give the tokens before `cut` (an index into the node's source) to a new node above; return that one."""
        above = self._append(self.parent[node], self.source[node], self.low[node], cut, self.start[node])
        self.start[node] += cut - self.low[node]
        self.low[node] = cut
        self.parent[node] = above
        self.children[above][int(self.source[node][cut])] = node
        return above


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """Length of the longest common prefix of two id vectors."""
    num = min(len(one), len(other))
    if num == 0 or one[0] != other[0]:
        return 0
    differs = one[:num] != other[:num]
    first = int(differs.argmax())
    return first if differs[first] else num


def build_tree(calls: tuple[Call, ...]) -> Tree:
    """The tree of `calls`, which stand in gateway order (a base before what continues it)."""
    forest = _Forest()
    for call in calls:
        forest.insert(call)
    return _freeze(forest, calls)


def _freeze(forest: _Forest, calls: tuple[Call, ...]) -> Tree:
    pieces: list[np.ndarray] = [np.empty(0, np.int32)]
    segment_of = [-1] * len(forest.source)
    bounds, parent, depth = [], [], []
    total = 0
    stack = list(reversed(forest.children[0].values()))
    while stack:
        node = stack.pop()
        above = forest.parent[node]
        if above == 0 or len(forest.children[above]) > 1:
            segment_of[node] = len(parent)
            bounds.append(total)
            parent.append(segment_of[above])
            depth.append(forest.start[node])
        else:
            segment_of[node] = segment_of[above]
        pieces.append(forest.source[node][forest.low[node]:forest.high[node]])
        total += len(pieces[-1])
        stack.extend(reversed(forest.children[node].values()))
    end = tuple(_end(call, segment_of[forest.end[call.record.call]], parent, depth) for call in calls)
    return Tree(calls, np.concatenate(pieces), (*bounds, total), tuple(parent), tuple(depth), _exits(parent), end)


def _end(call: Call, segment: int, parent: list[int], depth: list[int]) -> int:
    while segment >= 0 and depth[segment] >= call.length:
        segment = parent[segment]
    return segment


def _exits(parent: list[int]) -> tuple[int, ...]:
    exits = list(range(1, len(parent) + 1))
    for segment in range(len(parent) - 1, -1, -1):
        if parent[segment] >= 0:
            exits[parent[segment]] = max(exits[parent[segment]], exits[segment])
    return tuple(exits)
