"""What is said of an execution: a failing evaluator is retried, then unscorable, and never a zero."""

import asyncio
import io
import tarfile
from pathlib import Path

import pytest
from gyre.contracts.errors import EvaluationError, SandboxError
from gyre.contracts.events import BlobRef, EvaluationRequested, ExecutionScored, ExecutionUnscorable
from gyre.reward.core import Again, Budget, Failed, Graded, NothingGradable, Score, conclude, refuse_delivery
from gyre.reward.evaluation import Evaluation, TasksRoot
from gyre.reward.graders.base import FinalFailure, Task
from gyre.reward.snapshot import SnapshotLimits
from gyre.runtime.blobs import DirectoryBlobs

BUDGET = Budget(max_attempts=3, max_deliveries=2, first_delay_s=1.0, max_delay_s=1.5)


def packed(files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


def request(snapshot: BlobRef | None = None, task: str = "train/t1", ending: str = "timed_out") -> EvaluationRequested:
    return EvaluationRequested("g0-x0", "g0", "q0", task, "train", ending, snapshot or BlobRef("s.tar", "0" * 32, 0))


class RecordingClock:
    """Time stands still; what was slept is noted."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def now(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def read_and_spoil(workspace: Path) -> dict[str, str]:
    """What is in the workspace; afterwards it is no longer as it was, and hard to remove."""
    seen = {p.name: p.read_text() for p in workspace.iterdir()}
    (workspace / "a.py").write_text("changed by its grading")
    (workspace / "locked").mkdir(mode=0)
    following = int(workspace.name[1:]) + 1
    (workspace.parent / f"w{following}").symlink_to(workspace)
    (workspace.parent / f"w{following + 1}").write_text("in the way of what comes next")
    return seen


class ScriptedGrader:
    """Gives the next of `answers`; raises it if it is an error. Remembers what was in each workspace."""

    name = "scripted"

    def __init__(self, room: Path, *answers: Score | Exception) -> None:
        self.room = room
        self.answers = list(answers)
        self.seen: list[dict[str, str]] = []
        self.active = 0

    async def grade(self, task: Task, workspace: Path) -> Score:
        self.active += 1
        assert self.active == 1, "one workspace at a time"
        self.seen.append(read_and_spoil(workspace))
        await asyncio.sleep(0)
        self.active -= 1
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        pass


class Bench:
    def __init__(self, base: Path, *answers: Score | Exception) -> None:
        (base / "tasks/train/t1").mkdir(parents=True)
        (base / "room").mkdir()
        self.blobs = DirectoryBlobs(base / "blobs")
        self.grader = ScriptedGrader(base / "room", *answers)
        self.clock = RecordingClock()
        self.evaluation = Evaluation(self.grader, self.blobs, TasksRoot(base / "tasks"), SnapshotLimits(total_bytes=5000),
                                     BUDGET, self.clock, "reward-0")

    async def evaluate(self, files: dict[str, str], task: str = "train/t1") -> ExecutionScored | ExecutionUnscorable:
        return await self.evaluation.evaluate(request(self.blobs.put("s.tar", packed(files)), task))


async def test_a_timed_out_execution_counts_with_what_its_workspace_earned(tmp_path: Path) -> None:
    """Public reports: an agent's timeout with a verifier's 0.4 is a valid sample; the verifier's word stands."""
    bench = Bench(tmp_path, Score(0.4, 2, 5, {"coverage": 0.3}))
    said = await bench.evaluate({"a.py": "1"})
    assert said == ExecutionScored("g0-x0", "g0", 0.4, 2, 5, "reward-0", metrics={"coverage": 0.3})
    assert list((tmp_path / "room").iterdir()) == []


async def test_a_failing_evaluator_is_tried_again_on_a_fresh_workspace(tmp_path: Path) -> None:
    bench = Bench(tmp_path, EvaluationError("died"), SandboxError("gone"), Score(1.0, 1, 1))
    said = await bench.evaluate({"a.py": "1"})
    assert isinstance(said, ExecutionScored) and (said.reward, said.attempts) == (1.0, 3)
    assert bench.grader.seen == [{"a.py": "1"}] * 3 and bench.clock.slept == [1.0, 1.5]


async def test_an_evaluator_that_fails_every_time_gives_no_score_and_never_a_zero(tmp_path: Path) -> None:
    bench = Bench(tmp_path, *[EvaluationError("the verifier crashed")] * 3)
    said = await bench.evaluate({"a.py": "1"})
    assert said == ExecutionUnscorable("g0-x0", "g0", "EvaluationError: the verifier crashed", "reward-0", attempts=3)


@pytest.mark.parametrize(("files", "task", "reason"), [
    ({"a.py": "1"}, "train/missing", "no directory"),
    ({"a.py": "1"}, "../outside", "no directory"),
    ({"a.py": "x" * 6000}, "train/t1", "more than 5000 bytes"),
])
async def test_what_can_never_succeed_is_not_tried_again(tmp_path: Path, files: dict, task: str, reason: str) -> None:
    said = await Bench(tmp_path).evaluate(files, task)
    assert isinstance(said, ExecutionUnscorable) and reason in said.reason and said.attempts == 1


async def test_a_final_failure_of_the_grader_is_not_tried_again(tmp_path: Path) -> None:
    said = await Bench(tmp_path, FinalFailure("verifier.timeout_sec = 600 fired")).evaluate({"a.py": "1"})
    assert isinstance(said, ExecutionUnscorable) and (said.attempts, "600 fired" in said.reason) == (1, True)


async def test_a_snapshot_that_cannot_be_read_is_an_evaluator_failure(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    said = await bench.evaluation.evaluate(request(BlobRef("lost.tar", "0" * 32, 10)))
    assert isinstance(said, ExecutionUnscorable) and (said.attempts, "missing" in said.reason) == (3, True)


async def test_only_an_empty_workspace_gets_the_placeholder(tmp_path: Path) -> None:
    said = await Bench(tmp_path).evaluate({})
    assert isinstance(said, ExecutionScored) and said.placeholder and said.reward == 0.0
    scored = await Bench(tmp_path / "2", Score(0.0, 0, 1)).evaluate({"a": ""})
    assert isinstance(scored, ExecutionScored) and not scored.placeholder


async def test_members_that_were_left_out_are_counted_in_the_result(tmp_path: Path) -> None:
    said = await Bench(tmp_path, Score(1.0, 1, 1)).evaluate({"a.py": "1", "../b": "2"})
    assert isinstance(said, ExecutionScored) and said.metrics == {"num_refused_members": 1.0}


async def test_requests_wait_for_each_other(tmp_path: Path) -> None:
    bench = Bench(tmp_path, *[Score(1.0, 1, 1)] * 5)
    said = await asyncio.gather(*(bench.evaluate({"a.py": "1"}) for _ in range(5)))
    assert [s.reward for s in said] == [1.0] * 5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, None, "1"])
def test_a_reward_that_is_no_finite_number_is_no_score(value: object) -> None:
    with pytest.raises(EvaluationError, match="finite"):
        Score(value, 0, 1)


def test_every_number_of_failures_ends_within_the_budget() -> None:
    said = [conclude(request(), "e", Failed("r"), n, BUDGET) for n in (1, 2, 3)]
    assert said[:2] == [Again(1.0), Again(1.5)] and isinstance(said[2], ExecutionUnscorable)


def test_a_final_failure_ends_at_once_and_its_reason_is_bounded() -> None:
    said = conclude(request(), "e", Failed("r" * 10_000, final=True), 1, BUDGET)
    assert isinstance(said, ExecutionUnscorable) and len(said.reason) == 500


def test_work_that_takes_its_evaluators_down_ends_too() -> None:
    assert refuse_delivery(request(), "e", 2, BUDGET) is None
    said = refuse_delivery(request(), "e", 3, BUDGET)
    assert isinstance(said, ExecutionUnscorable) and (said.attempts, "3 times" in said.reason) == (3, True)


def test_a_score_and_a_placeholder_carry_how_many_attempts_they_took() -> None:
    scored = conclude(request(), "e", Graded(Score(0.5, 1, 2)), 2, BUDGET)
    empty = conclude(request(), "e", NothingGradable(3), 1, BUDGET)
    assert isinstance(scored, ExecutionScored) and scored.attempts == 2
    assert isinstance(empty, ExecutionScored) and empty.metrics == {"num_refused_members": 3.0}
