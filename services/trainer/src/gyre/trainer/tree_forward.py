"""Forward and backward on packed trees: every shared prefix is computed once.

A micro-step holds whole trees in depth-first order. Positions are depths, a query sees its ancestors and itself, and
the label of a token is scored by the hidden state of its parent, so a fork has one label per child. Several attentions
compute the same thing: `DenseTrees` pads trees into one masked call (few kernels, for short trees); `SegmentTrees` makes
one call per unbranched run over its ancestors (the reference); `flash_trees` does so without masks and copies on a CPU
and `flex_trees` as one block-sparse call on a GPU, both with work proportional to the visible pairs.

Axes: T packed tokens, K targets, E trees, L longest tree, V vocabulary, S tokens of a run, A its ancestors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from gyre.contracts.microstep import MicroStep
from gyre.policy.attention import Attention
from gyre.policy.model import PolicyModel
from gyre.trainer.flash_trees import FlashTrees, has_kernel
from gyre.trainer.runs import Run, runs_of
from torch.utils.checkpoint import checkpoint

#: A call per run costs about as much as this many extra (query, key) pairs in a dense call (measured, one CPU thread).
PAIRS_PER_CALL = 8_000
MAX_DENSE_PAIRS = 64_000_000
LOGITS_CHUNK = 2048


class SegmentTrees:
    """One causal call per run over its ancestors' keys, which stay one autograd value however many runs share them."""

    def __init__(self, runs: list[Run], device: torch.device | str = "cpu") -> None:
        self._runs = runs
        self._masks = [_lower_right(run, device) for run in runs]

    def __call__(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        gqa = q_THD.shape[1] != k_TKD.shape[1]
        outputs = []
        for run, mask in zip(self._runs, self._masks, strict=True):
            spans = (*run.ancestors, (run.start, run.end))
            out_1HSD = F.scaled_dot_product_attention(
                q_THD[run.start : run.end].transpose(0, 1).unsqueeze(0),
                torch.cat([k_TKD[a:b] for a, b in spans]).transpose(0, 1).unsqueeze(0),
                torch.cat([v_TKD[a:b] for a, b in spans]).transpose(0, 1).unsqueeze(0),
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=gqa,
            )
            outputs.append(out_1HSD[0].transpose(0, 1))
        return torch.cat(outputs)


def _lower_right(run: Run, device: torch.device | str) -> torch.Tensor | None:
    """Boolean [S, A + S]: all ancestors and the causal part of the run; None where plain causal is the same."""
    num_above = sum(b - a for a, b in run.ancestors)
    if not num_above:
        return None
    size = run.end - run.start
    return torch.ones(size, num_above + size, dtype=torch.bool, device=device).tril(num_above)


class DenseTrees:
    """All trees side by side in one padded call under a boolean ancestor mask."""

    def __init__(self, micro_step: MicroStep, device: torch.device | str = "cpu") -> None:
        starts = np.flatnonzero(np.diff(micro_step.tree, prepend=-1))
        lengths = np.diff(np.append(starts, micro_step.num_tokens))
        longest = int(lengths.max())
        row = np.repeat(np.arange(len(starts)), lengths)
        column = np.arange(micro_step.num_tokens) - np.repeat(starts, lengths)
        exits = np.zeros((len(starts), longest), np.int64)
        exits[row, column] = micro_step.exit - np.repeat(starts, lengths)
        places = np.arange(longest)
        mask = (places[None, None, :] <= places[None, :, None]) & (places[None, :, None] < exits[:, None, :])
        mask |= np.eye(longest, dtype=bool)  # a padded query needs one key, or its softmax is undefined
        self._shape = (len(starts), longest)
        self._full = bool((lengths == longest).all())
        self._slots_T = torch.from_numpy(row * longest + column).to(device)
        self._mask_E1LL = torch.from_numpy(mask).unsqueeze(1).to(device)

    def __call__(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        gqa = q_THD.shape[1] != k_TKD.shape[1]
        out_EHLD = F.scaled_dot_product_attention(
            self._pad(q_THD), self._pad(k_TKD), self._pad(v_TKD), attn_mask=self._mask_E1LL, enable_gqa=gqa
        )
        out_SHD = out_EHLD.transpose(1, 2).flatten(0, 1)
        return out_SHD if self._full else out_SHD.index_select(0, self._slots_T)

    def _pad(self, x_TND: torch.Tensor) -> torch.Tensor:
        """[T, N, D] -> [E, N, L, D]."""
        num_trees, longest = self._shape
        if not self._full:
            x_TND = x_TND.new_zeros(num_trees * longest, *x_TND.shape[1:]).index_copy(0, self._slots_T, x_TND)
        return x_TND.view(num_trees, longest, *x_TND.shape[1:]).transpose(1, 2)


def choose_attention(micro_step: MicroStep, device: torch.device | str = "cpu") -> Attention:
    """Dense for short trees, by run or by block for long ones: whichever the cost model above expects to be faster."""
    runs = runs_of(micro_step.parent)
    sizes = np.bincount(micro_step.tree)
    dense_pairs = int((sizes > 0).sum()) * int(sizes.max()) ** 2
    if dense_pairs <= min(MAX_DENSE_PAIRS, micro_step.num_pairs + PAIRS_PER_CALL * len(runs)):
        return DenseTrees(micro_step, device)
    if torch.device(device).type == "cuda":
        from gyre.trainer.flex_trees import FlexTrees  # it brings torch's compiler along, which takes seconds

        return FlexTrees(micro_step, device)
    return FlashTrees(runs) if has_kernel(device) else SegmentTrees(runs, device)


@dataclass(frozen=True)
class TargetScores:
    """logprob_K with gradient and entropy_K (with gradient where it was asked for), of the targets in order."""

    logprob_K: torch.Tensor
    entropy_K: torch.Tensor


def score_targets(
    model: PolicyModel,
    micro_step: MicroStep,
    attention: Attention,
    temperature: float = 1.0,
    *,
    entropy_gradient: bool = False,
    layer_checkpoints: bool = False,
) -> TargetScores:
    """Log-probs of the targets on the tree; logits exist for targets only, in at least float32."""
    device = next(iter(model.parameters())).device
    ids_T = torch.from_numpy(micro_step.ids.astype(np.int64)).to(device)
    positions_T = torch.from_numpy(micro_step.position.astype(np.int64)).to(device)
    hidden_TE = model(ids_T, positions_T, attention, layer_checkpoints)
    target_K = torch.from_numpy(micro_step.target.astype(np.int64)).to(device)
    scorer_K = torch.from_numpy(micro_step.parent[micro_step.target].astype(np.int64)).to(device)
    hidden_KE = hidden_TE.index_select(0, scorer_K)
    return TargetScores(*score_rows(model, hidden_KE, ids_T[target_K], temperature, entropy_gradient))


def score_rows(
    model: PolicyModel, hidden_NE: torch.Tensor, ids_N: torch.Tensor, temperature: float, entropy_gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """logprob_N of `ids_N` under each hidden state, with gradient, and entropy_N, with one if asked for.

    Logits exist for LOGITS_CHUNK rows at a time, in at least float32; backward makes them again.
    """
    if len(ids_N) <= LOGITS_CHUNK:
        return _score_chunk(model, hidden_NE, ids_N, temperature, entropy_gradient)
    parts = [
        checkpoint(_score_chunk, model, hidden, ids, temperature, entropy_gradient, use_reentrant=False)
        for hidden, ids in zip(hidden_NE.split(LOGITS_CHUNK), ids_N.split(LOGITS_CHUNK), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _score_chunk(
    model: PolicyModel, hidden_NE: torch.Tensor, ids_N: torch.Tensor, temperature: float, entropy_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_NV = model.logits(hidden_NE)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature
    logprobs_NV = F.log_softmax(logits_NV, dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return logprobs_NV.gather(1, ids_N.unsqueeze(1)).squeeze(1), entropy_N
