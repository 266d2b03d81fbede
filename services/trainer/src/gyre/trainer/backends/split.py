"""A micro-step divided between the ranks of one cell, so that the parts' gradients sum to the whole's.

The loss is a sum over targets in which only targets of one path meet. So whole trees can be handed out; where there are
fewer trees than ranks, whole paths are, and what their prefixes share is computed by each rank that needs it.

Axes: T packed tokens, K targets, E trees, P paths.
"""

from __future__ import annotations

import numpy as np
from gyre.contracts.microstep import MicroStep


def split(micro_step: MicroStep, num_ranks: int) -> list[MicroStep | None]:
    """One part per rank, None for a rank that nothing is left for; each target is in exactly one part.

    Rank 0 always has a part. Balanced by visible (query, key) pairs. Tokens that lead to no target are left out.
    """
    if num_ranks == 1 or not micro_step.num_targets:
        return [micro_step, *[None] * (num_ranks - 1)]
    if len(np.unique(micro_step.tree[micro_step.target])) >= num_ranks:
        rank_K = _by_tree(micro_step, num_ranks)
    else:
        rank_K = _by_path(micro_step, num_ranks)
    used = [rank for rank in range(num_ranks) if (rank_K == rank).any()]
    parts: list[MicroStep | None] = [_part(micro_step, rank_K == rank) for rank in used]
    return parts + [None] * (num_ranks - len(parts))


def _by_tree(micro_step: MicroStep, num_ranks: int) -> np.ndarray:
    """Rank of each target [K]: trees longest first, each to the rank that has least."""
    pairs_E = np.bincount(micro_step.tree, weights=micro_step.position + 1.0, minlength=len(micro_step.executions))
    loads = np.zeros(num_ranks)
    rank_E = np.zeros(len(pairs_E), np.int64)
    for tree in np.argsort(-pairs_E, kind="stable"):
        rank_E[tree] = loads.argmin()
        loads[rank_E[tree]] += pairs_E[tree]
    return rank_E[micro_step.tree[micro_step.target]]


def _by_path(micro_step: MicroStep, num_ranks: int) -> np.ndarray:
    """Rank of each target [K]: neighbouring paths in depth-first order, which share most, stay together.

    A path is charged for the tokens from the path before it to its own last target.
    """
    last_P = np.zeros(int(micro_step.path.max()) + 1, np.int64)
    np.maximum.at(last_P, micro_step.path, micro_step.target)
    order = np.argsort(last_P, kind="stable")
    pairs_T = np.cumsum(micro_step.position + 1.0)
    end_P = pairs_T[last_P[order]]
    middle_P = (np.concatenate(([0.0], end_P[:-1])) + end_P) / 2
    rank_P = np.empty(len(order), np.int64)
    rank_P[order] = np.minimum(middle_P / end_P[-1] * num_ranks, num_ranks - 1).astype(np.int64)
    return rank_P[micro_step.path]


def _part(micro_step: MicroStep, chosen_K: np.ndarray) -> MicroStep:
    """The chosen targets with their ancestors, numbered anew."""
    kept_T = _with_ancestors(micro_step.parent, micro_step.target[chosen_K])
    before = np.concatenate(([0], np.cumsum(kept_T)))
    chosen_E = np.zeros(len(micro_step.executions), bool)
    chosen_E[micro_step.tree[kept_T]] = True
    parent = micro_step.parent[kept_T]
    return MicroStep(
        micro_step=micro_step.micro_step,
        group=micro_step.group,
        executions=tuple(e for e, chosen in zip(micro_step.executions, chosen_E, strict=True) if chosen),
        advantage=micro_step.advantage[chosen_E],
        ids=micro_step.ids[kept_T],
        parent=np.where(parent < 0, parent, before[parent]).astype(np.int32),
        position=micro_step.position[kept_T],
        exit=before[micro_step.exit[kept_T]].astype(np.int32),
        tree=(np.cumsum(chosen_E) - 1)[micro_step.tree[kept_T]].astype(np.int32),
        target=before[micro_step.target[chosen_K]].astype(np.int32),
        path=np.unique(micro_step.path[chosen_K], return_inverse=True)[1].astype(np.int32),
        logprob=micro_step.logprob[chosen_K],
        version=micro_step.version[chosen_K],
        weight=micro_step.weight[chosen_K],
    )


def _with_ancestors(parent: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Boolean [T]: the tokens and everything above them. One pass per branching level, none per token."""
    kept = np.zeros(len(parent), bool)
    starts = np.concatenate(([0], np.flatnonzero(parent[1:] != np.arange(len(parent) - 1)) + 1))
    run = np.searchsorted(starts, np.arange(len(parent)), side="right") - 1
    todo = np.unique(tokens)
    while len(todo):
        lowest: dict[int, int] = {}
        for token in todo.tolist():
            lowest[int(run[token])] = max(token, lowest.get(int(run[token]), -1))
        above = []
        for number, token in lowest.items():
            start = int(starts[number])
            kept[start : token + 1] = True
            if parent[start] >= 0:
                above.append(int(parent[start]))
        todo = np.unique(np.array([a for a in above if not kept[a]], np.int64))
    return kept
