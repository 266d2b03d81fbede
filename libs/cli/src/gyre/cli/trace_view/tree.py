"""The spans of one transition as a tree, also when some of them are missing, unfinished, or timed by another clock.

- A span whose parent was not written hangs at the root. Without a root there is one all the same, over all spans.
- A span that never ended lasts, as far as anybody knows, until the last thing below it; an unfinished root until the last
  thing of its trace.
- A child cannot begin before the span that caused it. Where it seems to, the clock of its process is behind, by at least
  so much, and all times of that process are moved.
- Coverage is the part of the root's time in which at least one of its descendants runs.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gyre.cli.trace_view.spans import Span, Spans
from gyre.runtime.transition_traces import ROOT, is_of_transition, transition_id

NOT_RECORDED = "not recorded"
UNFINISHED = "unfinished"
# Of these a parent has many, each about something else; others that come again are tries.
_MANY = ("gyre.fact.delivery", "gyre.kv.migrate", "process ")
_MIN_GAP = 0.01  # of the root's time, to be named


@dataclass(frozen=True, slots=True)
class Node:
    """A span in its place; `end_ns` is what is known of its end. `number`: of those of its name below one parent."""

    span: Span
    end_ns: int
    children: tuple["Node", ...]
    number: int = 1

    @property
    def start_ns(self) -> int:
        return self.span.start_ns

    @property
    def is_finished(self) -> bool:
        return self.span.end_ns is not None

    def walk(self, depth: int = 0) -> Iterator[tuple[int, "Node"]]:
        """(depth, node) of the whole tree, parents first."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)


@dataclass(frozen=True, slots=True)
class Transition:
    """One transition. `moved_ns`: by how much the clocks of processes were moved. `links`: spans of other traces."""

    root: Node
    has_root: bool
    num_spans: int
    num_orphans: int
    processes: tuple[str, ...]
    coverage: float
    gaps: tuple[tuple[int, int], ...]
    moved_ns: Mapping[str, int]
    links: tuple[Span, ...] = ()

    def says(self, key: str, default: Any = "") -> Any:
        """What the root says, else any of its descendants."""
        found = (node.span.attributes for _, node in self.root.walk())
        return next((attributes[key] for attributes in found if key in attributes), default)

    @property
    def cell(self) -> int:
        return self.says("gyre.cell.id", -1)

    @property
    def epoch(self) -> int:
        return self.says("gyre.cell.epoch", -1)

    @property
    def name(self) -> str:
        return self.says("gyre.transition.id") or transition_id(self.cell, self.epoch)

    @property
    def roles(self) -> str:
        return f"{self.says('gyre.role.from', '?')} -> {self.says('gyre.role.to', '?')}"

    @property
    def outcome(self) -> str:
        if not self.has_root:
            return NOT_RECORDED
        return str(self.root.span.attributes.get("gyre.outcome", "ended")) if self.root.is_finished else UNFINISHED

    @property
    def duration_ns(self) -> int:
        return self.root.end_ns - self.root.start_ns

    @property
    def num_bytes(self) -> int:
        return sum(int(node.span.attributes.get("gyre.bytes", 0)) for _, node in self.root.walk())


def transitions(spans: Spans) -> list[Transition]:
    """Every transition that left a span, in order of time."""
    linked = _links(spans)
    found = [transition(trace, tuple(linked.get(name, ()))) for name, trace in spans.traces().items()]
    return sorted(found, key=lambda t: t.root.start_ns)


def transition(spans: Sequence[Span], links: tuple[Span, ...] = ()) -> Transition:
    """The tree of the spans of one trace; there is at least one."""
    moved = clock_corrections(spans)
    spans = [_moved(span, moved.get(span.process, 0)) for span in spans]
    roots = [span for span in spans if span.name == ROOT and not span.parent]
    root = min(roots, key=lambda span: span.start_ns) if roots else _missing_root(spans)
    below, num_orphans = _below(spans, root)
    last = max(max(span.start_ns, span.end_ns or 0) for span in spans)
    node = _node(root, below, frozenset(), last)
    inside = [(child.start_ns, child.end_ns) for _, child in node.walk() if child is not node]
    busy = union(inside, node.start_ns, node.end_ns)
    duration = node.end_ns - node.start_ns
    coverage = sum(b - a for a, b in busy) / duration if duration else float(bool(inside))
    return Transition(node, bool(roots), len(spans), num_orphans if roots else 0,
                      tuple(sorted({span.process for span in spans})), coverage, _gaps(busy, node), moved, links)


def union(intervals: Iterable[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """What the intervals cover between `start` and `end`: disjoint, ascending."""
    found: list[tuple[int, int]] = []
    for low, high in sorted((max(a, start), min(b, end)) for a, b in intervals):
        if high <= low:
            continue
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return found


def clock_corrections(spans: Sequence[Span]) -> dict[str, int]:
    """By how much each process's clock is behind, as far as its spans show: process -> nanoseconds, only where it is.

    Processes that follow from each other are corrected in turn; a circle of them ends after one round for each.
    """
    by_id = {span.id: span for span in spans}
    pairs = [(by_id[span.parent], span) for span in spans
             if span.parent in by_id and by_id[span.parent].process != span.process and not _is_before(span)]
    moved: dict[str, int] = defaultdict(int)
    for _ in {span.process for span in spans}:
        late = {}
        for parent, child in pairs:
            missing = parent.start_ns + moved[parent.process] - child.start_ns - moved[child.process]
            late[child.process] = max(missing, late.get(child.process, 0))
        if not any(late.values()):
            break
        for process, missing in late.items():
            moved[process] += missing
    return {process: offset for process, offset in moved.items() if offset > 0}


def _is_before(span: Span) -> bool:
    """Whether it is said to have happened before the transition was decided."""
    return bool(span.attributes.get("gyre.before"))


def _moved(span: Span, offset: int) -> Span:
    if not offset:
        return span
    return replace(span, start_ns=span.start_ns + offset, end_ns=None if span.end_ns is None else span.end_ns + offset)


def _missing_root(spans: Sequence[Span]) -> Span:
    start = min((span.start_ns for span in spans if not _is_before(span)), default=spans[0].start_ns)
    return Span(spans[0].trace, "", "", ROOT, "?", start)


def _below(spans: Sequence[Span], root: Span) -> tuple[dict[str, list[Span]], int]:
    """Children by the id of their parent, in order of time, and how many were taken in by the root."""
    known = {span.id for span in spans}
    below: dict[str, list[Span]] = defaultdict(list)
    num_orphans = 0
    for span in sorted(spans, key=lambda span: span.start_ns):
        if span is root or span.id == root.id:
            continue
        is_orphan = span.parent not in known or span.parent == span.id
        num_orphans += is_orphan and span.parent != root.id
        below[root.id if is_orphan else span.parent].append(span)
    return below, num_orphans


def _node(span: Span, below: Mapping[str, list[Span]], above: frozenset[str], last: int | None = None) -> Node:
    above = above | {span.id}
    numbers: Counter[tuple[str, str]] = Counter()
    children: list[Node] = []
    for child in below.get(span.id, ()):
        if child.id in above:
            continue
        numbers[child.name, child.process] += not child.name.startswith(_MANY)
        children.append(replace(_node(child, below, above), number=max(1, numbers[child.name, child.process])))
    known = max([span.start_ns, *(child.end_ns for child in children)]) if last is None else last
    return Node(span, max(span.start_ns, known if span.end_ns is None else span.end_ns), tuple(children))


def _gaps(busy: Sequence[tuple[int, int]], root: Node) -> tuple[tuple[int, int], ...]:
    """Times of the root in which nothing below it ran, if they are long enough to be named."""
    edges = [root.start_ns, *(edge for interval in busy for edge in interval), root.end_ns]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return tuple((a, b) for a, b in pairs if b - a > _MIN_GAP * (root.end_ns - root.start_ns))


def _links(spans: Spans) -> dict[str, list[Span]]:
    """Trace of a transition -> spans of other traces it is linked with, in either direction: batches, steps, weights."""
    by_id = {(span.trace, span.id): span for span in spans.spans}
    first: dict[str, Span] = {}
    for span in spans.spans:
        if not span.parent:
            first.setdefault(span.trace, span)
    found: dict[str, dict[tuple[str, str], Span]] = defaultdict(dict)
    for span in spans.spans:
        for trace, identity in span.links:
            if span.is_of_transition:
                other = by_id.get((trace, identity)) or first.get(trace)
                if other is not None and not other.is_of_transition:
                    found[span.trace][other.trace, other.id] = other
            elif is_of_transition(int(trace, 16)):
                found[trace][span.trace, span.id] = span
    return {trace: sorted(others.values(), key=lambda span: span.start_ns) for trace, others in found.items()}
