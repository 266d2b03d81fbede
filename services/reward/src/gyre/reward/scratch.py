"""Where a process unpacks and grades: a directory of its own, gone when it ends, and swept up when it was killed."""

import fcntl
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gyre.contracts.errors import EvaluationError
from gyre.reward.sandbox import remove_tree

MEMORY = Path("/dev/shm")
SPARE_WORKSPACES = 16
PREFIX = "gyre-reward-"
_MAX_TRIES = 10


@dataclass(frozen=True, slots=True)
class Scratch:
    """An empty directory; the lock on it, held through `lock_fd`, says that its process lives."""

    path: Path
    lock_fd: int

    def close(self) -> None:
        remove_tree(self.path)
        os.close(self.lock_fd)


def open_scratch(state_dir: Path, workspace_bytes: int, memory: Path = MEMORY) -> Scratch:
    """A new scratch directory; those that killed processes left beside it are removed.

    In memory where that has room for many workspaces: creating small files on a busy disk costs more than grading them.
    """
    roomy = memory.is_dir() and shutil.disk_usage(memory).free >= SPARE_WORKSPACES * workspace_bytes
    parent = memory if roomy else state_dir
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(f"{PREFIX}*"):
        _remove_if_abandoned(left)
    for _ in range(_MAX_TRIES):
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        lock_fd = _lock(path)
        if lock_fd is not None and path.exists():  # nobody swept it between the two lines above
            return Scratch(path, lock_fd)
    raise EvaluationError(f"{parent}: no scratch directory after {_MAX_TRIES} tries")


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock on a directory, None if somebody else holds it or it is not ours or gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _remove_if_abandoned(path: Path) -> None:
    if (fd := _lock(path)) is not None:
        remove_tree(path)
        os.close(fd)
