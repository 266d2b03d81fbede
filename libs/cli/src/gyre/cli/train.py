"""`gyre up` and `gyre train`: start the processes of a run, open it, show it live, and stop everything in the end."""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from gyre.cli.launcher import Launcher, connect_patiently, deploy_locally
from gyre.cli.ledger import RunLedger
from gyre.cli.metrics import StepLine, step_lines
from gyre.cli.run_dir import RunDir, read_pids
from gyre.cli.session import follow, start_run
from gyre.contracts.errors import GyreError
from gyre.contracts.events import GroupCompleted, RunClosed, StepFinished
from gyre.runtime.blobs import open_blobs
from gyre.runtime.bus import Bus
from gyre.runtime.config import Deployment, RunConfig, config_digest, load_deployment

Say = Callable[[str], None]
REST_S = 20.0  # for facts that were said before the run closed


class Interrupted(GyreError):
    """The user asked to stop."""


@dataclass(slots=True)
class Options:
    """How this machine runs it."""

    allow_unsandboxed: bool = False
    durability: str = "power"
    baselines: dict[str, float] = field(default_factory=dict)


@contextlib.asynccontextmanager
async def launched(run: RunDir, config: RunConfig, options: Options, say: Say) -> AsyncIterator[Launcher]:
    """All processes of the run, up and ready; stopped again whatever happens."""
    deployment = deploy_locally(run, config, options.allow_unsandboxed, options.durability)
    launcher = Launcher(run, deployment, say)
    try:
        await launcher.start()
        yield launcher
    finally:
        await launcher.stop()


@contextlib.contextmanager
def interruptible() -> AsyncIterator[asyncio.Event]:
    """An event that Ctrl-C or SIGTERM sets, once; a second one ends the program at once."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if event.is_set():
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        event.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        yield event
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def bar(done: int, total: int, width: int = 24) -> str:
    """How far something is, e.g. `[############------------] 32/64`."""
    filled = width * done // max(total, 1)
    return f"[{'#' * filled}{'-' * (width - filled)}] {done}/{total}"


class Watcher:
    """Folds a run's facts, says one line per step and writes one metrics row per step."""

    def __init__(self, run: RunDir, config: RunConfig, options: Options, say: Say) -> None:
        self.ledger = RunLedger()
        self._run, self._config, self.options, self._say = run, config, options, say
        self._num_lines = 0
        self._num_evaluated: dict[str, int] = {}
        run.metrics.write_text("")

    async def until_closed(self, deployment: Deployment, opening: int) -> str:
        """Follow the run until its opening number `opening` closes; returns the reason it gives."""
        bus = await connect_patiently(deployment.nats_url)
        closed = asyncio.get_running_loop().create_future()
        reading = asyncio.create_task(self._read(bus, deployment, opening, closed))
        try:
            await asyncio.wait({reading, closed}, return_when=asyncio.FIRST_COMPLETED)
            # The streams are read side by side: what was said before the end may be read after it.
            await asyncio.wait({reading}, timeout=REST_S if closed.done() else 0)
            if reading.done():
                reading.result()
            if not closed.done():
                raise GyreError("the run's facts ended")
            return closed.result()
        finally:
            reading.cancel()
            await bus.close()

    async def _read(self, bus: Bus, deployment: Deployment, opening: int, closed: asyncio.Future[str]) -> None:
        """Fold facts until the run is closed and all that belongs to it has been read."""
        async for envelope, fact in follow(bus, deployment.run, open_blobs(deployment.blobs)):
            self.ledger.fold(fact, envelope.time / 1e9)
            if isinstance(fact, StepFinished | GroupCompleted):
                self._show(fact)
            if isinstance(fact, RunClosed) and fact.opening >= opening and not closed.done():
                closed.set_result(fact.reason)
            if closed.done() and self.ledger.is_complete:
                return

    def _show(self, fact: StepFinished | GroupCompleted) -> None:
        if isinstance(fact, GroupCompleted) and fact.purpose == "eval":
            done = self._num_evaluated[fact.label] = self._num_evaluated.get(fact.label, 0) + 1
            total = self._config.evaluation.num_tasks
            if done == total or done % 16 == 0:
                self._say(f"held-out {fact.label} {bar(done, total)} tasks")
        for line in step_lines(self.ledger, self.options.baselines, self._num_lines):
            self._say(line.text(self._config.steps))
            self._append(line)
            self._num_lines += 1

    def _append(self, line: StepLine) -> None:
        with self._run.metrics.open("a") as file:
            file.write(json.dumps(line.row()) + "\n")


async def train(run: RunDir, config: RunConfig, options: Options, say: Say, attach: bool = False) -> Watcher:
    """Run to the end (or attach to processes that `gyre up` started). Raises Interrupted or GyreError."""
    with interruptible() as interrupt:
        if attach:
            gone = asyncio.create_task(_launcher_gone(run))
            try:
                return await _follow_until_end(run, config, options, say, interrupt, gone)
            finally:
                gone.cancel()
        async with launched(run, config, options, say) as launcher:
            return await _follow_until_end(run, config, options, say, interrupt, launcher.failure)


async def _launcher_gone(run: RunDir) -> str:
    """Returns once the processes that somebody else started are stopped."""
    while "launcher" in read_pids(run):  # noqa: ASYNC110 (another process tells nobody of its end)
        await asyncio.sleep(1.0)
    return f"the processes of run {run.name} were stopped"


async def _follow_until_end(run: RunDir, config: RunConfig, options: Options, say: Say, interrupt: asyncio.Event,
                            failure: asyncio.Future[str]) -> Watcher:
    deployment = load_deployment(run.deployment)
    watcher = Watcher(run, config, options, say)
    opening, _ = await start_run(deployment, config_digest(config))
    closed = asyncio.create_task(watcher.until_closed(deployment, opening))
    stopped = asyncio.create_task(interrupt.wait())
    waiting: set[asyncio.Future] = {closed, stopped, failure}
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if closed.done():
        say(f"run {run.name}: {closed.result()}")
        return watcher
    closed.cancel()
    if failure.done():
        raise GyreError(failure.result())
    raise Interrupted(f"interrupted; go on with: gyre train --resume {_relative(run.path)}")


async def up(run: RunDir, config: RunConfig, options: Options, say: Say) -> None:
    """Keep all processes running until Ctrl-C, SIGTERM or `gyre down`."""
    with interruptible() as interrupt:
        async with launched(run, config, options, say) as launcher:
            say(f"run {run.name} is up: `gyre status` shows it, `gyre train --attach` opens it, `gyre down` stops it")
            stopped = asyncio.create_task(interrupt.wait())
            await asyncio.wait({stopped, launcher.failure}, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            if launcher.failure.done():
                raise GyreError(launcher.failure.result())


def _relative(path: Path) -> str:
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
