"""Telemetry: context travels in headers, spans land in a file, and an exporter that fails harms nothing."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gyre.runtime import telemetry, transition_traces
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


def transition_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


@pytest.fixture
def transition_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "transitions.jsonl"
    provider = TracerProvider(id_generator=transition_traces.ChosenIds())
    provider.add_span_processor(transition_traces.WriteThrough(telemetry.FileExporter(path)))
    monkeypatch.setattr(telemetry, "tracer", lambda: provider.get_tracer("test"))
    monkeypatch.setattr(transition_traces, "run_of_process", lambda: "r")
    return path


def test_spans_of_a_transition_are_in_the_file_when_they_begin_and_when_they_end(transition_file):
    with telemetry.span("gyre.rollout.release", telemetry.transition(2, 5)):
        [begun] = transition_lines(transition_file)
        with telemetry.span("gyre.rollout.drain"):
            assert len(transition_lines(transition_file)) == 2
    with telemetry.span("of no transition"):
        pass
    ends = [(line["name"], line["end_time"] is not None) for line in transition_lines(transition_file)]
    assert ends == [("gyre.rollout.release", False), ("gyre.rollout.drain", False), ("gyre.rollout.drain", True),
                    ("gyre.rollout.release", True)]
    trace, root = transition_traces.ids_of("r", "cell-2-epoch-5")
    assert (begun["context"]["trace_id"], begun["parent_id"]) == (f"0x{trace:032x}", f"0x{root:016x}")


def test_every_process_finds_the_same_root_and_every_run_another(transition_file):
    for _ in range(2):
        telemetry.start_transition("cell-2-epoch-5", gyre__cell__id=2).end()
    contexts = {(line["context"]["trace_id"], line["context"]["span_id"]) for line in transition_lines(transition_file)}
    assert len(contexts) == 1
    assert transition_traces.ids_of("r", "cell-2-epoch-5") != transition_traces.ids_of("s", "cell-2-epoch-5")
    assert transition_traces.is_of_transition(transition_traces.ids_of("r", "x")[0])
    assert telemetry.transition(2, 0) == {}, "before its first assignment a cell is in no transition"


def test_a_span_that_began_earlier_ends_no_earlier_than_it_began(transition_file):
    long_from_now = time.time_ns() + 10**12
    telemetry.start("late", telemetry.transition(0, 1), long_from_now).end()
    [begun, ended] = transition_lines(transition_file)
    assert begun["start_time"] <= ended["end_time"] < "2100"


def test_a_line_that_was_torn_by_a_kill_does_not_take_the_next_one_with_it(transition_file):
    transition_file.write_text('{"name": "torn')
    telemetry.start_transition("cell-2-epoch-5").end()
    lines = transition_file.read_text().splitlines()
    assert lines[0] == '{"name": "torn' and len(lines) == 3
    assert json.loads(lines[1])["name"] == "gyre.cell.transition"


def test_with_otlp_transitions_are_in_the_file_too_and_others_are_not(tmp_path):
    code = f"""
from pathlib import Path
from gyre.runtime import telemetry
provider = telemetry.set_up("rollout", "rollout", "r", Path({str(tmp_path)!r}), {{endpoint!r}})
with telemetry.span("gyre.rollout.release", telemetry.transition(0, 1)):
    pass
with telemetry.span("chat"):
    pass
provider.shutdown()
"""
    for endpoint, names in (("http://collector.invalid", ["gyre.rollout.release"]), ("", ["gyre.rollout.release", "chat"])):
        subprocess.run([sys.executable, "-c", code.format(endpoint=endpoint)], check=True, timeout=60, capture_output=True)
        path = tmp_path / "traces" / "rollout.jsonl"
        assert [line["name"] for line in transition_lines(path) if line["end_time"]] == names
        path.unlink()
