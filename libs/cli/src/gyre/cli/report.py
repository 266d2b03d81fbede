"""One self-contained HTML file about one run: what it learned, what it did, and that the books balance.

No script, no external asset; light and dark; every text from a run is escaped. Sections of single executions are in
`gyre.cli.report_cases`.
"""

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from gyre.cli.cases import median_task, timed_out
from gyre.cli.charts import Axis, Interval, Rule, Series, Span, axis, curves, duration, intervals, short, timeline
from gyre.cli.conservation import Check
from gyre.cli.ledger import RunLedger
from gyre.cli.markup import Html, el, join, table, write_whole
from gyre.cli.metrics import Estimate, estimate, mean_reward, moving_mean, paired_gain
from gyre.cli.report_cases import Sources, held_out_case, timed_out_case
from gyre.cli.report_trees import trees_section
from gyre.cli.views import Evaluation, cell_timelines, joins, steps, waterlevels
from gyre.contracts import events as e
from gyre.runtime.config import RunConfig
from gyre.runtime.settings import to_toml

PROVES = ("A policy of 0.1M parameters on a CPU can prove that every part works together – every token trained at most "
          "once, in exactly the context it was sampled in, by updates that raise the reward on tasks never trained on "
          "– and proves nothing about how well or how fast a large model learns.")
NBSP = "\u00a0"
_TONES = {"rollout": "roll", "train": "train", "to train": "move", "to rollout": "move"}
_MULTIPLES = (
    ("loss", "Loss", "what is minimised", lambda s: s.loss),
    ("grad_norm", "Gradient norm", "before clipping", lambda s: s.grad_norm),
    ("clipped", "Clip share", "of targets", None),
    ("abs_dlogp", "Engine against trainer", "mean |difference of log-prob|, nats", None),
    ("kl_k3", "KL, engine to trainer", "k3 estimate, nats", None), ("entropy", "Entropy", "nats per target", None),
    ("reference_kl_k3", "KL to the reference policy", "k3 estimate, nats", None),
    ("ess", "Effective sample size", "of the importance weights, share of targets", None),
    ("masked", "Dropped by the correction", "of targets", None),
    ("truncated", "Capped by the correction", "of targets", None),
    ("staleness", "Staleness", "versions from sampling to training, mean over targets", None))
_SHARES = ("clipped", "ess", "masked", "truncated")
_STALENESS = re.compile(r"staleness_(\d+)")


@dataclass(frozen=True, slots=True)
class ReportContext:
    """What a report shows beside the facts; what is absent is left out.

    `run_dir`: the run's directory, for its manifest and blobs. `baselines`: held-out rewards `do_nothing`, `random`,
    `oracle`. `control`: held-out reward of the same run with learning rate 0, `control_rewards` the same by task, for
    the paired difference. `proves`: one sentence on what the run proves and what it does not.
    """

    run_dir: Path
    config: RunConfig
    baselines: Mapping[str, float] = field(default_factory=dict)
    control: Estimate | None = None
    control_rewards: Mapping[str, float] = field(default_factory=dict)
    proves: str = PROVES


def write_report(ledger: RunLedger, context: ReportContext, path: Path) -> None:
    """Write the report of a run, whole or in progress, to `path`; an older one is replaced at once."""
    write_whole(render_report(ledger, context), path)


def render_report(ledger: RunLedger, context: ReportContext) -> str:
    """The page as text. The same ledger and context give the same bytes."""
    before, after = ledger.evaluation("before"), ledger.evaluation("after")
    checks = ledger.checks()
    sources = Sources.open(context.run_dir, context.config)
    parts = [
        _head(ledger, context, before, after, checks), _held_out(context, before, after),
        _learning(ledger, context, before), held_out_case(median_task(ledger, before, after), sources),
        timed_out_case(timed_out(ledger), sources), _balance(checks), _cells(ledger), trees_section(ledger),
        _optimisation(ledger), _again(context),
    ]
    style = "".join(resources.files("gyre.cli").joinpath(name).read_text(encoding="utf-8")
                    for name in ("report.css", "drawing.css"))
    head = join((el("meta", charset="utf-8"),
                 el("meta", name="viewport", content="width=device-width, initial-scale=1"),
                 el("title", f"{context.config.name} · OpenGyre run report"), el("style", Html(style))))
    page = el("html", el("head", head), el("body", el("main", *parts)), lang="en")
    return f"<!doctype html>\n{page}\n"


# ---------------------------------------------------------------- what it comes to


def _head(ledger: RunLedger, context: ReportContext, before: Evaluation, after: Evaluation,
          checks: tuple[Check, ...]) -> Html:
    begin, end = ledger.span_s
    trained = [x for x in ledger.executions.values() if x.dispatched and x.dispatched.fact.purpose == "train"]
    limited = sum(1 for x in trained if x.terminated and x.terminated.fact.ending == "timed_out")
    held = sum(check.ok for check in checks)
    figures = [(str(len(ledger.steps)), "steps"), (f"{len(trained):,}", "training executions"),
               (f"{limited:,}", "of them ended by a limit, and scored"), (f"{len(ledger.calls):,}", "model calls"),
               (duration(end - begin), "from first fact to last"),
               (f"{held} of {len(checks)}", "checks of the books hold")]
    closed = [c.fact.reason for c in ledger.all(e.RunClosed).values()]
    state = closed[-1] if closed else "in progress"
    return join((el("p", f"OpenGyre run {context.run_dir.name} · {state}", cls="kicker"), el("h1", context.config.name),
                 el("p", _verdict(before, after), cls="lead"),
                 el("div", *[el("div", el("b", value), el("span", name)) for value, name in figures], cls="facts"),
                 el("p", context.proves, cls="mut") if context.proves else ""))


def _verdict(before: Evaluation, after: Evaluation) -> str:
    gain = paired_gain(before.rewards, after.rewards)
    first, last = estimate(before.rewards.values()), estimate(after.rewards.values())
    if gain is None or first is None or last is None:
        return "There is no held-out evaluation both before and after training, so nothing is said about learning."
    change = f"{first.mean:.3f} to {last.mean:.3f}: {gain.mean:+.3f} ({_range(gain)}, {gain.num} tasks)"
    if math.isfinite(gain.low) and gain.low > 0:
        return f"Reward on held-out tasks rose from {change}."
    if math.isfinite(gain.high) and gain.high < 0:
        return f"Reward on held-out tasks fell from {change}."
    return f"Reward on held-out tasks went from {change}, which does not exceed chance."


def _range(value: Estimate) -> str:
    if not math.isfinite(value.low):
        return "no interval from one value"
    return f"95{NBSP}% CI {value.low:.3f} to {value.high:.3f}"


def _held_out(context: ReportContext, before: Evaluation, after: Evaluation) -> Html:
    known = {name: Estimate(value, value, value, 0) for name, value in context.baselines.items()}
    named = [("do nothing", known.get("do_nothing"), "c3"), ("random actions", known.get("random"), "c3"),
             ("before training", estimate(before.rewards.values()), "c1"),
             ("learning rate 0", estimate(context.control_rewards.values()) or context.control, "c3"),
             ("after training", estimate(after.rewards.values()), "c2"), ("oracle", known.get("oracle"), "c3")]
    rows = [Interval(name, v.mean, v.low, v.high, _value(v), tone) for name, v, tone in named if v is not None]
    if not rows:
        return Html("")
    across = axis(0, max(1.0, *(r.mean for r in rows)), 5)
    gains = [("after − before", paired_gain(before.rewards, after.rewards)),
             ("after − learning rate 0", paired_gain(context.control_rewards, after.rewards)),
             ("learning rate 0 − before", paired_gain(before.rewards, context.control_rewards))]
    lines = [(name, f"{g.mean:+.3f}", _range(g), g.num) for name, g in gains if g is not None]
    differences = table(("difference on the same tasks", "mean", "", "tasks"), lines, frozenset({1, 3}))
    return join((el("h2", "Held-out tasks"),
                 el("p", "Tasks that are never trained on, run with the same seeds before and after. Bars are "
                         f"95{NBSP}% confidence intervals over tasks (Student's t); differences are paired by task."),
                 intervals("Mean reward", rows, across), differences if lines else None))


def _value(value: Estimate) -> str:
    if value.low == value.high:
        return f"{value.mean:.3f}"
    spread = f" ± {value.half_width:.3f}" if math.isfinite(value.low) else ""
    return f"{value.mean:.3f}{spread} · {value.num} tasks"


def _learning(ledger: RunLedger, context: ReportContext, before: Evaluation) -> Html:
    found = ledger.steps
    if not found:
        return join((el("h2", "Reward while training"), el("p", "No step has finished.")))
    rewards = [mean_reward(step) for step in found]
    numbers = [step.finished.step + 1 for step in found]
    start = estimate(before.rewards.values())
    rules = [Rule("held-out before", start.mean)] if start else []
    rules += [Rule("oracle", context.baselines["oracle"])] if "oracle" in context.baselines else []
    series = (Series("step", tuple(zip(numbers, rewards, strict=True)), "soft", "dots"),
              Series("mean of the last 10", tuple(zip(numbers, moving_mean(rewards), strict=True)), "c1"))
    top = max([1.0, *(r for r in rewards if math.isfinite(r))])
    return join((el("h2", "Reward while training"),
                 curves("Mean reward of a step's executions", series, x_name="step", rules=rules, y=axis(0, top, 5),
                        height=230)))


# ---------------------------------------------------------------- what it did


def _balance(checks: tuple[Check, ...]) -> Html:
    rows = [(c.name, f"{c.total:,}", c.sum_text, el("span", "holds", cls="ok") if c.ok else
             el("span", "does not hold", cls="bad")) for c in checks]
    problems = [el("p", el("b", f"{c.name}: "), "; ".join(c.problems) or "the parts do not add up", cls="bad")
                for c in checks if not c.ok]
    return join((el("h2", "Do the books balance?"),
                 el("p", "Each total, counted where it arose, against its parts, counted where they ended."),
                 table(("total", "", "is the sum of", ""), rows, frozenset({1})), *problems))


def _cells(ledger: RunLedger) -> Html:
    timelines = cell_timelines(ledger)
    if not timelines:
        return Html("")
    begin, end = ledger.span_s
    rows = [f"cell {cell}" for cell in timelines]
    spans = [Span(row, (b.start_s - begin), (b.end_s - begin), _TONES[b.role])
             for row, bars in enumerate(timelines.values()) for b in bars]
    level = [((time - begin), float(value)) for time, value in waterlevels(ledger)]
    keys = (("rollout", "roll"), ("train", "train"), ("in transition", "move"))
    whole = timeline("The whole run", rows, spans, level, (0.0, (end - begin)), keys)
    window = _middle_burst(ledger, begin)
    close = timeline("Two bursts from its middle", rows, spans, level, window, keys) if window else None
    lengths = {tone: sum(s.end - s.start for s in spans if s.tone == tone) for tone in ("roll", "train", "move")}
    total = sum(lengths.values()) or 1.0
    rollout, train, move = (100 * length / total for length in lengths.values())
    shares = (f"Cells spent {rollout:.0f} % of their time in rollout, {train:.0f} % in training and {move:.1f} % in "
              "transition.")
    return join((el("h2", "Cells over time"), el("p", shares), el("p", _who_computed(ledger)), whole, close))


def _who_computed(ledger: RunLedger) -> str:
    """How the cells shared the steps, and who came to a step that was running."""
    by_step = [step.finished.micro_steps_by_cell for step in steps(ledger)]
    totals: Counter[str] = Counter()
    for cells in by_step:
        totals.update(cells)
    shares = ", ".join(f"cell {cell} {num:,}" for cell, num in sorted(totals.items(), key=lambda item: int(item[0])))
    several = sum(len(cells) > 1 for cells in by_step)
    came = joins(ledger)
    early = sum(j.num_live > 0 for j in came)
    return (f"Micro-steps computed: {shares or 'none'}; in {several} of {len(by_step)} steps by more than one cell. "
            f"Satellites joined a running step {len(came)} times, {early} of them while executions of the run were unfinished.")


def _middle_burst(ledger: RunLedger, begin: int) -> tuple[float, float] | None:
    """Seconds from the opening of a burst in the middle to the opening of the next but one."""
    opened = sorted(b.time_s for b in ledger.all(e.BurstOpened).values())
    if len(opened) < 5:
        return None
    middle = len(opened) // 2
    return (opened[middle] - begin), (opened[middle + 2] - begin)


def _optimisation(ledger: RunLedger) -> Html:
    found = [step.finished for step in ledger.steps]
    charts = []
    for key, title, unit, read in _MULTIPLES:
        points = tuple((s.step + 1, read(s) if read else s.metrics.get(key, math.nan)) for s in found)
        finite = [v for _, v in points if math.isfinite(v)]
        if not finite:
            continue
        percent = key in _SHARES
        y = axis(0, max(finite)) if key != "loss" and min(finite) >= 0 else None
        charts.append(curves(title, (Series("", points, "c1"),), x_name="step", y_name=unit, y=_positive(y), height=150,
                             label=_percent if percent else short))
    if not charts:
        return Html("")
    return join((el("h2", "Optimisation"), el("div", *charts, cls="small"), _staleness(ledger)))


def _staleness(ledger: RunLedger) -> Html:
    """How many targets of the run were trained how many versions after they were sampled."""
    ages: Counter[int] = Counter()
    for step in ledger.steps:
        for name, share in step.finished.metrics.items():
            if found := _STALENESS.fullmatch(name):
                ages[int(found[1])] += round(share * step.finished.num_targets)
    total = sum(ages.values())
    rows = [(str(age), f"{num:,}", f"{100 * num / total:.1f} %") for age, num in sorted(ages.items()) if total]
    if not rows:
        return Html("")
    return table(("versions from sampling to training", "targets", "share"), rows, frozenset({0, 1, 2}))


def _positive(y: Axis | None) -> Axis | None:
    """An axis that begins at 0 also where every value is 0."""
    return y if y is None or y.low >= 0 else axis(0, 1)


def _percent(value: float) -> str:
    return f"{short(100 * value)} %"


def _again(context: ReportContext) -> Html:
    path = context.run_dir / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    parts: list[Html] = []
    if manifest.get("command"):
        parts.append(el("pre", shlex.join(map(str, manifest["command"])), cls="command"))
    if manifest:
        text = json.dumps(manifest, indent=2, ensure_ascii=False)
        parts.append(el("details", el("summary", "Manifest: what ran, on what"), el("pre", text)))
    parts.append(el("details", el("summary", "Configuration, resolved"), el("pre", to_toml(context.config))))
    return join((el("h2", "Run it again"), *parts))
