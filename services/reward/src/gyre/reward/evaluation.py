"""One evaluation: fetch the snapshot, unpack it afresh, grade it, clean up; again within the budget."""

import asyncio
import itertools
import logging
from dataclasses import dataclass
from pathlib import Path

from gyre.contracts.errors import BrokenBody, EvaluationError, SandboxError
from gyre.contracts.events import BlobRef, EvaluationRequested
from gyre.reward.core import Again, Attempt, Budget, Failed, Graded, NothingGradable, Result, conclude
from gyre.reward.graders.base import FinalFailure, Grader, Task, TaskBroken
from gyre.reward.sandbox import remove_tree
from gyre.reward.snapshot import SnapshotLimits, SnapshotRefused, extract, load_archive
from gyre.runtime.blobs import BlobStore
from gyre.runtime.clock import Clock

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TasksRoot:
    """Where task directories are; a task is named relative to it, or by an absolute path."""

    path: Path

    def find(self, task: str) -> Task:
        """Raises TaskBroken naming the directory that is missing."""
        root = self.path / task
        if ".." in Path(task).parts or not root.is_dir():
            raise TaskBroken(f"task {task!r}: no directory {root}")
        return Task(root)


class Evaluation:
    """Evaluates one request at a time with one grader; others wait."""

    def __init__(self, grader: Grader, blobs: BlobStore, tasks: TasksRoot, limits: SnapshotLimits, budget: Budget,
                 clock: Clock, evaluator: str) -> None:
        self._grader = grader
        self._blobs = blobs
        self._tasks = tasks
        self._limits = limits
        self._budget = budget
        self._clock = clock
        self._evaluator = evaluator
        self._serial = itertools.count()
        self._lock = asyncio.Lock()

    async def evaluate(self, request: EvaluationRequested) -> Result:
        """The fact to be said about `request.execution`."""
        for number in itertools.count(1):
            attempt = await self.attempt(request.task, request.snapshot)
            if isinstance(attempt, Failed):
                log.warning("%s: attempt %d failed: %s", request.execution, number, attempt.reason)
            said = conclude(request, self._evaluator, attempt, number, self._budget)
            if not isinstance(said, Again):
                return said
            await self._clock.sleep(said.delay_s)
        raise AssertionError("unreachable: every budget ends")

    async def attempt(self, task: str, snapshot: BlobRef) -> Attempt:
        """One try, on a workspace unpacked for it alone. Failures are values here, never exceptions."""
        async with self._lock:
            workspace = self._grader.room / f"w{next(self._serial)}"
            try:
                return await self._grade(self._tasks.find(task), snapshot, workspace)
            except (FinalFailure, SnapshotRefused) as error:
                return Failed(str(error), final=True)
            except (EvaluationError, SandboxError, BrokenBody, OSError) as error:
                return Failed(f"{type(error).__name__}: {error}")
            finally:  # also what graded code put beside its workspace
                for left in self._grader.room.iterdir():
                    remove_tree(left)

    async def _grade(self, task: Task, snapshot: BlobRef, workspace: Path) -> Attempt:
        archive = load_archive(self._blobs, snapshot, self._limits)
        extracted = extract(archive, workspace, self._limits)
        for refusal in extracted.refused:
            log.info("snapshot %s: left out %r: %s", snapshot.path, refusal.path, refusal.reason)
        if not extracted.num_files:
            return NothingGradable(len(extracted.refused))
        return Graded(await self._grader.grade(task, workspace), len(extracted.refused))
