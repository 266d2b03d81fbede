"""Trees from files of other tools, and trees as files: `gyre tree import` and `gyre tree export`.

The work is trajectory's, which is a service and so runs as a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gyre.cli.tree_view.source import find_place, known, open_file
from gyre.cli.treefile import TreeView, tree_path
from gyre.contracts.errors import ConfigError, GyreError, InvalidId
from gyre.contracts.ids import check_id

TOOL = "gyre.trajectory.portable.main"
ROLES = {256: "system", 257: "user", 258: "assistant", 259: "tool", 260: "summary"}  # ids beside the bytes


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """What is asked of the importer.

    main_only: without sub-agents; as_bytes: texts where there are no ids; policy: model whose outputs are targets;
    session: which one of several
    """

    main_only: bool = False
    as_bytes: bool = False
    policy: str = ""
    session: str = ""

    def arguments(self) -> list[str]:
        found = [*(["--main-only"] if self.main_only else []), *(["--bytes"] if self.as_bytes else [])]
        return [*found, *(["--policy", self.policy] if self.policy else []),
                *(["--session", self.session] if self.session else [])]


@dataclass(frozen=True, slots=True)
class Import:
    """What came of it: the lines to say, and the tree if the files hold one session alone."""

    lines: tuple[str, ...]
    view: TreeView | None

    @property
    def said(self) -> str:
        return "\n".join(self.lines)

    @property
    def is_text(self) -> bool:
        """Whether the ids are bytes."""
        return any(" unit=byte" in line for line in self.lines)


def import_files(files: Sequence[Path], options: ImportOptions, out: Path | None = None) -> Import:
    """Read files of one session, and write its tree to `out`. Raises ConfigError, GyreError."""
    with tempfile.TemporaryDirectory() as directory:
        tree = out or Path(directory) / "tree.msgpack"
        wanted = ["--out" if out else "--out-if-one", str(tree)]
        printed = _run(["import", *map(str, files), *options.arguments(), *wanted])
        return Import(tuple(printed.splitlines()), open_file(tree) if tree.exists() else None)


def export_tree(execution: str, file: Path, run: Path | None, runs: Path) -> int:
    """Write an execution of a run, or a .msgpack file, as `gyre-tree/1`; returns its bytes. Raises ConfigError, GyreError."""
    if execution.endswith(".msgpack"):
        _run(["export", execution, "--out", str(file)])
        return file.stat().st_size
    place = find_place(run, runs)
    try:
        check_id(execution, "EXECUTION")
        data = place.blobs.read(tree_path(execution))
    except (InvalidId, FileNotFoundError):
        raise ConfigError(f"{place.said} has no tree of {execution!r}; {known(place, execution)}") from None
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / "tree.msgpack"
        tree.write_bytes(data)
        _run(["export", str(tree), "--out", str(file)])
    return file.stat().st_size


def spell_bytes(ids: Sequence[int]) -> str:
    """Byte ids as text; a role begins a line."""
    pieces, run = [], bytearray()
    for index in ids:
        if index in ROLES:
            pieces.append(run.decode("utf-8", "replace"))
            pieces.append(f"\n[{ROLES[index]}] ")
            run = bytearray()
        else:
            run.append(index & 0xFF)
    return "".join((*pieces, run.decode("utf-8", "replace"))).lstrip("\n")


def _run(arguments: list[str]) -> str:
    """What the tool prints. Its code 2 is a ConfigError, any other but 0 a GyreError."""
    done = subprocess.run([sys.executable, "-m", TOOL, *arguments], capture_output=True, text=True)
    said = done.stderr.strip()
    if done.returncode == 2:
        raise ConfigError(said)
    if done.returncode:
        missing = "No module named 'gyre.trajectory" in said or f"No module named {TOOL}" in said
        raise GyreError("the package opengyre-trajectory is not installed beside this one" if missing else
                        said if done.returncode == 1 and "Traceback" not in said else
                        f"{TOOL} ended with {done.returncode}: {said.splitlines()[-1] if said else ''}")
    return done.stdout
