"""The block mask for GPUs: on a CPU it can be compared, entry by entry, with who is whose ancestor."""

import numpy as np
import pytest
import torch
from gyre.contracts.microstep import MicroStep
from gyre.trainer.flex_trees import BLOCK, FlexTrees, block_mask
from gyre.trainer.runs import check_trees
from gyre.trainer.tree_forward import DenseTrees
from trees import hand_built, random_micro_step


def spelled(mask: object, num: int) -> np.ndarray:
    """Bool [T, T]: what FlexAttention would compute, from its lists of blocks and its function of single entries."""
    places = torch.arange(num)
    single = mask.mask_mod(0, 0, places[:, None], places[None, :]).numpy()
    result = np.zeros((num, num), bool)
    for counts, indices, is_whole in ((mask.kv_num_blocks, mask.kv_indices, False),
                                      (mask.full_kv_num_blocks, mask.full_kv_indices, True)):
        for query in range(num // BLOCK):
            for key in indices[0, 0, query, :int(counts[0, 0, query])].tolist():
                area = np.ix_(range(query * BLOCK, (query + 1) * BLOCK), range(key * BLOCK, (key + 1) * BLOCK))
                result[area] = True if is_whole else single[area]
    return result


def ancestors(micro_step: MicroStep) -> np.ndarray:
    """Bool [T, T]: who is an ancestor of whom, or the same, parent by parent."""
    result = np.zeros((micro_step.num_tokens, micro_step.num_tokens), bool)
    for token, parent in enumerate(micro_step.parent.tolist()):
        if parent >= 0:
            result[token] = result[parent]
        result[token, token] = True
    return result


def check_mask(micro_step: MicroStep) -> None:
    mask, num = FlexTrees(micro_step, "cpu").block_mask, micro_step.num_tokens
    got = spelled(mask, -(-num // BLOCK) * BLOCK)
    assert (got[:num, :num] == ancestors(micro_step)).all()
    assert not got[:num, num:].any()
    assert (got[num:].sum(1) == 1).all()


@pytest.mark.parametrize("seed, fork", [(0, 0.02), (1, 0.2), (2, 0.0), (3, 0.6)])
def test_the_mask_is_who_is_an_ancestor_of_whom(seed: int, fork: float) -> None:
    check_mask(random_micro_step(seed, num_trees=4, tree_tokens=260, fork=fork))


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1])
def test_forks_and_roots_at_the_edge_of_a_block_are_where_they_are(length: int) -> None:
    """A trunk, two branches at its last token, one at the last token of the second, and a root of its own."""
    parent: list[int] = []
    for above in (-1, length - 1, length - 1, 3 * length - 1, -1):
        parent += [above, *range(len(parent), len(parent) + length - 1)]
    micro_step = hand_built(parent, [len(parent) - 1], [0])
    check_trees(micro_step)
    assert micro_step.num_tokens == 5 * length
    check_mask(micro_step)


def test_it_attends_as_the_dense_mask_does() -> None:
    micro_step = random_micro_step(5, num_trees=3, tree_tokens=120)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(micro_step.num_tokens, heads, 16, generator=generator) for heads in (4, 2, 2))
    torch.testing.assert_close(FlexTrees(micro_step, "cpu")(0, q, k, v), DenseTrees(micro_step)(0, q, k, v),
                               rtol=1e-5, atol=1e-5)


def test_a_long_trunk_is_made_of_whole_blocks() -> None:
    """4,096 tokens in a row: only the diagonal blocks need their entries looked at."""
    mask = block_mask(np.full(4096, 4096, np.int32), "cpu")
    assert mask.kv_num_blocks[0, 0].tolist() == [1] * 32
    assert mask.full_kv_num_blocks[0, 0].tolist() == list(range(32))
