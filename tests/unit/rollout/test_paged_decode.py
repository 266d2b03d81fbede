"""Attention in place gives what gathering and masking gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gyre.policy.config import PolicyConfig
from gyre.rollout.torch_engine import paged_decode
from gyre.rollout.torch_engine.kv import PagedKV
from gyre.rollout.torch_engine.paged_decode import PagedDecode, alike, serves

SIZE = 4
CPU = torch.device("cpu")


def shape(num_heads: int, num_kv_heads: int) -> PolicyConfig:
    return PolicyConfig("llama", 32, 32, 32, 2, num_heads, num_kv_heads, 8)


def filled(policy: PolicyConfig) -> PagedKV:
    cache = PagedKV(policy, 64, SIZE, torch.float32, CPU)
    cache.pool.copy_(torch.randn(cache.pool.shape, generator=torch.Generator().manual_seed(3)))
    return cache


def expected(cache: PagedKV, layer: int, q_HD: torch.Tensor, blocks: np.ndarray, context: int) -> torch.Tensor:
    kv = cache.pool[torch.from_numpy(blocks), layer].flatten(0, 1)[:context]
    k_KSD, v_KSD = kv.transpose(0, 2).unbind(1)
    return F.scaled_dot_product_attention(q_HD.unsqueeze(1), k_KSD, v_KSD, enable_gqa=True).squeeze(1)


def tables(contexts: list[int], num_shared_blocks: int) -> np.ndarray:
    """Rows of distinct blocks behind the shared ones; unused places hold a valid block, as in an engine."""
    order = np.random.default_rng(7).permutation(64)
    table = np.zeros((len(contexts), -(-max(contexts) // SIZE)), dtype=np.int64)
    taken = num_shared_blocks
    for row, context in enumerate(contexts):
        count = -(-context // SIZE)
        table[row, :num_shared_blocks] = order[:num_shared_blocks]
        table[row, num_shared_blocks:count] = order[taken : taken + count - num_shared_blocks]
        taken += count - num_shared_blocks
    return table


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("contexts", "num_shared"),
    [([1], 0), ([5], 0), ([8, 8, 8], 0), ([3, 17, 8, 1], 0), ([13, 20, 9, 16], 2), ([9, 9, 9, 9], 2), ([8, 8, 12, 8], 1),
     ([3, 70, 2, 5, 4, 1], 0), ([70, 11, 9, 10, 12, 9], 2)],
)
def test_rows_attend_to_their_own_keys(
    monkeypatch: pytest.MonkeyPatch, num_kv_heads: int, contexts: list[int], num_shared: int
) -> None:
    monkeypatch.setattr(paged_decode, "_MIN_SHARED_TOKENS", SIZE)
    monkeypatch.setattr(paged_decode, "_MIN_KEYS", SIZE)
    cache = filled(shape(4, num_kv_heads))
    table = tables(contexts, num_shared)
    decode = PagedDecode(cache, np.array(contexts), table)
    for layer in range(2):
        q_RHD = torch.randn(len(contexts), 4, 8, generator=torch.Generator().manual_seed(layer))
        found = decode.attend(layer, q_RHD)
        for row, context in enumerate(contexts):
            blocks = table[row, : -(-context // SIZE)]
            wanted = expected(cache, layer, q_RHD[row], blocks, context)
            torch.testing.assert_close(found[row], wanted, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("contexts", [[8192] + [200] * 31, [16_000] + [200] * 31, list(range(256, 8000, 250)), [5], [9, 9]])
def test_unlike_contexts_are_not_laid_side_by_side(contexts: list[int]) -> None:
    groups = alike(np.array(contexts))
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(contexts)))
    laid = sum(len(rows) * max(contexts[row] for row in rows) for rows in groups)
    assert laid <= 2 * sum(contexts)


def test_the_last_block_of_the_last_layer_is_within_reach() -> None:
    cache = filled(shape(4, 2))
    q_RHD = torch.randn(1, 4, 8)
    found = PagedDecode(cache, np.array([SIZE]), np.array([[63]])).attend(1, q_RHD)
    torch.testing.assert_close(found[0], expected(cache, 1, q_RHD[0], np.array([63]), SIZE), atol=2e-6, rtol=1e-5)


def test_only_float32_on_a_cpu_is_served() -> None:
    assert serves(filled(shape(4, 2)))
    assert not serves(PagedKV(shape(4, 2), 4, SIZE, torch.bfloat16, CPU))
