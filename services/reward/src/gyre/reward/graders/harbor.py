"""Harbor-format tasks: `tests/test.sh` judges `/app` and leaves a reward file, or pytest runs `tests/test_*.py`.

Both run in a box of their own in which the workspace appears as `/app` and the hidden tests as `/tests`, read-only. The
log directory is new each time, so nothing an agent left there can be taken for a reward.
"""

import itertools
import tomllib
from pathlib import Path

from gyre.contracts.errors import ConfigError, EvaluationError
from gyre.reward.graders.base import Score, Task, TaskBroken, VerifierTimeout
from gyre.reward.graders.rewards import read_rewards
from gyre.reward.process import Finished, run_box
from gyre.reward.sandbox import Box, Limits, Mount, Sandbox, clean_environment, remove_tree


def require_isolated(sandbox: Sandbox, grader: str) -> None:
    """Raises ConfigError where `/app` and `/tests` cannot be shown."""
    if not sandbox.isolated:
        raise ConfigError(f"reward.grader = {grader!r}: its tests expect the workspace at /app and themselves at "
                          "/tests, which only bubblewrap can arrange; install it, or use 'functions'")


def verifier_settings(task: Task, default_timeout_s: float) -> tuple[float, dict[str, str]]:
    """`[verifier] timeout_sec` and `env` of a task. Raises TaskBroken naming the key that is wrong."""
    try:
        tables = tomllib.loads(task.description.read_text()) if task.description.exists() else {}
    except tomllib.TOMLDecodeError as error:
        raise TaskBroken(f"{task.description}: {error}") from None
    verifier = tables.get("verifier", {})
    timeout_s, environment = verifier.get("timeout_sec", default_timeout_s), verifier.get("env", {})
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or timeout_s <= 0:
        raise TaskBroken(f"{task.description}: verifier.timeout_sec = {timeout_s!r}: must be a positive number")
    if not all(isinstance(v, str) for v in environment.values()):
        raise TaskBroken(f"{task.description}: verifier.env: every value must be a string")
    return float(timeout_s), environment


class HarborGrader:
    """`tests/test.sh`: its exit code is ignored, its reward file counts."""

    name = "harbor"

    def __init__(self, sandbox: Sandbox, scratch: Path, timeout_s: float, limits: Limits, reward_key: str = "") -> None:
        require_isolated(sandbox, self.name)
        self.room = scratch / "room"
        self._logs = scratch / "logs"
        for directory in (self.room, self._logs):
            directory.mkdir(parents=True)
        self._sandbox = sandbox
        self._timeout_s = timeout_s
        self._limits = limits
        self._reward_key = reward_key
        self._serial = itertools.count()

    async def grade(self, task: Task, workspace: Path) -> Score:
        if not (task.tests / "test.sh").is_file():
            raise TaskBroken(f"{task.tests / 'test.sh'}: missing; a Harbor task is judged by it")
        timeout_s, environment = verifier_settings(task, self._timeout_s)
        logs = self._logs / str(next(self._serial))
        (logs / "verifier").mkdir(parents=True)
        try:
            box = Box(("/bin/bash", "/tests/test.sh"), "/app", _mounts(task, workspace, logs / "verifier"),
                      clean_environment(**environment), self._limits)
            finished = await run_box(self._sandbox, box, timeout_s, logs / "output")
            return self._judge(finished, timeout_s, logs / "verifier")
        finally:
            remove_tree(logs)

    def _judge(self, finished: Finished, timeout_s: float, verifier: Path) -> Score:
        if finished.exit_code is None:
            raise VerifierTimeout(f"verifier.timeout_sec = {timeout_s:g} fired; output: {finished.output[-300:]}")
        try:
            return read_rewards(verifier, self._reward_key)
        except EvaluationError as error:
            ran = f"test.sh exit {finished.exit_code}; output: {finished.output[-300:]}"
            raise type(error)(f"{error} ({ran})") from None

    async def close(self) -> None:
        """Nothing is kept between workspaces."""


def _mounts(task: Task, workspace: Path, verifier: Path) -> tuple[Mount, ...]:
    return (Mount(workspace, "/app", writable=True), Mount(task.tests, "/tests"),
            Mount(verifier, "/logs/verifier", writable=True))
