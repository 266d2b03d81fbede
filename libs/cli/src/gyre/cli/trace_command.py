"""`gyre trace`: what a cell did, process by process, while it changed its role."""

from pathlib import Path
from typing import Annotated

import typer
from gyre.cli.terminal import harmless_line
from gyre.cli.tree_command import PIPED_WIDTH, explained, say
from gyre.contracts.errors import ConfigError
from rich.console import Console
from rich.text import Text

RunName = Annotated[str, typer.Argument(metavar="RUN", help="a run's directory or name, or a directory of span files; "
                                                            "default: the run that is up, else the newest")]
Last = Annotated[bool, typer.Option("--last", help="the newest transition (what is shown if none is named)")]
Named = Annotated[str, typer.Option("--transition", help="this transition, e.g. cell-0-epoch-2")]
Listed = Annotated[bool, typer.Option("--list", help="list the run's transitions; with --html draw them all")]
HtmlFile = Annotated[Path | None, typer.Option("--html", help="draw it as one page without external parts")]
Runs = Annotated[Path, typer.Option("--runs", help="where runs are kept")]


def trace(run: RunName = "", last: Last = False, transition: Named = "", listed: Listed = False, html: HtmlFile = None,
          runs: Runs = Path("runs")) -> None:
    """Print a role transition's trace over all its processes as a tree with times; the last line says what it covers."""
    from gyre.cli.trace_view.page import write_html
    from gyre.cli.trace_view.source import choose, find_place
    from gyre.cli.trace_view.spans import read_spans
    from gyre.cli.trace_view.text import print_list, print_transition
    from gyre.cli.trace_view.tree import transitions

    with explained():
        if sum((last, bool(transition), listed)) > 1:
            raise ConfigError("--last, --transition and --list: choose one of them")
        place = find_place(run, runs)
        spans = read_spans(place.directory)
        found = transitions(spans)
        chosen = choose(found, transition, place)
        said = f"{place.said}, {spans.num_files} span files"
        say(said + (f", {spans.num_unreadable} lines that are no spans" if spans.num_unreadable else ""))
        if html is not None:
            write_html(found if listed else [chosen], place.said, html)
            say(f"{html}: {html.stat().st_size / 1e3:.0f} kB")
        if listed:
            print_list(found, _out)
        else:
            print_transition(chosen, _out)


def _out(line: Text) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(harmless_line(line) if line.plain else "", width=None if console.is_terminal else PIPED_WIDTH)
