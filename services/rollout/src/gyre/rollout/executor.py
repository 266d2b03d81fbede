"""Runs executions: workspaces, harness processes, limits, preserving. Decides nothing: it performs the core's effects.

Who waits for whom: the watch looks at every live harness several times a second and reports exits and limits; a kill
waits for the whole process tree; preserving waits for the blob store. All of it is found again from the executions'
directories after a restart.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre.contracts.errors import GyreError, HarnessError
from gyre.contracts.events import BlobRef, Sampling
from gyre.rollout import workspace as workspaces
from gyre.rollout.execution import Execution, due_limit
from gyre.rollout.gateway.session import Sessions, SessionSpec
from gyre.rollout.harness.base import Harness, Launch
from gyre.rollout.local import (
    CallFinished,
    DiscardExecution,
    HarnessNotStarted,
    HarnessStarted,
    KillHarness,
    LimitFired,
    PreserveWorkspace,
    ProcessExited,
    StartHarness,
    WorkspacePreserved,
)
from gyre.rollout.workspace import WorkspaceLimits
from gyre.runtime import telemetry
from gyre.runtime.blobs import BlobStore
from gyre.runtime.clock import Clock
from gyre.runtime.config import fill

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExecutorSettings:
    """Where executions live and how their harness is started. Times in seconds."""

    root: Path  # one directory per execution
    tasks_root: Path
    config_dir: Path
    gateway_url: str  # as the harness sees it, without /v1
    command: tuple[str, ...]
    environment: Mapping[str, str]
    train_sampling: Sampling
    eval_sampling: Sampling
    workspace: WorkspaceLimits
    watch_s: float = 0.1
    kill_grace_s: float = 2.0
    kill_timeout_s: float = 10.0
    preserve_attempts: int = 5
    preserve_retry_s: float = 2.0
    max_starting: int = 4


Executions = Callable[[], Mapping[str, Execution]]
Post = Callable[[Any], Awaitable[None]]
Spawn = Callable[[Coroutine[Any, Any, None]], object]


class Executor:
    """Performs `StartHarness`, `KillHarness`, `PreserveWorkspace` and `DiscardExecution`."""

    def __init__(self, settings: ExecutorSettings, harness: Harness, sessions: Sessions, blobs: BlobStore,
                 executions: Executions, post: Post, spawn: Spawn, clock: Clock) -> None:
        self._settings, self._harness, self._sessions, self._blobs = settings, harness, sessions, blobs
        self._executions, self._post, self._spawn, self._clock = executions, post, spawn, clock
        self._watched: set[str] = set()
        self._begun: dict[str, asyncio.Event] = {}
        self._traces: dict[str, Mapping[str, str]] = {}  # context of each dispatch, which its end belongs to
        self._starting = asyncio.Semaphore(settings.max_starting)

    def home(self, execution: str) -> Path:
        """The directory of an execution."""
        return self._settings.root / execution

    async def perform(self, effect: Any, trace: Mapping[str, str] | None = None) -> bool:
        """Begin an effect under the context `trace`; False if it is none of the executor's."""
        trace = trace or {}
        if isinstance(effect, StartHarness):
            await self._open_session(effect)
            self._traces[effect.execution] = trace
            begun = self._begun.setdefault(effect.execution, asyncio.Event())
            self._spawn(self._start(effect, begun, trace))
        elif isinstance(effect, KillHarness):
            self._watched.discard(effect.execution)
            self._sessions.close(effect.execution)
            self._spawn(self._kill_and_report(effect.execution, trace))
        elif isinstance(effect, PreserveWorkspace):
            self._sessions.close(effect.execution)
            self._spawn(self._preserve(effect.execution, trace))
        elif isinstance(effect, DiscardExecution):
            self._watched.discard(effect.execution)
            self._begun.pop(effect.execution, None)
            self._traces.pop(effect.execution, None)
            self._sessions.forget(effect.execution)
            self._spawn(self._discard(effect.execution))
        else:
            return False
        return True

    # ------------------------------------------------------------ start

    async def _open_session(self, effect: StartHarness) -> None:
        settings, spec = self._settings, effect.spec
        sampling = settings.train_sampling if effect.purpose == "train" else settings.eval_sampling
        archived = self._sessions.open(SessionSpec(effect.execution, effect.group, spec.seed, sampling,
                                                   spec.timeout_calls))
        for call in archived:
            # What was archived but did not reach the journal before a crash; the core knows the others.
            await self._post(CallFinished(call.record, call.stall_s))

    async def _start(self, effect: StartHarness, begun: asyncio.Event, trace: Mapping[str, str]) -> None:
        """Start or adopt; `begun` is set when no start is under way any more, so that a kill does not overtake it."""
        try:
            with telemetry.span("start harness", trace, gyre__execution=effect.execution):
                await self._start_one(effect)
        finally:
            begun.set()

    async def _start_one(self, effect: StartHarness) -> None:
        execution = effect.execution
        home = self.home(execution)
        try:
            async with self._starting:
                if not self._is_wanted(execution):
                    return
                if effect.is_running and not self._harness.was_started(home):
                    await self._post(ProcessExited(execution, None, 0, "nothing is left of the harness",
                                                   self._sessions.undelivered(execution)))
                    return
                pid = await asyncio.to_thread(self._launch, effect)
        except (GyreError, OSError) as error:
            await self._post(HarnessNotStarted(execution, str(error)))
            return
        await self._post(HarnessStarted(execution, pid))
        self._watched.add(execution)

    def _is_wanted(self, execution: str) -> bool:
        known = self._executions().get(execution)
        return known is not None and known.takes_calls

    def _launch(self, effect: StartHarness) -> int:
        """Prepare directory and workspace, unless a harness was started there before, and start the shim."""
        home = self.home(effect.execution)
        task = self._task(effect.task)
        if not self._harness.was_started(home):
            workspaces.materialise(task, home / "workspace", self._settings.workspace)
            (home / "input").mkdir(exist_ok=True)
            shutil.copyfile(task / "instruction.md", home / "input" / "instruction.md")
        command = fill(self._settings.command, config_dir=str(self._settings.config_dir), task_dir=str(task))
        return self._harness.start(Launch(effect.execution, home, command, self._environment(effect.execution, home)))

    def _task(self, task: str) -> Path:
        directory = self._settings.tasks_root / task
        if not directory.is_dir():
            raise HarnessError(f"task {task}: no such directory below {self._settings.tasks_root}")
        return directory

    def _environment(self, execution: str, home: Path) -> dict[str, str]:
        """Everything the harness sees; nothing of the service's own environment."""
        url, secret = self._settings.gateway_url.rstrip("/"), self._sessions.secret(execution)
        return {
            "PATH": os.pathsep.join(dict.fromkeys((str(Path(sys.executable).parent), *os.defpath.split(os.pathsep)))),
            "HOME": str(home / "home"), "TMPDIR": str(home / "tmp"), "LANG": "C.UTF-8",
            **self._settings.environment,
            "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": secret,
            "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": secret,
            "GYRE_EXECUTION": execution,
        }

    # ------------------------------------------------------------ watch

    async def watch(self) -> None:
        """Report exits and limits, for ever."""
        while True:
            await self._clock.sleep(self._settings.watch_s)
            await self.look()

    async def look(self) -> None:
        """One look at every live harness and every limit."""
        now = self._clock.now()
        for execution_id in list(self._watched):
            if self._harness.ended(self.home(execution_id)) is not None:
                self._watched.discard(execution_id)
                self._spawn(self._kill_and_report(execution_id, self._traces.get(execution_id, {})))
        for execution in list(self._executions().values()):
            if execution.takes_calls:
                session = self._sessions.get(execution.id)
                limit = due_limit(execution, now, session.stall.untaken_s(now) if session else 0.0)
                if limit is not None:
                    await self._post(LimitFired(execution.id, limit))

    async def _kill_and_report(self, execution: str, trace: Mapping[str, str]) -> None:
        """End what is left of a harness, TERM then KILL, and report how it ended."""
        with telemetry.span("end harness", trace, gyre__execution=execution):
            await self._kill_all(execution)

    async def _kill_all(self, execution: str) -> None:
        home = self.home(execution)
        session = self._sessions.get(execution)
        if execution in self._begun:
            await self._begun[execution].wait()
        force_at = self._clock.now() + self._settings.kill_grace_s
        give_up_at = force_at + self._settings.kill_timeout_s
        while True:
            force = self._clock.now() >= force_at
            num_left = await asyncio.to_thread(self._harness.kill, home, force)
            ended = self._harness.ended(home)
            if num_left == 0 and (ended is not None or not self._harness.was_started(home)):
                break
            if self._clock.now() > give_up_at:
                log.error("%s: %d processes survive SIGKILL", execution, num_left)
                break
            await self._clock.sleep(0.05)
        num_errors = session.num_errors if session else 0
        code, reason = (ended.code, ended.reason) if ended else (None, "the harness never started")
        if code:
            reason = await asyncio.to_thread(self._harness.last_words, home)
        await self._post(ProcessExited(execution, code, num_errors, reason, self._sessions.undelivered(execution)))

    # ------------------------------------------------------------ after the end

    async def sweep(self, live: Collection[str]) -> None:
        """Remove what a crash left of executions that have terminated."""
        known = {*self._sessions.archived(), *(path.name for path in self._settings.root.glob("*") if path.is_dir())}
        for execution in sorted(known - set(live)):
            log.info("%s: removing what is left of it", execution)
            await self.perform(DiscardExecution(execution))

    async def _preserve(self, execution: str, trace: Mapping[str, str]) -> None:
        with telemetry.span("preserve workspace", trace, gyre__execution=execution):
            await self._try_to_preserve(execution)

    async def _try_to_preserve(self, execution: str) -> None:
        snapshot, reason = None, ""
        for attempt in range(self._settings.preserve_attempts):
            try:
                snapshot, reason = await asyncio.to_thread(self._pack, execution)
                break
            except (OSError, GyreError) as error:
                log.warning("%s: preserving, attempt %d: %s", execution, attempt + 1, error)
                reason = str(error)
                await self._clock.sleep(self._settings.preserve_retry_s)
        await self._post(WorkspacePreserved(execution, snapshot, reason))

    def _pack(self, execution: str) -> tuple[BlobRef, str]:
        preserved = workspaces.pack(self.home(execution) / "workspace", self._settings.workspace)
        return self._blobs.put(f"workspaces/{execution}.tar", preserved.data), preserved.reason

    async def _discard(self, execution: str) -> None:
        await asyncio.to_thread(self._harness.kill, self.home(execution), True)
        with contextlib.suppress(FileNotFoundError):
            await asyncio.to_thread(workspaces.remove, self.home(execution))
