"""OpenTelemetry from the first day: spans to OTLP when configured, to a local JSON-lines file otherwise.

Context travels in NATS headers and gRPC metadata (`traceparent`). An exporter that fails is counted and harms nothing.
The spans of role transitions (`transition_traces.py`) go to the file at once, wherever the others go.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gyre.runtime import transition_traces as transitions
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Link, Span, SpanContext, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

log = logging.getLogger(__name__)
Value = str | int | float | bool
_PROPAGATOR = TraceContextTextMapPropagator()
TRACES = "traces"  # below the log directory, one file for each process


class FileExporter(SpanExporter):
    """One JSON object per span and line. A full disk loses spans, counted in `num_dropped`, and nothing else."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._is_open = False
        self.num_dropped = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        text = "".join(span.to_json(indent=None) + "\n" for span in spans)
        try:
            with self._lock, self._path.open("a") as file:
                file.write("" if self._is_open or not self._is_torn() else "\n")
                self._is_open = True
                file.write(text)
        except OSError:
            self.num_dropped += len(spans)
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def _is_torn(self) -> bool:
        """Whether an earlier process of this name was killed inside its last line."""
        size = self._path.stat().st_size
        if size:
            with self._path.open("rb") as file:
                file.seek(size - 1)
                return file.read(1) != b"\n"
        return False


def set_up(service: str, process: str, run: str, log_dir: Path, otlp_endpoint: str = "") -> TracerProvider:
    """Install the process's tracer. `otlp_endpoint` is an OTLP/HTTP base URL; empty writes `<log_dir>/traces/`.

    A role transition's spans are written there in either case.
    """
    resource = Resource.create({"service.name": f"gyre-{service}", "service.instance.id": process, "gyre.run.id": run})
    provider = TracerProvider(resource=resource, id_generator=transitions.ChosenIds())
    to_file = _file_exporter(process, log_dir)
    provider.add_span_processor(transitions.WriteThrough(to_file))
    batch = {"max_queue_size": 2048, "export_timeout_millis": 5000}
    provider.add_span_processor(BatchSpanProcessor(_otlp_exporter(otlp_endpoint), **batch) if otlp_endpoint
                                else _AllOthers(to_file, **batch))
    trace.set_tracer_provider(provider)
    return provider


class _AllOthers(BatchSpanProcessor):
    """Leaves out what was written at once."""

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        if context is None or not transitions.is_of_transition(context.trace_id):
            super().on_end(span)


def _file_exporter(process: str, log_dir: Path) -> FileExporter:
    directory = log_dir / TRACES
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
    return FileExporter(directory / f"{process}.jsonl")


def _otlp_exporter(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=5)


def inject(context: Context | None = None) -> dict[str, str]:
    """Headers that carry the current (or the given) trace context; empty outside any span."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context)
    return carrier


def extract(headers: Mapping[str, str]) -> Context | None:
    """The trace context in headers, None if there is none."""
    return _PROPAGATOR.extract(headers) if "traceparent" in headers else None


def context_of(span: Span) -> dict[str, str]:
    """Headers that make whoever receives them a child of `span`."""
    return inject(trace.set_span_in_context(span))


def current_context() -> SpanContext:
    """That of the span this code runs in; not valid outside any."""
    return trace.get_current_span().get_span_context()


def tracer() -> trace.Tracer:
    return trace.get_tracer("gyre")


def transition(cell: int, epoch: int) -> dict[str, str]:
    """Headers that make whoever uses them a child of the transition of `cell` to `epoch`; empty without telemetry."""
    run = transitions.run_of_process()
    return transitions.headers_of(run, transitions.transition_id(cell, epoch)) if run and epoch > 0 else {}


def start_transition(name: str, start_ns: int | None = None, links: Sequence[Mapping[str, str]] = (),
                     **attributes: Value) -> Span:
    """The root of the transition `name`, to be ended by the caller. The same name gives the same root again."""
    with transitions.choosing(transitions.ids_of(transitions.run_of_process(), name)):
        return tracer().start_span(transitions.ROOT, Context(), attributes=_named(attributes), links=_links(links),
                                   start_time=start_ns)


def start(name: str, parent: Mapping[str, str] | None = None, start_ns: int | None = None,
          links: Sequence[Mapping[str, str]] = (), **attributes: Value) -> Span:
    """A span to be ended by the caller. `start_ns`: when it began, if not now; a time to come is taken as now."""
    now = time.time_ns()
    return tracer().start_span(name, extract(parent) if parent else None, attributes=_named(attributes),
                               links=_links(links), start_time=min(start_ns or now, now))


def note(name: str, parent: Mapping[str, str], start_ns: int, end_ns: int | None = None,
         links: Sequence[Mapping[str, str]] = (), **attributes: Value) -> None:
    """A span of something that is over, as the waiting for a message that is here now."""
    start(name, parent, start_ns, links, **attributes).end(end_ns)


@contextlib.contextmanager
def span(name: str, parent: Mapping[str, str] | None = None, kind: SpanKind = SpanKind.INTERNAL,
         links: Sequence[Mapping[str, str]] = (), start_ns: int | None = None, **attributes: Value) -> Iterator[Span]:
    """A span around a block; `parent` and `links` are header maps. Attribute names use __ for a dot."""
    context = extract(parent) if parent else None
    with tracer().start_as_current_span(name, context=context, kind=kind, attributes=_named(attributes),
                                        links=_links(links), start_time=start_ns) as current:
        yield current


def _named(attributes: Mapping[str, Value]) -> dict[str, Value]:
    return {key.replace("__", "."): value for key, value in attributes.items()}


def _links(headers: Sequence[Mapping[str, str]]) -> list[Link]:
    found = [trace.get_current_span(c).get_span_context() for c in map(extract, headers) if c is not None]
    return [Link(context) for context in found if context.is_valid]
