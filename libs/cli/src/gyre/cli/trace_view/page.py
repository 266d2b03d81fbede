"""Transitions as one HTML page that needs nothing else: a waterfall with a lane for each process, and the tree below it."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from gyre.cli.markup import Html, el, join, table, write_whole
from gyre.cli.trace_view.text import details, head, last_line, milliseconds
from gyre.cli.trace_view.tree import ROOT, Node, Transition

_ROW, _PAD, _LANE, _WIDTH, _LABEL = 18, 6, 8, 1000, 110  # pixels
_TOP, _RIGHT = 22, 60
_TICKS = 8
_MIN_BAR = 1.5
_LETTER = 6.2
_COLUMNS = ("span", "process", "begins", "lasts", "")
_NUMERIC = frozenset({2, 3})


def write_html(found: Sequence[Transition], run: str, path: Path) -> None:
    """Write the page of these transitions to `path`; an older one is replaced at once."""
    write_whole(render_page(found, run), path)


def render_page(found: Sequence[Transition], run: str) -> str:
    """The page as text. The same transitions give the same bytes."""
    title = found[0].name if len(found) == 1 else f"{len(found)} transitions"
    sheets = (resources.files("gyre.cli").joinpath(name) for name in ("report.css", "trace.css"))
    css = "".join(sheet.read_text(encoding="utf-8") for sheet in sheets)
    top = join((el("meta", charset="utf-8"), el("meta", name="viewport", content="width=device-width, initial-scale=1"),
                el("title", f"{title} · OpenGyre role transition"), el("style", Html(css))))
    body = el("main", el("p", run, cls="kicker"), el("h1", title), _legend(), *(_section(one, len(found) > 1) for one in found))
    return f"<!doctype html>\n{el('html', el('head', top), el('body', body), lang='en')}\n"


def _legend() -> Html:
    keys = (("work", "work"), ("wait", "a fact on its way"), ("small", "handling, commands"), ("failed", "failed"),
            ("work open", "never ended"), ("gap", "nothing recorded"))
    icons = ((el("svg", el("rect", width=14, height=10, cls=f"bar {kind}"), width=14, height=10), text) for kind, text in keys)
    return el("div", *(el("span", icon, el("span", text), cls="entry") for icon, text in icons), cls="legend")


def _section(one: Transition, is_titled: bool) -> Html:
    facts = [el("tr", el("th", word), el("td", text)) for word, text in head(one)]
    rows = [(Html("&nbsp;" * 4 * depth) + el("span", node.span.name, cls=_kind(node)), node.span.process,
             milliseconds(node.start_ns - one.root.start_ns), milliseconds(node.end_ns - node.start_ns), details(node))
            for depth, node in one.root.walk()]
    return el("section", el("h2", one.name) if is_titled else None, el("table", *facts, cls="head"),
              el("div", waterfall(one), cls="draw"),
              el("p", last_line(one), cls="mono"),
              el("details", el("summary", "every span"), table(_COLUMNS, [(Html(a), *rest) for a, *rest in rows], _NUMERIC)))


def waterfall(one: Transition) -> Html:
    """A lane for each process, in the order in which they come in; what overlaps lies in rows of its own."""
    nodes = [node for _, node in one.root.walk()]
    start = min(node.start_ns for node in nodes)
    end = max(max(node.end_ns for node in nodes), start + 1)
    behind: list[Html] = []
    bars: list[Html] = []
    y = _TOP
    for process, rows in _lanes(one).items():
        height = len(rows) * _ROW + _PAD
        behind += [el("rect", x=0, y=y, width=_LABEL + _WIDTH, height=height, cls="lane"),
                   el("text", process, x=4, y=y + _ROW - 4, cls="process")]
        bars += [_bar(node, one, _x(node.start_ns, start, end), _x(node.end_ns, start, end), y + _PAD / 2 + number * _ROW)
                 for number, row in enumerate(rows) for node in row]
        y += height + _LANE
    gaps = [el("rect", el("title", f"nothing recorded for {milliseconds(b - a)}"), x=_x(a, start, end), y=_TOP,
               width=max(round(_x(b, start, end) - _x(a, start, end), 2), 1), height=y - _TOP - _LANE, cls="gap")
            for a, b in one.gaps]
    width = _LABEL + _WIDTH + _RIGHT
    return el("svg", *behind, *_axis(one, start, end, y), *gaps, *bars, viewBox=f"0 0 {width} {y}", role="img", width=width,
              height=y, aria_label=f"waterfall of {one.name}", cls="waterfall")


def _lanes(one: Transition) -> dict[str, list[list[Node]]]:
    """Rows of each process. A span lies below those it is part of, in the first row that is free all its time."""
    above: dict[str, tuple[str, ...]] = {}
    for _, node in one.root.walk():
        above |= {child.span.id: (*above.get(node.span.id, ()), node.span.id) for child in node.children}
    lanes: dict[str, list[list[Node]]] = {}
    row_of: dict[str, tuple[str, int]] = {}
    for node in sorted((node for _, node in one.root.walk()), key=lambda node: (node.start_ns, -node.end_ns)):
        process, rows = node.span.process, lanes.setdefault(node.span.process, [])
        over = [row_of[name] for name in above.get(node.span.id, ()) if name in row_of]
        number = max((row for lane, row in over if lane == process), default=-1) + 1
        while number < len(rows) and any(_overlap(node, other) for other in rows[number]):
            number += 1
        rows += [[] for _ in range(number + 1 - len(rows))]
        rows[number].append(node)
        row_of[node.span.id] = process, number
    return lanes


def _overlap(one: Node, other: Node) -> bool:
    return one.start_ns < other.end_ns and other.start_ns < one.end_ns


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
