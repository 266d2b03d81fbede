"""Targets: the token positions that the trained policy really sampled in exactly that context.

The unit is the position in the tree, not the call: an output sampled twice from the same prompt is one run of targets
drawn twice, and a token that one call read and another sampled in the same context is a target. What other models
sampled, what the agent never saw, and what the harness says is not to be trained, is context.
"""

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
    chosen = [n for n, reason in enumerate(excluded) if not reason]
    drawn = _positions(tree, chosen)
    index, first = np.unique(drawn, return_index=True)  # of equal ones the first: the call that sampled it first
    is_root = np.isin(index, _root_starts(tree), assume_unique=True)
    kept, first = index[~is_root].astype(np.int32), first[~is_root]
    records = [tree.calls[n].record for n in chosen]
    counts = [len(r.output_ids) for r in records]
    call = np.repeat(np.array(chosen, np.int32), counts)[first]
    logprob = _joined([r.behaviour_logprobs for r in records], np.float32)[first]
    version = _joined([_versions(r) for r in records], np.int32)[first]
    others = {reason: [n for n, r in enumerate(excluded) if r == reason] for reason in ("untrainable", "unseen")}
    num_drawn = sum(counts) + sum(len(tree.calls[n].record.output_ids) for calls in others.values() for n in calls)
    return Targets(kept, call, logprob, version, tuple(np.searchsorted(kept, tree.bounds).tolist()), excluded, num_drawn,
                   _without(tree, others, index), int(is_root.sum()))


def _without(tree: Tree, others: dict[str, list[int]], sampled: np.ndarray) -> dict[str, int]:
    found: dict[str, int] = {}
    for reason, calls in others.items():
        positions = np.setdiff1d(_positions(tree, calls), sampled)
        sampled = np.union1d(sampled, positions)
        if len(positions):
            found[reason] = len(positions)
    return found


def _positions(tree: Tree, calls: Sequence[int]) -> np.ndarray:
    """Token indices of the outputs of `calls`, one call after another: int32 [sum of output lengths]."""
    pieces = [np.arange(start, stop, dtype=np.int32) for n in calls
              for start, stop in tree.spans(n, tree.calls[n].record.prompt_len, tree.calls[n].length)]
    return _joined(pieces, np.int32)


def _root_starts(tree: Tree) -> list[int]:
    return [start for start, parent in zip(tree.bounds, tree.parent, strict=False) if parent < 0]


def _versions(record: CallRecorded) -> np.ndarray:
    return np.repeat(np.array([s.version for s in record.spans], np.int32), [s.end - s.start for s in record.spans])


def _joined(pieces: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(pieces) if pieces else np.empty(0, dtype)
