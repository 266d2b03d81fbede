"""The model call: packed tokens of one batch through the decoder over a paged KV cache.

Axes: T packed tokens, B rows, N queries of a row (padded), S keys of a row (padded), H query heads, K key/value heads,
G = H / K, D head size, M blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from gyre.policy.model import PolicyModel
from gyre.rollout.torch_engine.kv import PagedKV
from gyre.rollout.torch_engine.paged_decode import PagedDecode, serves
from gyre.rollout.torch_engine.sequence import Batch, Slots

_MIN_KEYS = 256  # rows whose contexts are all below this are never split into several attention calls


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that attend in one call because their query counts and contexts are alike.

    `queries_BN` index the packed tokens (None: row b's only query is token b), `kept_P` are the places in the flattened
    result that are real, `tokens_P` the packed tokens they belong to. `mask` is additive, [B, 1, N, S]. `blocks_M` are as
    `PagedKV.gather` takes them.
    """

    blocks_M: torch.Tensor
    mask: torch.Tensor
    queries_BN: torch.Tensor | None
    kept_P: torch.Tensor | None
    tokens_P: torch.Tensor | None


class PagedAttention:
    """Attention of one batch: writes the new keys and values, then attends group by group."""

    def __init__(
        self, cache: PagedKV, places_T: torch.Tensor, groups: list[_Group], decode: PagedDecode | None = None,
        decode_T: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """`decode` has the packed tokens `decode_T` (None: all there are), which are in no group."""
        self._cache = cache
        self._places_T = places_T
        self._groups = groups
        self._decode = decode
        self._decode_T = decode_T

    def __call__(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        self._cache.write(layer, self._places_T, k_TKD, v_TKD)
        if len(self._groups) == 1 and self._groups[0].queries_BN is None:
            return self._attend(self._groups[0], layer, q_THD.unsqueeze(1)).squeeze(1)
        if self._decode is not None and self._decode_T is None:
            return self._decode.attend(layer, q_THD)
        out_THD = torch.empty_like(q_THD)
        if self._decode is not None and self._decode_T is not None:
            out_THD.index_copy_(0, self._decode_T, self._decode.attend(layer, q_THD.index_select(0, self._decode_T)))
        for group in self._groups:
            assert group.queries_BN is not None and group.kept_P is not None and group.tokens_P is not None
            out_BNHD = self._attend(group, layer, q_THD[group.queries_BN])
            out_THD.index_copy_(0, group.tokens_P, out_BNHD.flatten(0, 1).index_select(0, group.kept_P))
        return out_THD

    def _attend(self, group: _Group, layer: int, q_BNHD: torch.Tensor) -> torch.Tensor:
        """A decode lays the heads that share a key head along the query axis, so that no key is ever repeated."""
        kv = self._cache.gather(layer, group.blocks_M)
        num_kv_heads, head_dim = kv.shape[3], kv.shape[4]
        rows, num_heads = q_BNHD.shape[0], q_BNHD.shape[2]
        k_BKSD, v_BKSD = kv.view(rows, -1, 2, num_kv_heads, head_dim).transpose(1, 3).unbind(2)
        if q_BNHD.shape[1] == 1:
            q_BKGD = q_BNHD.view(rows, num_kv_heads, -1, head_dim)
            out = F.scaled_dot_product_attention(q_BKGD, k_BKSD, v_BKSD, attn_mask=group.mask)
            return out.reshape(rows, 1, num_heads, head_dim)
        q_BHND, gqa = q_BNHD.transpose(1, 2), num_heads != num_kv_heads
        out = F.scaled_dot_product_attention(q_BHND, k_BKSD, v_BKSD, attn_mask=group.mask, enable_gqa=gqa)
        return out.transpose(1, 2)


class Runner:
    """Model and cache on one device. `run` is the only thing that touches the model."""

    def __init__(self, model: PolicyModel, cache: PagedKV) -> None:
        self.model = model
        self.cache = cache
        self._device, self._dtype = cache.pool.device, cache.pool.dtype

    @torch.inference_mode()
    def run(self, batch: Batch, slots: Slots) -> torch.Tensor:
        """Computes the batch's tokens and returns logits_RV of the rows that yield, in order."""
        counts_B = np.array(batch.counts)
        starts_B = np.array(batch.starts)
        table_BM = slots.table[batch.slots]
        ends_B = counts_B.cumsum()
        ids_T = _packed_ids(batch, slots)
        positions_T = np.arange(ends_B[-1]) + np.repeat(starts_B - (ends_B - counts_B), counts_B)
        size = self.cache.block_size
        rows_T = np.repeat(np.arange(len(counts_B)), counts_B)
        places_T = self.cache.places(table_BM[rows_T, positions_T // size], positions_T % size)
        attention = self._attention(self._tensor(places_T), counts_B, starts_B, table_BM)
        hidden_TE = self.model(self._tensor(ids_T), self._tensor(positions_T), attention)
        last_R = ends_B[batch.yields] - 1
        if len(last_R) < len(ids_T):
            hidden_TE = hidden_TE.index_select(0, self._tensor(last_R))
        return self.model.logits(hidden_TE)

    def _attention(
        self, places_T: torch.Tensor, counts_B: np.ndarray, starts_B: np.ndarray, table_BM: np.ndarray
    ) -> PagedAttention:
        """Rows with one query attend in place where that is served, all others in groups."""
        singles = np.flatnonzero(counts_B == 1)
        if len(singles) == 0 or not serves(self.cache):
            return PagedAttention(self.cache, places_T, self._groups(np.arange(len(counts_B)), counts_B, starts_B, table_BM))
        decode = PagedDecode(self.cache, starts_B[singles] + 1, table_BM[singles])
        if len(singles) == len(counts_B):
            return PagedAttention(self.cache, places_T, [], decode)
        groups = self._groups(np.flatnonzero(counts_B > 1), counts_B, starts_B, table_BM)
        return PagedAttention(self.cache, places_T, groups, decode, self._tensor(counts_B.cumsum()[singles] - 1))

    def _groups(self, rows: np.ndarray, counts_B: np.ndarray, starts_B: np.ndarray, table_BM: np.ndarray) -> list[_Group]:
        """`rows` of like shape together: decodes apart from prefills, long contexts apart from short ones."""
        counts, contexts = counts_B[rows], counts_B[rows] + starts_B[rows]
        if len(rows) == len(counts_B) and counts.max() == 1 and contexts.max() <= _MIN_KEYS:
            return [self._group(rows, counts_B, starts_B, table_BM, True)]
        kinds = np.stack((_round_up(counts, 1), _round_up(contexts, _MIN_KEYS)))
        _, group_of = np.unique(kinds, axis=1, return_inverse=True)
        group_of = group_of.reshape(-1)
        members = (rows[group_of == index] for index in range(group_of.max() + 1))
        return [self._group(each, counts_B, starts_B, table_BM, False) for each in members]

    def _group(
        self, rows: np.ndarray, counts_B: np.ndarray, starts_B: np.ndarray, table_BM: np.ndarray, is_whole_batch: bool
    ) -> _Group:
        """`is_whole_batch`: every packed token is the only query of its row, so nothing needs to be picked."""
        counts, starts = counts_B[rows], starts_B[rows]
        num_queries = int(counts.max())
        num_blocks = -(-int((counts + starts).max()) // self.cache.block_size)
        blocks_M = self._tensor(table_BM[rows, :num_blocks].reshape(-1) * self.cache.num_layers)
        steps_N = np.minimum(np.arange(num_queries)[None], counts[:, None] - 1)  # padding repeats the last query
        keys_S = np.arange(num_blocks * self.cache.block_size)
        hidden_BNS = keys_S > (starts[:, None] + steps_N)[:, :, None]
        mask = np.zeros(hidden_BNS.shape, dtype=np.float32)
        mask[hidden_BNS] = -np.inf
        mask_B1NS = self._tensor(mask[:, None]).to(self._dtype)
        if is_whole_batch:
            return _Group(blocks_M, mask_B1NS, None, None, None)
        firsts = (counts_B.cumsum() - counts_B)[rows]
        queries_BN = firsts[:, None] + steps_N
        kept_P = np.flatnonzero(np.arange(num_queries)[None] < counts[:, None])
        tokens_P = queries_BN.reshape(-1)[kept_P]
        return _Group(blocks_M, mask_B1NS, self._tensor(queries_BN), self._tensor(kept_P), self._tensor(tokens_P))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _packed_ids(batch: Batch, slots: Slots) -> np.ndarray:
    """Int64 [T]. A row that computes its last known token alone is a decode, and those are read without Python."""
    if len(batch.rows) == len(batch.yields) == sum(batch.counts):
        return slots.last_ids[batch.slots]
    rows = zip(batch.rows, batch.starts, batch.counts, strict=True)
    return np.concatenate([s.ids[start : start + count] for s, start, count in rows]).astype(np.int64)


def _round_up(values: np.ndarray, smallest: int) -> np.ndarray:
    """The next power of two, at least `smallest`."""
    exponents = np.ceil(np.log2(np.maximum(values, smallest)))
    return np.exp2(exponents).astype(np.int64)
