"""A transition on a terminal: its tree with times, what it is linked with, what is not covered; and the list of them all."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from gyre.cli.trace_view.spans import Span
from gyre.cli.trace_view.tree import ROOT, Node, Transition
from rich.text import Text

Print = Callable[[Text], None]
# Attributes that say something beside the tree, with the word they are shown under.
_SHOWN = (("gyre.fact", ""), ("gyre.weights.version", "weights "), ("gyre.execution", ""), ("gyre.outcome", ""),
          ("gyre.reason", ""), ("gyre.calls", "calls "), ("gyre.moved", "moved "), ("gyre.replayed", "replayed "),
          ("gyre.tokens", "tokens "), ("gyre.detail", ""))
_MIN_LABEL = 28
_OF_ROOT = ("gyre.weights.version", "gyre.outcome")  # are in the head already


def milliseconds(nanoseconds: int) -> str:
    """In ms, with as many places as matter."""
    return f"{nanoseconds / 1e6:,.{1 if abs(nanoseconds) < 1e9 else 0}f} ms"


def size(num_bytes: int) -> str:
    """A number of bytes for people."""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "kB", "MB", "GB"):  # noqa: B007 (the last one is kept)
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def last_line(found: Transition) -> str:
    """What everything about one transition comes down to."""
    return f"trace spans={found.num_spans} processes={len(found.processes)} coverage={found.coverage:.3f}"


def head(found: Transition) -> list[tuple[str, str]]:
    """(word, what is said of it) for the whole transition."""
    at = datetime.fromtimestamp(found.root.start_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    lasted = f"{'in' if found.root.is_finished else 'after'} {milliseconds(found.duration_ns)}"
    rows = [("transition", f"{found.name}  cell {found.cell}  epoch {found.epoch}  {found.roles}  "
                           f"weights version {found.says('gyre.weights.version', '?')}"),
            ("outcome", f"{found.outcome} {lasted}  ({at})")]
    if found.says("gyre.resumed", False):
        rows.append(("resumed", "a scheduler that took over made its root again"))
    if found.links:
        rows.append(("linked with", "; ".join(map(_link, found.links))))
    if found.num_bytes:
        rows.append(("bytes", size(found.num_bytes)))
    if found.num_orphans:
        rows.append(("lost", f"the parents of {found.num_orphans} spans were not written; they hang at the root"))
    for process, offset in sorted(found.moved_ns.items()):
        rows.append(("clock", f"{process} is behind by {milliseconds(offset)} or more; its times are moved"))
    return rows


def _link(span: Span) -> str:
    attributes = span.attributes
    words = {"gyre.burst": "burst", "gyre.step": "step", "gyre.attempt": "attempt", "gyre.weights.version": "weights version"}
    said = " ".join(f"{word} {attributes[key]}" for key, word in words.items() if key in attributes)
    return f"{span.name} ({said}, {span.process})"


def details(node: Node) -> str:
    """What a span says of itself."""
    attributes = node.span.attributes
    skipped = _OF_ROOT if node.span.name == ROOT else ()
    said = [f"{word}{attributes[key]}" for key, word in _SHOWN if attributes.get(key) not in (None, "") and key not in skipped]
    if attributes.get("gyre.bytes"):
        said.append(size(int(attributes["gyre.bytes"])))
    if "gyre.cell.to" in attributes:
        said.append(f"to cell {attributes['gyre.cell.to']}")
    if node.number > 1:
        said.append(f"try {node.number}")
    if attributes.get("gyre.before"):
        said.append("before the decision")
    if not node.is_finished:
        said.append("UNFINISHED")
    if node.span.error:
        said.append(f"failed: {node.span.error}")
    return "  ".join(said)


def print_transition(found: Transition, out: Print) -> None:
    """Head, tree and last line."""
    for word, text in head(found):
        out(Text.assemble((f"{word:<13}", "bold"), text))
    out(Text())
    rows = list(_labels(found.root))
    label = max(_MIN_LABEL, *(len(text) for text, _ in rows))
    process = max(len(name) for name in (*found.processes, "process"))
    out(Text(f"{'span':<{label}}  {'process':<{process}}  {'begins':>12}  {'lasts':>12}", "dim"))
    for text, node in rows:
        times = f"{_offset(node.start_ns - found.root.start_ns):>12}  {milliseconds(node.end_ns - node.start_ns):>12}"
        style = "red" if node.span.error or not node.is_finished else ""
        out(Text(f"{text:<{label}}  {node.span.process:<{process}}  {times}  {details(node)}".rstrip(), style))
    for start, end in found.gaps:
        out(Text(f"nothing was recorded from {_offset(start - found.root.start_ns)} for {milliseconds(end - start)}", "yellow"))
    out(Text())
    out(Text(last_line(found)))


def _offset(nanoseconds: int) -> str:
    return f"{'+' if nanoseconds >= 0 else ''}{milliseconds(nanoseconds)}"


def _labels(node: Node, before: str = "", own: str = "") -> list[tuple[str, Node]]:
    rows = [(own + node.span.name, node)]
    for number, child in enumerate(node.children, 1):
        is_last = number == len(node.children)
        rows += _labels(child, before + ("   " if is_last else "│  "), before + ("└─ " if is_last else "├─ "))
    return rows


def print_list(all_: Sequence[Transition], out: Print) -> None:
    """One line for each transition, in order of time."""
    width = max(len("transition"), *(len(t.name) for t in all_))
    out(Text(f"{'transition':<{width}}  {'begins (UTC)':<12}  {'roles':<18}  {'weights':>7}  {'lasts':>12}  {'spans':>5}  "
             f"{'processes':>9}  {'coverage':>8}  outcome", "dim"))
    for found in all_:
        at = datetime.fromtimestamp(found.root.start_ns / 1e9, UTC).strftime("%H:%M:%S.%f")[:12]
        out(Text(f"{found.name:<{width}}  {at:<12}  {found.roles:<18}  {found.says('gyre.weights.version', '?')!s:>7}  "
                 f"{milliseconds(found.duration_ns):>12}  {found.num_spans:>5}  {len(found.processes):>9}  "
                 f"{found.coverage:>8.3f}  {found.outcome}"))
