"""Harnesses as local processes under `shim.sh`, with or without a bubblewrap sandbox around them.

Everything a later executor needs lies in the execution's directory: `run/lock` is locked as long as the shim lives,
`run/pid` is the shim's, `run/exit` says how the harness ended.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
from gyre.contracts.errors import HarnessError, SandboxError
from gyre.rollout.harness.base import Exit, Launch

SHIM = Path(__file__).with_name("shim.sh")
_BLOCK = 512
_START_TIMEOUT_S = 10.0
_LAST_WORDS = 1000  # bytes
INSTRUCTION_VARIABLE = "GYRE_TASK_INSTRUCTION"


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """`bwrap` is the program, empty for none. `hidden` directories look empty from inside."""

    bwrap: str = ""
    hidden: tuple[Path, ...] = ()
    max_file_bytes: int = 1024 * 1024 * 1024


def find_bwrap(wish: str, allow_unsandboxed: bool, shipped_example: bool) -> str:
    """The bubblewrap program that `wish` (auto | bwrap | none) leads to; empty for no sandbox.

    Raises:
        SandboxError: a sandbox is needed and there is none.
    """
    program = "" if wish == "none" else (shutil.which("bwrap") or "")
    if program and _works(program):
        return program
    if wish == "bwrap":
        raise SandboxError("harness.sandbox = 'bwrap': bubblewrap is missing or cannot make namespaces here")
    if not (allow_unsandboxed or shipped_example):
        raise SandboxError("no sandbox for the harness: install bubblewrap, or set allow_unsandboxed = true in the "
                           "deployment if you trust the harness and what the policy makes it do")
    return ""


def _works(program: str) -> bool:
    try:
        probe = subprocess.run([program, "--ro-bind", "/", "/", "--unshare-pid", "--proc", "/proc", "true"],
                               capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return probe.returncode == 0


class ProcessHarness:
    """`Harness` over local processes."""

    def __init__(self, sandbox: SandboxSettings) -> None:
        self._sandbox = sandbox
        self._children: dict[Path, subprocess.Popen[bytes]] = {}

    def start(self, launch: Launch) -> int:
        """See `Harness.start`."""
        run = launch.home / "run"
        for name in ("run", "home", "tmp"):
            (launch.home / name).mkdir(parents=True, exist_ok=True)
        lock = _try_lock(run)
        if lock is not None:
            try:
                if not (run / "pid").exists():
                    self._spawn(launch, run, lock)
            finally:
                os.close(lock)
        return self._pid(run)

    def _spawn(self, launch: Launch, run: Path, lock: int) -> None:
        """Start the shim with the lock as its standard input: there is no moment at which a start can be overlooked."""
        blocks = str(self._sandbox.max_file_bytes // _BLOCK)
        command = ["/bin/sh", str(SHIM), str(run), blocks, *self._wrap(launch)]
        try:
            with (run / "harness.log").open("ab") as log:
                self._children[launch.home] = subprocess.Popen(
                    command, cwd=launch.workspace, env=_environment_of(launch), stdin=lock, stdout=log, stderr=log,
                    start_new_session=True)
        except OSError as error:
            raise HarnessError(f"{launch.execution}: cannot start {launch.command[0]!r}: {error}") from error

    def _wrap(self, launch: Launch) -> list[str]:
        """The command, inside bubblewrap if there is one: own pids, read-only root, only its own directories."""
        if not self._sandbox.bwrap:
            return list(launch.command)
        arguments = [self._sandbox.bwrap, "--die-with-parent", "--unshare-pid", "--unshare-ipc", "--unshare-uts",
                     "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"]
        for directory in self._sandbox.hidden:
            arguments += ["--tmpfs", str(directory)]
        arguments += ["--ro-bind", str(launch.home / "input"), str(launch.home / "input")]
        for name in ("workspace", "home", "tmp"):
            arguments += ["--bind", str(launch.home / name), str(launch.home / name)]
        return [*arguments, "--chdir", str(launch.workspace), "--", *launch.command]

    def _pid(self, run: Path) -> int:
        """The shim's pid, which it writes as its first act."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            with contextlib.suppress(FileNotFoundError):
                return int((run / "pid").read_text())
            if time.monotonic() > deadline:
                raise HarnessError(f"{run}: the shim did not come up within {_START_TIMEOUT_S} s")
            time.sleep(0.001)

    def was_started(self, home: Path) -> bool:
        """See `Harness.was_started`."""
        return (home / "run" / "pid").exists() or self._shim_lives(home)

    def ended(self, home: Path) -> Exit | None:
        """See `Harness.ended`."""
        child = self._children.get(home)
        if child is not None:
            if child.poll() is None:
                return None
            del self._children[home]
        lives = child is None and self._shim_lives(home)
        # Looked at after the lock: the shim writes its last word before it lets go.
        try:
            return Exit(int((home / "run" / "exit").read_text()))
        except FileNotFoundError:
            return None if lives else Exit(None, "the shim is gone without a word")

    def _shim_lives(self, home: Path) -> bool:
        """Whether a shim holds the lock of this directory."""
        try:
            lock = _try_lock(home / "run")
        except FileNotFoundError:
            return False
        if lock is not None:
            os.close(lock)
        return lock is None

    def last_words(self, home: Path) -> str:
        """See `Harness.last_words`."""
        try:
            with (home / "run" / "harness.log").open("rb") as log:
                log.seek(-min(_LAST_WORDS, log.seek(0, os.SEEK_END)), os.SEEK_END)
                return log.read(_LAST_WORDS).decode(errors="replace").strip()
        except OSError:
            return ""

    def kill(self, home: Path, force: bool) -> int:
        """See `Harness.kill`. The shim itself is spared, so that it can say how the harness ended."""
        victims = list(_processes_of(_marker(home), self._shim_pid(home)))
        for pid in victims:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL if force else signal.SIGTERM)
        return len(victims)

    def _shim_pid(self, home: Path) -> int:
        try:
            return int((home / "run" / "pid").read_text())
        except FileNotFoundError:
            return -1


def _environment_of(launch: Launch) -> dict[str, str]:
    return {**launch.environment, INSTRUCTION_VARIABLE: str(launch.instruction)}


def _marker(home: Path) -> bytes:
    """What stands in the environment of every process of this directory and of no other run's."""
    return f"{INSTRUCTION_VARIABLE}={Launch('', home, (), {}).instruction}".encode()


def _try_lock(run: Path) -> int | None:
    """A descriptor that holds the directory's lock; None if a shim holds it. Raises FileNotFoundError."""
    descriptor = os.open(run / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


class _Row(NamedTuple):
    """One process. `started`: in clock ticks since boot, 0 where that is not known."""

    parent: int
    session: int
    started: int = 0


def _processes_of(marker: bytes, shim: int) -> Iterator[int]:
    """Everything an execution started: the shim's session, its descendants, and whoever carries its environment.

    Daemons that left both session and parent behind are found by their environment, which is read of processes that
    are younger than the shim alone.
    """
    table = dict(_process_table())
    members = {pid for pid, row in table.items() if row.session == shim and shim > 0}
    grown = True
    while grown:
        children = {pid for pid, row in table.items() if row.parent in members} - members
        members |= children
        grown = bool(children)
    since = table[shim].started if shim in table else 0
    for pid, row in table.items():
        if pid in (shim, os.getpid()):
            continue
        if pid in members or (row.started >= since and marker in _environment(pid)):
            yield pid


def _process_table() -> Iterator[tuple[int, _Row]]:
    """Every process but zombies."""
    proc = Path("/proc")
    if not (proc / "self/stat").exists():
        yield from _process_table_psutil()
        return
    with os.scandir(proc) as entries:
        pids = [entry.name for entry in entries if entry.name.isdigit()]
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
            if fields[0] != b"Z":
                yield int(pid), _Row(int(fields[1]), int(fields[3]), int(fields[19]))


def _process_table_psutil() -> Iterator[tuple[int, _Row]]:
    for process in psutil.process_iter(["pid", "ppid", "status"]):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if process.info["status"] != psutil.STATUS_ZOMBIE:
                yield process.info["pid"], _Row(process.info["ppid"] or 0, os.getsid(process.info["pid"]))


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        parts = [os.read(descriptor, 65536)]
        while parts[-1]:
            parts.append(os.read(descriptor, 65536))
        return b"".join(parts)
    finally:
        os.close(descriptor)


def _environment(pid: int) -> Sequence[bytes]:
    if Path("/proc/self/environ").exists():
        with contextlib.suppress(OSError):
            return _read(f"/proc/{pid}/environ").split(b"\0")
        return []
    with contextlib.suppress(psutil.Error):
        return [f"{k}={v}".encode() for k, v in psutil.Process(pid).environ().items()]
    return []
