"""Queries: the same bytes from the same seed, disjoint splits, and bugs that one repair each takes away."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import baselines
import grader
import harness
import pytest
import sessions
import tasks


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def enter(monkeypatch: pytest.MonkeyPatch, task: Path, workspace: Path) -> tuple[dict[str, object], dict[str, str]]:
    """The visible tests and the states of a fresh workspace, which becomes the working directory."""
    shutil.copytree(task / "workspace", workspace)
    monkeypatch.chdir(workspace)
    tests = harness.visible_tests()
    return tests, {name: harness.state_of(name, tests) for name in harness.NAMES}


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    for directory in ("one", "two"):
        tasks.write_all(tmp_path / directory, 3, {"train": 3, "held-out": 2})
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    tasks.write_all(tmp_path / "three", 4, {"train": 3, "held-out": 2})
    assert files_of(tmp_path / "one") != files_of(tmp_path / "three")


def test_no_held_out_pattern_is_ever_trained_on() -> None:
    patterns = {split: {tasks.generate(0, split, n).pattern for n in range(400)} for split in tasks.SPLITS}
    assert len(patterns["held-out"]) > 300
    assert not patterns["train"] & patterns["held-out"]
    warm_start = {tuple(row) for row in sessions.training_patterns().tolist()}
    assert patterns["train"] <= warm_start
    assert not patterns["held-out"] & warm_start


def test_an_unknown_split_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="split: 'test' must be one of"):
        tasks.generate(0, "test", 0)


def test_nothing_earns_nothing_and_the_solution_everything(tmp_path: Path) -> None:
    tasks.write_all(tmp_path, 0, {"held-out": 12})
    directories = sorted((tmp_path / "held-out").iterdir())
    assert baselines.value_of(baselines.leave_it, directories, seed=0) == 0.0
    assert baselines.value_of(baselines.solve, directories, seed=0) == 1.0
    assert 0.1 < baselines.value_of(baselines.act_at_random, directories, seed=0) < 0.6


def test_the_tests_that_fail_are_the_ones_the_task_names(tmp_path: Path) -> None:
    for index in range(8):
        query = tasks.generate(5, "train", index)
        tasks.write(query, tmp_path / query.task, 5)
        passed = grader.grade(tmp_path / query.task / "workspace", tmp_path / query.task).passed
        assert sorted(t for t, ok in passed.items() if not ok) == sorted(query.tests_of(broken=True))
        assert sorted(t for t, ok in passed.items() if ok) == sorted(query.tests_of(broken=False))


def test_a_visible_test_fails_for_its_kind_and_only_the_right_repair_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(12):
        query = tasks.generate(1, "train", index)
        tasks.write(query, tmp_path / query.task)
        tests, states = enter(monkeypatch, tmp_path / query.task, tmp_path / f"workspace-{index}")
        assert list(states.values()) == [str(kind or ".") for kind in query.pattern]
        for module in query.modules:
            before = harness.read(f"{module.name}.py")
            for kind in range(1, 5):
                repaired = harness.repair(before, kind)
                assert repaired == (module.source(0) if kind == module.kind else before)
                assert harness.repair(module.source(0), kind) == module.source(0)
            harness.obey(f"F {module.name} {module.kind or 1}", tests, states)
        assert grader.grade(Path(), tmp_path / query.task).reward == 1.0


def test_the_warm_start_follows_the_environment_as_real_files_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = sessions.VOCABULARY
    rng = random.Random(0)
    for index in range(6):
        query = tasks.generate(2, "train", index)
        tasks.write(query, tmp_path / query.task)
        tests, states = enter(monkeypatch, tmp_path / query.task, tmp_path / f"workspace-{index}")
        pattern = list(query.pattern)
        for _ in range(9):
            place, kind = rng.randrange(6), rng.randint(1, 4)
            pattern[place] *= pattern[place] != kind
            state_SM, module_S = sessions.np.array([pattern]), sessions.np.array([place])
            following = words[sessions.next_failing(state_SM, module_S, sessions.MODULE_IDS[None])[0]]
            told = f"{harness.NAMES[place]} {pattern[place] or '.'} {following}"
            assert harness.obey(f"F {harness.NAMES[place]} {kind}", tests, states) == told


@pytest.mark.parametrize("command", ["", "F", "F a", "F a 5", "F a 0", "F g 1", "F . 1", "G a 1", "F a 1 1", "F ab 1"])
def test_a_malformed_command_changes_nothing(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    query = tasks.generate(0, "train", 0)
    tasks.write(query, tmp_path / "task")
    tests, states = enter(monkeypatch, tmp_path / "task", tmp_path / "workspace")
    before = files_of(tmp_path / "workspace")
    assert harness.obey(command, tests, states) == f"? ? {harness.next_failing('f', states)}"
    assert files_of(tmp_path / "workspace") == before
