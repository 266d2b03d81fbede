"""The workspace of an execution: made from the task's directory, preserved as a tar once the harness is gone.

A task's `tests/` and `solution/` never enter a workspace. What a harness left behind is not trusted: links are kept as
links and never followed, odd files are refused and named, sizes and counts are capped, and one bad file does not lose
the rest.
"""

import io
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gyre.contracts.errors import HarnessError

MAX_NAMED = 8
MAX_PATH_BYTES = 1024


@dataclass(frozen=True, slots=True)
class WorkspaceLimits:
    """Caps of one workspace, when it is made and when it is preserved."""

    max_bytes: int = 64 * 1024 * 1024
    max_entries: int = 20_000


@dataclass(frozen=True, slots=True)
class Preserved:
    """A workspace as tar bytes; `refused` names what was left out and why."""

    data: bytes
    num_entries: int
    refused: tuple[str, ...]

    @property
    def reason(self) -> str:
        """One sentence on what was left out; empty if nothing was."""
        if not self.refused:
            return ""
        more = f" and {len(self.refused) - MAX_NAMED} more" if len(self.refused) > MAX_NAMED else ""
        return f"workspace: {len(self.refused)} entries left out: {', '.join(self.refused[:MAX_NAMED])}{more}"


def materialise(task: Path, workspace: Path, limits: WorkspaceLimits) -> None:
    """Make `workspace` anew with the content of `task`/workspace (empty if the task has none).

    Raises:
        HarnessError: the task is missing, too large, or holds something that is no file, directory or inner link.
    """
    if not (task / "instruction.md").is_file():
        raise HarnessError(f"task {task}: has no instruction.md")
    if workspace.exists():
        shutil.rmtree(workspace)
    workspace.mkdir(parents=True)
    source = task / "workspace"
    num_bytes = 0
    for number, (path, status) in enumerate(_walk(source) if source.is_dir() else ()):
        num_bytes += status.st_size if stat.S_ISREG(status.st_mode) else 0
        if num_bytes > limits.max_bytes or number >= limits.max_entries:
            raise HarnessError(f"task {task}: its workspace passes {limits.max_bytes} bytes or "
                               f"{limits.max_entries} entries")
        _copy(path, status, workspace / path.relative_to(source))


def _copy(path: Path, status: os.stat_result, target: Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        target.mkdir()
    elif stat.S_ISREG(status.st_mode):
        shutil.copyfile(path, target)
        target.chmod(0o755 if status.st_mode & 0o100 else 0o644)
    elif stat.S_ISLNK(status.st_mode) and _stays_inside(str(path.readlink())):
        target.symlink_to(path.readlink())
    else:
        raise HarnessError(f"{path}: a task's workspace may hold files, directories and links that stay inside")


def _stays_inside(link: str) -> bool:
    return not link.startswith("/") and ".." not in link.split("/")


def pack(workspace: Path, limits: WorkspaceLimits) -> Preserved:
    """The workspace as a tar with the same bytes for the same content.

    Raises:
        OSError: the workspace itself cannot be read.
    """
    buffer = io.BytesIO()
    refused: list[str] = []
    num_bytes = num_entries = 0
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, status in _walk(workspace):
            name = str(path.relative_to(workspace))
            size = status.st_size if stat.S_ISREG(status.st_mode) else 0
            why = _refusal(name, status, num_bytes + size > limits.max_bytes, num_entries >= limits.max_entries)
            if why or not _add(tar, path, name, status):
                refused.append(f"{_shown(name)} ({why or 'cannot be read'})")
                continue
            num_bytes += size
            num_entries += 1
    return Preserved(buffer.getvalue(), num_entries, tuple(refused))


def _walk(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Everything below `root` in order of name, parents first, no link followed."""
    with os.scandir(root) as entries:
        found = sorted(entries, key=lambda e: e.name)
    for entry in found:
        status = entry.stat(follow_symlinks=False)
        path = root / entry.name
        yield path, status
        if stat.S_ISDIR(status.st_mode) and os.access(path, os.R_OK | os.X_OK):
            yield from _walk(path)


def _refusal(name: str, status: os.stat_result, too_large: bool, too_many: bool) -> str:
    """Why an entry is left out; empty if it is not."""
    mode = status.st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
        return "not a file, directory or link"
    if len(os.fsencode(name)) > MAX_PATH_BYTES or not name.isprintable():
        return "odd name"
    if too_large:
        return "too many bytes"
    return "too many entries" if too_many else ""


def _add(tar: tarfile.TarFile, path: Path, name: str, status: os.stat_result) -> bool:
    """Append one entry; False if it cannot be read. Opened without following links, and again checked once open."""
    entry = tarfile.TarInfo(name)
    entry.mode = stat.S_IMODE(status.st_mode) & 0o755
    if stat.S_ISDIR(status.st_mode):
        entry.type = tarfile.DIRTYPE
        tar.addfile(entry)
        return True
    try:
        if stat.S_ISLNK(status.st_mode):
            entry.type, entry.linkname = tarfile.SYMTYPE, str(path.readlink())
            tar.addfile(entry)
            return True
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False
        data = file.read(status.st_size)
        entry.size = len(data)
        tar.addfile(entry, io.BytesIO(data))
    return True


def _shown(name: str) -> str:
    return ascii(name[:80])[1:-1]


def remove(directory: Path) -> None:
    """Delete a directory tree, also one whose rights were taken away; what cannot be deleted stays."""

    def open_up(function: object, path: str, error: object) -> None:
        parent = Path(path).parent
        try:
            parent.chmod(0o700)
            Path(path).unlink() if not Path(path).is_dir() else shutil.rmtree(path, ignore_errors=True)
        except OSError:
            return

    shutil.rmtree(directory, onerror=open_up)
