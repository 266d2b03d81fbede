"""Charts as inline SVG that keep their text size at every width: x in percent of the width, y in pixels.

Lines are paths in a nested, horizontally stretched viewport with strokes that do not scale; everything else stands at
percent positions. Colours are CSS classes of the page, so that one chart serves light and dark.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gyre.cli.markup import Html, el, join

PLOT_HEIGHT = 180
AXIS_WIDTH = 46
_TOP = 8
_BOTTOM = 24
_STRETCH = 1000.0


@dataclass(frozen=True, slots=True)
class Series:
    """One curve or cloud. `tone`: class of its colour (`c1`, `c2`, `c3`, `soft`); `kind`: `line`, `dots` or `steps`."""

    name: str
    points: tuple[tuple[float, float], ...]
    tone: str = "c1"
    kind: str = "line"


@dataclass(frozen=True, slots=True)
class Rule:
    """A horizontal line of reference with its label."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Axis:
    """The range [low, high] of an axis with its ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def share(self, value: float) -> float:
        """Where `value` lies, 0 to 1, held inside the axis."""
        width = self.high - self.low
        return min(1.0, max(0.0, (value - self.low) / width)) if width > 0 else 0.5


def axis(low: float, high: float, num: int = 4, snap: bool = True) -> Axis:
    """An axis over [low, high] with about `num` steps of 1, 2 or 5; `snap` widens it to whole steps."""
    if not (math.isfinite(low) and math.isfinite(high)):
        low, high = 0.0, 1.0
    if high <= low:
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    raw = (high - low) / num
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.floor(low / step + 1e-9) if snap else math.ceil(low / step - 1e-9)
    last = math.ceil(high / step - 1e-9) if snap else math.floor(high / step + 1e-9)
    ticks = tuple(round(i * step, 12) for i in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks) if snap else Axis(low, high, ticks)


def short(value: float) -> str:
    """A tick's label: few digits, no needless zeros."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:,.4f}".rstrip("0").rstrip(".") if abs(value) < 1000 else f"{value:,.0f}"


def seconds(value: float) -> str:
    """A length of time as a tick's label."""
    if value < 120:
        return f"{short(round(value, 3))} s"
    return f"{value / 60:.4g} min" if value < 7200 else f"{value / 3600:.4g} h"


def duration(value: float) -> str:
    """A length of time in running text, to three digits."""
    unit, name = (1, "s") if value < 120 else (60, "min") if value < 7200 else (3600, "h")
    return f"{value / unit:.3g}\u00a0{name}"


def time_axis(low: float, high: float) -> Axis:
    """An axis of seconds whose ticks are whole seconds, minutes or hours."""
    unit = 1.0 if high < 120 else 60.0 if high < 7200 else 3600.0
    scaled = axis(low / unit, high / unit, 6, snap=False)
    return Axis(low, high, tuple(t * unit for t in scaled.ticks))


# ---------------------------------------------------------------- line charts


def curves(title: str, series: Sequence[Series], *, x_name: str, y_name: str = "", y: Axis | None = None,
           rules: Sequence[Rule] = (), label: Callable[[float], str] = short, height: int = PLOT_HEIGHT) -> Html:
    """A chart of one or more series over a common x axis; places without a finite value interrupt a line."""
    xs = [p[0] for s in series for p in s.points]
    ys = [p[1] for s in series for p in s.points if math.isfinite(p[1])] + [r.value for r in rules]
    across = axis(min(xs, default=0), max(xs, default=1), 6, snap=False)
    up = y or axis(min(ys, default=0), max(ys, default=1))
    floor = height - _BOTTOM
    marks = [_grid(up, floor), _x_labels(across, floor, short, x_name)]
    marks += [_rule(rule, up, floor) for rule in rules]
    marks += [_series(s, across, up, floor, height) for s in series]
    plot = el("svg", *marks, cls="plot", height=height, role="img", aria_label=f"{title}: chart over {x_name}")
    return _figure(title, y_name, _legend([(s.name, s.tone, s.kind) for s in series if s.name]),
                   _y_labels(up, floor, height, label), plot)


def _figure(title: str, note: str, legend: Html, axis_svg: Html, plot: Html) -> Html:
    caption = el("figcaption", el("b", title), el("span", note, cls="unit") if note else None, legend)
    return el("figure", caption, el("div", axis_svg, plot, cls="row"), cls="chart")


def _legend(entries: Sequence[tuple[str, str, str]]) -> Html:
    if len(entries) < 2:
        return Html("")
    return el("span", *[el("span", el("i", cls=f"key {kind} {tone}"), name) for name, tone, kind in entries],
              cls="legend")


def _level(up: Axis, value: float, floor: int) -> float:
    return round(floor - up.share(value) * (floor - _TOP), 1)


def _grid(up: Axis, floor: int) -> Html:
    return join(el("line", x1=0, x2="100%", y1=_level(up, t, floor), y2=_level(up, t, floor),
                   cls="base" if t == up.low else "grid") for t in up.ticks)


def _y_labels(up: Axis, floor: int, height: int, label: Callable[[float], str]) -> Html:
    texts = [el("text", label(t), x=AXIS_WIDTH - 8, y=_level(up, t, floor) + 4, text_anchor="end") for t in up.ticks]
    return el("svg", *texts, cls="axis", width=AXIS_WIDTH, height=height, aria_hidden="true")


def _x_labels(across: Axis, floor: int, label: Callable[[float], str], name: str) -> Html:
    texts = []
    for number, tick in enumerate(across.ticks):
        share = across.share(tick)
        anchor = "start" if share < 0.02 else "end" if share > 0.98 else "middle"
        x = f"{100 * share:.2f}%"
        texts.append(el("line", x1=x, x2=x, y1=floor, y2=floor + 4, cls="base"))
        first = f"{name} " if number == 0 and name else ""
        texts.append(el("text", f"{first}{label(tick)}", x=x, y=floor + 18, text_anchor=anchor))
    return join(texts)


def _rule(rule: Rule, up: Axis, floor: int) -> Html:
    y = _level(up, rule.value, floor)
    below = y < _TOP + 12
    return join((el("line", x1=0, x2="100%", y1=y, y2=y, cls="rule"),
                 el("text", rule.name, x="100%", y=y + 13 if below else y - 4, text_anchor="end")))


def _series(series: Series, across: Axis, up: Axis, floor: int, height: int) -> Html:
    places = [(across.share(x), _level(up, v, floor) if math.isfinite(v) else math.nan) for x, v in series.points]
    if series.kind == "dots":
        return join(el("circle", cx=f"{100 * x:.2f}%", cy=y, r=2, cls=f"dot {series.tone}")
                    for x, y in places if math.isfinite(y))
    return _stretched(_path(places, series.kind == "steps"), series.tone, height)


def _stretched(path: str, tone: str, height: int) -> Html:
    line = el("path", d=path, cls=f"line {tone}", vector_effect="non-scaling-stroke")
    return el("svg", line, x=0, y=0, width="100%", height=height, viewBox=f"0 0 {_STRETCH:g} {height}",
              preserveAspectRatio="none")


def _path(places: Sequence[tuple[float, float]], stepped: bool) -> str:
    commands: list[str] = []
    pen_down = False
    for x, y in places:
        if not math.isfinite(y):
            pen_down = False
            continue
        at = f"{x * _STRETCH:.1f}"
        commands.append((f"H{at}V{y:g}" if stepped else f"L{at} {y:g}") if pen_down else f"M{at} {y:g}")
        pen_down = True
    return "".join(commands)


# ---------------------------------------------------------------- intervals, stacks, bars


@dataclass(frozen=True, slots=True)
class Interval:
    """A labelled mean with its interval; `low` and `high` NaN: none is known."""

    name: str
    mean: float
    low: float
    high: float
    note: str
    tone: str = "c1"


def intervals(title: str, rows: Sequence[Interval], across: Axis) -> Html:
    """Means as dots with their intervals as bars, one row each, on a common axis."""
    lines = [el("div", el("span", row.name, cls="name"), _interval(row, across), el("span", row.note, cls="value"),
                cls="interval") for row in rows]
    ticks = el("svg", _x_labels(across, 0, short, ""), cls="plot", height=22, aria_hidden="true")
    foot = el("div", el("span", cls="name"), ticks, el("span", cls="value"), cls="interval")
    return el("figure", el("figcaption", el("b", title)), *lines, foot, cls="chart")


def _interval(row: Interval, across: Axis) -> Html:
    marks = [el("line", x1=f"{100 * across.share(t):.2f}%", x2=f"{100 * across.share(t):.2f}%", y1=0, y2="100%",
                cls="grid") for t in across.ticks]
    middle = f"{100 * across.share(row.mean):.2f}%"
    if math.isfinite(row.low) and row.high > row.low:
        marks.append(el("line", x1=f"{100 * across.share(row.low):.2f}%", x2=f"{100 * across.share(row.high):.2f}%",
                        y1=14, y2=14, cls=f"whisker {row.tone}"))
    marks.append(el("circle", cx=middle, cy=14, r=4.5, cls=f"dot {row.tone}"))
    return el("svg", *marks, cls="plot", height=28, role="img", aria_label=f"{row.name}: {row.note}")


def stack(title: str, parts: Sequence[tuple[str, float, str]]) -> Html:
    """One bar divided into (name, amount, tone) parts, with a legend that gives amounts and shares."""
    total = sum(amount for _, amount, _ in parts) or 1.0
    marks, keys, at = [], [], 0.0
    for name, amount, tone in parts:
        width = 100 * amount / total
        marks.append(el("rect", x=f"{at:.3f}%", y=0, width=f"{width:.3f}%", height=22, cls=f"fill {tone}"))
        keys.append(el("span", el("i", cls=f"key fill {tone}"), f"{name} {amount:,.0f} ({width:.1f} %)"))
        at += width
    bar = el("svg", *marks, cls="plot", height=22, role="img", aria_label=title)
    return el("figure", el("figcaption", el("b", title)), bar, el("div", *keys, cls="legend below"), cls="chart")


@dataclass(frozen=True, slots=True)
class Span:
    """A bar of row `row` from `start` to `end` seconds, in colour `tone`."""

    row: int
    start: float
    end: float
    tone: str


def timeline(title: str, rows: Sequence[str], spans: Sequence[Span], level: Sequence[tuple[float, float]],
             window: tuple[float, float], keys: Sequence[tuple[str, str]]) -> Html:
    """Bars over time, one row a name, and below them the waterlevel on the same axis."""
    across = time_axis(*window)
    up = axis(0, max((v for _, v in level), default=1) or 1, 2)
    height = 26 * len(rows)
    inside = [s for s in spans if s.end > window[0] and s.start < window[1]]
    bars = [_bar(s, across) for s in inside]
    names = [el("text", name, x=AXIS_WIDTH - 8, y=26 * i + 15, text_anchor="end") for i, name in enumerate(rows)]
    top = el("div", el("svg", *names, cls="axis", width=AXIS_WIDTH, height=height),
             el("svg", *bars, cls="plot", height=height, role="img", aria_label=title), cls="row")
    tall = 100
    floor = tall - _BOTTOM
    drawn = _path([(across.share(t), _level(up, v, floor)) for t, v in _clipped(level, window)], stepped=True)
    plot = el("svg", _grid(up, floor), _x_labels(across, floor, seconds, ""), _stretched(drawn, "c3", tall), cls="plot",
              height=tall, role="img", aria_label="waterlevel over time")
    below = el("div", _y_labels(up, floor, tall, short), plot, cls="row")
    legend = _legend([(name, tone, "fill") for name, tone in keys] + [("waterlevel (executions)", "c3", "line")])
    return el("figure", el("figcaption", el("b", title), legend), top, below, cls="chart")


def _bar(span: Span, across: Axis) -> Html:
    left, right = 100 * across.share(span.start), 100 * across.share(span.end)
    return el("rect", x=f"{left:.3f}%", y=26 * span.row + 1, width=f"{right - left:.3f}%", height=20,
              cls=f"fill {span.tone}")


def _clipped(level: Sequence[tuple[float, float]], window: tuple[float, float]) -> list[tuple[float, float]]:
    """The step curve inside the window, beginning and ending at its edges."""
    before = [v for t, v in level if t <= window[0]]
    inside = [(t, v) for t, v in level if window[0] < t <= window[1]]
    first = (window[0], before[-1] if before else 0.0)
    last = inside[-1][1] if inside else first[1]
    return [first, *inside, (window[1], last)]
