"""FlexAttention on packed trees, for one GPU: a block-sparse mask from where subtrees end.

A query q sees a key k iff k <= q < exit[k]. Whether a block of keys is wholly, partly or not visible to a block of
queries follows from the least and the greatest exit of its keys, so the mask costs (T / block)^2 bits and never T^2.
FlexAttention has no backward pass on a CPU; there it serves to check the mask.

Axes: T packed tokens (padded to whole blocks), B blocks, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from gyre.contracts.microstep import MicroStep
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128


class FlexTrees:
    """The trees of one micro-step as one masked call (`gyre.policy.attention.Attention`)."""

    def __init__(self, micro_step: MicroStep, device: torch.device | str = "cuda") -> None:
        self._num_tokens = micro_step.num_tokens
        self._padding = -self._num_tokens % BLOCK
        # Padded tokens stand behind everything and see themselves alone, so that their softmax is defined.
        places = np.arange(self._num_tokens, self._num_tokens + self._padding)
        exits = np.concatenate((micro_step.exit, places + 1)).astype(np.int32)
        self.block_mask = block_mask(exits, device)

    def __call__(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        out_1HTD = _kernel(q_THD.device.type)(
            self._heads_first(q_THD), self._heads_first(k_TKD), self._heads_first(v_TKD), block_mask=self.block_mask,
            enable_gqa=q_THD.shape[1] != k_TKD.shape[1])
        return out_1HTD[0, :, :self._num_tokens].transpose(0, 1)

    def _heads_first(self, x_TND: torch.Tensor) -> torch.Tensor:
        return F.pad(x_TND, (0, 0, 0, 0, 0, self._padding)).transpose(0, 1).unsqueeze(0)


def block_mask(exits: np.ndarray, device: torch.device | str) -> BlockMask:
    """The mask of T = len(exits) tokens, a multiple of BLOCK."""
    blocks_BT = exits.reshape(-1, BLOCK)
    first, last = np.arange(0, len(exits), BLOCK), np.arange(BLOCK - 1, len(exits), BLOCK)
    some = (first[None, :] <= last[:, None]) & (blocks_BT.max(1)[None, :] > first[:, None])
    whole = (last[None, :] <= first[:, None]) & (blocks_BT.min(1)[None, :] > last[:, None])
    exits_T = torch.from_numpy(exits).to(device)

    def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < exits_T[key])

    return BlockMask.from_kv_blocks(*_lists(some & ~whole, device), *_lists(whole, device), BLOCK_SIZE=BLOCK, mask_mod=sees,
                                    seq_lengths=(len(exits), len(exits)))


def _lists(chosen_BB: np.ndarray, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Per block of queries: how many blocks of keys are chosen, and which, first ones first."""
    counts_B = chosen_BB.sum(1)
    order_BB = np.argsort(~chosen_BB, axis=1, kind="stable")
    return (torch.from_numpy(counts_B.astype(np.int32)).to(device)[None, None],
            torch.from_numpy(order_BB.astype(np.int32)).to(device)[None, None].contiguous())


@cache
def _kernel(device: str) -> Callable[..., torch.Tensor]:
    """Compiled once for all lengths on a GPU; as it is on a CPU, where compiling would only cost."""
    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention
