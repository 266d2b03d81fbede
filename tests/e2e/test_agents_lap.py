"""A lap with sub-agents and compaction on real processes: every role class comes about, known from the stream alone."""

from collections import Counter
from pathlib import Path

import pytest
from gyre.contracts.events import GroupCompleted
from lap import Lap, agents_config

pytestmark = pytest.mark.slow

ROLES = {"main", "main-summary", "sub-agent", "sub-agent-summary"}


async def test_every_role_class_comes_about_and_the_books_balance(tmp_path: Path) -> None:
    lap = Lap(tmp_path, agents_config(tmp_path))
    assert await lap.to_the_end() == "completed"
    lap.assert_books_balance()
    roots = Counter(call.execution for call in lap.watcher.ledger.calls.values() if call.base_call is None)
    assert max(roots.values()) >= 2, "contexts that share not one token: a main agent's and a sub-agent's"
    calls: Counter[str] = Counter()
    trained: Counter[str] = Counter()
    for completed in lap.watcher.ledger.all(GroupCompleted).values():
        for outcome in completed.fact.outcomes:
            calls.update({role: counts.num_calls for role, counts in outcome.roles.items()})
            trained.update({role: counts.num_trained for role, counts in outcome.roles.items()})
    assert set(+calls) == ROLES, calls
    assert trained["sub-agent"] > 0, trained
    assert calls.total() == len(lap.watcher.ledger.calls)
