"""A lap with sub-agents and compaction on real processes: every class of role comes about and the books balance."""

from collections import Counter
from pathlib import Path

import pytest
from lap import Lap, agents_config

pytestmark = pytest.mark.slow


async def test_an_execution_holds_every_class_of_context(tmp_path: Path) -> None:
    lap = Lap(tmp_path, agents_config(tmp_path))
    assert await lap.to_the_end() == "completed"
    lap.assert_books_balance()
    roots = Counter(call.execution for call in (c.fact for c in lap.watcher.ledger.calls.values()) if call.keep_len == 0)
    assert max(roots.values()) >= 4, "two contexts of the main agent and two of a sub-agent"
