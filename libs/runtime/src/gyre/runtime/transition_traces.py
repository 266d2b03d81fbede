"""The trace of a role transition: named by what it is of, so that every process, also a restarted one, finds its place.

Its trace id and the id of its root follow from run and transition. Whoever works for cell c at epoch e is a child of that
root, whether or not a message brought the context; a scheduler that comes back makes the root again under the same id.
The first bytes of the trace id spell `gyre`, so that these traces are known among all others: their spans are written
when they begin (a line without an end) and when they end, each before the process goes on. A process that is killed
loses none that had ended, and leaves what it was doing as a beginning without an end.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

ROOT = "gyre.cell.transition"
_MARK = b"gyre"


def transition_id(cell: int, epoch: int) -> str:
    """As `cell.role.assigned` says it."""
    return f"cell-{cell}-epoch-{epoch}"


def ids_of(run: str, transition: str) -> tuple[int, int]:
    """(trace id, span id of the root)."""
    digest = hashlib.blake2b(f"{run}/{transition}".encode(), digest_size=20).digest()
    return int.from_bytes(_MARK + digest[:12]), int.from_bytes(digest[12:]) or 1


def headers_of(run: str, transition: str) -> dict[str, str]:
    """Headers that make whoever uses them a child of the transition's root."""
    trace_id, span_id = ids_of(run, transition)
    return {"traceparent": f"00-{trace_id:032x}-{span_id:016x}-01"}


def is_of_transition(trace_id: int) -> bool:
    """Whether a trace is that of a transition."""
    return trace_id >> 96 == int.from_bytes(_MARK)


def leads_to_transition(headers: Mapping[str, str]) -> bool:
    """Whether headers carry the context of a transition."""
    return headers.get("traceparent", "")[3:11] == _MARK.hex()


# ---------------------------------------------------------------- ids that are chosen

_chosen: ContextVar[tuple[int, int] | None] = ContextVar("gyre_chosen_ids", default=None)


class ChosenIds(RandomIdGenerator):
    """Random ids, except inside `choosing`."""

    def generate_trace_id(self) -> int:
        chosen = _chosen.get()
        return chosen[0] if chosen else super().generate_trace_id()

    def generate_span_id(self) -> int:
        chosen = _chosen.get()
        return chosen[1] if chosen else super().generate_span_id()

    def is_trace_id_random(self) -> bool:
        return _chosen.get() is None


@contextmanager
def choosing(ids: tuple[int, int]) -> Iterator[None]:
    """The one span that is started inside gets these ids."""
    token = _chosen.set(ids)
    try:
        yield
    finally:
        _chosen.reset(token)


# ---------------------------------------------------------------- written at once


class WriteThrough(SpanProcessor):
    """Gives the spans of transitions to `exporter` when they begin and when they end, before anything else happens."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        self._write(span)

    def on_end(self, span: ReadableSpan) -> None:
        self._write(span)

    def _write(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        if context is not None and is_of_transition(context.trace_id):
            self._exporter.export([span])

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


def run_of_process() -> str:
    """The run whose spans this process writes; empty where telemetry was not set up."""
    resource = getattr(trace.get_tracer_provider(), "resource", None)
    return "" if resource is None else str(resource.attributes.get("gyre.run.id", ""))
