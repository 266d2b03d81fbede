"""Which path is drawn first, how often, and what is left behind."""

from collections import Counter
from typing import Any

from executions import POLICY, RecordedRoles
from gyre.trajectory.admission import Admission, admit, draw
from gyre.trajectory.roles import ROLE_ORDERS, leaf_roles
from gyre.trajectory.targets import find_targets


def admitted(calls: Any, max_paths: int = 5, preset: str = "paper", seed: tuple[str, str] = ("run", "x")) -> Admission:
    tree = calls.tree()
    roles = leaf_roles(tree, RecordedRoles().classify(tree.calls))
    return admit(tree, find_targets(tree, POLICY), roles, ROLE_ORDERS[preset], max_paths, seed)


def four_roles(script: Any) -> Any:
    return (script().call([1], [2, 3]).call([1, 9], [4], role_class="main-summary")
            .call([5], [6], role_class="sub-agent").call([5, 9], [7], role_class="sub-agent-summary"))


def test_role_classes_come_in_the_order_of_the_preset(script: Any) -> None:
    for preset, order in ROLE_ORDERS.items():
        assert tuple(p.role_class for p in admitted(four_roles(script), preset=preset).paths) == order


def test_a_class_is_used_up_before_the_next_one(script: Any) -> None:
    calls = script().call([1], [2], role_class="sub-agent").call([3], [4]).call([5], [6]).call([7], [8])
    assert [p.role_class for p in admitted(calls).paths] == ["main", "main", "main", "sub-agent"]


def test_a_path_whose_targets_are_all_owned_is_not_drawn(script: Any) -> None:
    calls = script().call([1], [2, 3]).call([1, 2, 3, 4], [])
    assert [p.num_owned for p in admitted(calls).paths] == [2]
    forked = script().call([1], [2, 3]).call([1, 2, 3, 4], []).call([1, 2, 3, 5], [])
    assert [p.num_owned for p in admitted(forked).paths] == [2]


def test_what_max_paths_leaves_behind_is_counted(script: Any) -> None:
    calls = script().call([1], [2, 3]).call([4], [5, 6]).call([7], [8, 9])
    admission = admitted(calls, max_paths=2)
    assert (admission.num_owned, admission.drops) == (4, {"max_paths": 2})


def test_a_role_class_that_is_not_asked_for_is_counted(script: Any) -> None:
    tree = four_roles(script).tree()
    roles = leaf_roles(tree, RecordedRoles().classify(tree.calls))
    admission = admit(tree, find_targets(tree, POLICY), roles, ("main",), 5, ("run", "x"))
    assert (admission.num_owned, admission.drops) == (2, {"role_class": 3})


def test_leaves_are_drawn_in_proportion_to_their_unowned_targets(script: Any) -> None:
    calls = script().call([1], [2] * 9).call([3], [4] * 3)
    first = Counter(admitted(calls, 1, seed=("run", f"x{n}")).paths[0].num_owned for n in range(4000))
    assert abs(first[9] / 4000 - 0.75) < 0.03


def test_draws_depend_on_run_and_execution_and_never_change(script: Any) -> None:
    assert [draw("run", "g00000-000-x00", n, 1000) for n in range(4)] == [833, 938, 543, 397]
    assert draw("run", "a", 0, 1 << 60) != draw("run", "b", 0, 1 << 60)
    assert draw("one", "a", 0, 1 << 60) != draw("two", "a", 0, 1 << 60)
    assert {draw("run", "x", n, 1) for n in range(50)} == {0}
