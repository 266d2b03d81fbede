"""The tree file that trajectory writes, or answers, is the tree that the report and `gyre tree` read."""

import msgspec
import numpy as np
import pytest
from executions import POLICY, RecordedRoles, random_calls
from gyre.cli import treefile
from gyre.cli.tree_view.anatomy import anatomy, samplers
from gyre.cli.tree_view.facts import call_rows, fates, role_rows
from gyre.cli.treefile import read_tree, tree_from_bytes, tree_from_json, turns
from gyre.contracts import events as e
from gyre.contracts.digest import token_digest
from gyre.runtime.blobs import DirectoryBlobs
from gyre.trajectory import inspection
from gyre.trajectory.admission import admit
from gyre.trajectory.inspection import Header, tree_file, tree_path
from gyre.trajectory.record import CallLog
from gyre.trajectory.roles import ROLE_ORDERS, leaf_roles
from gyre.trajectory.targets import find_targets
from gyre.trajectory.tree import build_tree
from long_execution import file_of, long_tree, small_records

EXECUTION = "g00000-000-x00"


def record(index: int, base: int | None, prompt: list[int], output: list[int], keep: int) -> e.CallRecorded:
    values = np.full(len(output), -0.5, np.float32)
    return e.CallRecorded(
        EXECUTION, "g00000-000", f"c{index}", index, None if base is None else f"c{base}", keep, len(prompt),
        np.array(prompt[keep:], np.int32), np.array(output, np.int32), values, values,
        (e.VersionSpan(0, len(output), 3),), "stop", token_digest(np.array(prompt + output, np.int32)))


def test_the_report_reads_what_trajectory_wrote(tmp_path):
    log = CallLog()
    log.add(record(0, None, [1, 2, 3], [4, 5], 0))
    log.add(record(1, 0, [1, 2, 3, 4, 5, 6], [7], 5))
    log.add(record(2, 0, [1, 2, 9], [8], 2))
    log.close(3)
    assert log.refusal is None
    roles = RecordedRoles()
    tree = build_tree(log.ordered())
    targets = find_targets(tree, POLICY)
    admission = admit(tree, targets, leaf_roles(tree, roles.classify(tree.calls)), ROLE_ORDERS["paper"], 1, ("r", "x"))
    outcome = e.Outcome(EXECUTION, "scored", "finished", 1.0, 0.5, 3, len(targets), admission.num_owned)
    header = Header("q", "g00000-000", "train", "policy", outcome)
    written = tree_file(header, tree, targets, admission, roles.classify(tree.calls))
    blobs = DirectoryBlobs(tmp_path)
    blobs.put(tree_path(EXECUTION), written.to_bytes())

    view = read_tree(blobs, EXECUTION)

    assert [view.sequence(call).tolist() for call in view.calls] == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7], [1, 2, 9, 8]]
    assert [(turn.added, turn.output) for turn in turns(view)] == [((1, 2, 3), (4, 5)), ((6,), (7,)), ((9,), (8,))]
    sampled = [view.ids[run.start:run.stop].tolist() for run in anatomy(view).runs if run.call >= 0]
    assert sorted(sampled) == [[4, 5], [7], [8]]
    assert sum(path.num_owned for path in view.paths) == admission.num_owned


PAIRS = ((treefile.TreeView, inspection.TreeFile), (treefile.Call, inspection.CallNote),
         (treefile.Path, inspection.PathNote), (treefile.Header, inspection.Header))


@pytest.mark.parametrize(("read", "written"), PAIRS, ids=lambda kind: kind.__name__)
def test_every_field_that_is_written_is_read(read, written):
    assert {f.name for f in msgspec.inspect.type_info(read).fields} == {
        f.name for f in msgspec.inspect.type_info(written).fields}


def test_nothing_is_lost_on_the_way():
    file = file_of(small_records(), max_paths=2)
    view = tree_from_bytes(file.to_bytes())
    assert view.header.outcome == file.header.outcome
    assert (view.header.query, view.header.group, view.header.policy) == ("train-0042", "g00007-003", "policy")
    for ours, theirs in zip(view.calls, file.calls, strict=True):
        for name in treefile.Call.__dataclass_fields__:
            assert getattr(ours, name) == getattr(theirs, name), name
    np.testing.assert_array_equal(view.logprobs, file.logprobs)
    np.testing.assert_array_equal(view.behaviour_logprobs, file.behaviour_logprobs)
    again = tree_from_json(file.to_json())
    np.testing.assert_array_equal(again.ids, view.ids)
    assert again.calls == view.calls


@pytest.mark.parametrize("seed", range(40))
def test_targets_follow_from_the_calls_alone_as_in_the_file(seed):
    view = tree_from_bytes(file_of(random_calls(seed).records).to_bytes())
    sampler, is_target, version = samplers(view)
    assert np.flatnonzero(is_target).tolist() == view.target.tolist()
    np.testing.assert_array_equal(sampler[view.target], view.call)
    np.testing.assert_array_equal(version[view.target], view.version)


@pytest.mark.parametrize("seed", range(40))
def test_what_is_counted_for_people_is_what_the_outcome_says(seed):
    view = tree_from_bytes(file_of(random_calls(seed).records, max_paths=3).to_bytes())
    tree, outcome = anatomy(view), view.header.outcome
    assert {r.role: (r.num_calls, r.num_sampled, r.num_paths, r.num_trained) for r in role_rows(tree)} == {
        role: (c.num_calls, c.num_sampled, c.num_paths, c.num_trained) for role, c in outcome.roles.items()}
    runs = [(run.fate, run.num) for run in tree.runs]
    assert sum(num for fate, num in runs if fate.startswith("path ")) == outcome.num_trained_targets
    for reason, num in (outcome.drops | outcome.not_targets).items():
        assert sum(n for fate, n in runs if fate == reason) == num, reason
    for call in view.calls:
        assert sum(fates(tree, call).values()) == call.length - call.prompt_len
    assert sum(num for _, num in runs) == view.num_tokens


def test_a_long_answer_of_the_service_lacks_tokens_and_still_shows_what_was_sampled():
    file = long_tree()
    whole, answer = tree_from_bytes(file.to_bytes()), tree_from_json(file.to_json())
    assert len(whole.ids) > inspection.MAX_JSON_TOKENS
    assert not answer.has_tokens
    one, other = anatomy(whole), anatomy(answer)
    assert one.runs == other.runs
    assert one.branches == other.branches
    assert call_rows(one) == call_rows(other)
