"""The clinic's grader: hidden tests on a workspace that a harness left, in whatever state it left it.

Every module is compiled and executed in a fresh namespace, with a time limit per module and per test. Nothing the
workspace holds may raise out of `grade`. This is no security boundary: code that swallows the time limit for ever, or
that escapes the reduced built-ins, is stopped by the evaluator's own process limit (here `GraderWorker`).

    python grader.py WORKSPACE TASK          prints one grade
    python grader.py --serve                 answers `{"workspace": ..., "task": ...}` lines, one JSON grade each
"""

from __future__ import annotations

import builtins
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

NAMES = "abcdef"
MAX_SOURCE_BYTES = 64 * 1024
LIMIT_S = 0.25
REFUSED = ("open", "exec", "eval", "compile", "input", "breakpoint", "exit", "quit", "help", "print", "globals", "vars")


@dataclass(frozen=True)
class Grade:
    """``reward`` in [0, 1]: share of fail-to-pass tests that pass, times share of pass-to-pass that still do."""

    reward: float
    passed: Mapping[str, bool]


class Expired(BaseException):
    """The time limit; not an Exception, so that ordinary handlers in graded code let it through."""


def grade(workspace: Path, task: Path, limit_s: float = LIMIT_S) -> Grade:
    """Grades one workspace. Must run in the main thread (the time limit is an alarm signal).

    Raises only for what the task itself got wrong: OSError, KeyError, ValueError, SyntaxError.
    """
    verdict = tomllib.loads((task / "task.toml").read_text(encoding="utf-8"))["grader"]
    tests = hidden_tests(task / "tests" / "test_hidden.py")
    modules = {name: load(workspace / f"{name}.py", name, limit_s) for name in NAMES}
    passed = {name: _passes(test, modules, limit_s) for name, test in tests.items()}
    share = _share(passed, verdict["fail_to_pass"]) * _share(passed, verdict["pass_to_pass"])
    return Grade(share, passed)


def hidden_tests(path: Path) -> dict[str, Callable[[], None]]:
    """The test functions of a trusted test file, by name."""
    namespace: dict[str, Any] = {"__name__": path.stem}
    exec(compile(path.read_bytes(), str(path), "exec"), namespace)
    return {name: value for name, value in namespace.items() if name.startswith("test_") and callable(value)}


def load(path: Path, name: str, limit_s: float) -> ModuleType | None:
    """The executed module; None if it is missing, too large, no plain file, broken or too slow."""
    source = _read_regular(path)
    if source is None:
        return None
    module = ModuleType(name)
    module.__dict__["__builtins__"] = _reduced_builtins()
    code = _guarded(lambda: compile(source, f"{name}.py", "exec", dont_inherit=True), limit_s)
    if not isinstance(code, CodeType):
        return None
    return module if _guarded(lambda: exec(code, module.__dict__) is None, limit_s) is True else None


def _passes(test: Callable[[], None], modules: Mapping[str, ModuleType | None], limit_s: float) -> bool:
    """Runs one hidden test; its `import a` finds the graded module and nothing else of that name."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)  # type: ignore[arg-type]  # None makes the import fail, as it should
    try:
        return _guarded(lambda: test() is None, limit_s) is True
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def _guarded(action: Callable[[], object], limit_s: float) -> object:
    """The action's result; None if it raised anything or took longer than the limit."""
    try:
        with _deadline(limit_s):
            return action()
    except BaseException:  # graded code may raise anything, SystemExit and KeyboardInterrupt included
        return None


@contextmanager
def _deadline(limit_s: float) -> Iterator[None]:
    """Raises `Expired` after the limit and again every tenth of it, for code that catches the first."""

    def expire(signum: int, frame: object) -> None:
        raise Expired

    before = signal.signal(signal.SIGPROF, expire)
    signal.setitimer(signal.ITIMER_PROF, limit_s, limit_s / 10)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _read_regular(path: Path) -> bytes | None:
    """Bytes of a plain file of bounded size: no link is followed and no FIFO is waited for."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    with os.fdopen(descriptor, "rb") as file:
        source = file.read(MAX_SOURCE_BYTES + 1)
    return source if len(source) <= MAX_SOURCE_BYTES else None


def _reduced_builtins() -> dict[str, Any]:
    """A copy for each module, so that none can change another's; without files, code from text, or imports."""
    reduced = {name: value for name, value in vars(builtins).items() if name not in REFUSED}
    reduced["__import__"] = _no_import
    return reduced


def _no_import(name: str, *_: object) -> ModuleType:
    raise ImportError(f"import {name}: clinic modules import nothing")


def _share(passed: Mapping[str, bool], tests: list[str]) -> float:
    """A test that is not there has failed."""
    return sum(passed.get(test, False) for test in tests) / len(tests) if tests else 1.0


class GraderWorker:
    """A grader process that is kept, and replaced when it dies or does not answer in time."""

    def __init__(self, answer_within_s: float = 10.0) -> None:
        self._answer_within_s = answer_within_s
        self._process: subprocess.Popen[str] | None = None

    def grade(self, workspace: Path, task: Path) -> float | None:
        """The reward; None if the worker died or hung, which says nothing about the workspace."""
        process = self._running()
        killer = threading.Timer(self._answer_within_s, process.kill)
        killer.start()
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps({"workspace": str(workspace), "task": str(task)}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        finally:
            killer.cancel()
        if not line:
            self.close()
            return None
        return json.loads(line)["reward"]

    def cpu_s(self) -> float:
        """CPU seconds the present process has used."""
        if self._process is None:
            return 0.0
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process = None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, "--serve"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        return self._process


def serve() -> None:
    """One JSON request a line in, one JSON grade a line out, until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what graded code prints cannot forge an answer
    for line in sys.stdin:
        request = json.loads(line)
        started = time.perf_counter()
        result = grade(Path(request["workspace"]), Path(request["task"]))
        answer = {"reward": result.reward, "passed": dict(result.passed), "seconds": time.perf_counter() - started}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main(arguments: list[str]) -> None:
    if arguments == ["--serve"]:
        serve()
    elif len(arguments) == 2:
        result = grade(Path(arguments[0]), Path(arguments[1]))
        print(json.dumps({"reward": result.reward, "passed": dict(result.passed)}, indent=2))
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
