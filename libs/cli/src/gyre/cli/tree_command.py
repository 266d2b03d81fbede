"""`gyre tree`: look inside one execution. `gyre tree EXECUTION` is short for `gyre tree show EXECUTION`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from gyre.cli.terminal import harmless, harmless_line
from gyre.contracts.errors import ConfigError, GyreError
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

if TYPE_CHECKING:
    from gyre.cli.tree_view.source import Place
    from gyre.cli.treefile import Decode, TreeView

PIPED_WIDTH = 120


class ShowByDefault(TyperGroup):
    """A first word that is no command is what `show` is to show."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, "--help"):
            args = ["show", *args]
        return super().parse_args(ctx, args)


tree_app = typer.Typer(cls=ShowByDefault, no_args_is_help=False, add_completion=False, pretty_exceptions_enable=False,
                       help="Look inside one execution's tree of calls. `gyre tree EXECUTION` is short for `gyre tree show "
                            "EXECUTION`, whose options `gyre tree show --help` lists.")
console = Console(highlight=False, soft_wrap=True)

Execution = Annotated[str, typer.Argument(help="an execution's id, a .msgpack file of a tree, or with --list the beginning "
                                               "of ids")]
RunPath = Annotated[Path | None, typer.Option("--run", help="a run's directory; default: the one that is up, else the newest")]
Runs = Annotated[Path, typer.Option("--runs", help="where runs are kept")]
HtmlFile = Annotated[Path | None, typer.Option("--html", help="write one page without external parts, instead of printing")]
WithText = Annotated[bool, typer.Option("--text", help="show how texts begin")]
AllCalls = Annotated[bool, typer.Option("--calls", help="list every call")]
OnePath = Annotated[str, typer.Option("--path", help="print one path as a transcript: number of an admitted path, "
                                                     "leaf:SEGMENT or call:INDEX")]
Width = Annotated[int, typer.Option("--width", help="columns; default: those of the terminal", min=0)]
Lines = Annotated[int, typer.Option("--lines", help="lines the outline may take before it is folded; 0: never", min=0)]
Listed = Annotated[bool, typer.Option("--list", help="list the executions that have a tree")]

Files = Annotated[list[Path], typer.Argument(help="the files of one session")]
OutFile = Annotated[Path | None, typer.Option("--out", help="write the tree, as a .msgpack file that `gyre tree` shows")]
MainOnly = Annotated[bool, typer.Option("--main-only", help="leave sub-agents out")]
AsBytes = Annotated[bool, typer.Option("--bytes", help="read texts as UTF-8 bytes where a trace has no ids")]
Policy = Annotated[str, typer.Option("--policy", help="model whose outputs are targets; default: that of the first call")]
Session = Annotated[str, typer.Option("--session", help="of several sessions in a file, this one")]
ExportedExecution = Annotated[str, typer.Argument(metavar="EXECUTION", help="an execution's id, or a .msgpack file of a tree")]
ExportFile = Annotated[Path, typer.Argument(metavar="FILE", help="FILE.json or FILE.json.gz")]


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Errors made on purpose end the program with their message: code 2 for what was asked, 1 for what was found."""
    try:
        yield
    except GyreError as error:
        console.print(harmless(f"gyre: {error}"), markup=False, style="red")
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None


@tree_app.command()
def show(execution: Execution = "", run: RunPath = None, runs: Runs = Path("runs"), html: HtmlFile = None,
         text: WithText = False, calls: AllCalls = False, path: OnePath = "", width: Width = 0, lines: Lines = 80,
         listed: Listed = False) -> None:
    """Print an execution's tree: what was sampled where, by whom, and what of it is trained."""
    from gyre.cli.tree_view.page import write_html
    from gyre.cli.tree_view.text import Options, print_tree
    from gyre.cli.tree_view.transcript import print_path

    with explained():
        if listed:
            _list(run, runs, execution)
            return
        view, decode = _opened(execution, run, runs)
        options = Options(width or (console.width if console.is_terminal else PIPED_WIDTH), lines, calls, text, decode)
        if html is not None:
            write_html(view, html, decode)
            say(f"{html}: {html.stat().st_size / 1e6:.1f} MB")
        elif path:
            print_path(view, path, options, _print)
        else:
            print_tree(view, options, _print)


@tree_app.command("import")
def import_(files: Files, html: HtmlFile = None, out: OutFile = None, main_only: MainOnly = False, as_bytes: AsBytes = False,
            policy: Policy = "", session: Session = "", calls: AllCalls = False, text: WithText = False, width: Width = 0,
            lines: Lines = 80) -> None:
    """Show the tree of a trace of another tool, or of an exported execution.

    Reads Harbor ATIF, SWE-agent .traj, Claude Code JSONL, sessions of prefix hashes, and gyre-tree/1; .gz or not.
    """
    from gyre.cli.tree_files import ImportOptions, import_files, spell_bytes
    from gyre.cli.tree_view.page import write_html
    from gyre.cli.tree_view.text import Options, print_tree

    with explained():
        found = import_files(files, ImportOptions(main_only, as_bytes, policy, session), out)
        decode = spell_bytes if found.is_text else None
        if found.view is not None and html is not None:
            write_html(found.view, html, decode)
            say(f"{html}: {html.stat().st_size / 1e6:.1f} MB")
        elif found.view is not None:
            columns = width or (console.width if console.is_terminal else PIPED_WIDTH)
            print_tree(found.view, Options(columns, lines, calls, text, decode), _print)
            say("")
        elif html is not None:
            raise ConfigError(f"--html: several sessions in the files; choose one with --session\n{found.said}")
        say(found.said)


@tree_app.command()
def export(execution: ExportedExecution, file: ExportFile, run: RunPath = None, runs: Runs = Path("runs")) -> None:
    """Write an execution's tree with all that was recorded as one JSON document, gyre-tree/1; FILE.gz is compressed."""
    from gyre.cli.tree_files import export_tree

    with explained():
        say(f"{file}: {export_tree(execution, file, run, runs):,} bytes")


def say(text: str) -> None:
    console.print(harmless(text), markup=False)


def _print(line: Text) -> None:
    console.print(harmless_line(line))


def _opened(execution: str, run: Path | None, runs: Path) -> tuple[TreeView, Decode | None]:
    """The tree, and what spells its ids. A file of its own is spelled by the run that was named, if one was."""
    from gyre.cli.tree_view.source import decoder, find_place, known, open_file, open_tree

    if execution.endswith(".msgpack"):
        return open_file(Path(execution)), decoder(find_place(run, runs)) if run else None
    place: Place = find_place(run, runs)
    if not execution:
        raise ConfigError(f"name an execution of {place.said}: gyre tree EXECUTION; {known(place, '')}")
    view = asyncio.run(open_tree(place, execution))
    say(place.said)
    return view, decoder(place)


def _list(run: Path | None, runs: Path, prefix: str) -> None:
    from gyre.cli.tree_view.listing import print_list
    from gyre.cli.tree_view.source import find_place, headers

    place = find_place(run, runs)
    say(place.said)
    print_list(headers(place, prefix), console.width if console.is_terminal else PIPED_WIDTH, _print)
