"""Attention of rows with one query each, read where the keys and values lie: no gathering, no padding of contexts.

On a CPU a decode step is bound by memory, and to gather blocks before attending to them moves every byte three times.
Scores are a product sampled at the places of a sparse matrix: a row per (sequence, head), a column per cached token and head.
Values are summed by the same places, weighted. Blocks that sequences share stay in the processor's cache.

Axes: R rows, S keys of a row, H query heads, K key/value heads, D head size, P places (the sum over rows of H * S).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from gyre.rollout.torch_engine.kv import PagedKV

_MAX_GROUP = 4  # heads that share a key head; with more of them reading it once, for a matrix product, costs less


def serves(cache: PagedKV) -> bool:
    """Whether this is a faster way for that cache. The kernels are those of float32 on a CPU."""
    return cache.pool.device.type == "cpu" and cache.pool.dtype == torch.float32


@dataclass(frozen=True, slots=True)
class Places:
    """Where the rows' keys lie, for every layer. `padded_P` are the places in [R, H, S], None if all rows are equally long."""

    scores: torch.Tensor  # sparse CSR, values 0
    columns_P: torch.Tensor
    starts: torch.Tensor
    padded_P: torch.Tensor | None
    longest: int


class PagedDecode:
    """The rows of one iteration."""

    def __init__(self, cache: PagedKV, contexts_R: np.ndarray, table_RM: np.ndarray) -> None:
        """`contexts_R`: keys of each row, its newest included; its blocks are the first ones of its row in the table."""
        self._cache = cache
        self._contexts_R = contexts_R
        self._table_RM = table_RM
        self._places: Places | None = None

    def attend(self, layer: int, q_RHD: torch.Tensor) -> torch.Tensor:
        """Returns out_RHD. The keys and values of this iteration must have been written."""
        rows, heads, head_dim = q_RHD.shape
        if self._places is None:
            self._places = _places(self._cache, self._contexts_R, self._table_RM, heads)
        places = self._places
        q_ND = q_RHD.reshape(-1, head_dim)
        keys, values = self._cache.vectors(layer)
        scores = torch.sparse.sampled_addmm(places.scores, q_ND, keys.t(), beta=0.0, alpha=head_dim**-0.5).values()
        if places.padded_P is None:
            weights_P = scores.view(-1, places.longest).softmax(-1).view(-1)
        else:
            padded = scores.new_full((rows * heads * places.longest,), float("-inf")).index_copy_(0, places.padded_P, scores)
            weights_P = padded.view(-1, places.longest).softmax(-1).view(-1).index_select(0, places.padded_P)
        out = torch.embedding_bag(values, places.columns_P, places.starts, per_sample_weights=weights_P)[0]
        return out.view(rows, heads, head_dim)


def _places(cache: PagedKV, contexts_R: np.ndarray, table_RM: np.ndarray, heads: int) -> Places:
    longest = int(contexts_R.max())
    columns_RS = cache.vector_columns(table_RM, longest)
    of_head_H = np.arange(heads, dtype=columns_RS.dtype) // (heads // cache.row_shape[3])
    columns_RHS = columns_RS[:, None, :] + of_head_H[:, None]
    ends = np.repeat(contexts_R, heads).cumsum()
    rows = np.concatenate(([0], ends)).astype(columns_RS.dtype)
    padded_P = None
    if int(contexts_R.min()) < longest:
        valid_RHS = np.broadcast_to((np.arange(longest) < contexts_R[:, None])[:, None], columns_RHS.shape)
        padded_P = torch.from_numpy(np.flatnonzero(valid_RHS))
        columns_RHS = columns_RHS[valid_RHS]
    columns_P = torch.from_numpy(columns_RHS.reshape(-1))
    starts = torch.from_numpy(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "beta state"
        size = (len(rows) - 1, cache.num_vectors)
        scores = torch.sparse_csr_tensor(starts, columns_P, torch.zeros(len(columns_P)), size, check_invariants=False)
    return Places(scores, columns_P, starts[:-1].contiguous(), padded_P, longest)
