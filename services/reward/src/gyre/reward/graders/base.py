"""What a grader is: it turns a task's hidden checks and a workspace into a score, or says why it cannot."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gyre.contracts.errors import EvaluationError


@dataclass(frozen=True, slots=True)
class Task:
    """A task directory: `tests/` is hidden from the agent, `solution/` also from the graded code."""

    root: Path

    @property
    def tests(self) -> Path:
        return self.root / "tests"

    @property
    def description(self) -> Path:
        return self.root / "task.toml"


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


class TaskBroken(EvaluationError):
    """The task or the configuration is wrong; trying again gives the same answer."""


class Grader(Protocol):
    """Grades one workspace at a time. Workspaces are unpacked below `room`, which belongs to this grader alone."""

    name: str
    room: Path

    async def grade(self, task: Task, workspace: Path) -> Score:
        """Raises EvaluationError if no score came about, TaskBroken if none ever will."""
        ...

    async def close(self) -> None: ...


def score_of(ids: tuple[str, ...], results: dict[str, tuple[bool, str]], metrics: dict[str, float] | None = None) -> Score:
    """The share of `ids` that passed. Only ids count that the tests themselves have; one that is absent has failed."""
    passed = [i for i in ids if results.get(i, (False, ""))[0]]
    details = {i: results[i][1] if i in results else "did not run" for i in ids if i not in passed}
    return Score(len(passed) / len(ids), len(passed), len(ids), metrics or {}, details)
