"""The same policy with larger heads, for attention kernels that have no head size as small as its own.

A head of size d becomes one of size D by zeros between its halves: rotary positions turn value i and value i + D/2 by an
angle that depends on i/D, so theta becomes theta^(D/d); a root mean square over D values is smaller by sqrt(d/D), and so
is the scale of the scores, which the norms' weights (or, without norms, the query projection) make up for. Exact but for
rounding, and with norms for their epsilon, which counts D/d times as much beside values of order one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from gyre.policy.config import PolicyConfig


def head_size_among(head_dim: int, sizes: Sequence[int]) -> int:
    """The smallest of `sizes` that a head of `head_dim` fits into. Raises ValueError if there is none."""
    fitting = [size for size in sizes if size >= head_dim and size % 2 == 0]
    if not fitting:
        raise ValueError(f"head_dim: {head_dim} is larger than every head size there is: {list(sizes)}")
    return min(fitting)


def widened_config(config: PolicyConfig, head_dim: int) -> PolicyConfig:
    """The shape of the policy with heads of size `head_dim`. Raises ValueError if its rotary base has no float32."""
    ratio = head_dim / config.head_dim
    if ratio * math.log10(config.rope_theta) > 37:
        raise ValueError(f"head_dim: {config.head_dim} is too small for heads of {head_dim}: rope_theta would become "
                         f"{config.rope_theta:g} to the power of {ratio:g}")  # fmt: skip
    return replace(config, head_dim=head_dim, rope_theta=config.rope_theta**ratio)


def widened_state(config: PolicyConfig, state: Mapping[str, torch.Tensor], head_dim: int) -> dict[str, torch.Tensor]:
    """The tensors of `widened_config(config, head_dim)` that compute what `state` computes."""
    ratio = head_dim / config.head_dim
    # of the weights that follow the root mean square; the query's also makes up for the scale of the scores
    factors = {"q_norm.weight": 1.0, "k_norm.weight": ratio**-0.5}
    if not config.qk_norm:
        factors = {"q_proj.weight": ratio**0.5, "q_proj.bias": ratio**0.5}
    return {name: _widened(name, tensor, config.head_dim, head_dim) * _factor(name, factors) for name, tensor in state.items()}


def _factor(name: str, factors: Mapping[str, float]) -> float:
    return next((factor for end, factor in factors.items() if name.endswith(end)), 1.0)


def _widened(name: str, tensor: torch.Tensor, old: int, new: int) -> torch.Tensor:
    """`tensor` with every head's axis spread out; others as they are."""
    if name.endswith("self_attn.o_proj.weight"):
        return _spread(tensor.T, old, new).T.contiguous()
    if ".self_attn." in name:
        return _spread(tensor, old, new)
    return tensor


def _spread(tensor: torch.Tensor, old: int, new: int) -> torch.Tensor:
    """First axis: heads of `old` rows each become heads of `new`, zeros behind either half."""
    heads = tensor.unflatten(0, (-1, 2, old // 2))
    spread = heads.new_zeros((heads.shape[0], 2, new // 2, *heads.shape[3:]))
    spread[:, :, : old // 2] = heads
    return spread.flatten(0, 2)
