"""Trees from files and files from trees: what `gyre tree import` and `gyre tree export` run.

    python -m gyre.trajectory.portable.main import FILE... [--out TREE.msgpack] [--main-only] [--bytes] [--policy NAME]
    python -m gyre.trajectory.portable.main export TREE.msgpack --out FILE.json[.gz]

`import` prints one line of counts for every session in the files; `--out` wants exactly one, which `--session` picks.
Ends with 2 if what was asked for is wrong, with 1 if a file cannot be read as what it is.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gyre.contracts.errors import ConfigError, GyreError
from gyre.trajectory.portable.session import Options
from gyre.trajectory.portable.tool import Say, Wanted, export_tree, import_files


def main(arguments: Sequence[str] | None = None, say: Say = print) -> int:
    """The tool. Returns its exit code."""
    parsed = _parser().parse_args(arguments)
    try:
        if parsed.command == "import":
            options = Options(parsed.main_only, parsed.bytes)
            import_files(Wanted(parsed.files, options, parsed.policy, parsed.session, parsed.out, parsed.out_if_one), say)
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
