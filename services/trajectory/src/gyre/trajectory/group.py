"""A group: what its executions count for, its statistics and its advantages.

Statistics are taken over executions, one vote each, whatever number of paths or tokens they have. Scored executions
vote and are trained; placeholders vote with reward 0 and are not trained; unscorable and dropped ones do neither.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gyre.contracts.events import ExecutionScored, ExecutionTerminated, ExecutionUnscorable, OutcomeKind, Signal

AdvantageKind = Literal["grpo", "mean", "rloo"]
Verdict = ExecutionScored | ExecutionUnscorable

EPSILON = 1e-6  # added to the standard deviation
FLAT = 1e-6  # rewards that differ by less, relative to their size, are equal
MAX_REWARD = 1e30  # larger ones are a fault of their evaluator: squared, or as float32 advantages, they would be infinite


@dataclass(frozen=True, slots=True)
class Standing:
    """What one execution counts for. `reward` is 0 unless it is scored."""

    kind: OutcomeKind
    reward: float = 0.0
    reason: str = ""

    @property
    def votes(self) -> bool:
        return self.kind in ("scored", "placeholder")


@dataclass(frozen=True, slots=True)
class Statistics:
    """Over the voting executions: number, mean, and standard deviation with n - 1 (0 for fewer than two votes)."""

    num_votes: int
    mean: float
    std: float


def standing(terminated: ExecutionTerminated, verdict: Verdict | None, quarantine: str) -> Standing:
    """The rules of what counts, in the order in which they bind. `quarantine` is why its records do not fit, or ""."""
    if terminated.ending == "dropped":
        return Standing("dropped", reason=terminated.reason or terminated.limit)
    if quarantine:
        return Standing("unscorable", reason=quarantine)
    if terminated.snapshot is None:
        return Standing("placeholder", reason="no workspace was preserved")
    if verdict is None:
        raise ValueError(f"execution {terminated.execution} has no verdict yet")
    if isinstance(verdict, ExecutionUnscorable):
        return Standing("unscorable", reason=verdict.reason)
    if verdict.placeholder:
        return Standing("placeholder", reason="nothing gradable")
    if not abs(verdict.reward) <= MAX_REWARD:
        what = f"beyond {MAX_REWARD:g}" if math.isfinite(verdict.reward) else "not finite"
        return Standing("unscorable", reason=f"reward {verdict.reward} is {what}")
    return Standing("scored", verdict.reward)


def statistics(rewards: Sequence[float]) -> Statistics:
    """Mean and sample standard deviation of finite rewards."""
    num = len(rewards)
    if num == 0:
        return Statistics(0, 0.0, 0.0)
    mean = math.fsum(rewards) / num
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (num - 1)) if num > 1 else 0.0
    return Statistics(num, mean, std)


def signal(rewards: Sequence[float]) -> Signal:
    """Whether the votes of a group can be compared; where they cannot, every advantage is 0."""
    if len(rewards) < 2:
        return "one_vote" if rewards else "no_votes"
    is_flat = max(rewards) - min(rewards) <= FLAT * max(1.0, max(abs(r) for r in rewards))
    return "zero_variance" if is_flat else "compared"


def advantages(rewards: Sequence[float], kind: AdvantageKind) -> list[float]:
    """One advantage per vote. A group of one, and a group whose rewards are all equal, gives zeros.

    grpo: (r - mean) / (std + 1e-6), std with n - 1 (Shao et al. 2024). mean: r - mean, which is grpo without std
    (Dr. GRPO, Liu et al. 2025). rloo: r - mean of the others (Ahmadian et al. 2024).
    """
    if signal(rewards) != "compared":
        return [0.0] * len(rewards)
    stats = statistics(rewards)
    scale = {"grpo": 1.0 / (stats.std + EPSILON), "mean": 1.0,
             "rloo": stats.num_votes / (stats.num_votes - 1)}[kind]
    return [(r - stats.mean) * scale for r in rewards]


def group_advantages(standings: Sequence[Standing], kind: AdvantageKind) -> tuple[list[float], Statistics]:
    """Advantage of every execution, in order; only scored ones can have one other than 0."""
    voting = [i for i, s in enumerate(standings) if s.votes]
    rewards = [standings[i].reward for i in voting]
    result = [0.0] * len(standings)
    for i, value in zip(voting, advantages(rewards, kind), strict=True):
        if standings[i].kind == "scored":
            result[i] = value
    return result, statistics(rewards)
