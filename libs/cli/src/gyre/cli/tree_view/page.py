"""A tree as one HTML page that needs nothing else: drawing, figures, admitted paths, outline, and every call with its text.

A small script of its own filters and sorts the calls and shows their texts, which lie in the page as data; without it
everything but the texts is there.
"""

from importlib import resources
from pathlib import Path

from gyre.cli.markup import Html, el, join, table, write_whole
from gyre.cli.tree_view.anatomy import Anatomy, anatomy
from gyre.cli.tree_view.drawing import ROLE_CLASSES, drawing, legend
from gyre.cli.tree_view.facts import (
    CallRow,
    call_rows,
    fates_text,
    head,
    role_rows,
    versions_text,
    weights,
)
from gyre.cli.tree_view.outline_html import outline_html
from gyre.cli.tree_view.pieces import texts
from gyre.cli.treefile import Decode, TreeView

OUTLINE_LINES = 160
_COLUMNS = ("call", "agent", "role", "known by", "after", "keeps", "prompt", "output", "finish", "weights",
            "path, or why not", "drawn")
_NUMERIC = frozenset({0, 4, 5, 6, 7, 11})


def write_html(view: TreeView, path: Path, decode: Decode | None = None) -> None:
    """Write the page of a tree to `path`; an older one is replaced at once. Without `decode` ids are shown."""
    write_whole(render_page(view, decode), path)


def render_page(view: TreeView, decode: Decode | None = None) -> str:
    """The page as text. The same tree gives the same bytes."""
    tree = anatomy(view)
    name = view.header.outcome.execution if view.header else "a tree"
    css = "".join(_asset(file) for file in ("report.css", "drawing.css", "tree.css"))
    top = join((el("meta", charset="utf-8"), el("meta", name="viewport", content="width=device-width, initial-scale=1"),
                el("title", f"{name} · OpenGyre trajectory tree"), el("style", Html(css))))
    parts = [_top(tree, name), el("h2", "Overview"), legend(tree), el("div", drawing(tree), cls="draw"),
             el("p", cls="hint", id="hint"), _paths(tree),
             el("h2", "Outline"), outline_html(tree, OUTLINE_LINES), _calls(tree)]
    scripts = (el("script", Html(texts(tree, decode)), type="application/json", id="texts"),
               el("script", Html(_asset("tree.js"))))
    page = el("html", el("head", top), el("body", el("main", *parts), *scripts), lang="en")
    return f"<!doctype html>\n{page}\n"


def _asset(name: str) -> str:
    return resources.files("gyre.cli").joinpath(name).read_text(encoding="utf-8")


def _top(tree: Anatomy, name: str) -> Html:
    said = [(key, value) for key, value in head(tree) if key != "execution"]
    header = tree.view.header
    kicker = f"OpenGyre trajectory tree · query {header.query}, group {header.group}, {header.purpose}" if header else ""
    facts = el("dl", *[join((el("dt", key), el("dd", value))) for key, value in said], cls="said-of")
    rows = [(join((el("i", cls=f"key {ROLE_CLASSES.get(r.role, 'r0')}"), r.role)), f"{r.num_calls:,}", f"{r.num_sampled:,}",
             f"{r.num_paths:,}", f"{r.num_trained:,}") for r in role_rows(tree)]
    roles = table(("role", "calls", "sampled", "paths", "trained"), rows, frozenset({1, 2, 3, 4}))
    versions = table(("weights", "sampled tokens"), [(f"v{v}", f"{num:,}") for v, num in weights(tree)], frozenset({1}))
    return join((el("p", kicker, cls="kicker"), el("h1", name), facts, el("div", roles, versions, cls="two")))


def _paths(tree: Anatomy) -> Html:
    paths = tree.view.paths
    if not paths:
        return el("p", f"No path was admitted to training: {tree.reason}.", cls="mut")
    total = sum(path.num_owned for path in paths)
    rows = []
    for number, path in enumerate(paths):
        inside = set(tree.path(path.leaf))
        num_calls = sum(call.segment in inside for call in tree.view.calls)
        rows.append((el("button", f"path {number}", type="button", data_path=number), path.role_class, path.leaf,
                     f"{tree.end(path.leaf):,}", num_calls, f"{path.num_owned:,}", f"{100 * path.num_owned / total:.1f} %"))
    return join((el("h2", "Admitted paths"),
                 el("p", f"In the order of their draw. Each target that a path owns weighs 1/{total:,}, so that the execution "
                         "weighs the same however many paths it has."),
                 el("div", table(("", "role", "leaf", "tokens", "calls on it", "owned targets", "share of the weight"), rows,
                                 frozenset({2, 3, 4, 5, 6})), cls="narrow")))


def _calls(tree: Anatomy) -> Html:
    rows = call_rows(tree)
    places = {call.index: number for number, call in enumerate(tree.view.calls)}
    roles = [r.role for r in role_rows(tree)]
    agents = list(dict.fromkeys(row.agent for row in rows))
    fates = sorted({fate for row in rows for fate in row.fates}, key=lambda f: (not f.startswith("path "), f))
    filters = el("p", _choice("role", roles), _choice("agent", agents), _choice("fate", fates, "path, or why not"),
                 el("label", "text ", el("input", type="search", id="find", size=18)),
                 el("span", f"{len(rows):,} calls", id="shown", cls="mut"), cls="filters")
    heads = join(el("th", name, cls="num" if i in _NUMERIC else None, data_column=i) for i, name in enumerate(_COLUMNS))
    body = join(_call(row, places[row.index]) for row in rows)
    listing = el("table", el("thead", el("tr", heads)), el("tbody", body), id="calls")
    how = "Choose a line, or a bar of the drawing, to read what a call added to its context and what it sampled. Headings sort."
    return join((el("h2", "Calls"), el("p", how),
                 filters, el("div", listing, cls="scroll")))


def _choice(name: str, values: list[str], label: str = "") -> Html:
    options = [el("option", "all", value=""), *(el("option", value, value=value) for value in values)]
    return el("label", f"{label or name} ", el("select", *options, data_filter=name))


def _call(row: CallRow, place: int) -> Html:
    cells = (f"#{row.index}", row.agent, row.role, row.known_by, "" if row.continues is None else f"#{row.continues}",
             f"{row.kept:,}" if row.kept else "", f"{row.prompt_len:,}", f"{row.num_output:,}", row.finish,
             versions_text(row.versions), fates_text(row.fates) if row.fates else "no output",
             f"{row.drawn}×" if row.drawn > 1 else "")
    tds = join(el("td", cell, cls="num" if i in _NUMERIC else None) for i, cell in enumerate(cells))
    return el("tr", tds, id=f"call-{place}", data_call=place, data_role=row.role, data_agent=row.agent,
              data_fate="|".join(row.fates), tabindex=0)
