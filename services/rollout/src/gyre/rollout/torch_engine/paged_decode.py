"""Attention of rows with one query each, read where the keys and values lie: no gathering, no padding of contexts.

On a CPU a decode step is bound by memory, and to gather blocks before attending to them moves every byte three times.
Scores are a product sampled at the places of a sparse matrix: a row per (sequence, head), a column per cached token and head.
Values are summed by the same places, weighted. What all rows begin with (a system prompt) is read once for all of them, by
plain matrix products.

Scores are laid side by side up to the longest context among them, so rows whose contexts are unlike are attended apart.

Axes: R rows, S keys, H query heads, K key/value heads, G = H / K, D head size, P places (the sum over rows of H * own keys).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from gyre.rollout.torch_engine.kv import PagedKV

_MIN_SHARING_ROWS = 3
_MIN_SHARED_TOKENS = 32
_MIN_KEYS = 256  # contexts below it are alike
_MAX_PADDING = 2


def serves(cache: PagedKV) -> bool:
    """Whether this is a faster way for that cache. The kernels are those of float32 on a CPU."""
    return cache.pool.device.type == "cpu" and cache.pool.dtype == torch.float32


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the rows' keys lie, for every layer. Keys are counted per row: those that all share, then a row's own.

    `own` is sparse, [R * H, vectors of the cache]; `columns_P` and `starts_N` are its indices. `shared_M` are blocks as
    `PagedKV.gather` takes them. `padded_P` are the places of own keys in [R, H, longest], None where that is all of it.
    """

    own: torch.Tensor
    columns_P: torch.Tensor
    starts_N: torch.Tensor
    shared_M: torch.Tensor | None
    padded_P: torch.Tensor | None
    longest: int


class PagedDecode:
    """The rows of one iteration."""

    def __init__(self, cache: PagedKV, contexts_R: np.ndarray, table_RM: np.ndarray) -> None:
        """`contexts_R`: keys of each row, its newest included; its blocks are the first ones of its row in the table."""
        self._cache = cache
        self._contexts_R = contexts_R
        self._table_RM = table_RM
        self._groups = alike(contexts_R)
        self._places: list[_Places] = []

    def attend(self, layer: int, q_RHD: torch.Tensor) -> torch.Tensor:
        """Returns out_RHD. The keys and values of this iteration must have been written."""
        if not self._places:
            self._places = [_places_of(self._cache, self._contexts_R[rows], self._table_RM[rows], q_RHD.shape[1])
                            for rows in self._groups]
        if len(self._groups) == 1:
            return self._attend(layer, q_RHD, self._places[0])
        out_RHD = torch.empty_like(q_RHD)
        for rows_R, places in zip(map(torch.from_numpy, self._groups), self._places, strict=True):
            out_RHD.index_copy_(0, rows_R, self._attend(layer, q_RHD.index_select(0, rows_R), places))
        return out_RHD

    def _attend(self, layer: int, q_RHD: torch.Tensor, places: _Places) -> torch.Tensor:
        rows, heads, head_dim = q_RHD.shape
        q_RHD = q_RHD * head_dim**-0.5
        keys, values = self._cache.vectors(layer)
        scores_P = torch.sparse.sampled_addmm(places.own, q_RHD.reshape(-1, head_dim), keys.t(), beta=0.0).values()
        if places.padded_P is None:
            weights_P = scores_P.view(-1, places.longest).softmax(-1).view(-1)
            return _sum(places, values, weights_P).view(rows, heads, head_dim)
        scores_RHS = q_RHD.new_full((rows, heads, places.longest), float("-inf"))
        scores_RHS.view(-1).index_copy_(0, places.padded_P, scores_P)
        if places.shared_M is None:
            weights_RHS = scores_RHS.softmax(-1)
            return _sum(places, values, weights_RHS.view(-1)[places.padded_P]).view(rows, heads, head_dim)
        k_KSD, v_KSD = self._shared(layer, places.shared_M)
        num_shared = k_KSD.shape[1]
        scores_RHS[..., :num_shared] = _by_rows(_by_heads(q_RHD, len(k_KSD)) @ k_KSD.transpose(1, 2), rows)
        weights_RHS = scores_RHS.softmax(-1)
        of_shared_RHD = _by_rows(_by_heads(weights_RHS[..., :num_shared], len(v_KSD)) @ v_KSD, rows)
        return _sum(places, values, weights_RHS.view(-1)[places.padded_P]).view(rows, heads, head_dim) + of_shared_RHD

    def _shared(self, layer: int, blocks_M: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kv = self._cache.gather(layer, blocks_M)
        k_SKD, v_SKD = kv.view(-1, *kv.shape[2:]).unbind(1)
        return k_SKD.transpose(0, 1), v_SKD.transpose(0, 1)


def alike(contexts_R: np.ndarray) -> list[np.ndarray]:
    """Row numbers in groups whose contexts are alike: all in one unless more than half of the scores would be padding."""
    if int(contexts_R.max()) * len(contexts_R) <= _MAX_PADDING * int(contexts_R.sum()):
        return [np.arange(len(contexts_R))]
    _, kind_R = np.unique(np.ceil(np.log2(np.maximum(contexts_R, _MIN_KEYS))), return_inverse=True)
    return [np.flatnonzero(kind_R == kind) for kind in range(int(kind_R.max()) + 1)]


def _sum(places: _Places, values: torch.Tensor, weights_P: torch.Tensor) -> torch.Tensor:
    return torch.embedding_bag(values, places.columns_P, places.starts_N, per_sample_weights=weights_P)[0]


def _by_heads(x_RHX: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """[R, K * G, X] -> [K, R * G, X]."""
    rows, _, size = x_RHX.shape
    return x_RHX.view(rows, num_kv_heads, -1, size).transpose(0, 1).reshape(num_kv_heads, -1, size)


def _by_rows(x_KNX: torch.Tensor, rows: int) -> torch.Tensor:
    """[K, R * G, X] -> [R, K * G, X]."""
    num_kv_heads, _, size = x_KNX.shape
    return x_KNX.view(num_kv_heads, rows, -1, size).transpose(0, 1).reshape(rows, -1, size)


def _places_of(cache: PagedKV, contexts_R: np.ndarray, table_RM: np.ndarray, heads: int) -> _Places:
    longest = int(contexts_R.max())
    num_blocks = _num_shared_blocks(contexts_R, table_RM, cache.block_size)
    num_shared = num_blocks * cache.block_size
    columns_RS = cache.vector_columns(table_RM[:, num_blocks:], longest - num_shared)
    of_head_H = np.arange(heads, dtype=columns_RS.dtype) // (heads // cache.row_shape[3])
    columns_RHS = columns_RS[:, None] + of_head_H[:, None]
    padded_P = None
    if num_shared or int(contexts_R.min()) < longest:
        is_own_RS = np.arange(num_shared, longest) < contexts_R[:, None]
        columns_RHS = columns_RHS[np.broadcast_to(is_own_RS[:, None], columns_RHS.shape)]
        is_own_RHS = np.zeros((len(contexts_R), heads, longest), dtype=bool)
        is_own_RHS[..., num_shared:] = is_own_RS[:, None]
        padded_P = torch.from_numpy(np.flatnonzero(is_own_RHS))
    ends_N = np.repeat(contexts_R - num_shared, heads).cumsum()
    starts_N = torch.from_numpy(np.concatenate(([0], ends_N)).astype(columns_RS.dtype))
    columns_P = torch.from_numpy(columns_RHS.reshape(-1))
    shared_M = torch.from_numpy(table_RM[0, :num_blocks] * cache.num_layers) if num_blocks else None
    own = _sparse(starts_N, columns_P, (len(ends_N), cache.num_vectors))
    return _Places(own, columns_P, starts_N[:-1], shared_M, padded_P, longest)


def _num_shared_blocks(contexts_R: np.ndarray, table_RM: np.ndarray, block_size: int) -> int:
    """Blocks that every row begins with; 0 if reading them apart would not pay. A row keeps a key of its own."""
    num_full = (int(contexts_R.min()) - 1) // block_size
    if len(contexts_R) < _MIN_SHARING_ROWS or num_full * block_size < _MIN_SHARED_TOKENS:
        return 0
    is_shared_M = (table_RM[:, :num_full] == table_RM[0, :num_full]).all(axis=0)
    num_shared = num_full if is_shared_M.all() else int(is_shared_M.argmin())
    return num_shared if num_shared * block_size >= _MIN_SHARED_TOKENS else 0


def _sparse(starts_N: torch.Tensor, columns_P: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that sparse tensors are "in beta state"
        return torch.sparse_csr_tensor(starts_N, columns_P, torch.zeros(len(columns_P)), size, check_invariants=False)
