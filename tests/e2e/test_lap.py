"""One token's whole journey on real processes, with everything counted."""

import json

import pytest
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
