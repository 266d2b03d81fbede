"""The tree file that trajectory writes is the tree that the report reads."""

import numpy as np
from executions import POLICY, RecordedRoles
from gyre.cli.treefile import read_tree, runs, turns
from gyre.contracts import events as e
from gyre.contracts.digest import token_digest
from gyre.runtime.blobs import DirectoryBlobs
from gyre.trajectory.admission import admit
from gyre.trajectory.inspection import Header, tree_file, tree_path
from gyre.trajectory.record import CallLog
from gyre.trajectory.roles import ROLE_ORDERS, leaf_roles
from gyre.trajectory.targets import find_targets
from gyre.trajectory.tree import build_tree

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
    sampled = [run.ids for segment in range(len(view.parent)) for run in runs(view, segment) if run.call >= 0]
    assert sorted(sampled) == [(4, 5), (7,), (8,)]
    assert sum(path.num_owned for path in view.paths) == admission.num_owned
