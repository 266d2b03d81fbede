"""One token's whole journey on real processes, with everything counted."""

import json
from pathlib import Path

import pytest
from gyre.cli.launcher import end_harnesses
from gyre.contracts.events import CellRoleAssigned
from gyre.runtime.config import load_deployment
from lap import Lap, clinic_config, left_running

pytestmark = pytest.mark.slow


async def test_a_lap_trains_and_its_books_balance(tmp_path):
    lap = Lap(tmp_path, clinic_config(tmp_path))
    assert await lap.to_the_end() == "completed"
    ledger = lap.watcher.ledger
    lap.assert_books_balance()
    assert len(ledger.steps) == 2
    assert ledger.num_executions == 2 * 2 * 4 + 2 * 2
    rows = [json.loads(line) for line in lap.run.metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    assert (lap.run.path / "checkpoints").is_dir()
    assert left_running(lap.run) == {}
    assert_transitions_are_whole_traces(lap.run.logs / "traces", len(ledger.all(CellRoleAssigned)))


def assert_transitions_are_whole_traces(directory: Path, num_assigned: int) -> None:
    """Each role transition is one tree of spans over scheduler, rollout, the cell's engine and its trainer."""
    traces: dict[str, list[dict]] = {}
    for path in directory.glob("*.jsonl"):
        for span in map(json.loads, path.read_text().splitlines()):
            span["process"] = path.stem
            traces.setdefault(span["context"]["trace_id"], []).append(span)
    transitions = [t for t in traces.values() if any(s["name"] == "gyre.cell.transition" for s in t)]
    assert len(transitions) == num_assigned >= 2 * 2  # in each of two steps at least the core goes and comes back
    for spans in transitions:
        ids = {s["context"]["span_id"] for s in spans}
        assert [s["name"] for s in spans if s["parent_id"] not in ids] == ["gyre.cell.transition"]
        names = {s["name"] for s in spans}
        assert "gyre.train.release" in names or "gyre.train.join" in names or "gyre.engine.sleep" in names, names
        assert {"scheduler", "rollout"} < {s["process"] for s in spans}


async def test_an_interrupted_run_leaves_no_process_behind_and_goes_on_where_it_was(tmp_path):
    lap = Lap(tmp_path, clinic_config(tmp_path, "evaluation.at_start=false"))
    await lap.interrupted(lambda: len(lap.watcher.ledger.calls) > 20)
    assert left_running(lap.run) == {}
    assert end_harnesses(load_deployment(lap.run.deployment).gateway_url) == 0
    assert await lap.to_the_end() == "completed"
    lap.assert_books_balance()
    ledger = lap.watcher.ledger
    assert len(ledger.steps) == 2
    dropped = [x for x in ledger.executions.values() if x.terminated.fact.ending == "dropped"]
    assert dropped, "what ran when everything was stopped leaves its step"
    assert all(x.outcome.kind == "dropped" for x in dropped)
