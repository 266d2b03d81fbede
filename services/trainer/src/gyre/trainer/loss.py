"""Policy losses as pure functions over a frozen record of log-probs.

    loss = sum over targets K of  share * (factor * surrogate + kl_coefficient * KL - entropy_coefficient * entropy)

`share` is 1 / |owned targets of the execution| (aggregation `execution`) or 1; `factor` is the correction of trainer
against engine. A loss is a *sum*: sums of micro-steps add up, on whatever cell, and are divided once, at the end of the
step, by what its sealed membership says (`LossConfig.scale`).

Axes: K targets of one micro-step, P admitted paths that own them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from gyre.runtime import losses
from gyre.trainer.correction import Paths, Weights, bounded, correct


@dataclass(frozen=True, slots=True)
class LossConfig(losses.LossConfig):
    """What run.toml says about the loss, and `temperature`: that of the sampling, at which log-probs are taken."""

    temperature: float = 1.0


@dataclass(frozen=True)
class Targets:
    """What a loss sees of one micro-step.

    logprob_K carries the gradient, and so does entropy_K (nats) where it is rewarded; behaviour_K (the engine's
    log-prob), advantage_K, weight_K (1 / |owned targets of the execution|) and reference_K (log-prob under the
    reference policy, where there is one) are constants. path_K (int64) numbers the owning path in [0, num_paths).
    A target of weight 0 does not count, whatever its other values are.
    """

    logprob_K: torch.Tensor
    behaviour_K: torch.Tensor
    advantage_K: torch.Tensor
    weight_K: torch.Tensor
    path_K: torch.Tensor
    num_paths: int
    entropy_K: torch.Tensor | None = None
    reference_K: torch.Tensor | None = None


@dataclass(frozen=True)
class LossOutput:
    """`loss` (scalar with gradient) and sums over targets, which `gyre.trainer.metrics` adds up and divides."""

    loss: torch.Tensor
    sums: dict[str, float]


@dataclass(frozen=True)
class Surrogate:
    """loss_K to be minimised; ratio_K that the clip looked at; clipped_K (bool): which targets it acted on."""

    loss_K: torch.Tensor
    ratio_K: torch.Tensor
    clipped_K: torch.Tensor


def policy_loss(targets: Targets, config: losses.LossConfig) -> LossOutput:
    """The weighted sum of the configured loss over all targets, with its metrics.

    Raises:
        ValueError: a KL without reference_K, or an entropy coefficient without entropy_K.
    """
    config = config.resolved()
    live_K = targets.weight_K != 0
    targets = _without_dead(targets, live_K)
    paths = Paths(targets.path_K, targets.num_paths, live_K)
    gap_K = (targets.logprob_K - targets.behaviour_K).detach()
    surrogate = SURROGATES[config.kind](targets, _log_ratio(targets, config), paths, config)
    weights = correct(gap_K, paths, config)
    loss_K = surrogate.loss_K * weights.factor_K
    if config.kl_coefficient:
        loss_K = loss_K + config.kl_coefficient * reference_kl(targets, config.kl_estimator)
    if config.entropy_coefficient:
        if targets.entropy_K is None:
            raise ValueError("loss.entropy_coefficient is set, but the targets have no entropy")
        loss_K = loss_K - config.entropy_coefficient * targets.entropy_K
    share_K = targets.weight_K if config.aggregation == "execution" else live_K.to(loss_K)
    loss = (share_K * loss_K).sum()
    sums = _sums(targets, surrogate, weights, paths, loss.detach())
    return LossOutput(loss, sums | _corrected(weights, live_K, config))


def loss_gradient(
    targets: Targets, config: losses.LossConfig
) -> tuple[LossOutput, torch.Tensor, torch.Tensor | None]:
    """The loss, dL/dlogprob_K, and dL/dentropy_K (None without an entropy bonus), from log-probs without a graph.

    For a backward pass in two phases: sum(dlogprob_K * logprob_K + dentropy_K * entropy_K) has the gradient of the loss.
    """
    rewards_entropy = bool(config.entropy_coefficient) and targets.entropy_K is not None
    logprob_K = targets.logprob_K.detach().requires_grad_(True)
    entropy_K = None if targets.entropy_K is None else targets.entropy_K.detach().requires_grad_(rewards_entropy)
    with torch.enable_grad():
        output = policy_loss(replace(targets, logprob_K=logprob_K, entropy_K=entropy_K), config)
    inputs = [logprob_K, entropy_K] if rewards_entropy else [logprob_K]
    dlogprob_K, *rest = torch.autograd.grad(output.loss, inputs)
    return LossOutput(output.loss.detach(), output.sums), dlogprob_K, rest[0] if rest else None


# ---------------------------------------------------------------- surrogates


def clipped_ratio(targets: Targets, log_ratio_K: torch.Tensor, paths: Paths, config: losses.LossConfig) -> Surrogate:
    """-min(r A, clip(r) A) with one ratio per target (GRPO, DAPO, Dr. GRPO); with a dual clip, where A < 0, never more
    than dual_clip |A|."""
    return _pessimistic(log_ratio_K.exp(), targets.advantage_K, config)


def gspo(targets: Targets, log_ratio_K: torch.Tensor, paths: Paths, config: losses.LossConfig) -> Surrogate:
    """The same with one ratio per path, the geometric mean over its targets; each target carries its own gradient.

    s_K = sg[s_path] * pi / sg[pi] (GSPO's token form), so that the value is the path's ratio.
    """
    path_ratio_K = bounded(paths.means(log_ratio_K.detach())).exp()
    ratio_K = path_ratio_K * (targets.logprob_K - targets.logprob_K.detach()).exp()
    return _pessimistic(ratio_K, targets.advantage_K, config)


def cispo(targets: Targets, log_ratio_K: torch.Tensor, paths: Paths, config: losses.LossConfig) -> Surrogate:
    """-sg[clip(r)] A log pi: the clip bounds the weight of a target and silences none."""
    ratio_K = log_ratio_K.detach().exp()
    weight_K = ratio_K.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return Surrogate(-weight_K * targets.advantage_K * targets.logprob_K, ratio_K, weight_K != ratio_K)


def policy_gradient(targets: Targets, log_ratio_K: torch.Tensor, paths: Paths, config: losses.LossConfig) -> Surrogate:
    """-A log pi (REINFORCE; RLOO by its advantage)."""
    loss_K = -targets.advantage_K * targets.logprob_K
    return Surrogate(loss_K, log_ratio_K.detach().exp(), torch.zeros_like(paths.live_K))


SURROGATES: dict[losses.LossKind, Callable[[Targets, torch.Tensor, Paths, losses.LossConfig], Surrogate]] = {
    "gspo": gspo, "grpo": clipped_ratio, "dapo": clipped_ratio, "dr_grpo": clipped_ratio, "cispo": cispo,
    "rloo": policy_gradient, "reinforce": policy_gradient,
}  # fmt: skip


def _pessimistic(ratio_K: torch.Tensor, advantage_K: torch.Tensor, config: losses.LossConfig) -> Surrogate:
    free_K = -ratio_K * advantage_K
    held_K = -ratio_K.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * advantage_K
    loss_K = torch.maximum(free_K, held_K)
    clipped_K = held_K.detach() > free_K.detach()
    if config.dual_clip:
        most_K = -config.dual_clip * advantage_K
        over_K = (advantage_K < 0) & (loss_K.detach() > most_K)
        loss_K, clipped_K = torch.where(over_K, most_K, loss_K), clipped_K | over_K
    return Surrogate(loss_K, ratio_K.detach(), clipped_K)


# ---------------------------------------------------------------- terms


def reference_kl(targets: Targets, estimator: losses.KLEstimator) -> torch.Tensor:
    """An estimate of KL(policy || reference) at each target [K] (Schulman's k1, k2, k3).

    As a loss only k2 and k3 pull towards the reference; the gradient of k1 has mean zero on policy.
    """
    if targets.reference_K is None:
        raise ValueError("loss.kl_coefficient is set, but the targets have no reference log-probs")
    above_K = bounded(targets.logprob_K - targets.reference_K)
    if estimator == "k1":
        return above_K
    if estimator == "k2":
        return above_K.square() / 2
    return (-above_K).exp() - 1.0 + above_K


def _log_ratio(targets: Targets, config: losses.LossConfig) -> torch.Tensor:
    """log(pi / reference): over the engine's log-probs, or over the trainer's own, where the value is 0 [K]."""
    reference_K = targets.behaviour_K if config.reference == "behaviour" else targets.logprob_K.detach()
    return bounded(targets.logprob_K - reference_K)


def _without_dead(targets: Targets, live_K: torch.Tensor) -> Targets:
    """Zeros for whatever does not count, before anything is computed: 0 * NaN would be NaN, in the gradient too."""

    def kept(values_K: torch.Tensor | None) -> torch.Tensor | None:
        return None if values_K is None else torch.where(live_K, values_K, 0.0)

    names = ("logprob_K", "behaviour_K", "advantage_K", "entropy_K", "reference_K")
    return replace(targets, **{name: kept(getattr(targets, name)) for name in names})


# ---------------------------------------------------------------- metrics


def _sums(
    targets: Targets, surrogate: Surrogate, weights: Weights, paths: Paths, loss: torch.Tensor
) -> dict[str, float]:
    """Sums over the targets that count, in float64. `kl_*` without a name compare engine and trainer."""
    live_K = paths.live_K
    gap_K = bounded((targets.logprob_K - targets.behaviour_K).detach().double())
    weight_K = weights.weight_K.double() * live_K
    sums = {
        "num_targets": live_K.sum(),
        "loss": loss,
        "ratio": (surrogate.ratio_K.double() * live_K).sum(),
        "clipped": (surrogate.clipped_K & live_K).sum(),
        "abs_dlogp": gap_K.abs().sum(),
        "max_abs_dlogp": gap_K.abs().amax() if len(gap_K) else gap_K.sum(),
        "kl_k1": -gap_K.sum(),
        "kl_k3": (gap_K.exp() - 1.0 - gap_K).sum(),
        "weight": weight_K.sum(),
        "weight_squared": weight_K.square().sum(),
        "logprob": targets.logprob_K.detach().sum(),
    }
    if targets.entropy_K is not None:
        sums["entropy"] = targets.entropy_K.detach().sum()
    if targets.reference_K is not None:
        sums["reference_kl_k1"] = reference_kl(targets, "k1").detach().sum()
        sums["reference_kl_k3"] = reference_kl(targets, "k3").detach().sum()
    return _numbers(sums)


def _corrected(weights: Weights, live_K: torch.Tensor, config: losses.LossConfig) -> dict[str, float]:
    """How many targets the correction dropped or capped, where it is on."""
    found = {"mask": ("masked", weights.masked_K), "truncate": ("truncated", weights.truncated_K)}.get(config.correction)
    return {} if found is None else _numbers({found[0]: (found[1] & live_K).sum()})


def _numbers(sums: dict[str, torch.Tensor]) -> dict[str, float]:
    values = torch.stack([value.to(torch.float64) for value in sums.values()]).tolist()  # one wait for the device
    return dict(zip(sums, values, strict=True))
