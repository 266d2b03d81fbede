"""The functions grader on honest, broken and hostile workspaces; in a plain process, and in bubblewrap where it is."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from gyre.contracts.errors import EvaluationError
from gyre.reward.core import Score
from gyre.reward.graders.base import Task, TaskBroken
from gyre.reward.graders.functions import FunctionsGrader, TimeLimits
from gyre.reward.sandbox import Limits, Plain, Sandbox, find_bubblewrap

TESTS = """
from a import double

def test_two():
    assert double(2) == 4

def test_three():
    assert double(3) == 6

def test_late_import():
    import b
    assert b.name() == "b"

def test_zero():
    assert double(0) == 0
"""
HONEST = {"a.py": "def double(x):\n    return 2 * x\n", "b.py": "def name():\n    return 'b'\n"}
QUICK = TimeLimits(test_cpu_s=0.3, test_wall_s=1.0, workspace_s=20.0, margin_s=20.0)
BWRAP, WHY_NOT = find_bubblewrap()
SANDBOXES = [pytest.param(Plain(), id="plain"),
             pytest.param(BWRAP, id="bwrap", marks=pytest.mark.skipif(BWRAP is None, reason=WHY_NOT))]


def write(directory: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


class Bench:
    """A grader and a task; `grade` puts files on top of the honest workspace."""

    def __init__(self, sandbox: Sandbox, base: Path) -> None:
        self.grader = FunctionsGrader(sandbox, base / "scratch", QUICK, Limits())
        self.task = Task(write(base / "task", {"tests/test_all.py": TESTS, "solution/a.py": HONEST["a.py"]}))
        self.num = 0

    async def grade(self, files: dict[str, str], task: Task | None = None) -> Score:
        self.num += 1
        workspace = self.grader.room / str(self.num)
        workspace.mkdir()
        return await self.grader.grade(task or self.task, write(workspace, HONEST | files))


@pytest_asyncio.fixture(params=SANDBOXES)
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(request.param, tmp_path)
    yield bench
    await bench.grader.close()


def failed(score: Score) -> set[str]:
    return {name.partition("::")[2] for name in score.details}


ALL = {"test_two", "test_three", "test_late_import", "test_zero"}


async def test_an_honest_workspace_passes_everything(bench: Bench) -> None:
    score = await bench.grade({})
    assert (score.reward, score.num_passed, score.num_checks) == (1.0, 4, 4)


async def test_partial_credit_is_the_share_of_tests(bench: Bench) -> None:
    score = await bench.grade({"a.py": "def double(x):\n    return x + 2\n"})
    assert score.reward == 0.5 and failed(score) == {"test_three", "test_zero"}


async def test_one_worker_grades_many_and_nothing_is_left_from_the_one_before(bench: Bench) -> None:
    await bench.grade({})
    pid = bench.grader.worker_pid
    assert (await bench.grade({"a.py": "def double(x):\n    return 1\n"})).reward == 0.25
    assert (await bench.grade({"a.py": "import sys, builtins; sys.modules['b'] = builtins.abs = 3\n"})).reward == 0
    assert (await bench.grade({})).reward == 1.0
    assert bench.grader.worker_pid == pid


@pytest.mark.parametrize(("a", "lost"), [
    ("import sys\nsys.exit(0)", ALL),
    ("import os\nos._exit(0)", ALL),
    ("raise SystemExit", ALL),
    ("def double(x", ALL),
    ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", ALL),
    ("while True: pass", ALL),
    ("import time\ntime.sleep(1e6)", ALL),
    ("def double(x):\n    while x == 3: pass\n    return 2 * x", {"test_three"}),
    ("import os\ndef double(x):\n    if x == 3: os._exit(0)\n    return 2 * x", {"test_three"}),
    ("import sys\ndef double(x):\n    if x == 3: sys.exit(0)\n    return 2 * x", {"test_three"}),
    ("def double(x):\n    while x == 3:\n        try:\n            while True: pass\n"
     "        except BaseException: pass\n    return 2 * x", {"test_three"}),
    ("import signal\nfor n in (signal.SIGALRM, signal.SIGPROF): signal.signal(n, signal.SIG_IGN)\n"
     "def double(x):\n    while x == 3: pass\n    return 2 * x", {"test_three"}),
    ("def double(x):\n    return double(x)", {"test_two", "test_three", "test_zero"}),
    ("def double(x):\n    return [0] * 10**12", {"test_two", "test_three", "test_zero"}),
    ("class E(Exception):\n    def __str__(self): raise E\ndef double(x):\n    raise E",
     {"test_two", "test_three", "test_zero"}),
])
async def test_what_breaks_costs_its_own_tests_and_no_others(bench: Bench, a: str, lost: set[str]) -> None:
    score = await bench.grade({"a.py": a})
    assert failed(score) == lost, score.details
    assert (await bench.grade({})).reward == 1.0


FORGE_OUTPUT = """
import json
for line in ('{"id": 0, "results": {}}', json.dumps(["end", 0, True, ""]), "PASSED 4 passed"):
    print(line, flush=True)
import os
for fd in (1, 2):
    os.write(fd, b'["end",0,true,""]\\n')
def double(x): return 0
"""
FORGE_PIPE = """
import json, os
for i in range(4):
    os.write(3, json.dumps(["begin", i, False, ""]).encode() + b"\\n")
    os.write(3, json.dumps(["end", i, True, ""]).encode() + b"\\n")
os.write(3, json.dumps(["done", 4, False, ""]).encode() + b"\\n")
os._exit(0)
"""
FLOOD_PIPE = "import os\nwhile True: os.write(3, b'x' * 65536)"
FIND = """
import sys
frame = sys._getframe()
while "reports" not in frame.f_locals: frame = frame.f_back
reports = frame.f_locals["reports"]
"""
PATCH = """
import builtins, os, json, signal
class Fake(AssertionError):
    def __new__(cls, *a): os._exit(0)
builtins.AssertionError = Fake
json.dumps = lambda *a, **k: '["end", 0, true, ""]'
signal.setitimer = lambda *a: None
def double(x): return 0
"""


async def test_what_a_workspace_prints_is_no_result(bench: Bench) -> None:
    assert failed(await bench.grade({"a.py": FORGE_OUTPUT})) == {"test_two", "test_three"}


@pytest.mark.parametrize("a", [
    FORGE_PIPE, FLOOD_PIPE, "import os\nos.write(3, b'[]\\n')\nos._exit(0)",
    "import os\nos.write(3, b'[' * 5000 + b'\\n')\nos._exit(0)",
    *(f"{FIND}{forgery}; reports.flush()\ndef double(x): return 2 * x\n" for forgery in (
        "reports.add('end', 2, True)", "reports.add('done', 4)", "reports.add('import', 0)", "reports.add('begin', 1)",
        "reports.add('begin', 0); reports.add('end', 0, 1)")),
])
async def test_a_forged_report_fails_everything_and_is_told(bench: Bench, a: str) -> None:
    score = await bench.grade({"a.py": a})
    assert (score.reward, score.metrics) == (0.0, {"forged": 1.0})


async def test_patching_what_tests_rely_on_passes_no_assert(bench: Bench) -> None:
    assert failed(await bench.grade({"a.py": PATCH})) == {"test_two", "test_three"}


@pytest.mark.parametrize("files", [
    {"conftest.py": "raise SystemExit"}, {"sitecustomize.py": "raise SystemExit"}, {"usercustomize.py": "1/0"},
    {"json.py": "1/0"}, {"test_all.py": "def test_two(): pass"}, {"tests/test_all.py": "1/0"},
    {"pytest.ini": "[pytest]\naddopts = --collect-only"},
])
async def test_files_that_tests_could_stumble_over_neither_help_nor_hurt(bench: Bench, files: dict[str, str]) -> None:
    assert (await bench.grade(files)).reward == 1.0
    assert (await bench.grade(files | {"a.py": "def double(x): return 1"})).reward == 0.25


async def test_packages_and_helpers_are_found_where_they_should_be(bench: Bench, tmp_path: Path) -> None:
    task = Task(write(tmp_path / "other", {
        "tests/helper.py": "LIMIT = 3", "tests/data.txt": "4",
        "tests/test_it.py": "import math\nimport pathlib\nimport helper\nfrom pkg.inner import f\n"
                            "def test_f():\n    here = pathlib.Path(__file__).parent\n"
                            "    assert f() == helper.LIMIT + int((here / 'data.txt').read_text())\n"}))
    files = {"pkg/__init__.py": "", "pkg/inner.py": "def f(): return 7", "helper.py": "LIMIT = 9"}
    assert (await bench.grade(files, task)).reward == 1.0


async def test_the_worker_that_is_killed_is_an_evaluator_failure_and_is_replaced(bench: Bench) -> None:
    await bench.grade({})
    os.killpg(bench.grader.worker_pid, signal.SIGSTOP)
    os.killpg(bench.grader.worker_pid, signal.SIGKILL)
    try:
        assert (await bench.grade({})).reward == 1.0  # its end was seen in time
    except EvaluationError as error:
        assert "died" in str(error)
    assert (await bench.grade({})).reward == 1.0


async def test_a_worker_that_hangs_is_an_evaluator_failure_and_is_replaced(tmp_path: Path) -> None:
    bench = Bench(Plain(), tmp_path)
    bench.grader = FunctionsGrader(Plain(), tmp_path / "s", TimeLimits(workspace_s=0.1, margin_s=0.2), Limits())
    with pytest.raises(EvaluationError, match="hung for 0.3 s"):
        await bench.grade({"a.py": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\nwhile True: pass"})
    assert bench.grader.worker_pid is None
    await bench.grader.close()


async def test_many_hanging_tests_end_at_the_workspace_limit_with_what_passed(tmp_path: Path) -> None:
    bench = Bench(Plain(), tmp_path)
    times = TimeLimits(5.0, 5.0, workspace_s=0.5, margin_s=30.0)
    bench.grader = FunctionsGrader(Plain(), tmp_path / "s", times, Limits())
    score = await bench.grade({"a.py": "def double(x):\n    while x == 3: pass\n    return 2 * x"})
    assert (score.num_passed, score.details["test_all.py::test_zero"]) == (1, "did not run")
    await bench.grader.close()


async def test_its_own_grader_answers_for_the_checks_it_names(bench: Bench, tmp_path: Path) -> None:
    grader = ("CHECKS = ('built', 'fast', 'small')\n"
              "def grade(workspace):\n    import a\n"
              "    return {'built': a.double(2) == 4, 'fast': 1, 'extra': True}\n")
    task = Task(write(tmp_path / "own", {"tests/grader.py": grader}))
    score = await bench.grade({}, task)
    assert (score.num_passed, score.num_checks) == (1, 3)
    assert score.details == {"grader.py::fast": "grade says 1, not True or False",
                             "grader.py::small": "grade says None, not True or False"}


REPAIR = '[grader]\nfail_to_pass = ["test_three", "test_all.py::test_zero"]\npass_to_pass = ["test_two"]\n'


async def test_doing_nothing_earns_nothing_and_breaking_what_worked_costs(bench: Bench, tmp_path: Path) -> None:
    task = Task(write(tmp_path / "repair", {"tests/test_all.py": TESTS, "task.toml": REPAIR}))
    assert (await bench.grade({"a.py": "def double(x): return x + 2"}, task)).reward == 0.0
    assert (await bench.grade({"a.py": "def double(x): return 2 * x if x != 3 else 0"}, task)).reward == 0.5
    assert (await bench.grade({"a.py": "def double(x): return 2 * x if x != 2 else 0"}, task)).reward == 0.0
    assert (await bench.grade({}, task)).reward == 1.0


@pytest.mark.parametrize(("files", "message"), [
    ({"tests/test_a.py": "x = 1"}, "holds no"),
    ({"instruction.md": ""}, "no such directory"),
    ({"tests/test_a.py": "def test_a(tmp_path): pass"}, "takes arguments"),
    ({"tests/test_a.py": "class TestA: pass"}, "only plain functions"),
    ({"tests/test_a.py": "async def test_a(): pass"}, "async"),
    ({"tests/test_a.py": "def test_a(): pass\ndef test_a(): pass"}, "exists twice"),
    ({"tests/test_a.py": "def test_a("}, "test_a.py"),
    ({"tests/grader.py": "CHECKS = tuple(range(3))"}, "literal tuple"),
    ({"tests/test_a.py": "def test_a(): pass", "task.toml": "[grader]\nfail_to_pass = ['test_b']"}, "names 0 tests"),
    ({"tests/test_a.py": "def test_a(): pass", "task.toml": "[grader]\nfail_to_pass = []"}, "at least one"),
    ({"tests/test_a.py": "def test_a(): pass", "task.toml": "["}, "task.toml"),
])
async def test_a_task_that_cannot_be_graded_says_why(tmp_path: Path, files: dict[str, str], message: str) -> None:
    bench = Bench(Plain(), tmp_path)
    with pytest.raises(TaskBroken, match=message):
        await bench.grade({}, Task(write(tmp_path / "broken", files)))


def test_only_the_tests_of_a_task_are_shown_and_never_its_solution(tmp_path: Path) -> None:
    bench = Bench(Plain(), tmp_path)
    staged = bench.grader._stage_tests(bench.task)
    assert [p.name for p in staged.tests.iterdir()] == ["test_all.py"]
    assert not any(p.name == "solution" for p in (tmp_path / "scratch").rglob("*"))


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no limit on address space")
async def test_memory_is_limited_and_only_the_hungry_test_is_lost(bench: Bench) -> None:
    score = await bench.grade({"a.py": "def double(x):\n    if x == 3: bytearray(8 * 2**30)\n    return 2 * x"})
    assert failed(score) == {"test_three"} and "MemoryError" in score.details["test_all.py::test_three"]


BOMB = "import os\ndef double(x):\n    while x == 3: os.fork()\n    return 2 * x"
ESCAPE = "import os, time\ndef double(x):\n    if x == 3 and not os.fork():\n        os.setsid()\n" \
         "        if not os.fork(): time.sleep(1e6)\n        os._exit(0)\n    return 2 * x"


@pytest.mark.skipif(BWRAP is None, reason=WHY_NOT)
async def test_a_fork_bomb_costs_its_own_test_and_is_gone_afterwards(tmp_path: Path) -> None:
    bench = Bench(BWRAP, tmp_path)
    score = await bench.grade({"a.py": BOMB})
    assert "test_three" in failed(score) and num_processes_of(bench) == 2
    assert (await bench.grade({})).reward == 1.0
    await bench.grader.close()


@pytest.mark.skipif(BWRAP is None, reason=WHY_NOT)
async def test_a_process_that_leaves_its_session_is_gone_with_its_workspace(tmp_path: Path) -> None:
    bench = Bench(BWRAP, tmp_path)
    assert (await bench.grade({"a.py": ESCAPE})).reward == 1.0
    assert num_processes_of(bench) == 2
    await bench.grader.close()


@pytest.mark.skipif(BWRAP is None, reason=WHY_NOT)
async def test_what_processes_hold_together_is_limited_too(tmp_path: Path) -> None:
    bench = Bench(BWRAP, tmp_path)
    bench.grader = FunctionsGrader(BWRAP, tmp_path / "s", QUICK, Limits(memory_bytes=200 * 2**20))
    hungry = "import os, time\ndef double(x):\n    if x == 3:\n        [os.fork() for _ in range(3)]\n" \
             "        held = b'x' * 2**26\n        time.sleep(0.9)\n    return 2 * x"
    score = await bench.grade({"a.py": hungry})
    assert "used more than" in score.details["test_all.py::test_three"]
    await bench.grader.close()


def num_processes_of(bench: Bench) -> int:
    """Processes in the worker's box, seen from outside: its init, the worker, and what should not be there."""
    return len(psutil.Process(bench.grader.worker_pid).children(recursive=True))


async def test_an_answer_that_nobody_waits_for_is_not_taken_for_the_next_one(bench: Bench) -> None:
    await bench.grade({})
    slow = asyncio.create_task(bench.grade({"a.py": "import time\ntime.sleep(0.5)\ndef double(x): return 1\n"}))
    while bench.num < 2:
        await asyncio.sleep(0.01)
    slow.cancel()
    await asyncio.wait((slow,))
    assert slow.cancelled() and (await bench.grade({})).reward == 1.0
