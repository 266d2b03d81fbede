"""Span files as processes write them: one JSON object a line, a file for each process.

A span of a transition is in its file twice, when it began (no end) and when it ended; a process that was killed left the
first alone, and a scheduler that took over made a root again under the ids it had. Both are one span here. A last line
that was torn is counted and left out.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gyre.contracts.errors import ConfigError
from gyre.runtime.transition_traces import is_of_transition

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
# Transitions, and what may be linked with them; the spans of calls, of which there may be millions, are not parsed.
_WANTED = ('"name": "gyre.', '"trace_id": "0x67797265')


@dataclass(frozen=True, slots=True)
class Span:
    """One span of one process. Times are Unix nanoseconds; `end_ns` None: it was never seen to end."""

    trace: str
    id: str
    parent: str
    name: str
    process: str
    start_ns: int
    end_ns: int | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    links: tuple[tuple[str, str], ...] = ()
    error: str = ""

    @property
    def is_of_transition(self) -> bool:
        return is_of_transition(int(self.trace, 16))


@dataclass(frozen=True, slots=True)
class Spans:
    """What the files of a run hold. `num_unreadable`: lines that are no spans."""

    spans: tuple[Span, ...]
    num_files: int
    num_unreadable: int = 0

    def traces(self) -> dict[str, list[Span]]:
        """The traces of transitions, by trace id."""
        found: dict[str, list[Span]] = {}
        for span in self.spans:
            if span.is_of_transition:
                found.setdefault(span.trace, []).append(span)
        return found


def read_spans(directory: Path) -> Spans:
    """Every span of every file in `directory`. Raises ConfigError if there is no such file."""
    files = sorted(directory.glob("*.jsonl"))
    if not files:
        raise ConfigError(f"{directory}: no span files (*.jsonl) there; processes write them below their log directory")
    lines: list[tuple[str, str]] = []
    for path in files:
        text = path.read_text(encoding="utf-8", errors="replace")
        lines += [(path.stem, line) for line in text.splitlines() if any(mark in line for mark in _WANTED)]
    return parse(lines, len(files))


def parse(lines: Iterable[tuple[str, str]], num_files: int = 1) -> Spans:
    """Spans of (process, line) pairs, in the order in which they were written."""
    found: dict[tuple[str, str], Span] = {}
    num_unreadable = 0
    for process, line in lines:
        try:
            span = span_of(process, json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            num_unreadable += 1
            continue
        key = (span.trace, span.id)
        found[key] = merged(found[key], span) if key in found else span
    return Spans(tuple(found.values()), num_files, num_unreadable)


def span_of(process: str, row: Mapping[str, Any]) -> Span:
    """One line. Raises ValueError, KeyError or TypeError for what is no span."""
    context, status = row["context"], row.get("status") or {}
    links = tuple((_bare(link["context"]["trace_id"]), _bare(link["context"]["span_id"])) for link in row.get("links") or ())
    error = status.get("description") or "error" if status.get("status_code") == "ERROR" else ""
    return Span(_bare(context["trace_id"]), _bare(context["span_id"]), _bare(row.get("parent_id") or ""), str(row["name"]),
                process, _nanoseconds(row["start_time"]), _nanoseconds(row["end_time"]) if row.get("end_time") else None,
                dict(row.get("attributes") or {}), links, str(error))


def merged(first: Span, second: Span) -> Span:
    """One span that was written twice. It began when it first did, and what first said that it ended knows best how."""
    start_ns = min(first.start_ns, second.start_ns)
    if first.end_ns is not None:
        return replace(first, start_ns=start_ns)
    return replace(second, start_ns=start_ns, attributes={**first.attributes, **second.attributes},
                   links=tuple(dict.fromkeys(first.links + second.links)))


def _bare(identity: str) -> str:
    return identity.removeprefix("0x")


def _nanoseconds(text: str) -> int:
    return (datetime.fromisoformat(text) - _EPOCH) // _MICROSECOND * 1000
