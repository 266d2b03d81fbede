"""The `[loss]` section of run.toml: which policy loss, what it adds up over, and what is checked before a run starts.

A field that says `auto` or -1 takes what the paper of its kind uses; `LossConfig.resolved` fills it in. What each kind
computes is in `gyre.trainer.loss`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from gyre.contracts.errors import ConfigError

LossKind = Literal["gspo", "grpo", "dapo", "dr_grpo", "rloo", "reinforce", "cispo"]
Aggregation = Literal["auto", "execution", "token", "constant"]
Correction = Literal["auto", "none", "truncate", "mask"]
CorrectionLevel = Literal["token", "sequence", "geometric"]
KLEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True)
class KindDefaults:
    """What `auto` and -1 stand for. A kind without `clip` takes no ratio, so it has nothing to clip."""

    aggregation: Aggregation
    clip: tuple[float, float] | None  # below and above 1
    correction: Correction = "none"


KINDS: dict[LossKind, KindDefaults] = {
    "gspo": KindDefaults("execution", (0.005, 0.005), "truncate"),
    "grpo": KindDefaults("execution", (0.2, 0.2)),
    "dapo": KindDefaults("token", (0.2, 0.28)),
    "dr_grpo": KindDefaults("constant", (0.2, 0.2)),
    "rloo": KindDefaults("execution", None),
    "reinforce": KindDefaults("execution", None),
    "cispo": KindDefaults("token", (1.0, 4.0)),
}
PESSIMISTIC: tuple[LossKind, ...] = ("grpo", "dapo", "dr_grpo")  # min(r A, clip(r) A) with a ratio per token
WEIGHTED_BY_RATIO: tuple[LossKind, ...] = (*PESSIMISTIC, "cispo")  # over `behaviour` their ratio is the importance weight


@dataclass(frozen=True, slots=True)
class LossConfig:
    """The policy loss."""

    kind: LossKind = "gspo"
    aggregation: Aggregation = "auto"  # mean over an execution's targets, then executions; over the step's targets; constant
    constant_length: int = 0  # aggregation constant: the number of targets that every execution is divided by
    reference: Literal["behaviour", "proximal"] = "behaviour"  # denominator of the ratio: engine's, or trainer's own log-probs
    clip_low: float = -1.0  # the ratio (gspo: of the path) not below 1 - clip_low; -1: the kind's
    clip_high: float = -1.0  # the ratio not above 1 + clip_high; -1: the kind's
    dual_clip: float = 0.0  # grpo, dapo, dr_grpo: with a negative advantage the loss is at most this times |advantage|; 0: off
    correction: Correction = "auto"  # of trainer against engine: cap the importance weight, or drop what leaves its bounds
    correction_level: CorrectionLevel = "token"  # one weight per target; per path: product (sequence) or mean (geometric)
    correction_low: float = 0.0  # mask: the smallest weight that is kept
    correction_high: float = 5.0  # truncate: the largest weight; mask: the largest weight that is kept
    kl_coefficient: float = 0.0  # times the KL to a reference policy; 0: none
    kl_estimator: KLEstimator = "k3"
    kl_reference: str = ""  # Hugging Face directory of the reference policy; "": policy.checkpoint, version 0 of the run
    entropy_coefficient: float = 0.0  # times the entropy, which is rewarded; 0: none

    def resolved(self) -> Self:
        """The same with `auto` and -1 replaced by what the kind uses."""
        kind = KINDS[self.kind]
        low, high = kind.clip or (0.0, 0.0)
        correction = "truncate" if self.reference == "proximal" else kind.correction
        return replace(
            self,
            aggregation=kind.aggregation if self.aggregation == "auto" else self.aggregation,
            clip_low=low if self.clip_low == -1 else self.clip_low,
            clip_high=high if self.clip_high == -1 else self.clip_high,
            correction=correction if self.correction == "auto" else self.correction,
        )

    @property
    def weighs(self) -> bool:
        """Whether the correction's weight multiplies the loss; where the ratio is that weight already, it only drops."""
        return self.reference == "proximal" or self.kind not in WEIGHTED_BY_RATIO

    @property
    def has_reference_policy(self) -> bool:
        return self.kl_coefficient != 0.0

    @property
    def trains_zero_advantage(self) -> bool:
        """Whether executions with advantage 0 have something to learn from all the same."""
        return bool(self.kl_coefficient or self.entropy_coefficient)

    def scale(self, num_executions: int, num_targets: int) -> float:
        """What a step's sum is multiplied by, once, after the reduction.

        num_executions: M of the sealed step. num_targets: those of its micro-steps. 0 if there is nothing to train.
        """
        size = {"execution": num_executions, "token": num_targets, "constant": num_executions * self.constant_length}
        divisor = size[self.resolved().aggregation]
        return 1.0 / divisor if divisor else 0.0


def describe_loss(loss: LossConfig) -> str:
    """What the configured loss comes to, in one line, with what `auto` and -1 stand for."""
    loss = loss.resolved()
    ratio = "no ratio"
    if KINDS[loss.kind].clip is not None:
        over = "engine" if loss.reference == "behaviour" else "trainer before the update"
        ratio = f"ratio over the {over} in [{1 - loss.clip_low:g}, {1 + loss.clip_high:g}]"
    parts = [loss.kind, ratio, {"execution": "mean over executions", "token": "mean over targets",
                                "constant": f"sum over {loss.constant_length} targets per execution"}[loss.aggregation]]
    if loss.correction != "none":
        low = f"{loss.correction_low:g} to " if loss.correction == "mask" else ""
        parts.append(f"{loss.correction} {loss.correction_level} weights at {low}{loss.correction_high:g}")
    if loss.kl_coefficient:
        parts.append(f"{loss.kl_coefficient:g} * KL ({loss.kl_estimator}) to {loss.kl_reference or 'version 0'}")
    if loss.entropy_coefficient:
        parts.append(f"{loss.entropy_coefficient:g} * entropy")
    return ", ".join(parts)


def check_loss(loss: LossConfig, advantage: str) -> None:
    """Refuse what means nothing. `advantage`: of `[admission]`. Raises ConfigError naming field, value and what is right."""
    _check_numbers(loss)
    _check_ratio(loss)
    _check_correction(loss)
    if loss.kind == "rloo" and advantage != "rloo":
        _refuse("kind", loss.kind, f"is REINFORCE with the leave-one-out baseline; set admission.advantage = 'rloo' (it is "
                f"{advantage!r}), or loss.kind = 'reinforce'")
    if loss.kind == "dr_grpo" and advantage == "grpo":
        _refuse("kind", loss.kind, "does not divide by the group's standard deviation; set admission.advantage = 'mean', or "
                "loss.kind = 'grpo'")
    if loss.kl_reference and not loss.kl_coefficient:
        _refuse("kl_reference", loss.kl_reference, "is not used with loss.kl_coefficient = 0; set one, or leave it out")


def _check_numbers(loss: LossConfig) -> None:
    for field in ("clip_low", "clip_high"):
        value = getattr(loss, field)
        if value != -1 and not 0 <= value < float("inf"):
            _refuse(field, value, "must be 0 or more, or -1 for what the kind uses")
    if loss.clip_low > 1:
        _refuse("clip_low", loss.clip_low, "must be at most 1: a ratio is never below 0")
    for field in ("correction_low", "kl_coefficient", "entropy_coefficient"):
        value = getattr(loss, field)
        if not 0 <= value < float("inf"):
            _refuse(field, value, "must be 0 or more, and finite")
    if not loss.correction_low < loss.correction_high < float("inf"):
        _refuse("correction_high", loss.correction_high, f"must be finite and more than loss.correction_low = "
                f"{loss.correction_low}")
    if loss.dual_clip != 0 and not 1 < loss.dual_clip < float("inf"):
        _refuse("dual_clip", loss.dual_clip, "must be more than 1 (3 is usual), or 0 for none")
    constant = loss.resolved().aggregation == "constant"
    if constant and loss.constant_length <= 0:
        _refuse("constant_length", loss.constant_length, "must be more than 0 with loss.aggregation = 'constant' (what "
                f"loss.kind = {loss.kind!r} uses if nothing else is said): the most targets an execution can have")
    if not constant and loss.constant_length:
        _refuse("constant_length", loss.constant_length, "is used with loss.aggregation = 'constant' only; use 0")


def _check_ratio(loss: LossConfig) -> None:
    if KINDS[loss.kind].clip is None:
        for field, unset in (("clip_low", -1), ("clip_high", -1), ("reference", "behaviour")):
            if getattr(loss, field) != unset:
                _refuse(field, getattr(loss, field), f"loss.kind = {loss.kind!r} takes no ratio; leave it out, or use grpo")
    if loss.dual_clip and loss.kind not in PESSIMISTIC:
        _refuse("dual_clip", loss.dual_clip, f"loss.kind = {loss.kind!r} has none; use 0, or one of {', '.join(PESSIMISTIC)}")


def _check_correction(loss: LossConfig) -> None:
    correction = loss.resolved().correction
    if correction == "truncate" and not loss.weighs:
        _refuse("correction", loss.correction, f"the ratio of loss.kind = {loss.kind!r} over the engine is the "
                "importance weight already; use none or mask, or loss.reference = 'proximal'")
    if correction != "mask" and loss.correction_low:
        _refuse("correction_low", loss.correction_low, "is used with loss.correction = 'mask' only; use 0")


def _refuse(field: str, value: object, why: str) -> None:
    raise ConfigError(f"loss.{field} = {value!r}: {why}")
