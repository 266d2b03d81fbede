"""Trees from files and files from trees: what `gyre tree import` and `gyre tree export` run.

    python -m gyre.trajectory.portable.main import FILE... [--out TREE.msgpack] [--main-only] [--bytes] [--policy NAME]
    python -m gyre.trajectory.portable.main export TREE.msgpack --out FILE.json[.gz]

`import` prints one line of counts for every execution in the files; `--out` wants exactly one, which `--session` picks.
Ends with 2 if what was asked for is wrong, with 1 if a file cannot be read as what it is.
"""

import argparse
import gzip
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gyre.contracts.errors import ConfigError, GyreError
from gyre.trajectory.inspection import tree_from_bytes
from gyre.trajectory.portable.document import to_document
from gyre.trajectory.portable.formats import Counts, Imported, imported
from gyre.trajectory.portable.session import Options, Trace

Say = Callable[[str], None]


def main(arguments: Sequence[str] | None = None, say: Say = print) -> int:
    """The tool. Returns its exit code."""
    parsed = _parser().parse_args(arguments)
    try:
        if parsed.command == "import":
            import_files(parsed, say)
        else:
            export_tree(parsed.tree, parsed.out)
    except (ConfigError, FileNotFoundError, IsADirectoryError, PermissionError) as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        sys.stderr.write(f"{text}\n")
        return 2
    except GyreError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def import_files(parsed: argparse.Namespace, say: Say) -> None:
    """Read, count, write. Raises GyreError, OSError."""
    traces = [Trace(path.name, path.read_bytes(), _beside(path)) for path in parsed.files]
    found: list[Imported] = []
    for one in imported(traces, Options(parsed.main_only, parsed.bytes), parsed.policy):
        if parsed.session in ("", one.name):
            found.append(one)
            facts = "".join(f" {key}={value}" for key, value in one.facts.items())
            say(f"from {one.format} session={one.name} files={one.num_files} unit={one.unit.replace(' ', '-')}{facts}")
            say(Counts.of(one.file).line)
    if not found:
        raise ConfigError(f"--session {parsed.session}: no such session in the files" if parsed.session else
                          "no session in the files")
    if len(found) > 1:
        _say_total(found, say)
    if parsed.out is not None:
        if len(found) != 1:
            names = ", ".join(one.name for one in found)
            raise ConfigError(f"--out: {len(found)} sessions in the files; choose one with --session: {names}")
        parsed.out.write_bytes(found[0].file.to_bytes())
    if parsed.out_if_one is not None and len(found) == 1:
        parsed.out_if_one.write_bytes(found[0].file.to_bytes())


def export_tree(tree: Path, out: Path) -> None:
    """Write a tree file as `gyre-tree/1`, compressed if the name says so. Raises GyreError, OSError."""
    data = to_document(tree_from_bytes(tree.read_bytes()))
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gyre.trajectory.portable.main",
                                     description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    reading = commands.add_parser("import", help="a tree from the files of one session")
    reading.add_argument("files", nargs="+", type=Path, metavar="FILE")
    reading.add_argument("--out", type=Path, help="where the tree is written")
    reading.add_argument("--out-if-one", type=Path, help="the same, but nothing is written of several sessions")
    reading.add_argument("--main-only", action="store_true", help="leave sub-agents out")
    reading.add_argument("--bytes", action="store_true", help="read texts as UTF-8 bytes where there are no ids")
    reading.add_argument("--policy", default="", help="model whose outputs are targets; default: that of the first call")
    reading.add_argument("--session", default="", help="of several sessions in a file, this one")
    writing = commands.add_parser("export", help="a tree file as a gyre-tree/1 document")
    writing.add_argument("tree", type=Path, metavar="TREE.msgpack")
    writing.add_argument("--out", type=Path, required=True, help="FILE.json or FILE.json.gz")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
