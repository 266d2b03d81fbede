"""Telemetry: context travels in headers, spans land in a file, and an exporter that fails harms nothing."""

import json
from pathlib import Path

import pytest
from gyre.runtime import telemetry
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult


@pytest.fixture
def spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    provider = TracerProvider(resource=Resource.create({"service.name": "test"}))
    path = tmp_path / "spans.jsonl"
    provider.add_span_processor(SimpleSpanProcessor(telemetry.FileExporter(path)))
    monkeypatch.setattr(telemetry, "tracer", lambda: provider.get_tracer("test"))
    return path


def read(path: Path) -> dict[str, dict]:
    return {span["name"]: span for span in map(json.loads, path.read_text().splitlines())}


def test_a_span_made_from_headers_is_a_child_of_the_span_that_sent_them(spans):
    with telemetry.span("sender"):
        headers = telemetry.inject()
    with telemetry.span("receiver", headers, gyre__cell__id=3):
        pass
    found = read(spans)
    assert found["receiver"]["context"]["trace_id"] == found["sender"]["context"]["trace_id"]
    assert found["receiver"]["parent_id"] == found["sender"]["context"]["span_id"]
    assert found["receiver"]["attributes"] == {"gyre.cell.id": 3}


def test_links_join_what_is_not_a_child(spans):
    with telemetry.span("group") as group:
        headers = telemetry.context_of(group)
    with telemetry.span("step", links=[headers, {}]):
        pass
    found = read(spans)
    assert found["step"]["parent_id"] is None
    assert found["step"]["links"][0]["context"]["span_id"] == found["group"]["context"]["span_id"]


def test_outside_any_span_nothing_is_injected_and_broken_headers_are_no_parent(spans):
    assert telemetry.inject() == {}
    assert telemetry.extract({}) is None
    with telemetry.span("root", {"traceparent": "nonsense"}):
        pass
    assert read(spans)["root"]["parent_id"] is None


def test_a_disk_that_refuses_loses_spans_and_counts_them(tmp_path):
    exporter = telemetry.FileExporter(tmp_path)  # a directory cannot be written as a file
    assert exporter.export([]) is SpanExportResult.FAILURE
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with provider.get_tracer("test").start_as_current_span("lost"):
        assert trace.get_current_span().is_recording()
    assert exporter.num_dropped == 1
