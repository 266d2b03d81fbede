"""Made executions for training: as trees for our trainer, and as the rows a trainer of single sequences needs.

`linear`: one prompt, one completion. `branching`: an agent's session of several turns whose context goes on in three
ways from random turns (a retry, a compaction, a sub-agent), as harnesses do. Only outputs are targets, each owned by
the first path that holds it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from gyre.contracts.microstep import MicroStep


@dataclass
class Node:
    """A stretch of tokens after `parent`; `sampled`: they are an output, so targets."""

    size: int
    sampled: bool
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)

    def then(self, size: int, sampled: bool) -> Node:
        child = Node(size, sampled, self)
        self.children.append(child)
        return child


@dataclass(frozen=True)
class Row:
    """One root-to-leaf path: token ids, and which of them the path owns as targets."""

    ids: list[int]
    owned: list[int]


def linear(rng: np.random.Generator, scale: int) -> Node:
    root = Node(4 * scale, False)
    root.then(int(rng.integers(3 * scale, 5 * scale)), True)
    return root


def branching(rng: np.random.Generator, scale: int) -> Node:
    """About as many tokens as `linear` on its longest path, and three more leaves."""
    root = Node(scale, False)
    turns = [root]
    for _ in range(6):
        turns.append(turns[-1].then(scale // 2, True).then(scale // 2, False))
    turns[-1].then(scale // 2, True)
    for at in rng.choice(len(turns) - 1, 3, replace=False):
        node = turns[int(at)]
        for _ in range(2):
            node = node.then(scale // 2, False).then(scale // 2, True)
    return root


SHAPES = {"linear": linear, "branching": branching}


def make(shape: str, seed: int, name: str, executions: int, scale: int, vocab: int) -> tuple[MicroStep, list[Row]]:
    """One micro-step, and the same signal as rows."""
    rng = np.random.default_rng(seed)
    packer = _Packer(rng, vocab)
    for execution in range(executions):
        packer.add(SHAPES[shape](rng, scale), execution)
    return packer.micro_step(name, executions), packer.rows


class _Packer:
    """Trees, depth first, one after another."""

    def __init__(self, rng: np.random.Generator, vocab: int) -> None:
        self._rng, self._vocab = rng, vocab
        self.rows: list[Row] = []
        self._ids: list[int] = []
        self._parent: list[int] = []
        self._position: list[int] = []
        self._exit: list[int] = []
        self._tree: list[int] = []
        self._sampled: list[bool] = []
        self._owner: dict[int, int] = {}

    def add(self, root: Node, tree: int) -> None:
        self._lay(root, -1, [], tree)

    def _lay(self, node: Node, above: int, path: list[int], tree: int) -> None:
        start = len(self._ids)
        for offset in range(node.size):
            self._ids.append(int(self._rng.integers(3, self._vocab)))
            self._parent.append(above if offset == 0 else start + offset - 1)
            self._position.append(len(path) + offset)
            self._tree.append(tree)
            self._sampled.append(node.sampled)
        self._exit += [0] * node.size
        path = [*path, *range(start, start + node.size)]
        for child in node.children:
            self._lay(child, path[-1], path, tree)
        self._exit[start : start + node.size] = [len(self._ids)] * node.size
        if not node.children:
            owned = [t for t in path if self._sampled[t] and t not in self._owner]
            self._owner.update(dict.fromkeys(owned, len(self.rows)))
            at = {t: i for i, t in enumerate(path)}
            self.rows.append(Row([self._ids[t] for t in path], [at[t] for t in owned]))

    def micro_step(self, name: str, executions: int) -> MicroStep:
        target = np.array(sorted(self._owner), np.int32)
        tree = np.array(self._tree, np.int32)
        counts = np.bincount(tree[target], minlength=executions)
        return MicroStep(
            name, "g", tuple(f"x{i}" for i in range(executions)), self._rng.normal(size=executions).astype(np.float32),
            np.array(self._ids, np.int32), np.array(self._parent, np.int32), np.array(self._position, np.int32),
            np.array(self._exit, np.int32), tree, target, np.array([self._owner[t] for t in target.tolist()], np.int32),
            np.full(len(target), -np.log(self._vocab), np.float32), np.zeros(len(target), np.int32),
            (1.0 / counts[tree[target]]).astype(np.float32),
        )  # fmt: skip
