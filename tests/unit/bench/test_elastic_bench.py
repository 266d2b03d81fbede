"""The workloads and arrangements of the benches of elastic scheduling."""

from __future__ import annotations

import importlib
import statistics
from pathlib import Path
from types import ModuleType

import pytest
from gyre.cli.ledger import RunLedger
from gyre.cli.run_dir import RunDir
from gyre.contracts import events as e
from recorded_facts import recorded_facts

BENCH = Path(__file__).resolve().parents[3] / "bench"
TOKEN_S = 0.25


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("elastic_parts.records")


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("elastic_parts.shapes")


@pytest.mark.parametrize("workload", ["paper", "sessions"])
def test_a_seed_always_has_the_same_executions_and_another_one_others(records: ModuleType, workload: str) -> None:
    one, again, other = (records.groups_of(workload, seed, 6, 4, TOKEN_S) for seed in (1, 1, 2))
    assert one == again
    assert one != other


@pytest.mark.parametrize("workload", ["paper", "sessions"])
def test_half_of_the_executions_take_at_least_twenty_seconds(records: ModuleType, workload: str) -> None:
    groups = records.groups_of(workload, 3, 200, 8, TOKEN_S)
    durations = [record.duration_s(TOKEN_S) for group in groups for record in group]
    assert statistics.median(durations) == pytest.approx(20.2, abs=1.5)
    assert max(durations) < (records.SESSION_CAP_S if workload == "sessions" else 45.5) + 2 * TOKEN_S
    assert min(wait for group in groups for r in group for wait, _ in r.calls) >= 0


def test_the_cut_of_recorded_stretches_keeps_their_times(records: ModuleType) -> None:
    pairs = [(1.0, 2.0)] * 20
    record = records.scaled(pairs, 2.0, TOKEN_S)
    assert len(record.calls) <= records.MAX_CALLS
    assert record.duration_s(TOKEN_S) == pytest.approx(30.0, abs=len(record.calls) * TOKEN_S)


@pytest.mark.parametrize("workload", ["paper", "sessions"])
def test_every_arrangement_has_the_same_staleness_and_cells(shapes: ModuleType, workload: str) -> None:
    base = shapes.base_config(workload)
    assert set(shapes.CHOSEN[workload]) == set(shapes.SCHEDULES)
    for schedule, shape in shapes.CHOSEN[workload].items():
        config = shapes.config_of(base, shape)
        assert config.cells.schedule == schedule
        assert shape.phi + (shape.steps_per_burst - 1) / 2 == 2
        assert config.cells.count + config.cells.standalone == 4
        assert config.steps == base.steps
        assert config.burst.staleness_limit >= config.burst.phi + config.burst.steps_per_burst - 1
        rolling = 4 - config.cells.training
        assert config.harness.max_concurrent == rolling * config.cells.executions_per_cell


def test_a_finished_run_is_read_whole(shapes: ModuleType, tmp_path: Path) -> None:
    """Every figure of a row, from the facts of a recorded run whose trainers left no log."""
    runs, reading = (importlib.import_module(f"elastic_parts.{name}") for name in ("runs", "reading"))
    shape = shapes.CHOSEN["paper"]["elastic"]
    config, rows = runs.prepared(tmp_path, "paper", 0, shape, ["steps=5"])
    ledger = RunLedger()
    for fact, time_s in (*recorded_facts(), (e.BurstOpened(0, 0, 1), 99.5), (e.RunClosed("completed", 1), 141.5)):
        ledger.fold(fact, time_s)
    directory = RunDir(tmp_path / "run")
    found = reading.measured(runs.Run("paper", 0, shape, config, directory, ledger, runs.Load(), rows, "completed"))
    assert (found.makespan_s, found.num_steps, found.num_transitions) == (pytest.approx(42.0), 1, 2)
    assert found.transition_s[0] == pytest.approx(0.8)
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert min(found.bound_s, found.simulated_s, found.foretold_s) > 0


@pytest.mark.parametrize(("durations", "empty"), [
    ([3.0, 3.0, 3.0, 3.0], 0.0),  # both cells are full until everything ends
    ([2.0, 3.0, 3.0, 3.0], 0.5),  # one of two slots for a second
    ([1.0, 1.0, 4.0, 4.0], 0.0),  # the cell whose two are done leaves
    ([1.0, 1.0, 1.0, 4.0], 1.5),  # the last one keeps half a cell empty for three seconds
    ([1.0, 1.0, 1.0, 1.0, 2.0], 1.0),  # the fifth waits for a slot, and is alone in a cell for two seconds
])
def test_slots_that_stay_empty_in_two_cells_of_two(shapes: ModuleType, durations: list[float], empty: float) -> None:
    choose = importlib.import_module("elastic_parts.choose")  # beside `shapes`
    assert choose.empty_slots_s(durations, 2, 2) == pytest.approx(empty)
