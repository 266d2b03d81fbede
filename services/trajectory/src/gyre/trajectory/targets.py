"""Targets: the token positions that the trained policy really sampled in exactly that context.

The unit is the position in the tree, not the call: an output sampled twice from the same prompt is one run of targets
drawn twice, and a token that one call read and another sampled in the same context is a target. What other models
sampled, what the agent never saw, and what the harness says is not to be trained, is context.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from gyre.contracts.events import CallRecorded
from gyre.trajectory.tree import Tree

UNSEEN = ("abort", "error")  # finish reasons of outputs the agent never saw
TRAINABLE_TAG = "x-gyre-trainable"  # `no`: the harness says that this output is evidence only

Exclusion = Literal["", "model", "untrainable", "unseen"]


@dataclass(frozen=True, slots=True)
class Eligibility:
    """Which calls' outputs are targets.

    policy        model whose outputs they are
    undelivered   calls whose answer never reached the harness
    train_unseen  train also what the agent never saw: aborted and undelivered outputs
    """

    policy: str = "policy"
    undelivered: frozenset[str] = frozenset()
    train_unseen: bool = False

    def exclusion(self, record: CallRecorded) -> Exclusion:
        """Why the output of a call is no target, or ""."""
        if record.model != self.policy:
            return "model"
        if record.evidence.tags.get(TRAINABLE_TAG) == "no":
            return "untrainable"
        unseen = record.finish_reason in UNSEEN or record.call in self.undelivered
        return "unseen" if unseen and not self.train_unseen else ""


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """The Y targets of a tree, ascending in depth-first order.

    index     int32 [Y] token index in the tree
    call      int32 [Y] number of the first call that sampled it; logprob and version are that call's
    logprob   float32 [Y] behaviour log-prob
    version   int32 [Y] weights version it was sampled under
    offsets   [S + 1] targets of segment s are [offsets[s], offsets[s + 1])
    excluded  [C] why a call's output is no target, "" where it is
    num_drawn   sampled policy tokens, each as often as it was drawn
    num_without   positions that only excluded calls of the policy sampled, by reason; not targets
    num_rootless  sampled first tokens of a root: no context could score them; not targets
    """

    index: np.ndarray
    call: np.ndarray
    logprob: np.ndarray
    version: np.ndarray
    offsets: tuple[int, ...]
    excluded: tuple[Exclusion, ...]
    num_drawn: int
    num_without: dict[str, int]
    num_rootless: int

    def __len__(self) -> int:
        return len(self.index)

    def count(self, segment: int) -> int:
        return self.offsets[segment + 1] - self.offsets[segment]


def find_targets(tree: Tree, eligibility: Eligibility) -> Targets:
    """The targets of `tree`. Time and memory follow the sampled tokens, not the tree."""
    excluded = tuple(eligibility.exclusion(c.record) for c in tree.calls)
    cover = _Cover()
    pieces = [piece for n, reason in enumerate(excluded) if not reason for piece in _new_pieces(tree, n, cover)]
    num_without = {}
    for why in ("untrainable", "unseen"):
        others = [piece for n, reason in enumerate(excluded) if reason == why for piece in _new_pieces(tree, n, cover)]
        if others:
            num_without[why] = sum(len(piece) for piece in others)
    roots = {start for start, parent in zip(tree.bounds, tree.parent, strict=False) if parent < 0}
    scored = sorted((piece.behind(1) if piece.start in roots else piece for piece in pieces), key=lambda piece: piece.start)
    records = [tree.calls[piece.call].record for piece in scored]
    index = _joined([np.arange(p.start, p.stop, dtype=np.int32) for p in scored], np.int32)
    return Targets(
        index, np.repeat(np.array([p.call for p in scored], np.int32), [len(p) for p in scored]),
        _joined([r.behaviour_logprobs[p.offset:p.offset + len(p)] for p, r in zip(scored, records, strict=True)], np.float32),
        _joined([_versions(r, p.offset, p.offset + len(p)) for p, r in zip(scored, records, strict=True)], np.int32),
        tuple(np.searchsorted(index, tree.bounds).tolist()), excluded,
        sum(len(c.record.output_ids) for c, why in zip(tree.calls, excluded, strict=True) if why != "model"), num_without,
        sum(piece.start in roots for piece in pieces))


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens [start, stop) of the tree, inside one segment: the output of call number `call` from `offset` on."""

    start: int
    stop: int
    call: int
    offset: int

    def __len__(self) -> int:
        return self.stop - self.start

    def behind(self, num: int) -> "_Piece":
        """Without its first `num` tokens."""
        return _Piece(self.start + num, self.stop, self.call, self.offset + num)


class _Cover:
    """Token positions that are taken, as disjoint ascending ranges."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def take(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of [start, stop) that nobody had taken; all of it is taken now."""
        first = last = bisect.bisect_right(self._stops, start)
        parts, at = [], start
        while last < len(self._starts) and self._starts[last] < stop:
            if self._starts[last] > at:
                parts.append((at, self._starts[last]))
            at = self._stops[last]
            last += 1
        if at < stop:
            parts.append((at, stop))
        self._starts[first:last] = [min([start, *self._starts[first:last]])]
        self._stops[first:last] = [max([stop, *self._stops[first:last]])]
        return parts


def _new_pieces(tree: Tree, call: int, cover: _Cover) -> list[_Piece]:
    """What the output of a call holds that no call before it held."""
    record, found, done = tree.calls[call].record, [], 0
    for start, stop in tree.spans(call, record.prompt_len, tree.calls[call].length):
        found += [_Piece(a, b, call, done + a - start) for a, b in cover.take(start, stop)]
        done += stop - start
    return found


def _versions(record: CallRecorded, start: int, stop: int) -> np.ndarray:
    """Weights version of each of the output tokens [start, stop): int32."""
    spans = [(max(s.start, start), min(s.end, stop), s.version) for s in record.spans if s.start < stop and s.end > start]
    return np.repeat(np.array([version for _, _, version in spans], np.int32), [high - low for low, high, _ in spans])


def _joined(pieces: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(pieces) if pieces else np.empty(0, dtype)
