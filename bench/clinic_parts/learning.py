"""The loss and the update: group advantage, mean over an execution's targets, then mean over executions.

A context is a root-to-leaf path of an execution: its ids, which of them were sampled (targets), and under what
log-probability.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from gyre.policy.attention import CausalAttention
from gyre.policy.decoder import Decoder


@dataclass
class Context:
    """Parallel lists: token id, whether the policy sampled it here, behaviour log-probability (0 where it did not)."""

    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def given(self, ids: list[int]) -> None:
        self.ids += ids
        self.sampled += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def answered(self, ids: list[int], logprobs: list[float]) -> None:
        self.ids += ids
        self.sampled += [True] * len(ids)
        self.logprobs += logprobs


@dataclass
class Execution:
    """What is trained of one execution."""

    contexts: list[Context]
    reward: float = 0.0
    advantage: float = 0.0

    @property
    def num_targets(self) -> int:
        return sum(sum(context.sampled) for context in self.contexts)


@dataclass(frozen=True)
class Recipe:
    """Optimizer and loss settings of the run."""

    learning_rate: float = 5e-4
    beta1: float = 0.9
    beta2: float = 0.95
    clip_low: float = 0.2
    clip_high: float = 0.28
    max_grad_norm: float = 1.0
    warmup_steps: int = 2
    advantage: str = "grpo"


def set_advantages(group: list[Execution], kind: str) -> None:
    """Reward minus the group's mean, for "grpo" over its standard deviation; equal rewards give zero."""
    rewards = torch.tensor([execution.reward for execution in group], dtype=torch.float64)
    centred = rewards - rewards.mean()
    if kind == "grpo":
        centred = centred / (rewards.std(correction=0) + 1e-6)
    for execution, value in zip(group, centred.tolist(), strict=True):
        execution.advantage = value


class Learner:
    """The policy's optimizer; one update a step."""

    def __init__(self, decoder: Decoder, recipe: Recipe) -> None:
        self.decoder, self.recipe, self.num_steps = decoder, recipe, 0
        betas = (recipe.beta1, recipe.beta2)
        self.optimizer = torch.optim.AdamW(decoder.parameters(), lr=recipe.learning_rate, betas=betas, weight_decay=0.0)

    def update(self, executions: list[Execution]) -> float:
        """One step; returns the gradient norm. Executions with advantage 0 count in the mean and cost nothing."""
        self.num_steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate * min(1.0, self.num_steps / self.recipe.warmup_steps)
        rows = [(c, e.advantage / e.num_targets) for e in executions if e.advantage and e.num_targets
                for c in e.contexts if any(c.sampled)]
        if not rows:
            return 0.0
        self.optimizer.zero_grad()
        (self._loss(rows) / len(executions)).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), self.recipe.max_grad_norm)
        self.optimizer.step()
        return float(norm)

    def _loss(self, rows: list[tuple[Context, float]]) -> torch.Tensor:
        ids_T = torch.tensor([token for context, _ in rows for token in context.ids])
        positions_T = torch.cat([torch.arange(len(context.ids)) for context, _ in rows])
        hidden_TE = self.decoder(ids_T, positions_T, CausalAttention([len(context.ids) for context, _ in rows]))
        targets_P = torch.tensor([flag for context, _ in rows for flag in context.sampled]).nonzero()[:, 0]
        behaviour_P = torch.tensor([value for context, _ in rows for value in context.logprobs])[targets_P]
        weight_P = torch.tensor([weight for context, weight in rows for flag in context.sampled if flag])
        logprobs_PV = torch.log_softmax(self.decoder.logits(hidden_TE[targets_P - 1]), dim=-1)
        ratio_P = (logprobs_PV.gather(1, ids_T[targets_P, None])[:, 0] - behaviour_P).exp()
        clipped_P = ratio_P.clamp(1 - self.recipe.clip_low, 1 + self.recipe.clip_high)
        return -torch.minimum(ratio_P * weight_P, clipped_P * weight_P).sum()
