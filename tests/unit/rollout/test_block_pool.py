"""The block pool neither leaks nor hands out a block twice, and finds exactly what was filed."""

from __future__ import annotations

import numpy as np
from gyre.rollout.torch_engine.cache import BlockPool
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = (1, "x")


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_a_filed_prefix_is_found_by_its_exact_ids_within_its_root() -> None:
    pool = BlockPool(8, 2)
    blocks = [pool.allocate(), pool.allocate()]
    pool.file(ROOT, blocks, ids(1, 2, 3, 4))
    pool.release(blocks)
    assert pool.match(ROOT, ids(1, 2, 3, 4, 5))[0] == blocks
    assert pool.match(ROOT, ids(1, 2, 9, 4, 5))[0] == blocks[:1]
    assert pool.match((2, "x"), ids(1, 2, 3, 4, 5))[0] == []
    assert pool.match((1, "y"), ids(1, 2, 3, 4, 5))[0] == []


def test_one_token_is_always_left_to_compute() -> None:
    pool = BlockPool(8, 2)
    blocks = [pool.allocate(), pool.allocate()]
    pool.file(ROOT, blocks, ids(1, 2, 3, 4))
    assert pool.match(ROOT, ids(1, 2, 3, 4))[0] == blocks[:1]


def test_tails_are_evicted_before_heads_and_blocks_in_use_never() -> None:
    pool = BlockPool(3, 1)
    blocks = [pool.allocate() for _ in range(3)]
    pool.file(ROOT, blocks, ids(1, 2, 3))
    pool.release(blocks)
    held, _ = pool.match(ROOT, ids(1, 9))
    assert pool.allocate() == blocks[2]
    assert pool.allocate() == blocks[1]
    assert pool.allocate() is None and held == blocks[:1]


def test_a_chain_never_continues_through_a_block_that_was_reused_for_something_else() -> None:
    pool = BlockPool(2, 1)
    blocks = [pool.allocate(), pool.allocate()]
    pool.file(ROOT, blocks, ids(1, 2))
    pool.release(blocks)
    first, second = pool.allocate(), pool.allocate()  # evicts both
    pool.file(ROOT, [second], ids(7))
    assert pool.match(ROOT, ids(7, 2, 0))[0] == [second]
    assert pool.match(ROOT, ids(1, 2, 0))[0] == []
    assert first is not None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), min_size=1, max_size=9)), max_size=40))
def test_blocks_are_conserved(operations: list[tuple[int, list[int]]]) -> None:
    pool = BlockPool(6, 2)
    live: list[list[int]] = []
    for kind, values in operations:
        if kind == 0 and live:
            pool.release(live.pop(len(values) % len(live)))
        elif kind == 1:
            pool.forget(lambda root: True)
        else:
            sequence = ids(*values)
            blocks, tip = pool.match(ROOT, sequence)
            num_found = len(blocks)
            while len(blocks) < len(values) // 2 and (block := pool.allocate()) is not None:
                blocks.append(block)
            pool.file(tip, blocks[num_found:], sequence[num_found * 2 : len(blocks) * 2])
            live.append(blocks)
        used = {b for blocks in live for b in blocks}
        assert len(used) + pool.num_available == pool.num_blocks
    for blocks in live:
        pool.release(blocks)
    assert pool.num_available == pool.num_blocks
