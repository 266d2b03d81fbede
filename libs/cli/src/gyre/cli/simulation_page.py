"""The timeline of simulated runs as one HTML page that needs nothing else: a lane per cell, what it did, and why not."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from gyre.cli.charts import Span, duration, timeline
from gyre.cli.markup import Html, el, join, table, write_whole
from gyre.cli.simulation import EXPLAINED, HEADS, LEFT, Line, cells
from gyre.contracts.simulation import Simulated

KEYS = (("rollout", "roll"), ("training", "train"), ("idle: tail", "tail"), ("idle: no data", "data"),
        ("idle: step's end", "end"), ("update", "update"), ("between roles", "move"), ("lost", "lost"))
COLOURS = (":root{--tail:#e9d8a6;--data:#e2b6c6;--end:#cdb4e0;--update:#5b8a72;--lost:#b3261e}"
           "@media (prefers-color-scheme:dark)"
           "{:root{--tail:#6a5a2a;--data:#7a4458;--end:#5d4579;--update:#7cc7a0;--lost:#f08b82}}")
WINDOW_BURSTS = 3  # of the close view, from the run's middle


def write_page(lines: Sequence[Line], title: str, notes: Sequence[str], path: Path) -> None:
    """Write the page of the lines' first seeds to `path`; an older one is replaced at once."""
    write_whole(render(lines, title, notes), path)


def render(lines: Sequence[Line], title: str, notes: Sequence[str]) -> str:
    """The page as text. The same lines give the same bytes."""
    css = "".join(resources.files("gyre.cli").joinpath(name).read_text(encoding="utf-8")
                  for name in ("report.css", "drawing.css"))
    css += COLOURS + "".join(f".fill.{t}{{fill:var(--{t});background:var(--{t})}}"
                             for t in ("tail", "data", "end", "update", "lost"))
    top = join((el("meta", charset="utf-8"), el("meta", name="viewport", content="width=device-width, initial-scale=1"),
                el("title", f"{title} · OpenGyre simulation"), el("style", Html(css))))
    numeric = frozenset(range(len(HEADS))) - frozenset(LEFT)
    parts = [el("p", "OpenGyre simulation", cls="kicker"), el("h1", title), *(el("p", note) for note in notes),
             table(HEADS, (cells(line) for line in lines), numeric), el("p", EXPLAINED, cls="mut"),
             *(_lanes(line.first) for line in lines)]
    page = el("html", el("head", top), el("body", el("main", *parts)), lang="en")
    return f"<!doctype html>\n{page}\n"


def _lanes(run: Simulated) -> Html:
    total = run.num_cells + run.num_standalone
    names = [f"cell {c}" + (" (only rolls out)" if c >= run.num_cells else "") for c in range(total)]
    spans = [Span(s.cell, s.start_s, s.end_s, s.use) for s in run.stretches]
    levels = [(time, float(level)) for time, level in run.levels]
    begin, end = _window(run)
    heading = f"{run.schedule}, mu = {run.steps_per_burst}, phi = {run.phi}"
    said = (f"{duration(run.makespan_s)} for {len(run.steps)} steps of {run.num_executions:,} executions. Of the rollout cells "
            "those are drawn as idle that the others could have done without.")
    return join((el("h2", heading), el("p", said),
                 timeline("The whole run", names, spans, levels, (0.0, run.makespan_s), KEYS),
                 timeline("From its middle", names, spans, levels, (begin, end), KEYS)))


def _window(run: Simulated) -> tuple[float, float]:
    """Some bursts in the middle of the run."""
    ends = [0.0, *(step.finished_s for step in run.steps)]
    first = len(ends) // 2 // run.steps_per_burst * run.steps_per_burst
    last = min(first + WINDOW_BURSTS * run.steps_per_burst, len(ends) - 1)
    return ends[first] if first < last else 0.0, ends[last]
