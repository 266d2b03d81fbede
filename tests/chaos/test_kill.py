"""kill -9 of every kind of process in one run: nothing is lost, nothing is trained twice, the books balance."""

import pytest
from gyre.cli.trace_view.spans import read_spans
from gyre.cli.trace_view.tree import transitions
from gyre.contracts.events import CellRoleAssigned
from lap import Lap, clinic_config, left_running

pytestmark = pytest.mark.slow


async def kill_each_once(lap: Lap) -> None:
    """One process of each kind, while executions run, while they are scored, and while a step trains."""
    ledger = lap.watcher.ledger
    await lap.until(lambda: len(ledger.calls) > 10)
    lap.kill("rollout")
    await lap.until(lambda: len(ledger.calls) > 30)
    lap.kill("trajectory")
    await lap.until(lambda: len(ledger.calls) > 50)
    lap.kill("evaluator-0")
    await lap.until(lambda: len(ledger.calls) > 80)
    lap.kill("nats")
    await lap.until(lambda: len(ledger.steps) >= 1)
    lap.kill("scheduler")
    await lap.until(lambda: len(ledger.calls) > 160)
    lap.kill("engine-0")
    await lap.until(lambda: len(ledger.steps) >= 2)
    lap.kill("trainer-0")
    lap.kill("trainer-1")


async def test_the_run_ends_well_although_every_kind_of_process_is_killed(tmp_path):
    config = clinic_config(tmp_path, "steps=4", "burst.executions_per_group=8", "evaluation.at_start=false")
    lap = Lap(tmp_path, config)
    assert await lap.to_the_end(kill_each_once, timeout_s=400) == "completed"
    lap.assert_books_balance()
    ledger = lap.watcher.ledger
    assert len(ledger.steps) == 4
    endings = {x.terminated.fact.ending for x in ledger.executions.values()}
    assert endings <= {"finished", "timed_out"}, endings
    assert left_running(lap.run) == {}
    assert_every_transition_has_a_root_that_ended(lap)


def assert_every_transition_has_a_root_that_ended(lap: Lap) -> None:
    """Also of those that a process was killed in: what it had ended is there, what it had begun is known as unfinished."""
    found = {one.name: one for one in transitions(read_spans(lap.run.logs / "traces"))}
    assigned = {stamped.fact.transition for stamped in lap.watcher.ledger.all(CellRoleAssigned).values()}
    assert set(found) >= assigned
    assert {found[name].outcome for name in assigned} <= {"completed", "superseded"}
    assert all(found[name].num_orphans == 0 for name in assigned)
