"""Numbers of a run: means with intervals, and one line per finished step for the terminal and `metrics.jsonl`."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gyre.cli.ledger import RunLedger
from gyre.cli.views import Step, cell_timelines, evaluation, executions, level_at, roles_at, steps, waterlevels

MOVING_STEPS = 10
_T_975 = (12.706, 4.303, 3.182, 2.776)  # Student's t for 1 to 4 degrees of freedom
_Z_975 = 1.959964
_LETTERS = {"rollout": "R", "train": "T", "to train": ">T", "to rollout": ">R"}


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of `num` independent values with its 95 % confidence interval [low, high]."""

    mean: float
    low: float
    high: float
    num: int

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def t_975(degrees: int) -> float:
    """The 97.5 % quantile of Student's t (Cornish-Fisher beyond 4 degrees of freedom, error below 0.003)."""
    if degrees <= len(_T_975):
        return _T_975[max(degrees, 1) - 1]
    z = _Z_975
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


def estimate(values: Iterable[float]) -> Estimate | None:
    """Mean and t interval over tasks; None without values. One value has no width that could be known: NaN."""
    found = [float(v) for v in values]
    num = len(found)
    if num == 0:
        return None
    mean = math.fsum(found) / num
    if num == 1:
        return Estimate(mean, math.nan, math.nan, 1)
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in found) / (num - 1))
    half = t_975(num - 1) * deviation / math.sqrt(num)
    return Estimate(mean, mean - half, mean + half, num)


def exact(value: float, num: int = 0) -> Estimate:
    """A value that is known, not estimated."""
    return Estimate(value, value, value, num)


def paired_gain(before: Mapping[str, float], after: Mapping[str, float]) -> Estimate | None:
    """Mean of the differences over the tasks that both have, with the interval of the paired difference."""
    return estimate(after[task] - before[task] for task in before if task in after)


def moving_mean(values: Sequence[float], width: int = MOVING_STEPS) -> list[float]:
    """Mean of the last `width` values at every place, of fewer at the beginning; NaN is left out."""
    result: list[float] = []
    for end in range(1, len(values) + 1):
        window = [v for v in values[max(0, end - width):end] if not math.isnan(v)]
        result.append(math.fsum(window) / len(window) if window else math.nan)
    return result


@dataclass(frozen=True, slots=True)
class Baselines:
    """Held-out rewards that no training gives: leaving the workspace alone, acting at random, the solution."""

    do_nothing: Estimate | None = None
    random: Estimate | None = None
    oracle: Estimate | None = None


@dataclass(frozen=True, slots=True)
class StepLine:
    """One finished step. `start`: held-out reward before training; `roles`: R, T, or > while in transition."""

    step: int
    num_steps: int
    version: int
    updated: bool
    reward: float
    moving_reward: float
    start: float
    do_nothing: float
    oracle: float
    num_executions: int
    num_timeouts_scored: int
    num_harness_errors: int
    waterlevel: int
    roles: tuple[str, ...]
    seconds: float
    loss: float
    grad_norm: float
    learning_rate: float
    num_targets: int
    num_tokens: int
    time_s: float
    metrics: dict[str, float] = field(default_factory=dict)
    micro_steps_by_cell: dict[str, int] = field(default_factory=dict)

    def text(self) -> str:
        """The line for the terminal."""
        width = len(str(max(self.num_steps, self.step + 1)))
        beside = " ".join(f"{name} {value:.3f}" for name, value in
                          (("start", self.start), ("nothing", self.do_nothing), ("oracle", self.oracle))
                          if not math.isnan(value))
        parts = [f"step {self.step + 1:>{width}}/{self.num_steps}", f"reward {self.reward:.3f}",
                 f"mean {self.moving_reward:.3f}" + (f" ({beside})" if beside else ""),
                 f"{self.num_executions} executions", f"{self.num_timeouts_scored:>2} timeouts scored",
                 f"w {self.waterlevel}", f"cells {' '.join(self.roles)}", f"errors {self.num_harness_errors}",
                 f"{self.seconds:.1f} s"]
        return "  ".join(parts) + ("" if self.updated else "  (no update)")

    def row(self) -> dict[str, Any]:
        """The row of `metrics.jsonl`; what is not a number is null."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    return list(value) if isinstance(value, tuple) else value


def step_lines(ledger: RunLedger, num_steps: int, baselines: Baselines | None = None) -> list[StepLine]:
    """The lines of all finished steps, in order. A run in progress asks again and prints what is new."""
    found = steps(ledger)
    rewards = [mean_reward(step) for step in found]
    moving = moving_mean(rewards)
    start = estimate(evaluation(ledger, "before").rewards.values())
    beside = baselines or Baselines()
    errors = {name: x.terminated.fact.num_harness_errors for name, x in executions(ledger).items() if x.terminated}
    timelines, curve = cell_timelines(ledger), waterlevels(ledger)
    return [_line(step, num_steps, reward, smooth, (start, beside.do_nothing, beside.oracle), errors,
                  level_at(curve, step.ended_ns),
                  tuple(_LETTERS[role] for role in roles_at(timelines, step.ended_ns).values()))
            for step, reward, smooth in zip(found, rewards, moving, strict=True)]


def mean_reward(step: Step) -> float:
    """Mean over the executions of the step that vote; NaN if none does."""
    rewards = step.rewards
    return math.fsum(rewards) / len(rewards) if rewards else math.nan


def _line(step: Step, num_steps: int, reward: float, smooth: float, beside: tuple[Estimate | None, ...],
          errors: Mapping[str, int], level: int, roles: tuple[str, ...]) -> StepLine:
    outcomes, fact = list(step.outcomes), step.finished
    start, do_nothing, oracle = (math.nan if b is None else b.mean for b in beside)
    return StepLine(
        step=fact.step, num_steps=num_steps, version=fact.version, updated=fact.updated, reward=reward,
        moving_reward=smooth, start=start, do_nothing=do_nothing, oracle=oracle, num_executions=len(outcomes),
        num_timeouts_scored=sum(o.ending == "timed_out" and o.kind == "scored" for o in outcomes),
        num_harness_errors=sum(errors.get(o.execution, 0) for o in outcomes), waterlevel=level, roles=roles,
        seconds=(step.ended_ns - step.started_ns) / 1e9, loss=fact.loss, grad_norm=fact.grad_norm,
        learning_rate=fact.learning_rate, num_targets=fact.num_targets, num_tokens=fact.num_tokens,
        time_s=step.ended_ns / 1e9, metrics=dict(fact.metrics), micro_steps_by_cell=dict(fact.micro_steps_by_cell))
