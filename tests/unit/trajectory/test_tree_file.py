"""The file of a tree: what people and tools see of an execution."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gyre.contracts.errors import BrokenBody
from gyre.contracts.events import Outcome, RoleCounts
from gyre.runtime.effects import WriteBlob
from gyre.trajectory import inspection
from gyre.trajectory.config import TrajectoryConfig
from gyre.trajectory.core import TrajectoryCore
from gyre.trajectory.inspection import TreeFile, tree_from_bytes, tree_from_json, tree_path


@pytest.fixture
def files(script: Any, story: Any, settings: Callable[..., TrajectoryConfig]) -> dict[str, TreeFile]:
    """A winner with a compaction and a sub-agent, admitted two paths; a loser; a quarantined one."""
    winner = (script(execution="g00000-000-x00").call([1, 2], [10, 11]).call([1, 2, 10, 11, 3], [12], version=1)
              .call([1, 2, 10, 11, 3, 12, 9], [20, 21], role_class="main-summary", version=1)
              .call([1, 20, 21], [13], version=1).call([7, 8], [14], role_class="sub-agent", version=1))
    loser = script(execution="g00000-000-x01").call([1, 2], [30])
    broken = script(execution="g00000-000-x02").call([1, 2], [31], digest="0" * 32)
    told = story([winner, loser, broken], [1.0, 0.0, 0.0])
    core = TrajectoryCore(settings(max_paths=2))
    state, effects = core.initial(), []
    for fact in told.facts():
        state, more = core.step(state, fact, 0.0)
        effects += more
    blobs = {e.path: e.data for e in effects if isinstance(e, WriteBlob)}
    return {s.execution[-3:]: tree_from_bytes(blobs[tree_path(s.execution)]) for s in told.scripts}


def test_a_file_says_who_sampled_what_and_what_was_trained(files: dict[str, TreeFile]) -> None:
    file = files["x00"]
    assert file.ids.tolist() == [1, 2, 10, 11, 3, 12, 9, 20, 21, 20, 21, 13, 7, 8, 14]
    assert [(n.index, n.role_class, n.segment, n.prompt_len, n.length) for n in file.calls] == [
        (0, "main", 1, 2, 4), (1, "main", 1, 5, 6), (2, "main-summary", 1, 7, 9), (3, "main", 2, 3, 4),
        (4, "sub-agent", 3, 2, 3)]
    assert file.ids[file.target].tolist() == [10, 11, 12, 20, 21, 13, 14]
    assert file.version.tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert [p.role_class for p in file.paths] == ["main", "main-summary"]
    assert file.owner.tolist() == [-1, 1, 0, -1]
    assert [(n.agent, n.known_by) for n in file.calls] == [
        ("main", "stream"), ("main", "stream"), ("main", "harness"), ("main", "unknown"), ("sub-4", "harness")]
    assert file.header.outcome.num_unknown_roots == 1
    assert file.header.outcome.roles == {
        "main": RoleCounts(3, 4, 1, 1), "main-summary": RoleCounts(1, 2, 1, 5), "sub-agent": RoleCounts(1, 1, 0, 0)}
    assert file.header.outcome.drops == {"max_paths": 1}


def test_json_is_the_same_file(files: dict[str, TreeFile]) -> None:
    for file in files.values():
        again = tree_from_json(file.to_json())
        assert again.to_bytes() == file.to_bytes()
        assert isinstance(again.header.outcome, Outcome)


def test_json_of_a_very_long_tree_leaves_out_what_is_per_token(files: dict[str, TreeFile]) -> None:
    small = files["x00"]
    big = replace(small, ids=np.zeros(inspection.MAX_JSON_TOKENS + 1, np.int32))
    assert json.loads(big.to_json())["ids"] is None
    assert tree_from_json(big.to_json()).bounds.tolist() == small.bounds.tolist()


@pytest.mark.parametrize("data", [b"{", b"[]", b"{}", b'{"ids": "x"}'])
def test_json_of_something_else_is_refused(data: bytes) -> None:
    with pytest.raises(BrokenBody):
        tree_from_json(data)
