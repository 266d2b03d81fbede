"""The model call of the deterministic mode: one token in one context has the same logits, bit for bit, in any company.

Matrix products and attention give other last bits when the shape of the batch changes. So nothing here has a shape that
depends on the batch: the whole model runs on tiles of 16 tokens, and a token's row within its tile is its position modulo
16. Attention runs per sequence and tile, over all keys up to the tile's end, so that its shape depends on the position
alone. Then prefill, chunked prefill, decode, recompute and a move compute the same bits.

What it costs: tokens of one batch whose positions fall on the same row need tiles of their own (64 decodes at random
positions take about 9 passes of 16 rows instead of one of 64; 64 that are in step take 64), attention is one call per
sequence, tile and layer, in which a decode fills one of 16 query rows, and a prefill never uses more than 16 rows at once.
Measured on one CPU thread with a policy of 0.1M parameters, all sequences in step: 2 times slower with 1 sequence, 8 times
with 8, 15 times with 64. For tests, for debugging and for evidence; not for throughput.

Equal bits need equal software, the same kind of device and the same number of threads.

Axes: N = 16 rows of a tile, S keys, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from gyre.rollout.torch_engine.kv import PagedKV
from gyre.rollout.torch_engine.runner import Runner
from gyre.rollout.torch_engine.sequence import Batch, Slots

TILE = 16


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, stop) of row `row` of the batch, all in one tile of its positions."""

    row: int
    start: int
    stop: int

    @property
    def slots(self) -> slice:
        """Where they are in their tile."""
        first = self.start % TILE
        return slice(first, first + self.stop - self.start)


@dataclass(slots=True)
class Tile:
    """Up to 16 tokens, each at its position modulo 16. Bit s of `taken`: slot s is in use."""

    taken: int = 0
    segments: list[Segment] = field(default_factory=list)


def tiles_of(starts: list[int], counts: list[int]) -> list[Tile]:
    """Puts each row's tokens into tiles. A later token is never in an earlier tile, because it attends to the earlier."""
    tiles: list[Tile] = []
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        earliest, end = 0, start + count
        while start < end:
            segment = Segment(row, start, min(end, start - start % TILE + TILE))
            bits = ((1 << (segment.stop - start)) - 1) << (start % TILE)
            free = (i for i in range(earliest, len(tiles)) if not tiles[i].taken & bits)
            earliest = next(free, len(tiles))
            if earliest == len(tiles):
                tiles.append(Tile())
            tiles[earliest].taken |= bits
            tiles[earliest].segments.append(segment)
            start = segment.stop
    return tiles


class TileAttention:
    """Attention of one tile: stores the new keys and values, then attends segment by segment."""

    def __init__(self, cache: PagedKV, tile: Tile, table_BM: np.ndarray, device: torch.device, dtype: torch.dtype) -> None:
        self._cache = cache
        size = cache.block_size
        slots, places, self._calls = [], [], []
        for segment in tile.segments:
            positions = np.arange(segment.start, segment.stop)
            slots.append(np.arange(segment.slots.start, segment.slots.stop))
            places.append(cache.places(table_BM[segment.row, positions // size], positions % size))
            end = segment.start - segment.start % TILE + TILE
            blocks = np.zeros(-(-end // size), dtype=np.int64)  # what is not there yet is masked: any block will do
            there = table_BM[segment.row, : len(blocks)]
            blocks[: len(there)] = there
            blocks_M = torch.from_numpy(blocks * cache.num_layers).to(device)
            self._calls.append((segment.slots, blocks_M, _mask(end - TILE, len(blocks) * size, dtype, device)))
        self._slots = torch.from_numpy(np.concatenate(slots)).to(device)
        self._places = torch.from_numpy(np.concatenate(places)).to(device)

    def __call__(self, layer: int, q_NHD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor) -> torch.Tensor:
        self._cache.write(layer, self._places, k_NKD[self._slots], v_NKD[self._slots])
        out_NHD = torch.zeros_like(q_NHD)
        q_1HND, gqa = q_NHD.transpose(0, 1).unsqueeze(0), q_NHD.shape[1] != k_NKD.shape[1]
        for slots, blocks_M, mask_NS in self._calls:
            kv = self._cache.gather(layer, blocks_M)
            k_1KSD, v_1KSD = kv.view(1, -1, 2, *kv.shape[3:]).transpose(1, 3).unbind(2)
            out_1HND = F.scaled_dot_product_attention(q_1HND, k_1KSD, v_1KSD, attn_mask=mask_NS, enable_gqa=gqa)
            out_NHD[slots] = out_1HND[0].transpose(0, 1)[slots]
        return out_NHD


class TiledRunner(Runner):
    """See the module."""

    @torch.inference_mode()
    def run(self, batch: Batch, slots: Slots) -> torch.Tensor:
        """Computes the batch's tokens and returns logits_RV of the rows that yield, in order."""
        table_BM = slots.table[batch.slots]
        lasts = {row: batch.starts[row] + batch.counts[row] - 1 for row in batch.yields}
        logits: dict[int, torch.Tensor] = {}
        for tile in tiles_of(batch.starts, batch.counts):
            ids, positions = np.zeros(TILE, dtype=np.int64), np.arange(TILE)
            for segment in tile.segments:
                ids[segment.slots] = batch.rows[segment.row].ids[segment.start : segment.stop]
                positions[segment.slots] = np.arange(segment.start, segment.stop)
            attention = TileAttention(self.cache, tile, table_BM, self._device, self._dtype)
            hidden_NE = self.model(self._tensor(ids), self._tensor(positions), attention)
            yielding = [s for s in tile.segments if lasts.get(s.row, -1) == s.stop - 1]
            if yielding:
                logits_NV = self.model.logits(hidden_NE)
                logits.update((s.row, logits_NV[(s.stop - 1) % TILE]) for s in yielding)
        if not logits:
            return torch.empty(0, self.model.config.vocab_size, device=self._device)
        return torch.stack([logits[row] for row in batch.yields])


@lru_cache(maxsize=256)
def _mask(first: int, num_keys: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Additive mask_NS: the query at position first + n sees the keys up to itself."""
    hidden_NS = torch.arange(num_keys) > first + torch.arange(TILE).unsqueeze(1)
    return torch.zeros(TILE, num_keys).masked_fill(hidden_NS, float("-inf")).to(device=device, dtype=dtype)
