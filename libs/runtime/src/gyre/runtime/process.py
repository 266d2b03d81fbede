"""How every process starts: arguments, environment, logging, telemetry, signals, exit code.

Each argument may also come from the environment: --config GYRE_CONFIG, --deployment GYRE_DEPLOYMENT, --cell GYRE_CELL,
--index GYRE_INDEX. The process exits 0 when it was asked to stop, 1 when something broke (its supervisor restarts it),
2 when its configuration is wrong.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from gyre.contracts.errors import ConfigError
from gyre.runtime import telemetry
from gyre.runtime.blobs import BlobStore, open_blobs
from gyre.runtime.bus import Bus
from gyre.runtime.clock import Clock, SystemClock
from gyre.runtime.config import Deployment, RunConfig, load_deployment, load_run
from gyre.runtime.store import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Process:
    """What a process knows of itself. `index` is the cell or the evaluator number, None for singletons."""

    name: str
    service: str
    config: RunConfig
    config_dir: Path
    deployment: Deployment
    index: int | None
    blobs: BlobStore
    clock: Clock
    stopping: asyncio.Event
    started: float

    @property
    def run(self) -> str:
        return self.deployment.run

    def store(self) -> Store:
        """This process's SQLite file."""
        return Store(Path(self.deployment.state_dir) / f"{self.name}.sqlite", self.deployment.durability)

    async def connect(self) -> Bus:
        """Connect to NATS and verify the streams. Raises BusError."""
        bus = await Bus.connect(self.deployment.nats_url, self.name, self.clock)
        await bus.verify_streams()
        return bus

    @property
    def uptime_s(self) -> float:
        return self.clock.now() - self.started


Main = Callable[[Process], Awaitable[None]]


def parser(program: str, about: str, index: str = "") -> argparse.ArgumentParser:
    """The arguments every process takes; `index` is "cell" or "index" for processes that exist several times."""
    arguments = argparse.ArgumentParser(prog=program, description=about)
    add_arguments(arguments, index)
    return arguments


def add_arguments(arguments: argparse.ArgumentParser, index: str = "") -> None:
    """Add --config, --deployment and, for processes that exist several times, --cell or --index."""
    arguments.add_argument("--config", type=Path, default=_path("GYRE_CONFIG"), help="run.toml: what the run is")
    arguments.add_argument("--deployment", type=Path, default=_path("GYRE_DEPLOYMENT"),
                           help="deployment.toml: where it runs")
    if index:
        variable = f"GYRE_{index.upper()}"
        arguments.add_argument(f"--{index}", dest="index", type=int, help=f"number of this {index} (or {variable})",
                               default=int(os.environ[variable]) if variable in os.environ else None)


def _path(variable: str) -> Path | None:
    return Path(os.environ[variable]) if variable in os.environ else None


def run(main: Main, service: str, kind: str, arguments: argparse.Namespace) -> None:
    """Run `main` until it returns or a signal asks it to stop. Never returns."""
    try:
        process = _assemble(service, kind, arguments)
    except ConfigError as error:
        print(f"{kind}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    log_dir = Path(process.deployment.log_dir)
    set_up_logging(process.name, log_dir)
    provider = telemetry.set_up(service, process.name, process.run, log_dir, process.config.telemetry.otlp_endpoint)
    try:
        asyncio.run(_until_stopped(main, process))
    except ConfigError as error:
        log.error("%s: %s", process.name, error)
        raise SystemExit(2) from None
    except Exception:  # the process's one broad except: record, then let the supervisor restart it
        log.exception("%s failed", process.name)
        raise SystemExit(1) from None
    finally:
        provider.shutdown()


def _assemble(service: str, kind: str, arguments: argparse.Namespace) -> Process:
    index = getattr(arguments, "index", None)
    for name in ("config", "deployment"):
        if getattr(arguments, name) is None:
            raise ConfigError(f"--{name} is missing (or set GYRE_{name.upper()})")
    if hasattr(arguments, "index") and index is None:
        raise ConfigError("the number of this process is missing: --cell or --index")
    deployment = load_deployment(arguments.deployment)
    clock = SystemClock()
    return Process(name=kind if index is None else f"{kind}-{index}", service=service,
                   config=load_run(arguments.config), config_dir=arguments.config.resolve().parent,
                   deployment=deployment, index=index,
                   blobs=open_blobs(deployment.blobs, deployment.durability), clock=clock, stopping=asyncio.Event(),
                   started=clock.now())


async def _until_stopped(main: Main, process: Process) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, process.stopping.set)
    log.info("%s started, pid %d, run %s", process.name, os.getpid(), process.run)
    orphaned = asyncio.create_task(_stop_when_orphaned(process.stopping))
    await main(process)
    orphaned.cancel()
    log.info("%s stopped", process.name)


async def _stop_when_orphaned(stopping: asyncio.Event) -> None:
    """A launcher that was killed cannot stop its processes: they notice and stop by themselves."""
    launcher = os.environ.get("GYRE_LAUNCHER_PID")
    while launcher is not None and os.getppid() == int(launcher):  # noqa: ASYNC110 (nothing tells of a parent's death)
        await asyncio.sleep(1.0)
    if launcher is not None:
        log.warning("the launcher is gone, stopping")
        stopping.set()


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry = {"time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)), "level": record.levelname,
                 "process": self._process, "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def set_up_logging(process: str, log_dir: Path) -> None:
    """JSON lines to `<log_dir>/<process>.log`, warnings also to stderr."""
    log_dir.mkdir(parents=True, exist_ok=True)
    to_file = logging.FileHandler(log_dir / f"{process}.log")
    to_file.setFormatter(JsonFormatter(process))
    to_stderr = logging.StreamHandler()
    to_stderr.setLevel(logging.WARNING)
    to_stderr.setFormatter(logging.Formatter(f"{process}: %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[to_file, to_stderr], force=True)
    logging.getLogger("nats").setLevel(logging.CRITICAL)
