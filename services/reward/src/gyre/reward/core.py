"""What is said of an execution, decided from what its evaluation attempts gave. Pure: no clock, no network.

A score counts. An attempt that fails is tried again within the budget; when the budget is used up, or no further try
could differ, the execution is unscorable and leaves its step. A failing evaluator is never a zero. The placeholder with
reward 0 stands only for a workspace in which the agent left nothing at all.
"""

import math
from dataclasses import dataclass, field

from gyre.contracts.errors import EvaluationError
from gyre.contracts.events import EvaluationRequested, ExecutionScored, ExecutionUnscorable

MAX_REASON_CHARS = 500
Result = ExecutionScored | ExecutionUnscorable


@dataclass(frozen=True, slots=True)
class Budget:
    """How often an evaluation is tried, and how often it may be delivered (each delivery more is a lost evaluator)."""

    max_attempts: int = 3
    max_deliveries: int = 5
    first_delay_s: float = 0.25
    max_delay_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Score:
    """A finite reward, the share or the count it rests on, and further figures by name."""

    reward: float
    num_passed: int
    num_checks: int
    metrics: dict[str, float] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)  # failed check -> why, for people

    def __post_init__(self) -> None:
        for name, value in {"reward": self.reward, **self.metrics}.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise EvaluationError(f"{name} = {value!r}: must be a finite number")


@dataclass(frozen=True, slots=True)
class Graded:
    """A grader gave a score; `num_refused` members of the snapshot were left out."""

    score: Score
    num_refused: int = 0


@dataclass(frozen=True, slots=True)
class NothingGradable:
    """The snapshot holds no file."""

    num_refused: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """No score came about. `final`: another attempt would give the same."""

    reason: str
    final: bool = False


Attempt = Graded | NothingGradable | Failed


@dataclass(frozen=True, slots=True)
class Again:
    """Try once more, after `delay_s`."""

    delay_s: float


def refuse_delivery(request: EvaluationRequested, evaluator: str, num_delivered: int, budget: Budget) -> Result | None:
    """What is said without any attempt, because this work took down every evaluator that had it."""
    if num_delivered <= budget.max_deliveries:
        return None
    reason = f"delivered {num_delivered} times and never answered: it takes its evaluator down"
    return ExecutionUnscorable(request.execution, request.group, reason, evaluator, attempts=num_delivered)


def conclude(request: EvaluationRequested, evaluator: str, attempt: Attempt, number: int,
             budget: Budget) -> Result | Again:
    """What follows from attempt `number` (the first is 1)."""
    if isinstance(attempt, Failed):
        if attempt.final or number >= budget.max_attempts:
            reason = attempt.reason[:MAX_REASON_CHARS]
            return ExecutionUnscorable(request.execution, request.group, reason, evaluator, attempts=number)
        return Again(min(budget.first_delay_s * 2 ** (number - 1), budget.max_delay_s))
    refused = {"num_refused_members": float(attempt.num_refused)} if attempt.num_refused else {}
    if isinstance(attempt, NothingGradable):
        return ExecutionScored(request.execution, request.group, 0.0, 0, 0, evaluator, placeholder=True,
                               metrics=refused, attempts=number)
    score = attempt.score
    return ExecutionScored(request.execution, request.group, float(score.reward), score.num_passed, score.num_checks,
                           evaluator, metrics={**score.metrics, **refused}, attempts=number)
