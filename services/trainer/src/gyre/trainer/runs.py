"""Packed trees as unbranched runs, and whether the arrays of a micro-step describe trees at all.

Axes: T packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gyre.contracts.errors import ContractError
from gyre.contracts.microstep import MicroStep


class BrokenTree(ContractError):
    """A micro-step whose arrays do not describe trees; the message names the array and the first bad token."""


@dataclass(frozen=True)
class Run:
    """Tokens [start, end) that follow each other in depth-first order; `ancestors` are the index ranges above."""

    start: int
    end: int
    ancestors: tuple[tuple[int, int], ...]


def check_trees(micro_step: MicroStep) -> None:
    """Raise `BrokenTree` unless parents, positions, exits and targets fit together. O(T), no Python loop."""
    parent, position, index = micro_step.parent, micro_step.position, np.arange(micro_step.num_tokens)
    root = parent < 0
    above = np.where(root, 0, parent)
    _require(parent < index, "parent", "must come before its child")
    expected = np.where(root, 0, position[above] + 1)
    _require(position == expected, "position", "must be the number of ancestors")
    inside = root | ((index < micro_step.exit[above]) & (micro_step.exit <= micro_step.exit[above]))
    _require(inside & (micro_step.exit > index), "exit", "must end the subtree, inside the parent's")
    _require(root | (micro_step.tree == micro_step.tree[above]), "tree", "must be the parent's")
    _require(parent[micro_step.target] >= 0, "target", "a root has no context that could score it")


def _require(good: np.ndarray, array: str, rule: str) -> None:
    if not good.all():
        raise BrokenTree(f"micro-step {array}: entry {int(np.flatnonzero(~good)[0])} is wrong, it {rule}")


def runs_of(parent: np.ndarray) -> list[Run]:
    """Maximal runs with parent[i] == i - 1, each with the index ranges of its ancestors, root first."""
    starts = np.concatenate(([0], np.flatnonzero(parent != np.arange(len(parent)) - 1)))
    ends = np.append(starts[1:], len(parent))
    runs: list[Run] = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        above = int(parent[start])
        ancestors: tuple[tuple[int, int], ...] = ()
        if above >= 0:
            host = runs[int(np.searchsorted(starts, above, side="right")) - 1]
            ancestors = (*host.ancestors, (host.start, above + 1))
        runs.append(Run(start, end, ancestors))
    return runs
