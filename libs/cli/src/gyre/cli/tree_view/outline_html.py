"""The outline of a tree as HTML: the same lines as on a terminal, with texts below where there is room for them."""

from collections.abc import Callable, Sequence

from gyre.cli.markup import Html, el, join
from gyre.cli.tree_view.anatomy import Anatomy
from gyre.cli.tree_view.facts import fates_names, numbers, versions_text, whose_text
from gyre.cli.tree_view.outline import Row, outline
from gyre.cli.tree_view.text import glyph, heading, note

Spell = Callable[[Sequence[int]], str]
NUM_TINTS = 5
MAX_RUNS = 24
MAX_TOKENS = 400
_HEADINGS = ("", "tokens", "calls", "whose", "sampled", "path, or why not", "weights", "")


def outline_html(tree: Anatomy, max_lines: int, spell: Spell | None = None) -> Html:
    """The sections one after another. With `spell` every line has its text below, sampled runs marked by their owner."""
    parts: list[Html] = []
    for section in outline(tree, max_lines):
        body: list[Html] = []
        for row in section.rows:
            body.append(_row(tree, row, row is section.rows[-1]))
            if spell is not None and row.kind in ("trunk", "side"):
                body.append(el("tr", el("td"), el("td", _said(tree, row, spell), colspan=7, cls="said")))
        heads = el("tr", *[el("th", name, cls="num" if name == "sampled" else None) for name in _HEADINGS])
        parts.append(el("h3", heading(tree, section)))
        parts.append(el("div", el("table", el("thead", heads), el("tbody", *body), cls="outline"), cls="scroll"))
    return join(parts)


def _row(tree: Anatomy, row: Row, is_last: bool) -> Html:
    calls = [tree.view.calls[n] for n in row.calls]
    trained = any(fate.startswith("path ") for fate in row.fates)
    whose = whose_text(calls) or ("" if row.num_sampled else "context")
    cells = (f"{row.start:,}..{row.stop:,}", numbers([c.index for c in calls]), whose)
    return el("tr", el("td", glyph(row, is_last), cls="graph"), *[el("td", cell) for cell in cells],
              el("td", f"{row.num_sampled:,}" if row.num_sampled else "", cls="num"), el("td", fates_names(row.fates)),
              el("td", versions_text(row.versions)), el("td", note(row)),
              cls=row.kind if trained or row.kind == "section" else f"{row.kind} mut")


def _said(tree: Anatomy, row: Row, spell: Spell) -> Html:
    runs = [run for segment in row.segments for run in tree.runs_of(segment)]
    parts: list[Html | str] = []
    for run in runs[:MAX_RUNS]:
        text = spell(tuple(tree.view.ids[run.start:min(run.stop, run.start + MAX_TOKENS)].tolist()))
        left = f" … {run.num - MAX_TOKENS:,} more tokens" if run.num > MAX_TOKENS else ""
        if run.call < 0:
            parts.append(f"{text}{left}\n")
        else:
            parts.append(join((el("mark", text, cls=tint(run.fate)), f"{left}  #{tree.view.calls[run.call].index}\n")))
    left_runs = len(runs) - MAX_RUNS
    return join((*parts, f"and {left_runs} more pieces" if left_runs > 0 else ""))


def tint(fate: str) -> str:
    """The class of a mark: one of a few colours by owner, dashed where nothing is trained."""
    return f"p{int(fate.removeprefix('path ')) % NUM_TINTS}" if fate.startswith("path ") else "free"
