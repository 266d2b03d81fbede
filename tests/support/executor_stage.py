"""The executor with real processes around the real core, without NATS and without engines."""

import asyncio
import io
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

from gyre.contracts.events import ExecutionSpec, ExecutionTerminated, GroupDispatched, Sampling
from gyre.rollout.core import RolloutCore
from gyre.rollout.executor import Executor, ExecutorSettings
from gyre.rollout.gateway.archive import CallArchive
from gyre.rollout.gateway.session import Sessions
from gyre.rollout.harness.process import ProcessHarness, SandboxSettings
from gyre.rollout.workspace import WorkspaceLimits
from gyre.runtime.blobs import DirectoryBlobs
from gyre.runtime.clock import SystemClock
from gyre.runtime.effects import Publish

X = "g00000-000-x00"


class ExecutorStage:
    """Core, executor and processes, without NATS. Events go to the core at once, effects to the executor."""

    def __init__(self, root: Path, *command: str, **settings: object) -> None:
        self.root = root
        task = root / "tasks" / "t"
        for name, text in (("instruction.md", "do it"), ("workspace/a.txt", "a"), ("tests/secret.py", "s")):
            (task / name).parent.mkdir(parents=True, exist_ok=True)
            (task / name).write_text(text)
        self.core = RolloutCore(4, 0)
        self.state = self.core.initial()
        self.facts: list[object] = []
        self.events: list[object] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.settings = ExecutorSettings(**{
            "root": root / "executions", "tasks_root": root / "tasks", "config_dir": root,
            "gateway_url": "http://gateway", "command": command, "environment": {}, "train_sampling": Sampling(),
            "eval_sampling": Sampling(), "workspace": WorkspaceLimits(), "kill_grace_s": 0.2,
            "preserve_retry_s": 0.01, **settings})
        self.blobs = DirectoryBlobs(root / "blobs")
        self.open()

    def open(self) -> None:
        """A fresh executor over what lies on the disk."""
        self.archive = CallArchive(self.root / "calls.sqlite", "process")
        self.sessions = Sessions(b"k" * 32, self.archive)
        self.executor = Executor(self.settings, ProcessHarness(SandboxSettings()), self.sessions, self.blobs,
                                 lambda: self.state.executions, self.tell, self.spawn, SystemClock())

    def spawn(self, work: object) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def tell(self, event: object) -> None:
        self.events.append(event)
        self.state, effects = self.core.step(self.state, event, time.time())
        self.facts += [f.fact for f in effects if isinstance(f, Publish)]
        for effect in effects:
            if not isinstance(effect, Publish):
                assert await self.executor.perform(effect)

    async def crash(self) -> None:
        """The executor dies and another one resumes."""
        for task in list(self.tasks):
            task.cancel()
        self.archive.close()
        self.open()
        for effect in self.core.resume(self.state, time.time()):
            await self.executor.perform(effect)

    async def until(self, condition: Callable[[], object], seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not happen"
            await self.executor.look()
            await asyncio.sleep(0.01)

    def ends(self) -> list[ExecutionTerminated]:
        return [f for f in self.facts if isinstance(f, ExecutionTerminated)]

    async def dispatch(self, timeout_s: float = 30.0, overall_timeout_s: float = 60.0, task: str = "t") -> None:
        spec = ExecutionSpec(X, 1, timeout_s, overall_timeout_s)
        await self.tell(GroupDispatched("g00000-000", 0, "q", task, "train", 0, (spec,)))

    def preserved(self) -> dict[str, bytes]:
        [end] = self.ends()
        data = self.blobs.get(end.snapshot)
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            return {m.name: tar.extractfile(m).read() for m in tar if m.isfile()}
