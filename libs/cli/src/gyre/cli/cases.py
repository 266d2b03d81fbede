"""The single executions that a report shows: which are chosen, and what changed in a workspace.

The choice follows a rule that is stated beside what it chose, so that nobody has to wonder what was left out.
"""

import difflib
import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gyre.cli.facts import FactLog
from gyre.cli.views import Evaluation, Execution, executions
from gyre.contracts.errors import BrokenBody
from gyre.contracts.events import BlobRef
from gyre.runtime.blobs import BlobStore

MAX_FILES = 500
MAX_FILE_BYTES = 256 * 1024
MAX_DIFF_LINES = 400


@dataclass(frozen=True, slots=True)
class BeforeAfter:
    """One held-out task with its first execution before and after training."""

    task: str
    before: Execution
    after: Execution


def median_task(log: FactLog, before: Evaluation, after: Evaluation) -> BeforeAfter | None:
    """The held-out task whose gain is the median of all gains (of equals the first by name); None without both."""
    gains = sorted((after.rewards[t] - before.rewards[t], t) for t in before.rewards if t in after.rewards)
    if not gains:
        return None
    middle = gains[(len(gains) - 1) // 2][0]
    task = min(t for gain, t in gains if gain == middle)
    rows = executions(log).values()
    chosen = [min((x for x in rows if _is_of(x, task, label)), key=lambda x: x.execution, default=None)
              for label in (before.label, after.label)]
    if chosen[0] is None or chosen[1] is None:
        return None
    return BeforeAfter(task, chosen[0], chosen[1])


def _is_of(x: Execution, task: str, label: str) -> bool:
    return x.dispatched is not None and x.dispatched.fact.label == label and x.dispatched.fact.task == task


def timed_out(log: FactLog) -> Execution | None:
    """The last training execution that a limit ended and whose targets were trained; else the last that it ended.

    Of those, one with a reward is preferred: its workspace was worth scoring.
    """
    found = [x for x in executions(log).values() if x.terminated and x.terminated.fact.ending == "timed_out"
             and x.terminated.fact.purpose == "train"]
    return max(found, key=_worth, default=None)


def _worth(x: Execution) -> tuple[bool, bool, bool, str]:
    outcome = x.outcome
    return (outcome is not None and outcome.num_trained_targets > 0, outcome is not None and outcome.reward > 0,
            x.terminated is not None and x.terminated.fact.snapshot is not None, x.execution)


# ---------------------------------------------------------------- workspaces


def workspace_of_task(task: Path) -> dict[str, bytes]:
    """Files of a task's initial workspace by their relative names; links and odd files are left out."""
    root = task / "workspace"
    found: dict[str, bytes] = {}
    for path in sorted(root.rglob("*")) if root.is_dir() else ():
        if path.is_file() and not path.is_symlink() and len(found) < MAX_FILES:
            found[path.relative_to(root).as_posix()] = path.read_bytes()[:MAX_FILE_BYTES]
    return found


def workspace_of_snapshot(blobs: BlobStore, snapshot: BlobRef) -> dict[str, bytes]:
    """Files of a preserved workspace, read from its tar without putting anything on disk.

    Raises:
        BrokenBody: the blob is missing, other than its reference says, or no tar.
    """
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(blobs.get(snapshot)), mode="r:") as tar:
            for entry in tar:
                file = tar.extractfile(entry) if entry.isreg() and len(found) < MAX_FILES else None
                if file is not None:
                    found[entry.name.removeprefix("./")] = file.read(MAX_FILE_BYTES)
    except tarfile.TarError as error:
        raise BrokenBody(f"snapshot {snapshot.path}: {error}") from error
    return found


def diff(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    """A unified diff over all files, at most `MAX_DIFF_LINES` lines of it."""
    lines: list[str] = []
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            lines.extend(_file_diff(name, before.get(name), after.get(name)))
    left = len(lines) - MAX_DIFF_LINES
    return [*lines[:MAX_DIFF_LINES], f"@@ {left} more lines @@"] if left > 0 else lines


def _file_diff(name: str, before: bytes | None, after: bytes | None) -> Iterator[str]:
    try:
        old, new = ((b or b"").decode("utf-8").splitlines() for b in (before, after))
    except UnicodeDecodeError:
        yield f"@@ {name}: binary content differs @@"
        return
    yield from difflib.unified_diff(old, new, "nothing" if before is None else f"before/{name}",
                                    "nothing" if after is None else f"after/{name}", lineterm="", n=2)
