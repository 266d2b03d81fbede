"""Policy-gradient losses as pure functions over a frozen record of log-probs.

Axes: K targets of one micro-step, P admitted paths that own them. Every loss is a *sum* over targets, each weighted
with 1 / |owned targets of its execution|; the division by the step's M happens once, after the last micro-step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

LossKind = Literal["token_clip", "gspo"]
Reference = Literal["behaviour", "proximal"]


@dataclass(frozen=True)
class LossConfig:
    """Which surrogate, and its limits.

    kind: `token_clip` is GRPO's ratio per token with DAPO's asymmetric clip; `gspo` gates on one ratio per path.
    reference: denominator of the ratio. `behaviour`: the log-probs sampled by the engine. `proximal`: the trainer's
        own before the update (one update per step, so the ratio is 1), with a truncated importance weight instead.
    clip_low, clip_high: `token_clip` keeps the ratio in [1 - clip_low, 1 + clip_high] (DAPO, arXiv 2503.14476).
    sequence_low, sequence_high: `gspo` keeps the path's ratio in this interval (QwenGyre, arXiv 2609.33848).
    token_weight_cap: largest importance weight of a token (trainer over engine), a constant in the gradient.
    temperature: the sampling temperature that behaviour log-probs were taken at.
    """

    kind: LossKind = "token_clip"
    reference: Reference = "behaviour"
    clip_low: float = 0.2
    clip_high: float = 0.28
    sequence_low: float = 0.995
    sequence_high: float = 1.005
    token_weight_cap: float = 5.0
    temperature: float = 1.0


@dataclass(frozen=True)
class Targets:
    """What a loss sees of one micro-step.

    logprob_K carries the gradient; behaviour_K, advantage_K, weight_K are constants; path_K (int64) numbers the owning
    path in [0, num_paths). entropy_K is for metrics only and may be absent.
    """

    logprob_K: torch.Tensor
    behaviour_K: torch.Tensor
    advantage_K: torch.Tensor
    weight_K: torch.Tensor
    path_K: torch.Tensor
    num_paths: int
    entropy_K: torch.Tensor | None = None


@dataclass(frozen=True)
class LossOutput:
    """`loss` (scalar with gradient) and plain sums over targets; divide a sum by `num_targets` for its mean."""

    loss: torch.Tensor
    sums: dict[str, float]


def policy_loss(targets: Targets, config: LossConfig) -> LossOutput:
    """The weighted sum of the configured surrogate over all targets, with its metrics."""
    reference_K = targets.behaviour_K if config.reference == "behaviour" else targets.logprob_K.detach()
    log_ratio_K = targets.logprob_K - reference_K
    surrogate: Callable[..., tuple[torch.Tensor, torch.Tensor]] = {"token_clip": token_clip, "gspo": gspo}[config.kind]
    loss_K, clipped_K = surrogate(targets, log_ratio_K, config)
    if config.kind == "gspo" or config.reference == "proximal":
        loss_K = loss_K * importance_weight(targets, config)
    loss = (targets.weight_K * loss_K).sum()
    return LossOutput(loss, _sums(targets, log_ratio_K.detach(), clipped_K, loss.detach()))


def token_clip(targets: Targets, log_ratio_K: torch.Tensor, config: LossConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """loss_K = -min(r A, clip(r) A) and which targets the clip silenced (bool [K])."""
    ratio_K = log_ratio_K.exp()
    bounded_K = ratio_K.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return _pessimistic(ratio_K, bounded_K, targets.advantage_K)


def gspo(targets: Targets, log_ratio_K: torch.Tensor, config: LossConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """GSPO's token form (arXiv 2507.18071): the path's geometric mean ratio gates, each target carries the gradient.

    s_K = sg[s_path] * pi / sg[pi], so that the value is the path's ratio and the gradient that of each log-prob.
    """
    mean_P = _path_means(log_ratio_K.detach(), targets)
    ratio_K = mean_P.exp()[targets.path_K] * (targets.logprob_K - targets.logprob_K.detach()).exp()
    bounded_K = ratio_K.clamp(config.sequence_low, config.sequence_high)
    return _pessimistic(ratio_K, bounded_K, targets.advantage_K)


def importance_weight(targets: Targets, config: LossConfig) -> torch.Tensor:
    """min(pi_trainer / pi_engine, cap) per target, without gradient [K]."""
    return (targets.logprob_K.detach() - targets.behaviour_K).exp().clamp(max=config.token_weight_cap)


def _path_means(values_K: torch.Tensor, targets: Targets) -> torch.Tensor:
    sums_P = values_K.new_zeros(targets.num_paths).index_add(0, targets.path_K, values_K)
    counts_P = torch.bincount(targets.path_K, minlength=targets.num_paths).clamp(min=1)
    return sums_P / counts_P


def _pessimistic(
    ratio_K: torch.Tensor, bounded_K: torch.Tensor, advantage_K: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    free_K, held_K = -ratio_K * advantage_K, -bounded_K * advantage_K
    return torch.maximum(free_K, held_K), held_K.detach() > free_K.detach()


def _sums(targets: Targets, log_ratio_K: torch.Tensor, clipped_K: torch.Tensor, loss: torch.Tensor) -> dict[str, float]:
    """Sums over targets. `abs_dlogp` and `kl_k3` compare trainer and engine (k3: Schulman's unbiased estimator)."""
    gap_K = targets.logprob_K.detach() - targets.behaviour_K
    sums = {
        "num_targets": torch.tensor(float(len(gap_K))),
        "loss": loss,
        "ratio": log_ratio_K.exp().sum(),
        "clipped": clipped_K.sum(),
        "abs_dlogp": gap_K.abs().sum(),
        "kl_k3": (gap_K.exp() - 1.0 - gap_K).sum(),
        "logprob": targets.logprob_K.detach().sum(),
    }
    if targets.entropy_K is not None:
        sums["entropy"] = targets.entropy_K.detach().sum()
    values = torch.stack([value.to(torch.float64) for value in sums.values()]).tolist()
    return dict(zip(sums, values, strict=True))
