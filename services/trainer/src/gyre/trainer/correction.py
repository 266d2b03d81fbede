"""Importance weights of the trainer over the engine, for targets whose recorded log-probs are stale or do not match.

Axes: K targets, P paths. Everything is a constant in the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gyre.runtime.losses import CorrectionLevel, LossConfig

#: |log-ratio| is cut here: e^60 = 1e26 squares without overflow in float64 and is far outside of every clip.
LOG_RATIO_LIMIT = 60.0


@dataclass(frozen=True)
class Paths:
    """Which path owns each target. path_K (int64) in [0, num_paths); live_K (bool) is False for what does not count."""

    path_K: torch.Tensor
    num_paths: int
    live_K: torch.Tensor

    def sums(self, values_K: torch.Tensor) -> torch.Tensor:
        """The sum over each path's targets, at each of them [K]."""
        sums_P = values_K.new_zeros(self.num_paths).index_add(0, self.path_K, values_K * self.live_K)
        return sums_P[self.path_K]

    def means(self, values_K: torch.Tensor) -> torch.Tensor:
        """The mean over each path's targets, at each of them [K]."""
        return self.sums(values_K) / self.sums(torch.ones_like(values_K)).clamp(min=1)


@dataclass(frozen=True)
class Weights:
    """weight_K: after cap or drop. factor_K: what the loss is multiplied by. masked_K, truncated_K: which it changed."""

    weight_K: torch.Tensor
    factor_K: torch.Tensor
    masked_K: torch.Tensor
    truncated_K: torch.Tensor


def bounded(log_ratio_K: torch.Tensor) -> torch.Tensor:
    """Cut to +-LOG_RATIO_LIMIT, so that ratios are finite; what is cut has no gradient."""
    return log_ratio_K.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def importance_weights(gap_K: torch.Tensor, paths: Paths, level: CorrectionLevel) -> torch.Tensor:
    """pi_trainer / pi_engine of each target, or of its path: the product over its targets, or their geometric mean [K].

    gap_K: log-prob of the trainer minus the engine's, in nats, without gradient.
    """
    if level == "sequence":
        gap_K = paths.sums(gap_K)
    elif level == "geometric":
        gap_K = paths.means(gap_K)
    return bounded(gap_K).exp()


def correct(gap_K: torch.Tensor, paths: Paths, config: LossConfig) -> Weights:
    """The configured correction (`config` resolved). Dropping a target leaves every denominator as it was."""
    raw_K = importance_weights(gap_K, paths, config.correction_level)
    nothing_K = torch.zeros_like(paths.live_K)
    if config.correction == "none":
        return Weights(raw_K, torch.ones_like(raw_K), nothing_K, nothing_K)
    if config.correction == "truncate":
        weight_K = raw_K.clamp(max=config.correction_high)
        return Weights(weight_K, weight_K, nothing_K, raw_K > config.correction_high)
    masked_K = (raw_K < config.correction_low) | (raw_K > config.correction_high)
    weight_K = raw_K.masked_fill(masked_K, 0.0)
    return Weights(weight_K, weight_K if config.weighs else (~masked_K).to(raw_K), masked_K, nothing_K)
