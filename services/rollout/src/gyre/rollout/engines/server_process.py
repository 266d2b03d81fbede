"""An engine server as a child process: command, environment, log, death noticed, no orphan."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gyre.contracts.errors import ConfigError, EngineError
from gyre.runtime.ports import free_ports

_SHIM = Path(__file__).with_name("server_shim.py")
_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
_STOP_WAIT_S = 15.0
_LOG_TAIL_BYTES = 20_000


@dataclass(frozen=True)
class ServerPlace:
    """Where a server lives. `host`: the address other cells reach this one by. `home`: a directory of its own, fast if it
    can be: weights pass through it."""

    host: str
    log: Path
    home: Path


@dataclass(frozen=True)
class ServerCommand:
    """How a server is started. `environment` is added to ours, less what belongs to our interpreter alone."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    log: Path = Path(os.devnull)
    directory: Path | None = None


class ServerProcess:
    """A server that runs. It ends with us, however we end."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    @classmethod
    async def start(cls, command: ServerCommand) -> ServerProcess:
        """Starts it; it need not answer yet."""
        inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        command.log.parent.mkdir(parents=True, exist_ok=True)
        with command.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(_SHIM), *command.arguments, stdin=subprocess.PIPE, stdout=log,
                stderr=subprocess.STDOUT, env={**inherited, **command.environment}, cwd=command.directory,
                start_new_session=True)  # fmt: skip
        return cls(process, command.log)

    @property
    def pid(self) -> int:
        """Of the group's leader, and so the group's id."""
        return self._process.pid

    async def ended(self) -> None:
        """Waits for the end."""
        await self._process.wait()

    def last_words(self, num_lines: int = 5) -> str:
        """The last lines of the log that are not empty."""
        try:
            with self._log.open("rb") as log:
                log.seek(max(0, self._log.stat().st_size - _LOG_TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            lines = []
        kept = [line.strip() for line in lines if line.strip()][-num_lines:]
        return f"{' | '.join(kept)} (log: {self._log})"

    async def stop(self) -> None:
        """Asks the server to stop, then kills what is left of its group. Idempotent."""
        if self._process.returncode is not None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()  # the shim takes it for our end, and sees to the rest
        try:
            async with asyncio.timeout(_STOP_WAIT_S):
                await self._process.wait()
        except TimeoutError:
            os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()


def find_python(backend: str, configured: str, config_dir: Path) -> Path:
    """The interpreter of a backend's environment: as configured, from the environment variable, or `.venv-BACKEND` beside
    our own environment. Raises ConfigError if there is none."""
    variable, name = f"GYRE_{backend.upper()}_PYTHON", f".venv-{backend.replace('_', '-')}"
    beside = Path(sys.prefix).parent / name / "bin" / "python"
    for candidate in (configured, os.environ.get(variable, "")):
        if candidate:
            # joined, not resolved: the link's place is what makes it that environment's interpreter
            return config_dir / Path(candidate).expanduser()
    if beside.exists():
        return beside
    raise ConfigError(f"engine.server.python = '': engine.backend = {backend!r} runs in an environment of its own and none was "
                      f"found; name its interpreter there or in {variable}, or make {name} beside {sys.prefix}")


def free_port(host: str) -> int:
    """A port of `host` that nobody listens on now. Raises EngineError."""
    try:
        return free_ports(1, host)[0]
    except OSError as error:
        raise EngineError(f"no port on {host!r}: {error}") from None


def reachable_host(listen: str) -> str:
    """The address by which others reach what listens on `host:port`; this machine's, if that is all of them."""
    host = listen.rpartition(":")[0].strip("[]")
    try:
        everywhere = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        everywhere = not host  # a name, or nothing
    return socket.gethostbyname(socket.gethostname()) if everywhere else host
