"""Harbor tasks and pytest tasks in a real bubblewrap box; skipped where there is none."""

import socket
from pathlib import Path

import pytest
from gyre.contracts.errors import ConfigError, EvaluationError
from gyre.reward.core import Score
from gyre.reward.graders.base import Task, TaskBroken, VerifierTimeout
from gyre.reward.graders.harbor import HarborGrader
from gyre.reward.graders.pytest import PytestGrader
from gyre.reward.sandbox import Limits, Plain, find_bubblewrap

BWRAP, WHY_NOT = find_bubblewrap()
needs_bwrap = pytest.mark.skipif(BWRAP is None, reason=WHY_NOT)
WORKSPACE = {"a.py": "def double(x):\n    return 2 * x\n"}


def write(directory: Path, files: dict[str, str]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def harbor(base: Path, timeout_s: float = 20.0, key: str = "") -> HarborGrader:
    return HarborGrader(BWRAP, base / "scratch", timeout_s, Limits(), key)


async def judge(base: Path, script: str, workspace: dict[str, str] = WORKSPACE, toml: str = "", **options: object) -> Score:
    task = Task(write(base / "task", {"tests/test.sh": script, "tests/expected": "4", "solution/solve.sh": "secret",
                                      "task.toml": toml}))
    grader = harbor(base, **options)
    return await grader.grade(task, write(grader.room / "w", workspace))


@needs_bwrap
async def test_the_reward_file_counts_and_the_exit_code_does_not(tmp_path: Path) -> None:
    score = await judge(tmp_path, "cd /app && test $(python -c 'import a; print(a.double(2))') = $(cat /tests/expected)"
                                  " && echo 0.75 > /logs/verifier/reward.txt\nexit 3")
    assert score.reward == 0.75


@needs_bwrap
async def test_a_reward_that_the_agent_left_is_not_found(tmp_path: Path) -> None:
    """Public report: the agent writes /logs/verifier/reward.txt = 1 and solves nothing."""
    forged = {"logs/verifier/reward.txt": "1", "reward.txt": "1", "reward.json": '{"reward": 1}'}
    with pytest.raises(EvaluationError, match="neither reward.json nor reward.txt.*exit 7"):
        await judge(tmp_path, "exit 7", WORKSPACE | forged)


@needs_bwrap
async def test_a_verifier_that_times_out_gives_no_reward_and_names_its_limit(tmp_path: Path) -> None:
    with pytest.raises(VerifierTimeout, match="verifier.timeout_sec = 0.5 fired.*thinking"):
        await judge(tmp_path, "echo thinking; echo 1 > /logs/verifier/reward.txt; sleep 1000",
                    toml="[verifier]\ntimeout_sec = 0.5\n")


@needs_bwrap
async def test_a_verifier_that_cannot_reach_the_network_is_a_failure_not_a_zero(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        reach = f"exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]} && echo 0 > /logs/verifier/reward.txt"
        with pytest.raises(EvaluationError, match="neither.*refused"):
            await judge(tmp_path, reach)


@needs_bwrap
async def test_what_runs_on_in_the_background_holds_nobody_up(tmp_path: Path) -> None:
    """Public report: `sleep 30 & echo started` comes back at once, although the pipe stays open."""
    score = await judge(tmp_path, "sleep 1000 & setsid sleep 1000 & echo 1 > /logs/verifier/reward.txt", timeout_s=60.0)
    assert score.reward == 1.0


@needs_bwrap
async def test_a_megabyte_on_one_line_is_cut_in_the_middle(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="the end"):
        await judge(tmp_path, "head -c 1000000 /dev/zero | tr '\\0' x; echo the end")


@needs_bwrap
async def test_the_box_shows_nothing_it_should_not(tmp_path: Path) -> None:
    questions = {"tests": "echo x > /tests/y", "usr": "echo x > /usr/y", "root": "echo x > /y", "home": "ls -d /home",
                 "solution": f"ls -d /solution {tmp_path / 'task/solution'}", "others": f"ls -d {tmp_path}",
                 "shadow": "cat /etc/shadow", "gyre": "env | grep GYRE", "processes": "test -e /proc/20"}
    script = "".join(f"if ({ask}) >&2; then echo '\"{name}\": 1,' >> /tmp/seen; fi\n" for name, ask in questions.items())
    score = await judge(tmp_path, f"touch /tmp/seen\n{script}"
                                  'echo "{ $(cat /tmp/seen) \\"reward\\": 0.5 }" > /logs/verifier/reward.json')
    assert (score.reward, score.metrics) == (0.5, {})


@needs_bwrap
@pytest.mark.parametrize(("toml", "message"), [
    ("[verifier]\ntimeout_sec = 0\n", "timeout_sec = 0"), ("[verifier]\nenv = {A = 1}\n", "must be a string"), ("[", "toml"),
])
async def test_a_description_that_is_wrong_is_told(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(TaskBroken, match=message):
        await judge(tmp_path, "exit 0", toml=toml)


@needs_bwrap
async def test_the_environment_of_the_verifier_is_passed(tmp_path: Path) -> None:
    score = await judge(tmp_path, 'echo "{\\"$NAME\\": 1, \\"b\\": 0}" > /logs/verifier/reward.json',
                        toml='[verifier]\nenv = {NAME = "chosen"}\n', key="chosen")
    assert (score.reward, score.metrics) == (1.0, {"b": 0.0})


@pytest.mark.parametrize("grader", ["harbor", "pytest"])
def test_without_bubblewrap_it_is_refused_at_the_start(tmp_path: Path, grader: str) -> None:
    with pytest.raises(ConfigError, match=f"reward.grader = '{grader}'.*bubblewrap"):
        if grader == "harbor":
            HarborGrader(Plain(), tmp_path, 1.0, Limits())
        PytestGrader(Plain(), tmp_path, 1.0, 1.0, Limits())


# ------------------------------------------------------------ pytest

PYTEST = """
import pytest
import a

@pytest.fixture
def four():
    return 4

def test_fixture(four):
    assert a.double(2) == four

@pytest.mark.parametrize("x", [1, 3])
def test_cases(x):
    assert a.double(x) == 2 * x

class TestMore:
    def test_zero(self, tmp_path):
        assert a.double(0) == 0
"""


async def run_pytest(base: Path, workspace: dict[str, str], tests: dict[str, str] | None = None, toml: str = "") -> Score:
    task = Task(write(base / "task", {f"tests/{n}": t for n, t in (tests or {"test_a.py": PYTEST}).items()}
                      | {"task.toml": toml}))
    grader = PytestGrader(BWRAP, base / "scratch", 30.0, 2.0, Limits())
    return await grader.grade(task, write(grader.room / "w", workspace))


@needs_bwrap
@pytest.mark.parametrize(("a", "passed"), [
    (WORKSPACE["a.py"], 3),
    ("def double(x): return 4 if x == 2 else 2", 1),
    ("def double(x): return 2 * x if x != 3 else 0", 2),
    ("import os\nos._exit(0)", 0),
    ("import sys\nsys.exit(0)", 0),
    ("import atexit, os\natexit.register(os._exit, 0)\ndef double(x): return 1", 0),
    ("def double(x):\n    while x == 3: pass\n    return 2 * x", 2),
    ("import pytest\npytest.skip('all', allow_module_level=True)", 0),
])
async def test_pytest_counts_functions_that_passed_and_nothing_else(tmp_path: Path, a: str, passed: int) -> None:
    score = await run_pytest(tmp_path, {"a.py": a})
    assert (score.num_passed, score.num_checks) == (passed, 3), score.details


CONFTEST = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""


@needs_bwrap
@pytest.mark.parametrize("files", [
    {"conftest.py": CONFTEST}, {"conftest.py": "1/0"}, {"pytest.ini": "[pytest]\naddopts = --co"}, {"pytest.py": "1/0"},
    {"tests/conftest.py": CONFTEST}, {"pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--co'"}, {"json.py": "1/0"},
    {"sitecustomize.py": "1/0"}, {"test_a.py": "1/0"}, {"evil.pth": "import os; os._exit(0)"},
])
async def test_a_workspace_conftest_neither_helps_nor_hurts(tmp_path: Path, files: dict[str, str]) -> None:
    assert (await run_pytest(tmp_path / "good", WORKSPACE | files)).reward == 1.0
    bad = await run_pytest(tmp_path / "bad", {"a.py": "def double(x): return 1"} | files)
    assert bad.reward == 0.0


@needs_bwrap
async def test_a_helper_and_a_conftest_of_the_hidden_tests_are_used(tmp_path: Path) -> None:
    tests = {"conftest.py": "import pytest\n@pytest.fixture\ndef four(): return 4\n",
             "helper.py": "def same(a, b): return a == b",
             "test_b.py": "import a\nfrom helper import same\ndef test_b(four): assert same(a.double(2), four)\n"}
    assert (await run_pytest(tmp_path, WORKSPACE, tests)).reward == 1.0


@needs_bwrap
async def test_pytest_that_does_not_start_is_an_evaluator_failure(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="pytest did not start"):
        grader = PytestGrader(BWRAP, tmp_path / "s", 30.0, 2.0, Limits(memory_bytes=1024))
        task = Task(write(tmp_path / "task", {"tests/test_a.py": PYTEST}))
        await grader.grade(task, write(grader.room / "w", WORKSPACE))
