"""Numbers of a run: means with intervals, and one line per finished step for the terminal and `metrics.jsonl`."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any

from gyre.cli.facts import FactLog
from gyre.cli.views import Step, cell_timelines, evaluation, level_at, roles_at, steps, waterlevels
from gyre.contracts.events import ExecutionTerminated, StepFinished

MOVING_STEPS = 10
MAX_FAILURE = 120  # characters of what a failed harness said last
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

    def text(self) -> str:
        """Mean and half width, e.g. `0.412 ± 0.031`."""
        return f"{self.mean:.3f} ± {self.half_width:.3f}" if self.half_width > 0 else f"{self.mean:.3f}"


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


def paired_gain(before: Mapping[str, float], after: Mapping[str, float]) -> Estimate | None:
    """Mean of the differences over the tasks that both have, with the interval of the paired difference."""
    return estimate(after[task] - before[task] for task in before if task in after)


def estimate_of(log: FactLog, label: str) -> Estimate | None:
    """Mean held-out reward of the evaluation `label` over its tasks; None if there was none."""
    return estimate(evaluation(log, label).rewards.values())


def gain_of(log: FactLog) -> Estimate | None:
    """Held-out gain of training: the paired difference of `after` and `before`."""
    return paired_gain(evaluation(log, "before").rewards, evaluation(log, "after").rewards)


def moving_mean(values: Sequence[float], width: int = MOVING_STEPS) -> list[float]:
    """Mean of the last `width` values at every place, of fewer at the beginning; NaN is left out."""
    result: list[float] = []
    for end in range(1, len(values) + 1):
        window = [v for v in values[max(0, end - width):end] if not math.isnan(v)]
        result.append(math.fsum(window) / len(window) if window else math.nan)
    return result


@dataclass(frozen=True, slots=True)
class StepLine:
    """One finished step. `start`: held-out reward before training; `roles`: R, T, or > while in transition.

    num_failed, failure: executions whose harness failed, and what most of those said last.
    """

    step: int
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
    num_failed: int = 0
    failure: str = ""

    def text(self, num_steps: int) -> str:
        """The line for the terminal; the run has `num_steps` steps."""
        width = len(str(max(num_steps, self.step + 1)))
        beside = " ".join(f"{name} {value:.3f}" for name, value in
                          (("start", self.start), ("nothing", self.do_nothing), ("oracle", self.oracle))
                          if not math.isnan(value))
        parts = [f"step {self.step + 1:>{width}}/{num_steps}", f"reward {self.reward:.3f}",
                 f"mean {self.moving_reward:.3f}" + (f" ({beside})" if beside else ""),
                 f"{self.num_executions} executions", f"{self.num_timeouts_scored:>2} timeouts scored",
                 f"w {self.waterlevel}", f"cells {' '.join(self.roles)}", f"errors {self.num_harness_errors}",
                 f"{self.num_failed} failed: {self.failure}" if self.num_failed else "",
                 f"clip {100 * clipped:.0f} %" if math.isfinite(clipped := self.metrics.get("clipped", math.nan)) else "",
                 f"{self.seconds:.1f} s"]
        return "  ".join(filter(None, parts)) + ("" if self.updated else "  (no update)")

    def row(self) -> dict[str, Any]:
        """The row of `metrics.jsonl`; what is not a number is null."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    return list(value) if isinstance(value, tuple) else value


def step_lines(log: FactLog, baselines: Mapping[str, float], first: int = 0) -> list[StepLine]:
    """The lines of the finished steps from the one at place `first` on, in order, up to the first of which not every
    fact has been read yet: the streams of a run are read side by side.

    `baselines`: `do_nothing` and `oracle` on the held-out tasks, if known.
    """
    if len(log.facts.get(StepFinished, {})) <= first:
        return []
    found = list(takewhile(lambda step: step.is_whole, steps(log)))
    rewards = [mean_reward(step) for step in found]
    start = estimate_of(log, "before")
    beside = (math.nan if start is None else start.mean, baselines.get("do_nothing", math.nan),
              baselines.get("oracle", math.nan))
    timelines, curve = cell_timelines(log), waterlevels(log)
    return [_line(log, step, (reward, smooth), beside, level_at(curve, step.ended_s),
                  tuple(_LETTERS[role] for role in roles_at(timelines, step.ended_s).values()))
            for step, reward, smooth in list(zip(found, rewards, moving_mean(rewards), strict=True))[first:]]


def mean_reward(step: Step) -> float:
    """Mean over the executions of the step that vote; NaN if none does."""
    rewards = step.rewards
    return math.fsum(rewards) / len(rewards) if rewards else math.nan


def _line(log: FactLog, step: Step, reward: tuple[float, float], beside: tuple[float, float, float], level: int,
          roles: tuple[str, ...]) -> StepLine:
    outcomes, fact = list(step.outcomes), step.finished
    ended = [t.fact for t in (log.get(ExecutionTerminated, o.execution) for o in outcomes) if t is not None]
    failures = Counter(_failure(t) for t in ended if t.ending == "failed")
    return StepLine(
        step=fact.step, version=fact.version, updated=fact.updated, reward=reward[0], moving_reward=reward[1],
        start=beside[0], do_nothing=beside[1], oracle=beside[2], num_executions=len(outcomes),
        num_timeouts_scored=sum(o.ending == "timed_out" and o.kind == "scored" for o in outcomes),
        num_harness_errors=sum(t.num_harness_errors for t in ended), waterlevel=level, roles=roles,
        seconds=step.ended_s - step.started_s, loss=fact.loss, grad_norm=fact.grad_norm,
        learning_rate=fact.learning_rate, num_targets=fact.num_targets, num_tokens=fact.num_tokens,
        time_s=step.ended_s, metrics=dict(fact.metrics), micro_steps_by_cell=dict(fact.micro_steps_by_cell),
        num_failed=failures.total(), failure=failures.most_common(1)[0][0] if failures else "")


def _failure(ended: ExecutionTerminated) -> str:
    """Why a harness failed, in one short line: the last that it wrote, behind its exit code."""
    words = ended.reason.strip().splitlines() or [""]
    code = "" if ended.exit_code is None else f"exit code {ended.exit_code}"
    return ", ".join(filter(None, (code, words[-1][:MAX_FAILURE]))) or "no exit code"
