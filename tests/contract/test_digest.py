"""The digest of a token sequence is chained over fixed blocks and does not depend on how the sequence was cut."""

import numpy as np
import pytest
from gyre.contracts.digest import BLOCK, TokenChain, token_digest
from hypothesis import given
from hypothesis import strategies as st


def test_known_values():
    assert token_digest(np.zeros(0, np.int32)) == "6a03e62aaa9da4d24cd57f8b35a49ba3"
    assert token_digest(np.array([1, 2, 3], np.int64)) == "fba8f77439a989eaeaa0600f2b53650c"
    assert token_digest(np.arange(1000, dtype=np.int32)) == "03c8ba7355ccb655e143e8cbe4f5c3a7"


@given(st.lists(st.integers(0, 50_000), max_size=3 * BLOCK), st.lists(st.integers(0, 3 * BLOCK), max_size=5))
def test_any_cut_gives_the_same_digest(values, cuts):
    ids = np.array(values, np.int32)
    edges = sorted({0, len(ids), *(min(c, len(ids)) for c in cuts)})
    chain = TokenChain()
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        chain = chain.extend(ids[start:end])
    assert chain.hexdigest() == token_digest(ids)
    assert chain.length == len(ids)


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_every_position_counts(length):
    ids = np.arange(length, dtype=np.int32)
    digests = {token_digest(ids)}
    for position in {0, length // 2, length - 1}:
        changed = ids.copy()
        changed[position] += 1
        digests.add(token_digest(changed))
    digests.add(token_digest(np.append(ids, np.int32(0))))
    assert len(digests) == 2 + len({0, length // 2, length - 1})


def test_extending_a_chain_leaves_the_old_one_usable():
    first = TokenChain().extend(np.arange(10, dtype=np.int32))
    before = first.hexdigest()
    first.extend(np.arange(10, dtype=np.int32))
    assert first.hexdigest() == before
