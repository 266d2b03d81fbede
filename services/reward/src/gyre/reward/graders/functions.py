"""Plain test functions, graded by one warm worker process: milliseconds per workspace.

The worker (`worker.py`) lives in the sandbox; this side starts it, feeds it, doubts it and replaces it. The list of
checks is read from the tests' source on this side, so a worker can at most say less than there is.
"""

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from gyre.contracts.errors import EvaluationError
from gyre.reward.graders import worker
from gyre.reward.graders.base import Checks, Score, Task, TaskBroken, score_of
from gyre.reward.graders.tests import HiddenTests, choose_checks, list_tests
from gyre.reward.sandbox import Box, Limits, Mount, Sandbox, clean_environment

_MAX_STAGED = 256
_MAX_REPLY_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """How long graded code may run. Processor time decides; wall time, longer, stops what only waits."""

    test_cpu_s: float = 2.0
    test_wall_s: float = 10.0
    workspace_s: float = 30.0
    margin_s: float = 5.0  # what the worker may take beyond `workspace_s` before it counts as hung


@dataclass(frozen=True, slots=True)
class _Staged:
    """Tests copied to where the sandbox shows them, without the solution beside them."""

    tests: Path
    listed: HiddenTests
    checks: Checks


class FunctionsGrader:
    """Share of the task's test functions (or of the checks of its own `grade`) that pass on a workspace."""

    name = "functions"

    def __init__(self, sandbox: Sandbox, scratch: Path, times: TimeLimits, limits: Limits) -> None:
        self.room = scratch / "room"
        self._stage = scratch / "tests"
        for directory in (self.room, self._stage):
            directory.mkdir(parents=True)
        self._sandbox = sandbox
        self._times = times
        self._limits = limits
        self._staged: dict[Path, _Staged] = {}
        self._serial = itertools.count()
        self._process: asyncio.subprocess.Process | None = None
        self._dying: list[asyncio.subprocess.Process] = []

    @property
    def worker_pid(self) -> int | None:
        """The leader of the worker's session, while there is one."""
        return self._process.pid if self._process else None

    async def grade(self, task: Task, workspace: Path) -> Score:
        staged = self._stage_tests(task)
        serial = next(self._serial)
        limit_s = self._times.workspace_s + self._times.margin_s
        score: Score | None = None
        try:
            async with asyncio.timeout(limit_s):
                reply = await self._ask(self._request(serial, staged, workspace))
            score = _read_reply(reply, serial, staged.checks)
        except TimeoutError:
            raise EvaluationError(f"the grading worker hung for {limit_s:g} s and was replaced") from None
        except (ConnectionError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise EvaluationError(f"the grading worker died ({type(error).__name__}) and was replaced") from None
        finally:
            if score is None:  # also when cancelled: an answer that comes later would be taken for the next one's
                self._abandon()
        return score

    def _request(self, serial: int, staged: _Staged, workspace: Path) -> dict[str, object]:
        times = self._times
        return {"id": serial, "workspace": str(workspace), "tests": str(staged.tests), "ids": staged.listed.ids,
                "kind": staged.listed.kind, "preload": staged.listed.preload, "test_cpu_s": times.test_cpu_s,
                "test_wall_s": times.test_wall_s, "timeout_s": times.workspace_s}

    async def _ask(self, request: dict[str, object]) -> dict[str, object]:
        process = self._process
        if process is None or process.returncode is not None:
            process = await self._start()
        process.stdin.write(json.dumps(request).encode() + b"\n")
        await process.stdin.drain()
        return json.loads(await process.stdout.readuntil(b"\n"))

    async def _start(self) -> asyncio.subprocess.Process:
        script = Path(worker.__file__)
        owns = "1" if self._sandbox.isolated else "0"
        limits = (str(self._limits.processes), str(self._limits.memory_bytes))
        box = Box(argv=(sys.executable, "-s", "-P", str(script), owns, *limits), cwd=str(self.room),
                  mounts=(Mount(self.room, writable=True), Mount(self._stage), Mount(script)), limits=self._limits)
        self._process = await asyncio.create_subprocess_exec(
            *self._sandbox.command(box), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL, env=clean_environment(TMPDIR="/tmp"), start_new_session=True,
            limit=_MAX_REPLY_BYTES)
        return self._process

    def _stage_tests(self, task: Task) -> _Staged:
        """Copy the tests once per task; the oldest copy makes room when there are too many."""
        known = self._staged.get(task.root)
        if known is not None:
            return known
        if not task.tests.is_dir():
            raise TaskBroken(f"{task.tests}: no such directory; a task needs its hidden tests there")
        while len(self._staged) >= _MAX_STAGED:
            shutil.rmtree(self._staged.pop(next(iter(self._staged))).tests)
        target = self._stage / str(next(self._serial))
        shutil.copytree(task.tests, target, ignore=shutil.ignore_patterns("__pycache__"))
        try:
            listed = list_tests(target)
            staged = _Staged(target, listed, choose_checks(task, listed.ids))
        except TaskBroken as error:
            shutil.rmtree(target)
            raise TaskBroken(str(error).replace(str(target), str(task.tests))) from None
        self._staged[task.root] = staged
        return staged

    def _abandon(self) -> None:
        """Kill the worker; the next `grade` starts another."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            self._dying = [p for p in self._dying if p.returncode is None] + [process]

    async def close(self) -> None:
        self._abandon()
        for process in self._dying:
            await process.wait()


def _read_reply(reply: dict[str, object], serial: int, checks: Checks) -> Score:
    if reply.get("id") != serial:
        raise EvaluationError(f"the grading worker answered {reply.get('id')!r}, {serial} was asked")
    if error := reply.get("error"):
        raise TaskBroken(str(error))
    results = {str(k): (v[0] is True, str(v[1])) for k, v in reply["results"].items()}
    forged = str(reply["forged"])
    if forged:
        failed = dict.fromkeys(checks.ids, (False, f"forged report: {forged}"))
        return score_of(checks, failed, {"forged": 1.0})
    return score_of(checks, results)
