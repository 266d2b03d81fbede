"""What the tool does: files to trees, trees to files."""

import gzip
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gyre.contracts.errors import BrokenBody, ConfigError
from gyre.trajectory.inspection import tree_from_bytes
from gyre.trajectory.portable.document import to_document
from gyre.trajectory.portable.fields import TraceError
from gyre.trajectory.portable.formats import Counts, Imported, imported
from gyre.trajectory.portable.session import Options, Trace

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to import. `out` wants exactly one session, `out_if_one` is not written if there are several."""

    files: Sequence[Path]
    options: Options = Options()
    policy: str = ""
    session: str = ""
    out: Path | None = None
    out_if_one: Path | None = None


def import_files(wanted: Wanted, say: Say) -> None:
    """Read, count, write. Raises GyreError, OSError."""
    traces = [Trace(path.name, path.read_bytes(), _beside(path)) for path in wanted.files]
    found: list[Imported] = []
    for one in imported(traces, wanted.options, wanted.policy):
        if wanted.session in ("", one.name):
            found.append(one)
            facts = "".join(f" {key}={value}" for key, value in one.facts.items())
            say(f"from {one.format} session={one.name} files={one.num_files} unit={one.unit.replace(' ', '-')}{facts}")
            say(Counts.of(one.file).line)
    if not found:
        raise ConfigError(f"--session {wanted.session}: no such session in the files" if wanted.session else
                          "no session in the files")
    if len(found) > 1:
        _say_total(found, say)
    if wanted.out is not None:
        if len(found) != 1:
            names = ", ".join(one.name for one in found)
            raise ConfigError(f"--out: {len(found)} sessions in the files; choose one with --session: {names}")
        wanted.out.write_bytes(found[0].file.to_bytes())
    if wanted.out_if_one is not None and len(found) == 1:
        wanted.out_if_one.write_bytes(found[0].file.to_bytes())


def export_tree(tree: Path, out: Path) -> None:
    """Write a tree file as `gyre-tree/1`, compressed if the name says so. Raises GyreError, OSError."""
    try:
        data = to_document(tree_from_bytes(tree.read_bytes()))
    except (BrokenBody, TraceError) as error:
        raise TraceError(f"{tree.name}: {error}") from error
    out.write_bytes(gzip.compress(data, mtime=0) if out.suffix == ".gz" else data)


def _say_total(found: Sequence[Imported], say: Say) -> None:
    counts = [Counts.of(one.file) for one in found]
    flat, unique = sum(c.flat for c in counts), sum(c.unique for c in counts)
    ratio = flat / unique if unique else 0.0
    say(f"total sessions={len(found)} calls={sum(c.calls for c in counts)} flat={flat} unique={unique} ratio={ratio:.2f}")


def _beside(path: Path) -> Callable[[str], bytes | None]:
    def read(name: str) -> bytes | None:
        other = path.parent / name
        return other.read_bytes() if other.is_file() else None
    return read
