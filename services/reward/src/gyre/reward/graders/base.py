"""What a grader is: it turns a task's hidden checks and a workspace into a score, or says why it cannot."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gyre.contracts.errors import EvaluationError
from gyre.reward.core import Score


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


class FinalFailure(EvaluationError):
    """No score came about, and another attempt would give the same."""


class TaskBroken(FinalFailure):
    """The task or the configuration is wrong."""


class VerifierTimeout(FinalFailure):
    """The verifier's own limit fired. That is no word about the workspace, and a second run would cost as much."""


class Grader(Protocol):
    """Grades one workspace at a time. Workspaces are unpacked below `room`, which belongs to this grader alone."""

    name: str
    room: Path

    async def grade(self, task: Task, workspace: Path) -> Score:
        """Raises EvaluationError if no score came about, FinalFailure if none ever will."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Checks:
    """The ids that count, as the tests themselves have them; `repair` fail on the untouched workspace, `keep` pass."""

    repair: tuple[str, ...]
    keep: tuple[str, ...] = ()

    @property
    def ids(self) -> tuple[str, ...]:
        return self.repair + self.keep


Outcomes = dict[str, tuple[bool, str]]  # id -> passed, and in words why not


def score_of(checks: Checks, outcomes: Outcomes, metrics: dict[str, float] | None = None) -> Score:
    """Share of `repair` that passes, times share of `keep` that still does: an untouched workspace has 0.

    Only ids count that are in `checks`; one that is absent from `outcomes` has failed.
    """
    passed = {i for i in checks.ids if outcomes.get(i, (False, ""))[0]}
    details = {i: outcomes[i][1] if i in outcomes else "did not run" for i in checks.ids if i not in passed}
    reward = _share(checks.repair, passed) * _share(checks.keep, passed)
    return Score(reward, len(passed), len(checks.ids), metrics or {}, details)


def _share(ids: tuple[str, ...], passed: set[str]) -> float:
    return sum(i in passed for i in ids) / len(ids) if ids else 1.0
