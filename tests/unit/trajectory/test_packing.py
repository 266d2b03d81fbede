"""Micro-steps: budgets, cuts between paths, exact contexts, determinism."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from executions import POLICY, RecordedRoles
from gyre.contracts.digest import bytes_digest
from gyre.contracts.events import RoleClass
from gyre.contracts.microstep import MicroStep, micro_step_from_bytes
from gyre.trajectory.admission import admit
from gyre.trajectory.packing import Budget, Extent, Member, micro_step, pack
from gyre.trajectory.roles import ROLE_ORDERS, leaf_roles
from gyre.trajectory.targets import find_targets

WIDE = Budget(10**9, 10**12)


def member(calls: Any, advantage: float = 1.0, max_paths: int = 5) -> Member:
    tree = calls.tree()
    targets = find_targets(tree, POLICY)
    roles = leaf_roles(tree, RecordedRoles().classify(tree.calls))
    admission = admit(tree, targets, roles, ROLE_ORDERS["paper"], max_paths, ("run", calls.execution))
    return Member(calls.execution, advantage, tree, targets, admission)


def packed(members: list[Member], budget: Budget) -> list[MicroStep]:
    return [micro_step("g", n, p, members) for n, p in enumerate(pack(members, budget))]


def context(step: MicroStep, row: int) -> tuple[int, ...]:
    """Token ids from the root to `row`."""
    ids: list[int] = []
    while row >= 0:
        ids.append(int(step.ids[row]))
        row = int(step.parent[row])
    return tuple(ids[::-1])


def test_a_small_tree_is_one_micro_step_in_depth_first_order(script: Any) -> None:
    calls = script().call([1, 2], [10, 11], logprobs=[-1, -2], version=4).call([1, 2], [20, 21, 22], version=5)
    (step,) = packed([member(calls, 0.5)], WIDE)
    assert step.ids.tolist() == [1, 2, 10, 11, 20, 21, 22]
    assert step.parent.tolist() == [-1, 0, 1, 2, 1, 4, 5]
    assert step.position.tolist() == [0, 1, 2, 3, 2, 3, 4]
    assert step.exit.tolist() == [7, 7, 4, 4, 7, 7, 7]
    assert step.target.tolist() == [2, 3, 4, 5, 6]
    assert len(set(step.path[:2].tolist()) | set(step.path[2:].tolist())) == 2
    assert step.version.tolist() == [4, 4, 5, 5, 5]
    assert step.logprob[:2].tolist() == [-1, -2]
    assert step.weight.tolist() == pytest.approx([0.2] * 5)
    assert step.advantage.tolist() == [0.5]
    assert (step.num_pairs, step.micro_step) == (1 + 2 + 3 + 4 + 3 + 4 + 5, "g-m000")


def test_rows_end_with_the_last_target_of_each_path(script: Any) -> None:
    """A tool result after the last output scores nothing."""
    calls = script().call([1, 2], [3]).call([1, 2, 3, 4, 5, 6], [])
    (step,) = packed([member(calls)], WIDE)
    assert step.ids.tolist() == [1, 2, 3]
    assert step.target.tolist() == [2]


def test_several_executions_share_a_micro_step_one_tree_after_another(script: Any) -> None:
    members = [member(script(execution=f"x{n}").call([n, 2], [3, 4]), advantage=n) for n in (1, 2)]
    (step,) = packed(members, WIDE)
    assert step.executions == ("x1", "x2")
    assert step.tree.tolist() == [0] * 4 + [1] * 4
    assert step.parent.tolist() == [-1, 0, 1, 2, -1, 4, 5, 6]
    assert step.exit.tolist() == [4] * 4 + [8] * 4
    assert step.path.tolist() == [0, 0, 1, 1]
    assert step.advantage.tolist() == [1, 2]


def test_a_tree_that_is_too_large_is_cut_between_paths(script: Any) -> None:
    shared = list(range(100, 110))
    calls = script()
    for branch in range(4):
        calls.call(shared, [branch, 50, 51])
    steps = packed([member(calls)], Budget(16, 10**9))
    assert [s.num_tokens for s in steps] == [16, 16]
    assert sorted(int(s.ids[t]) for s in steps for t in s.target) == sorted([0, 1, 2, 3, 50, 51] + [50, 51] * 3)
    assert all(s.weight.tolist() == pytest.approx([1 / 12] * 6) for s in steps)


def test_paths_of_one_execution_that_meet_again_share_their_prefix(script: Any) -> None:
    """Neighbours did not fit together, but the first and the third do: 2 shared tokens are encoded once."""
    calls = script().call([1, 2], [10, 11, 12]).call([1, 2], list(range(20, 27))).call([1, 2], [30, 31, 32])
    steps = packed([member(calls)], Budget(10, 10**9))
    assert [s.ids.tolist() for s in steps] == [[1, 2, *range(20, 27)], [1, 2, 10, 11, 12, 30, 31, 32]]


def test_a_path_longer_than_the_budget_is_a_micro_step_of_its_own(script: Any) -> None:
    """C17: lengths 10, 3, 4 under a budget of 8 give {10}, {4, 3}: nothing is dropped, nothing raises."""
    members = [member(script(execution=f"x{n}").call([n], list(range(n + 1, n + size)))) for n, size in
               ((100, 10), (200, 3), (300, 4))]
    steps = packed(members, Budget(8, 10**9))
    assert [(s.executions, s.num_tokens) for s in steps] == [(("x100",), 10), (("x200", "x300"), 7)]


def test_the_pairs_budget_binds_too(script: Any) -> None:
    members = [member(script(execution=f"x{n}").call([n], [1] * 9)) for n in range(3)]
    assert [len(s.executions) for s in packed(members, Budget(10**9, 110))] == [2, 1]
    assert [len(s.executions) for s in packed(members, Budget(10**9, 109))] == [1, 1, 1]


def test_nothing_to_train_is_no_micro_step() -> None:
    assert pack([], WIDE) == []


def test_cost_is_linear_in_tokens_and_pairs() -> None:
    assert Budget(1, 1, 2.0, 0.5).cost(Extent(10, 55)) == 47.5


def random_member(script: Any, seed: int) -> Member:
    rng = random.Random(seed)
    calls = script(execution=f"x{seed}")
    while True:
        prompt: list[int] = []
        if calls.sequences and rng.random() < 0.9:
            earlier = rng.choice(calls.sequences)
            prompt = earlier[:len(earlier) if rng.random() < 0.5 else rng.randint(0, len(earlier))]
        roles: tuple[RoleClass, ...] = ROLE_ORDERS["paper"]
        calls.call([*prompt, *(rng.randrange(4) for _ in range(rng.randint(1, 9)))],
                   [rng.randrange(4) for _ in range(rng.randint(0, 6))], version=rng.randrange(5),
                   role_class=rng.choice(roles))
        found = member(calls, advantage=rng.choice([-1.0, 0.5]), max_paths=rng.randint(1, 6))
        if found.admission.paths and rng.random() < 0.25:
            return found


def expected_targets(one: Member) -> Counter[tuple[Any, ...]]:
    """(execution, context, logprob, version) of every owned target, from the tree."""
    parents = one.tree.token_parents()
    segment_of = np.repeat(np.arange(one.tree.num_segments), np.diff(one.tree.bounds))
    found: Counter[tuple[Any, ...]] = Counter()
    for k, token in enumerate(one.targets.index.tolist()):
        if one.admission.owner[segment_of[token]] >= 0:
            row, ids = token, []
            while row >= 0:
                ids.append(int(one.tree.ids[row]))
                row = int(parents[row])
            found[one.execution, tuple(ids[::-1]), float(one.targets.logprob[k]), int(one.targets.version[k])] += 1
    return found


def check_structure(step: MicroStep) -> None:
    rows = range(step.num_tokens)
    assert all(step.parent[i] < i for i in rows)
    assert all(step.position[i] == (step.position[step.parent[i]] + 1 if step.parent[i] >= 0 else 0) for i in rows)
    assert all(step.tree[i] == step.tree[step.parent[i]] for i in rows if step.parent[i] >= 0)
    below = [1] * step.num_tokens
    useful = [False] * step.num_tokens
    for t in step.target:
        useful[t] = True
    for i in reversed(rows):
        if step.parent[i] >= 0:
            below[step.parent[i]] += below[i]
            useful[step.parent[i]] |= useful[i]
    assert all(step.exit[i] == i + below[i] for i in rows)
    assert all(useful)
    assert step.target.tolist() == sorted(set(step.target.tolist()))
    pairs = list(zip(step.tree[step.target].tolist(), step.path.tolist(), strict=True))
    assert len(set(pairs)) == len(set(step.path.tolist()))


def test_random_groups_train_every_owned_target_once_in_its_context(script: Any) -> None:
    for seed in range(120):
        members = [random_member(script, 1000 * seed + n) for n in range(1 + seed % 4)]
        budget = Budget([20, 40, 80, 10**9][seed % 4], [10**9, 300][seed % 2])
        packs = pack(members, budget)
        steps = [micro_step("g", n, p, members) for n, p in enumerate(packs)]
        found: Counter[tuple[Any, ...]] = Counter()
        for step, chosen in zip(steps, packs, strict=True):
            check_structure(step)
            assert Extent(step.num_tokens, step.num_pairs) == chosen.extent
            assert budget.holds(chosen.extent) or [len(p) for p in chosen.paths.values()] == [1]
            for k, t in enumerate(step.target.tolist()):
                execution = step.executions[step.tree[t]]
                found[execution, context(step, t), float(step.logprob[k]), int(step.version[k])] += 1
        assert found == sum((expected_targets(m) for m in members), Counter()), seed
        assert set(found.values()) == {1}
        for one in members:
            weights = [s.weight[k] for s in steps for k, t in enumerate(s.target)
                       if s.executions[s.tree[t]] == one.execution]
            assert sum(weights) == pytest.approx(1.0, abs=1e-5)


def test_the_bytes_depend_on_the_contents_alone(script: Any) -> None:
    budget = Budget(60, 10**9)
    first = [s.to_bytes() for s in packed([random_member(script, n) for n in range(5)], budget)]
    again = [s.to_bytes() for s in packed([random_member(script, n) for n in range(5)], budget)]
    assert first == again
    for data in first:
        step = micro_step_from_bytes(data, bytes_digest(data))
        integers = (step.ids, step.parent, step.position, step.exit, step.tree, step.target, step.path, step.version)
        assert {a.dtype.str for a in integers} == {"<i4"}
        assert {a.dtype.str for a in (step.logprob, step.weight, step.advantage)} == {"<f4"}
