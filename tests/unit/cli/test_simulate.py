"""`gyre simulate`: what it prints, draws and refuses; recorded runs become workloads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gyre.cli.ledger import RunLedger
from gyre.cli.main import app
from gyre.cli.recorded import Room, recording_of
from gyre.cli.simulation import best_lines, lines_of, merged_constants, workload_rows
from gyre.contracts.errors import ConfigError
from gyre.contracts.simulation import Simulated, SimulatedStep
from recorded_facts import recorded_facts
from typer.testing import CliRunner

CONFIG = """
name = "small"
steps = 4
[policy]
checkpoint = "policy"
[tasks]
root = "tasks"
[harness]
command = ["agent"]
timeout_s = 20000.0
overall_timeout_s = 30000.0
[cells]
count = 4
schedule = "elastic"
executions_per_cell = 8
[engine]
kv_tokens = 10000000
[burst]
steps_per_burst = 2
groups_per_step = 2
executions_per_group = 4
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return path


def simulated(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["simulate", *map(str, arguments)])
    return done.exit_code, done.output


def test_schedules_stand_side_by_side_with_their_shares_and_the_bound(config):
    code, text = simulated(config, "--seeds", "2", "--schedule", "elastic", "--schedule", "colocate")
    assert code == 0, text
    rows = [line.split() for line in text.splitlines() if line.startswith(("elastic ", "colocate "))]
    assert [row[0] for row in rows] == ["elastic", "colocate"]
    assert "1.000" in rows[0]
    assert "of bound" in text and "tail" in text


def test_a_sweep_ends_with_best_against_best(config):
    code, text = simulated(config, "--sweep", "--seeds", "1", "--schedule", "elastic", "--schedule", "colocate",
                           "--set", "burst.steps_per_burst=3", "--set", "steps=3")
    assert code == 0, text
    assert text.count("\nelastic ") == 2 + 1, "elastic with mu = 1 and mu = 3, and the better one again"
    assert text.count("\ncolocate ") == 1 + 1, "colocate carries nothing over: mu = 3 alone"
    assert "best against best" in text


def test_the_picture_is_one_file_with_a_lane_for_each_cell(config, tmp_path):
    picture = tmp_path / "lanes.html"
    code, text = simulated(config, "--seeds", "1", "--schedule", "elastic", "--picture", picture)
    assert code == 0, text
    page = picture.read_text()
    assert all(f">cell {c}<" in page for c in range(4))
    assert "fill train" in page and "fill roll" in page
    assert "src=" not in page and "http" not in page.replace("http://www.w3.org", "")


def test_constants_and_recorded_tables_are_files_of_the_users(config, tmp_path):
    table, constants = tmp_path / "table.json", tmp_path / "constants.toml"
    table.write_text(json.dumps({"fields": ["llm_calls", "seconds", "max_context"], "rows": [[20, 100.0, 1000]]}))
    free = {"rollout": ("evaluation_s",), "training": ("seconds_per_second", "update_s", "publish_s"),
            "transition": ("release_s", "join_s", "leave_s", "ready_s", "swap_s", "fact_s")}
    constants.write_text("\n".join(f"[{section}]\n" + "\n".join(f"{name} = 0.0" for name in names)
                                   for section, names in free.items()))
    code, text = simulated(config, "--workload", table, "--constants", constants, "--seeds", "1", "--schedule", "colocate")
    assert code == 0, text
    row = next(line for line in text.splitlines() if line.startswith("colocate "))
    assert "50\u00a0s" in row, f"two steps share the 100 s of one burst: {row}"


@pytest.mark.parametrize(("arguments", "said"), [
    (["--schedule", "magic"], "cells.schedule = 'magic': unknown; use elastic"),
    (["--workload", "nowhere.json"], "--workload nowhere.json: no such file; give lognormal"),
    (["--set", "burst.phi=1", "--schedule", "colocate"], "burst.phi = 1: colocate carries nothing over a burst; use 0"),
    (["--cells", "1", "--schedule", "async"], "at least one has to train and one to roll out"),
    (["--cells", "1", "--schedule", "colocate+standalone"], "of 1 cells at least one has to train and one to roll out alone"),
    (["--from", "nowhere"], "nowhere: no run there"),
    (["--picture", "nowhere/lanes.html"], "--picture nowhere/lanes.html: give a file in a directory that is there"),
    (["--picture", "."], "--picture .: give a file in a directory that is there"),
])
def test_what_cannot_be_is_refused_with_its_reason(config, arguments, said):
    code, text = simulated(config, *arguments)
    assert code == 2
    assert said in " ".join(text.split())


def test_it_is_said_how_many_executions_end_at_the_harness_timeout(config):
    """The distribution's executions take hours: with a short timeout they are all of one length, and there is no tail."""
    few = ("--seeds", "1", "--schedule", "elastic")
    _, text = simulated(config, *few, "--set", "harness.timeout_s=60")
    assert "32 of 32 executions are ended at harness.timeout_s = 60 s" in text
    _, text = simulated(config, *few)
    assert "are ended at" not in text


def test_an_unknown_constant_names_its_neighbour(config, tmp_path):
    constants = tmp_path / "constants.toml"
    constants.write_text("[rollout]\nevaluation = 1.0\n")
    code, text = simulated(config, "--constants", constants)
    assert code == 2
    assert "rollout.evaluation_s" in text


def test_without_a_configuration_it_says_what_to_name():
    code, text = simulated()
    assert code == 2 and "gyre simulate CONFIG.toml" in text


def test_sessions_are_cut_into_stretches_that_end_with_the_turn(tmp_path):
    calls = [[10.0 * i, 1000 + i, 5, 2.0, 8.0, "tool_use"] for i in range(25)]
    calls[21][5] = "end_turn"
    path = tmp_path / "sessions.jsonl"
    path.write_text(json.dumps({"id": "a", "req": calls}) + "\n")
    rows = workload_rows(str(path))
    assert rows is not None and rows.fields == ("seconds", "max_context")
    assert rows.rows == ((212.0, 1026.0),), "22 calls; the three after the turn are too few"


def test_constants_of_the_user_win_over_measured_ones(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("[training]\nupdate_s = 7.0\n")
    text = merged_constants(path, {"training": {"update_s": 1.0, "publish_s": 2.0}})
    assert "update_s = 7.0" in text and "publish_s = 2.0" in text


def run_of(schedule: str, seed: int, phi: int, seconds: float) -> Simulated:
    uses = dict.fromkeys(("roll", "tail", "train", "data", "end", "update", "move", "lost"), 1.0)
    step = SimulatedStep(seconds, 0.0, (0,))
    return Simulated(schedule, seed, 2, 0, 1, phi, 0, seconds, 1.0, uses, (step,), 1, 0, 0, 0, 0, {}, 1)


def test_ratios_are_taken_seed_by_seed_and_the_best_shape_stands_for_its_schedule():
    runs = [run_of("a", 0, 0, 10.0), run_of("a", 1, 0, 20.0), run_of("a", 0, 1, 5.0), run_of("a", 1, 1, 10.0),
            run_of("b", 0, 0, 6.0), run_of("b", 1, 0, 8.0)]
    assert [line.ratios for line in lines_of(runs)] == [(1.0, 1.0), (0.5, 0.5), (0.6, 0.4)]
    best = best_lines(runs)
    assert [(line.first.schedule, line.first.phi, line.ratios) for line in best] == [("a", 1, (1.0, 1.0)), ("b", 0, (1.2, 0.8))]


# ---------------------------------------------------------------- recorded runs


def recorded_run() -> RunLedger:
    ledger = RunLedger("r")
    for fact, time_s in recorded_facts():
        ledger.fold(fact, time_s)
    return ledger


def test_a_recorded_run_gives_its_groups_costs_and_transitions():
    recording = recording_of(recorded_run(), Room(8, 8))
    assert recording.rows.fields == ("seconds", "max_context", "train_s", "group")
    assert [row[:2] for row in recording.rows.rows] == [(10.0, 500), (30.0, 501)] * 2
    # 20 cell-seconds of training for a cost of 20; each of the four executions has a quarter of it
    assert [row[2] for row in recording.rows.rows] == pytest.approx([5.0] * 4)
    assert recording.constants["rollout"] == pytest.approx({"evaluation_s": 0.5, "move_stall_s": 0.3})
    assert recording.constants["transition"] == pytest.approx({"release_s": 0.3, "join_s": 0.5, "swap_s": 0.0})
    assert recording.constants["training"] == pytest.approx({"publish_s": 0.25, "update_s": 0.0})
    assert (recording.makespan_s, recording.num_steps) == pytest.approx((41.0, 1))


def test_executions_that_had_to_wait_for_others_count_from_their_start():
    recording = recording_of(recorded_run(), Room(8, 2))
    assert [row[0] for row in recording.rows.rows] == [8.0] * 4


def test_executions_that_shared_too_few_slots_count_as_what_they_would_have_taken_alone():
    recording = recording_of(recorded_run(), Room(1, 8))
    # four on two cells of one slot each: half as fast until two have ended at 110
    assert [row[0] for row in recording.rows.rows] == pytest.approx([5.0, 25.0] * 2)


def test_a_run_without_a_complete_group_cannot_be_simulated():
    with pytest.raises(ConfigError, match="no training group is complete"):
        recording_of(RunLedger("empty"), Room(1, 1))
