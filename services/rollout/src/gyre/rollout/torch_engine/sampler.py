"""From logits to tokens: one vectorised draw per row, with noise that depends on (seed, position) alone.

Axes: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of R rows. `positions` is the absolute position of the token that is drawn."""

    temperatures_R: np.ndarray
    top_ps_R: np.ndarray
    top_ks_R: np.ndarray
    seeds_R: np.ndarray
    positions_R: np.ndarray


@dataclass(frozen=True, slots=True)
class Sampled:
    """Drawn tokens; logprobs are natural logarithms, computed in float32."""

    token_ids: list[int]
    logprobs: list[float]
    behaviour_logprobs: list[float]


def sample(logits_RV: torch.Tensor, rows: SamplingRows) -> Sampled:
    """Draws one token per row by inverting the cumulative distribution, or takes the largest where T is 0."""
    logp_RV = torch.log_softmax(logits_RV.float(), dim=-1)
    greedy_R = rows.temperatures_R == 0
    unrestricted_R = _unrestricted(rows)
    behaviour_RV = logp_RV if (unrestricted_R | greedy_R).all() else _restrict(logp_RV, rows)
    if behaviour_RV is not logp_RV and unrestricted_R.any():  # the same bits whoever else is in the batch
        plain_R1 = torch.from_numpy(unrestricted_R).to(logp_RV.device).unsqueeze(1)
        behaviour_RV = torch.where(plain_R1, logp_RV, behaviour_RV)
    if greedy_R.all():
        tokens_R1 = logp_RV.argmax(dim=-1, keepdim=True)
    else:
        tokens_R1 = _invert(behaviour_RV, uniforms(rows.seeds_R, rows.positions_R))
        if greedy_R.any():
            mask_R1 = torch.from_numpy(greedy_R).to(logp_RV.device).unsqueeze(1)
            tokens_R1 = torch.where(mask_R1, logp_RV.argmax(dim=-1, keepdim=True), tokens_R1)
    logprobs = logp_RV.gather(1, tokens_R1).squeeze(1).tolist()
    behaviour = logprobs if behaviour_RV is logp_RV else behaviour_RV.gather(1, tokens_R1).squeeze(1).tolist()
    if greedy_R.any():
        behaviour = [0.0 if greedy else value for greedy, value in zip(greedy_R, behaviour, strict=True)]
    return Sampled(tokens_R1.squeeze(1).tolist(), logprobs, behaviour)


def uniforms(seeds_R: np.ndarray, positions_R: np.ndarray) -> np.ndarray:
    """One number in [0, 1) per (seed, position), by splitmix64. 48 bits, so that u * total stays below total."""
    state = seeds_R.astype(np.uint64) + (positions_R.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    for _ in range(2):  # a second round separates seeds that differ by a multiple of the increment
        state = (state ^ (state >> np.uint64(30))) * _MIX_1
        state = (state ^ (state >> np.uint64(27))) * _MIX_2
        state = (state ^ (state >> np.uint64(31))) + _GOLDEN
    return (state >> np.uint64(16)).astype(np.float64) * 2.0**-48


def _unrestricted(rows: SamplingRows) -> np.ndarray:
    """Bool [R]: rows whose sampling distribution is the policy's own."""
    return (rows.temperatures_R == 1) & (rows.top_ps_R == 1) & (rows.top_ks_R == 0)


def _invert(behaviour_RV: torch.Tensor, noise_R: np.ndarray) -> torch.Tensor:
    """The first token whose cumulative probability exceeds the noise, so one of probability 0 is never drawn."""
    cumulative_RV = behaviour_RV.exp().double().cumsum(dim=-1)
    noise_R1 = torch.from_numpy(noise_R).to(cumulative_RV.device).unsqueeze(1)
    return torch.searchsorted(cumulative_RV, noise_R1 * cumulative_RV[:, -1:], right=True)


def _restrict(logp_RV: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Log-probabilities after temperature, then top-k, then top-p, renormalised over what is left."""
    device = logp_RV.device
    temperatures_R = np.where(rows.temperatures_R == 0, 1, rows.temperatures_R).astype(np.float32)
    scaled_RV = logp_RV / torch.from_numpy(temperatures_R).to(device).unsqueeze(1)
    if (rows.top_ks_R > 0).any() or (rows.top_ps_R < 1).any():
        ordered_RV, order_RV = scaled_RV.sort(dim=-1, descending=True, stable=True)
        num_vocab = scaled_RV.shape[1]
        top_ks_R = np.where(rows.top_ks_R == 0, num_vocab, rows.top_ks_R)
        ranks_V = torch.arange(num_vocab, device=device)
        dropped_RV = ranks_V >= torch.from_numpy(top_ks_R).to(device).unsqueeze(1)
        probs_RV = ordered_RV.masked_fill(dropped_RV, float("-inf")).softmax(dim=-1)
        before_RV = probs_RV.cumsum(dim=-1) - probs_RV  # mass of better tokens: the best one is always kept
        top_ps_R1 = torch.from_numpy(rows.top_ps_R.astype(np.float32)).to(device).unsqueeze(1)
        dropped_RV = dropped_RV | ((before_RV >= top_ps_R1) & (top_ps_R1 < 1))
        dropped_RV = torch.zeros_like(dropped_RV).scatter(1, order_RV, dropped_RV)
        scaled_RV = scaled_RV.masked_fill(dropped_RV, float("-inf"))
    return torch.log_softmax(scaled_RV, dim=-1)
