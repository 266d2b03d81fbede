"""Harbor-style tests under pytest: `tests/test_*.py` are run on `/app`, collected and judged by our own plugin.

What is in the workspace neither helps nor hurts: its conftest.py, pytest.ini and plugins are not loaded, and it cannot
shadow pytest or the standard library. A test function counts as one check, passed when all its cases passed.
"""

import ast
import itertools
import json
import sys
from pathlib import Path

from gyre.contracts.errors import EvaluationError
from gyre.reward.graders.base import Checks, Outcomes, Score, Task, TaskBroken, VerifierTimeout, score_of
from gyre.reward.graders.harbor import require_isolated, verifier_settings
from gyre.reward.graders.tests import choose_checks
from gyre.reward.process import run_box
from gyre.reward.sandbox import Box, Limits, Mount, Sandbox, clean_environment, remove_tree

_MAX_REPORT_BYTES = 16 * 1024 * 1024


class PytestGrader:
    """Share of the task's pytest functions that pass."""

    name = "pytest"

    def __init__(self, sandbox: Sandbox, scratch: Path, timeout_s: float, test_wall_s: float, limits: Limits) -> None:
        require_isolated(sandbox, self.name)
        self.room = scratch / "room"
        self._logs = scratch / "logs"
        for directory in (self.room, self._logs):
            directory.mkdir(parents=True)
        self._sandbox = sandbox
        self._timeout_s = timeout_s
        self._test_wall_s = test_wall_s
        self._limits = limits
        self._serial = itertools.count()

    async def grade(self, task: Task, workspace: Path) -> Score:
        checks = choose_checks(task, list_pytest(task.tests))
        timeout_s, environment = verifier_settings(task, self._timeout_s)
        logs = self._logs / str(next(self._serial))
        (logs / "report").mkdir(parents=True)
        script = Path(__file__).with_name("pytest_runner.py")  # runs in the box; pytest is an extra of this package
        mounts = (Mount(workspace, "/app", writable=True), Mount(task.tests, "/tests"), Mount(script, "/run_pytest.py"),
                  Mount(logs / "report", "/report", writable=True))
        argv = (sys.executable, "-s", "-P", "/run_pytest.py", str(self._test_wall_s))
        environment = clean_environment(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", **environment)
        box = Box(argv, "/app", mounts, environment, self._limits)
        try:
            finished = await run_box(self._sandbox, box, timeout_s, logs / "output")
            if finished.exit_code is None:
                raise VerifierTimeout(f"verifier.timeout_sec = {timeout_s:g} fired; output: {finished.output[-300:]}")
            return read_report(logs / "report" / "report.jsonl", checks, finished.output)
        finally:
            remove_tree(logs)

    async def close(self) -> None:
        """Nothing is kept between workspaces."""


def list_pytest(tests: Path) -> tuple[str, ...]:
    """Every test function and method as pytest would name it, without its parameters, read from the source.

    Raises:
        TaskBroken: there are none.
    """
    ids: list[str] = []
    for file in sorted(tests.rglob("test_*.py")):
        try:
            tree = ast.parse(file.read_bytes(), str(file))
        except (SyntaxError, ValueError) as error:
            raise TaskBroken(f"{file}: {error}") from None
        ids += [f"{file.relative_to(tests).as_posix()}::{name}" for name in _names(tree.body, "")]
    if not ids:
        raise TaskBroken(f"{tests}: holds no test_*.py with tests")
    return tuple(dict.fromkeys(ids))


def _names(body: list[ast.stmt], prefix: str) -> list[str]:
    names: list[str] = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            names.append(prefix + node.name)
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            names += _names(node.body, f"{prefix}{node.name}::")
    return names


def read_report(path: Path, checks: Checks, output: str) -> Score:
    """The score a report comes to: lines `["test", id, passed, detail]` between `["start"]` and `["end"]`.

    Without a start, pytest never ran and nothing is known of the workspace; without an end, what is missing failed.

    Raises:
        EvaluationError: the report never started.
    """
    lines = path.read_bytes()[:_MAX_REPORT_BYTES].decode("utf-8", "replace").splitlines() if path.is_file() else []
    if not lines or lines[0] != '["start"]':
        raise EvaluationError(f"pytest did not start; output: {output[-300:]}")
    outcomes: Outcomes = {}
    for line in lines[1:]:
        try:
            _, name, passed, detail = json.loads(line)
        except ValueError:
            continue  # the end mark, or a line cut off when the process was ended from inside
        before = outcomes.get(name, (True, ""))
        outcomes[name] = (before[0] and passed is True, before[1] or str(detail)[:200])
    return score_of(checks, outcomes)
