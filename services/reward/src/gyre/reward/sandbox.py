"""Where code runs that nobody trusts: a bubblewrap box when there is one, a plain process with limits otherwise.

A box has its own processes, network (none), /tmp and /proc, sees the system's programs and nothing else of the machine
but what it is given, and dies as a whole. A plain process is for shipped examples only, or for who says so in so many
words; it has resource limits and a session of its own, and nothing that keeps it from reading or reaching out.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from gyre.contracts.errors import ConfigError, SandboxError

SandboxMode = Literal["auto", "bwrap", "none"]
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix",
           "/etc/alternatives", "/etc/ld.so.cache", "/etc/passwd", "/etc/group", "/etc/localtime", "/etc/ssl/certs")
_PROBE_TIMEOUT_S = 10.0
_TMP_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one process tree; 0 leaves a limit as it is."""

    memory_bytes: int = 2 * 1024**3  # of each process, and of all together where they can be counted
    file_bytes: int = 64 * 1024 * 1024  # largest file it may write
    open_files: int = 256
    processes: int = 64  # in a box; root is not held by this limit, the functions grader counts for itself


@dataclass(frozen=True, slots=True)
class Mount:
    """`source` of this machine appears in the box as `target` (the same path if it is empty)."""

    source: Path
    target: str = ""
    writable: bool = False


@dataclass(frozen=True, slots=True)
class Box:
    """What is to run: a command, where, with what it may see and use."""

    argv: tuple[str, ...]
    cwd: str
    mounts: tuple[Mount, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)


class Sandbox(Protocol):
    """Turns a box into the command line that starts it."""

    name: str
    isolated: bool

    def command(self, box: Box) -> list[str]: ...


class Bubblewrap:
    """Everything unshared; the root is empty but for the system's programs, Python's own, and the box's mounts."""

    name = "bwrap"
    isolated = True

    def __init__(self, program: str, system: tuple[str, ...] = _SYSTEM) -> None:
        self._program = program
        self._system = system

    def command(self, box: Box) -> list[str]:
        argv = [self._program, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        argv += [part for path in self._system for part in _system_mount(path)]
        argv += ["--proc", "/proc", "--dev", "/dev", "--size", str(_TMP_BYTES), "--tmpfs", "/tmp"]
        for prefix in _python_roots():
            argv += ["--ro-bind", prefix, prefix]
        for mount in box.mounts:
            argv += ["--bind" if mount.writable else "--ro-bind", str(mount.source), mount.target or str(mount.source)]
        argv += ["--remount-ro", "/", "--chdir", box.cwd, "--", *_counted(box.argv, box.limits)]
        return _limited(argv, box.limits)


class Plain:
    """A process with limits in a session of its own. It can read what its user can."""

    name = "none"
    isolated = False

    def command(self, box: Box) -> list[str]:
        """Raises SandboxError for a box that needs paths to appear elsewhere, which only bubblewrap can do."""
        moved = [m for m in box.mounts if m.target and m.target != str(m.source)]
        if moved:
            raise SandboxError(f"{moved[0].target}: a plain process cannot see {moved[0].source} there; install "
                               "bubblewrap, or use the grader 'functions'")
        return _limited(list(box.argv), box.limits)


def _system_mount(path: str) -> list[str]:
    if Path(path).is_symlink():
        return ["--symlink", str(Path(path).readlink()), path]
    return ["--ro-bind", path, path] if Path(path).exists() else []


def _python_roots() -> list[str]:
    """Where this interpreter's files are, unless the system's directories hold them."""
    roots = dict.fromkeys((sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent)))
    return [root for root in roots if not any(root == s or root.startswith(s + "/") for s in _SYSTEM)]


def _limited(argv: list[str], limits: Limits) -> list[str]:
    """`argv` behind a shell that sets limits. (A hook before exec would fork a process that holds gRPC threads.)"""
    sets = ["ulimit -c 0"]
    if limits.memory_bytes and sys.platform != "darwin":  # macOS refuses a limit on address space
        sets.append(f"ulimit -v {limits.memory_bytes // 1024}")
    if limits.file_bytes:
        sets.append(f"ulimit -f {limits.file_bytes // 512}")
    if limits.open_files:
        sets.append(f"ulimit -n {limits.open_files}")
    return ["/bin/sh", "-c", "; ".join(sets) + '; exec "$@"', "sh", *argv]


def _counted(argv: tuple[str, ...], limits: Limits) -> list[str]:
    """`argv` with a limit on its user's processes, to be set inside the box, where the user has no others."""
    n = limits.processes
    return ["/bin/sh", "-c", f'{{ ulimit -u {n} || ulimit -p {n}; }} 2>/dev/null; exec "$@"', "sh", *argv]


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment of graded code: nothing of ours, no user site, no bytecode, a fixed hash seed."""
    base = {"PATH": f"{Path(sys.executable).parent}:{os.defpath}", "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1", "PYTHONHASHSEED": "0", "HOME": "/tmp"}
    return base | extra


def find_bubblewrap() -> tuple[Bubblewrap | None, str]:
    """Bubblewrap if it works here, and in words why not."""
    program = shutil.which("bwrap")
    if program is None:
        return None, "bwrap is not on PATH"
    sandbox = Bubblewrap(program)
    probe = sandbox.command(Box((sys.executable, "-I", "-c", "print(6 * 7)"), "/tmp", environment=clean_environment()))
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False,
                              env=clean_environment(), stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"bwrap does not start: {error}"
    if done.stdout.strip() != "42":
        return None, f"bwrap exits {done.returncode}: {done.stderr.strip()[-300:] or 'no output'}"
    return sandbox, ""


def open_sandbox(mode: SandboxMode, *, shipped_example: bool, allow_unsandboxed: bool) -> Sandbox:
    """The sandbox of this machine, probed once.

    Raises:
        ConfigError: there is no bubblewrap and nothing says that the workspaces may run without.
    """
    reason = "harness.sandbox = 'none'"
    if mode != "none":
        sandbox, reason = find_bubblewrap()
        if sandbox is not None:
            return sandbox
        if mode == "bwrap":
            raise ConfigError(f"harness.sandbox = 'bwrap': {reason}; install bubblewrap")
    if shipped_example or allow_unsandboxed:
        return Plain()
    raise ConfigError(f"no sandbox ({reason}): workspaces hold code that a model wrote. Install bubblewrap, or set "
                      "allow_unsandboxed = true in the deployment if that code may do whatever your user may")


def remove_tree(path: Path) -> None:
    """Remove whatever graded code left at `path`, with the modes it chose; nothing there is fine."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        for directory, names, _ in os.walk(path):  # top down: a directory is opened up before it is listed
            for name in names:
                if not (inner := Path(directory) / name).is_symlink():
                    inner.chmod(0o700)
        shutil.rmtree(path)
