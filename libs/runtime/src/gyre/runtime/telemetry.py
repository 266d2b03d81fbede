"""OpenTelemetry from the first day: spans to OTLP when configured, to a local JSON-lines file otherwise.

Context travels in NATS headers and gRPC metadata (`traceparent`). An exporter that fails is counted and harms nothing.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Link, Span, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

log = logging.getLogger(__name__)
_PROPAGATOR = TraceContextTextMapPropagator()


class FileExporter(SpanExporter):
    """One JSON object per span and line. A full disk loses spans, counted in `num_dropped`, and nothing else."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.num_dropped = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        text = "".join(span.to_json(indent=None) + "\n" for span in spans)
        try:
            with self._lock, self._path.open("a") as file:
                file.write(text)
        except OSError:
            self.num_dropped += len(spans)
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS


def set_up(service: str, process: str, run: str, log_dir: Path, otlp_endpoint: str = "") -> TracerProvider:
    """Install the process's tracer. `otlp_endpoint` is an OTLP/HTTP base URL; empty writes `<log_dir>/traces/`."""
    resource = Resource.create({"service.name": f"gyre-{service}", "service.instance.id": process, "gyre.run.id": run})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(_exporter(process, log_dir, otlp_endpoint), max_queue_size=2048,
                                                   export_timeout_millis=5000))
    trace.set_tracer_provider(provider)
    return provider


def _exporter(process: str, log_dir: Path, otlp_endpoint: str) -> SpanExporter:
    if otlp_endpoint:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=f"{otlp_endpoint.rstrip('/')}/v1/traces", timeout=5)
    directory = log_dir / "traces"
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
    return FileExporter(directory / f"{process}.jsonl")


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


def tracer() -> trace.Tracer:
    return trace.get_tracer("gyre")


@contextlib.contextmanager
def span(name: str, parent: Mapping[str, str] | None = None, kind: SpanKind = SpanKind.INTERNAL,
         links: Sequence[Mapping[str, str]] = (), **attributes: str | int | float | bool) -> Iterator[Span]:
    """A span around a block; `parent` and `links` are header maps. Attribute names use __ for a dot."""
    context = extract(parent) if parent else None
    found = [trace.get_current_span(c).get_span_context() for c in map(extract, links) if c is not None]
    named = {key.replace("__", "."): value for key, value in attributes.items()}
    with tracer().start_as_current_span(name, context=context, kind=kind, attributes=named,
                                        links=[Link(s) for s in found]) as current:
        yield current
