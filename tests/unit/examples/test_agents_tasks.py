"""Queries with directories: the same bytes from the same seed, disjoint splits, one list of directories everywhere."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import agents_baselines
import agents_harness
import agents_sessions
import agents_tasks
import pytest
from gyre.reward.graders.base import Task
from gyre.reward.graders.functions import FunctionsGrader, TimeLimits
from gyre.reward.sandbox import Limits, Plain


@pytest.fixture
async def grader(tmp_path: Path) -> AsyncIterator[FunctionsGrader]:
    grader = FunctionsGrader(Plain(), tmp_path / "grading", TimeLimits(), Limits())
    yield grader
    await grader.close()


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    for directory in ("one", "two"):
        agents_tasks.write_all(tmp_path / directory, 3, {"train": 2, "held-out": 2})
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    agents_tasks.write_all(tmp_path / "three", 4, {"train": 2, "held-out": 2})
    assert files_of(tmp_path / "one") != files_of(tmp_path / "three")


def test_no_sick_directory_of_a_held_out_query_starts_as_one_that_is_trained_on() -> None:
    found = {
        split: {tuple(m.kind for m in modules) for n in range(200) for _, modules in
                agents_tasks.generate(0, split, n).directories()}
        for split in ("train", "held-out")
    }
    assert found["held-out"] == {*agents_tasks.patterns_of("held-out"), agents_tasks.HEALTHY}
    assert found["train"] & found["held-out"] == {agents_tasks.HEALTHY}
    warm_start = {tuple(row) for row in agents_sessions.training_patterns().tolist()}
    assert found["train"] - warm_start == {agents_tasks.HEALTHY}
    assert not found["held-out"] & warm_start


def test_an_unknown_split_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="split: 'test' must be one of"):
        agents_tasks.generate(0, "test", 0)


def test_harness_and_tasks_mean_the_same_directories_and_lengths() -> None:
    assert agents_harness.DIRECTORIES == agents_tasks.DIRECTORIES
    assert agents_sessions.COMMANDS_PER_CONTEXT == agents_harness.COMMANDS_PER_CONTEXT == agents_harness.NUM_COMMANDS / 2
    assert agents_sessions.TURNS_PER_CONTEXT == agents_harness.TURNS_PER_CONTEXT


async def test_nothing_earns_nothing_and_the_solution_everything(tmp_path: Path, grader: FunctionsGrader) -> None:
    agents_tasks.write_all(tmp_path, 0, {"held-out": 12})
    directories = sorted((tmp_path / "held-out").iterdir())
    assert await agents_baselines.value_of(agents_baselines.leave_it, directories, 0, grader) == 0.0
    assert await agents_baselines.value_of(agents_baselines.solve, directories, 0, grader) == 1.0
    assert 0.1 < await agents_baselines.value_of(agents_baselines.act_at_random, directories, 0, grader) < 0.5


async def test_each_module_counts_on_its_own(tmp_path: Path, grader: FunctionsGrader) -> None:
    query = agents_tasks.generate(5, "train", 1)
    agents_tasks.write(query, tmp_path / "task", 5)
    broken = sorted((tmp_path / "task" / "solution").glob("*/*.py"))
    assert [path.stem for path in broken] == [m.name for m in query.modules if m.kind]
    for num, path in enumerate(broken):
        score = await grader.grade(Task(tmp_path / "task"), tmp_path / "task" / "workspace")
        assert score.reward == pytest.approx(num / len(broken))
        (tmp_path / "task" / "workspace" / path.parent.name / path.name).write_bytes(path.read_bytes())
