"""The loss of one micro-step in one pass over its trees: what every backend goes backward from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from gyre.contracts.microstep import MicroStep
from gyre.policy.model import PolicyModel
from gyre.trainer.loss import LossConfig, Targets, policy_loss
from gyre.trainer.tree_forward import choose_attention, score_targets


@dataclass(frozen=True)
class TreeLoss:
    """`loss`: scalar with gradient, a sum over targets. `sums`: what the micro-step adds to the step's metrics."""

    loss: torch.Tensor
    sums: dict[str, float]


def tree_loss(model: PolicyModel, micro_step: MicroStep, config: LossConfig) -> TreeLoss:
    """Forward over the packed trees, then the policy loss."""
    attention = choose_attention(micro_step, next(iter(model.parameters())).device)
    scores = score_targets(model, micro_step, attention, config.temperature)
    output = policy_loss(targets_of(micro_step, scores.logprob_K, scores.entropy_K), config)
    return TreeLoss(output.loss, {**output.sums, "num_tokens": float(micro_step.num_tokens)})


def targets_of(micro_step: MicroStep, logprob_K: torch.Tensor, entropy_K: torch.Tensor | None = None) -> Targets:
    """The loss record of a micro-step, constants in the log-probs' dtype and place."""

    def constant(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(values)).to(logprob_K)

    path_K = torch.from_numpy(micro_step.path.astype(np.int64)).to(logprob_K.device)
    advantage = micro_step.advantage[micro_step.tree[micro_step.target]]
    return Targets(
        logprob_K, constant(micro_step.logprob), constant(advantage), constant(micro_step.weight), path_K,
        int(micro_step.path.max()) + 1, entropy_K,
    )  # fmt: skip
