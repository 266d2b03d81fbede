"""The parts of a micro-step are micro-steps, and their gradients sum to the whole's."""

import numpy as np
import pytest
import torch
from gyre.contracts.microstep import MicroStep
from gyre.trainer.backends.split import split
from gyre.trainer.loss import LossConfig
from gyre.trainer.metrics import add_sums
from gyre.trainer.runs import check_trees
from gyre.trainer.tree_training import tree_loss
from trees import gradients, random_micro_step, relative_error, tiny_decoder


@pytest.mark.parametrize("kind", ["gspo", "dapo"])
@pytest.mark.parametrize("num_trees, num_ranks", [(1, 2), (1, 4), (2, 2), (3, 2), (2, 5), (7, 3)])
def test_gradients_and_metrics_of_the_parts_sum_to_the_wholes(num_trees: int, num_ranks: int, kind: str) -> None:
    decoder, config = tiny_decoder(), LossConfig(kind=kind)  # type: ignore[arg-type]
    for seed in range(4):
        micro_step = random_micro_step(seed, num_trees, tree_tokens=40, fork=0.3)
        whole = tree_loss(decoder, micro_step, config)
        want, total = gradients(decoder, whole.loss), {n: torch.zeros_like(p) for n, p in decoder.named_parameters()}
        sums: dict[str, float] = {}
        for part in split(micro_step, num_ranks):
            if part is not None:
                check_trees(part)
                output = tree_loss(decoder, part, config)
                for name, gradient in gradients(decoder, output.loss).items():
                    total[name] += gradient
                add_sums(sums, output.sums)
        assert relative_error(total, want) < 1e-12
        assert all(sums[n] == pytest.approx(v, rel=1e-9, abs=1e-9) for n, v in whole.sums.items() if n != "num_tokens")


def pairs(part: MicroStep | None) -> int:
    return 0 if part is None else part.num_pairs


def comb(num_branches: int, trunk: int, tooth: int) -> MicroStep:
    """A trunk with equal branches at its end, every branch a path with its own targets."""
    parent = list(range(-1, trunk - 1))
    for _ in range(num_branches):
        parent += [trunk - 1, *range(len(parent), len(parent) + tooth - 1)]
    parents = np.array(parent, np.int32)
    template = random_micro_step(0, 1)
    position = np.concatenate([np.arange(trunk), np.tile(np.arange(trunk, trunk + tooth), num_branches)]).astype(np.int32)
    ends = trunk + tooth * (1 + np.arange(num_branches))
    exit_ = np.concatenate([np.full(trunk, ends[-1]), np.repeat(ends, tooth)]).astype(np.int32)
    target = np.arange(trunk, len(parents)).astype(np.int32)
    ones = np.ones(len(target), np.float32)
    return MicroStep(
        "m", "g", ("x0",), template.advantage[:1], np.zeros(len(parents), np.int32), parents, position, exit_,
        np.zeros(len(parents), np.int32), target, np.repeat(np.arange(num_branches), tooth).astype(np.int32), -ones,
        np.zeros(len(target), np.int32), ones / len(target),
    )  # fmt: skip


def test_one_tree_with_many_paths_is_divided_evenly_between_whole_paths() -> None:
    micro_step = comb(num_branches=8, trunk=10, tooth=30)
    parts = split(micro_step, 4)
    assert [len(np.unique(p.path)) for p in parts if p is not None] == [2, 2, 2, 2]
    assert max(map(pairs, parts)) < 0.3 * micro_step.num_pairs


def test_many_trees_are_divided_evenly_and_whole() -> None:
    micro_step = random_micro_step(3, num_trees=24, tree_tokens=60)
    parts = split(micro_step, 3)
    assert sorted(e for p in parts if p is not None for e in p.executions) == sorted(micro_step.executions)
    assert sum(map(pairs, parts)) <= micro_step.num_pairs, "what leads to no target is left out"
    assert max(map(pairs, parts)) < 1.1 * micro_step.num_pairs / 3


def test_one_path_is_left_to_the_leader() -> None:
    micro_step = comb(num_branches=1, trunk=3, tooth=5)
    first, *others = split(micro_step, 3)
    assert first is not None and first.num_targets == 5 and others == [None, None]


def test_alone_nothing_is_copied() -> None:
    micro_step = random_micro_step(0)
    assert split(micro_step, 1) == [micro_step]
