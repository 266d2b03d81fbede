"""Records of targets written as lists, and one configuration of every loss there is."""

from __future__ import annotations

import torch
from gyre.runtime.losses import KINDS
from gyre.trainer.loss import LossConfig, Targets, policy_loss

BEHAVIOUR = -1.0

ALL_LOSSES = [
    *(LossConfig(kind=kind, constant_length=6 * (kind == "dr_grpo")) for kind in KINDS),
    *(LossConfig(kind=kind, aggregation="execution", kl_coefficient=0.3, kl_estimator=estimator, entropy_coefficient=0.1)
      for kind, estimator in zip(KINDS, ("k1", "k2", "k3", "k1", "k2", "k3", "k3"), strict=True)),
    LossConfig(kind="dapo", dual_clip=3.0, correction="mask", correction_low=0.5, correction_high=2.0),
    LossConfig(kind="grpo", reference="proximal"),
    LossConfig(kind="gspo", reference="proximal", correction_level="geometric", correction_high=1.2),
    LossConfig(kind="cispo", correction="mask", correction_level="geometric", correction_low=0.9, correction_high=1.1),
    LossConfig(kind="rloo", correction="truncate", correction_level="sequence", correction_high=2.0),
    LossConfig(kind="reinforce", correction="mask", correction_level="sequence", correction_low=0.5, correction_high=2.0),
]  # fmt: skip


def targets(
    log_ratio: list[float], advantage: list[float], weight: list[float], path: list[int], *,
    entropy: list[float] | None = None, reference: list[float] | None = None, dtype: torch.dtype = torch.float64,
) -> Targets:  # fmt: skip
    """log_ratio: log-prob of the trainer minus the engine's. reference: the same minus that of the reference policy."""

    def constant(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    behaviour = torch.full((len(log_ratio),), BEHAVIOUR, dtype=dtype)
    logprob = (behaviour + constant(log_ratio)).requires_grad_(True)
    return Targets(
        logprob, behaviour, constant(advantage), constant(weight), torch.tensor(path, dtype=torch.int64),
        max(path, default=-1) + 1, None if entropy is None else constant(entropy),
        None if reference is None else logprob.detach() - constant(reference),
    )  # fmt: skip


def value(record: Targets, config: LossConfig) -> float:
    """The summed loss."""
    return policy_loss(record, config).loss.item()


def gradient(record: Targets, config: LossConfig) -> list[float]:
    """dL/dlogp of every target."""
    (grad,) = torch.autograd.grad(policy_loss(record, config).loss, record.logprob_K)
    return grad.tolist()
