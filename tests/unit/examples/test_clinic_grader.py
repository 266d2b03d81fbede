"""The clinic's grader on whatever an execution may leave behind: it always returns a reward, and never a wrong one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import grader
import pytest
import tasks

LIMIT_S = 0.1

HOSTILE: dict[str, str] = {
    "no syntax": "def add(:\n",
    "null bytes": "x = 1\x00",
    "deep nesting": "x = " + "(" * 5000 + ")" * 5000,
    "endless import": "while True: pass\n",
    "endless import that catches once": "try:\n    while True: pass\nexcept BaseException:\n    while True: pass\n",
    "exits": "raise SystemExit(0)\n",
    "interrupts": "raise KeyboardInterrupt\n",
    "recursion": "def f(): return f()\nf()\n",
    "memory": "x = [0] * 10 ** 15\n",
    "imports": "import os\nos._exit(0)\n",
    "opens files": "open('/etc/hostname')\n",
    "too large": "#" * (grader.MAX_SOURCE_BYTES + 1),
    "empty": "",
}


@pytest.fixture
def task(tmp_path: Path) -> Path:
    tasks.write(tasks.generate(0, "train", 1), tmp_path / "task")
    return tmp_path / "task"


@pytest.fixture
def solved(task: Path) -> Path:
    """The workspace with every bug repaired."""
    for path in (task / "solution").iterdir():
        (task / "workspace" / path.name).write_bytes(path.read_bytes())
    return task / "workspace"


def broken_module(task: Path) -> str:
    return next(path.stem for path in sorted((task / "solution").iterdir()))


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_module_costs_its_own_tests_and_no_others(kind: str, task: Path, solved: Path) -> None:
    name = broken_module(task)
    (solved / f"{name}.py").write_text(HOSTILE[kind], encoding="utf-8")
    grade = grader.grade(solved, task, LIMIT_S)
    num_bugs = len(list((task / "solution").iterdir()))
    assert grade.reward == pytest.approx((num_bugs - 1) / num_bugs)
    assert {test for test, ok in grade.passed.items() if not ok} == {f"test_{name}_parts", f"test_{name}_whole"}


def test_breaking_a_healthy_module_costs_too(task: Path, solved: Path) -> None:
    healthy = next(name for name in tasks.NAMES if not (task / "solution" / f"{name}.py").exists())
    (solved / f"{healthy}.py").write_text("", encoding="utf-8")
    assert grader.grade(solved, task).reward < 1.0


def plant_fifo(path: Path) -> None:
    os.mkfifo(path)


def plant_link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "solution" / path.name)


def plant_directory(path: Path) -> None:
    path.mkdir()


def plant_nothing(path: Path) -> None:
    """The file is missing."""


@pytest.mark.parametrize("plant", [plant_fifo, plant_link, plant_directory, plant_nothing])
def test_what_is_no_plain_file_is_not_read(plant: Callable[[Path], None], task: Path, solved: Path) -> None:
    name = broken_module(task)
    (solved / f"{name}.py").unlink()
    plant(solved / f"{name}.py")
    assert grader.grade(solved, task).passed[f"test_{name}_whole"] is False


def test_an_object_that_equals_everything_earns_nothing(task: Path, solved: Path) -> None:
    name = broken_module(task)
    source = (task / "workspace" / f"{name}.py").read_text(encoding="utf-8")
    cheat = "class Any(int):\n    __eq__ = lambda self, other: True\n    __hash__ = int.__hash__\n"
    names = [line.split("(")[0].removeprefix("def ") for line in source.splitlines() if line.startswith("def ")]
    (solved / f"{name}.py").write_text(cheat + "".join(f"def {n}(*_): return Any()\n" for n in names), "utf-8")
    assert grader.grade(solved, task).passed[f"test_{name}_parts"] is False


def test_one_module_cannot_change_the_built_ins_of_another(task: Path, solved: Path) -> None:
    name = broken_module(task)
    source = (solved / f"{name}.py").read_text(encoding="utf-8")
    (solved / f"{name}.py").write_text(source + "\n__builtins__.clear()\n__builtins__['len'] = lambda x: 0\n", "utf-8")
    passed = grader.grade(solved, task).passed
    assert all(ok for test, ok in passed.items() if not test.startswith(f"test_{name}_"))


def test_a_task_that_is_broken_itself_is_an_error_and_no_reward(task: Path, solved: Path) -> None:
    (task / "tests" / "test_hidden.py").unlink()
    with pytest.raises(FileNotFoundError):
        grader.grade(solved, task)


def test_a_worker_grades_again_after_code_that_nothing_stops(task: Path, solved: Path) -> None:
    worker = grader.GraderWorker(answer_within_s=8.0)
    try:
        assert worker.grade(solved, task) == 1.0
        name = broken_module(task)
        keep = (solved / f"{name}.py").read_text(encoding="utf-8")
        (solved / f"{name}.py").write_text("x = sum(range(10 ** 13))\n", encoding="utf-8")  # no signal reaches into it
        assert worker.grade(solved, task) is None
        (solved / f"{name}.py").write_text(keep, encoding="utf-8")
        assert worker.grade(solved, task) == 1.0
    finally:
        worker.close()
