"""Transitions as one HTML page that needs nothing else: a waterfall with a lane for each process, and the tree below it."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from gyre.cli.markup import Html, el, join, table
from gyre.cli.trace_view.text import details, head, last_line, milliseconds
from gyre.cli.trace_view.tree import ROOT, Node, Transition

_ROW, _PAD, _LANE, _WIDTH, _LABEL = 18, 6, 8, 1000, 110  # pixels
_TICKS = 8
_MIN_BAR = 1.5
_LETTER = 6.2
_COLUMNS = ("span", "process", "begins", "lasts", "")
_NUMERIC = frozenset({2, 3})


def write_html(found: Sequence[Transition], run: str, path: Path) -> None:
    """Write the page of these transitions to `path`; an older one is replaced at once."""
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(render_page(found, run), encoding="utf-8")
    aside.replace(path)


def render_page(found: Sequence[Transition], run: str) -> str:
    """The page as text. The same transitions give the same bytes."""
    title = found[0].name if len(found) == 1 else f"{len(found)} transitions"
    sheets = (resources.files("gyre.cli").joinpath(name) for name in ("report.css", "trace.css"))
    css = "".join(sheet.read_text(encoding="utf-8") for sheet in sheets)
    top = join((el("meta", charset="utf-8"), el("meta", name="viewport", content="width=device-width, initial-scale=1"),
                el("title", f"{title} · OpenGyre role transition"), el("style", Html(css))))
    body = el("main", el("p", run, cls="kicker"), el("h1", title), *(_section(one) for one in found))
    return f"<!doctype html>\n{el('html', el('head', top), el('body', body), lang='en')}\n"


def _section(one: Transition) -> Html:
    facts = [el("tr", el("th", word), el("td", text)) for word, text in head(one)]
    rows = [(Html("&nbsp;" * 4 * depth) + el("span", node.span.name, cls=_kind(node)), node.span.process,
             milliseconds(node.start_ns - one.root.start_ns), milliseconds(node.end_ns - node.start_ns), details(node))
            for depth, node in one.root.walk()]
    return el("section", el("h2", one.name), el("table", *facts, cls="head"), el("div", waterfall(one), cls="draw"),
              el("p", last_line(one), cls="mono"),
              el("details", el("summary", "every span"), table(_COLUMNS, [(Html(a), *rest) for a, *rest in rows], _NUMERIC)))


def waterfall(one: Transition) -> Html:
    """A lane for each process, in the order in which they come in; spans that overlap lie in rows of their own."""
    nodes = [node for _, node in one.root.walk()]
    start = min(node.start_ns for node in nodes)
    end = max(max(node.end_ns for node in nodes), start + 1)
    lanes: dict[str, list[list[Node]]] = {}
    for node in sorted(nodes, key=lambda node: (node.start_ns, -node.end_ns)):
        _place(lanes.setdefault(node.span.process, []), node)
    parts: list[Html] = []
    y = 22
    for process, rows in lanes.items():
        height = len(rows) * _ROW + _PAD
        parts.append(el("rect", x=0, y=y, width=_LABEL + _WIDTH, height=height, cls="lane"))
        parts.append(el("text", process, x=4, y=y + _ROW - 4, cls="process"))
        parts += [_bar(node, one, _x(node.start_ns, start, end), _x(node.end_ns, start, end), y + _PAD / 2 + number * _ROW)
                  for number, row in enumerate(rows) for node in row]
        y += height + _LANE
    gaps = [el("rect", el("title", f"nothing recorded for {milliseconds(b - a)}"), x=_x(a, start, end), y=22,
               width=max(_x(b, start, end) - _x(a, start, end), 1), height=y - 22 - _LANE, cls="gap") for a, b in one.gaps]
    return el("svg", *_axis(one, start, end, y), *gaps, *parts, viewBox=f"0 0 {_LABEL + _WIDTH} {y}", role="img",
              width=_LABEL + _WIDTH, height=y, aria_label=f"waterfall of {one.name}", cls="waterfall")


def _place(rows: list[list[Node]], node: Node) -> None:
    """Into the first row that is free then."""
    for row in rows:
        if row[-1].end_ns <= node.start_ns:
            row.append(node)
            return
    rows.append([node])


def _x(time_ns: int, start: int, end: int) -> float:
    return round(_LABEL + (time_ns - start) / (end - start) * _WIDTH, 2)


def _axis(one: Transition, start: int, end: int, height: int) -> list[Html]:
    step = _round((end - start) / _TICKS)
    first = -((one.root.start_ns - start) // step)
    ticks = range(first, (end - one.root.start_ns) // step + 1)
    places = [(_x(one.root.start_ns + tick * step, start, end), milliseconds(tick * step)) for tick in ticks]
    return [el("g", el("line", x1=x, x2=x, y1=16, y2=height, cls="grid"), el("text", text, x=x + 2, y=11))
            for x, text in places]


def _round(nanoseconds: float) -> int:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10 ** max(0, len(str(int(nanoseconds))) - 1)
    return next(int(power * factor) for factor in (1, 2, 5, 10) if power * factor >= nanoseconds)


def _bar(node: Node, one: Transition, left: float, right: float, y: float) -> Html:
    said = (f"{node.span.name}\n{node.span.process}, begins {milliseconds(node.start_ns - one.root.start_ns)}, "
            f"lasts {milliseconds(node.end_ns - node.start_ns)}\n{details(node)}")
    width = max(right - left, _MIN_BAR)
    label = node.span.name.removeprefix("gyre.").rsplit("/", 1)[-1]
    fits = len(label) * _LETTER < width
    return el("g", el("title", said), el("rect", x=left, y=y, width=round(width, 2), height=_ROW - 3, rx=2,
                                         cls=f"bar {_kind(node)}" + ("" if node.is_finished else " open")),
              el("text", label, x=left + 4, y=y + _ROW - 7, cls="label") if fits else None)


def _kind(node: Node) -> str:
    name = node.span.name
    if node.span.error:
        return "failed"
    if name == ROOT:
        return "root"
    if name == "gyre.fact.delivery":
        return "wait"
    return "work" if name.startswith("gyre.") and "/" not in name else "small"
