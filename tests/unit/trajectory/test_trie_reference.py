"""An independent slow builder (one dict per token) against the real one, on random executions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from executions import POLICY, RecordedRoles, random_calls
from gyre.trajectory.admission import admit, draw
from gyre.trajectory.record import CallLog
from gyre.trajectory.roles import ROLE_ORDERS, leaf_roles
from gyre.trajectory.targets import find_targets
from gyre.trajectory.tree import Tree, build_tree
from hypothesis import given, settings
from hypothesis import strategies as st

Prefix = tuple[int, ...]
ROLES = ROLE_ORDERS["paper"]


class SlowTrie:
    """Prefixes as tuples. Everything is recomputed from the definition."""

    def __init__(self, calls: Any) -> None:
        self.calls = calls
        self.nodes: list[Prefix] = []  # in the order of their first call: children stand in this order
        for sequence in calls.sequences:
            self.nodes += [p for n in range(1, len(sequence) + 1) if (p := tuple(sequence[:n])) not in set(self.nodes)]
        self.sampled: dict[Prefix, tuple[float, int]] = {}
        for record, sequence in zip(calls.records, calls.sequences, strict=True):
            if record.model == "policy" and record.finish_reason != "abort":
                self._sample(record, sequence)

    def _sample(self, record: Any, sequence: Sequence[int]) -> None:
        for t in range(len(record.output_ids)):
            version = next(s.version for s in record.spans if s.start <= t < s.end)
            node = tuple(sequence[:record.prompt_len + t + 1])
            if len(node) == 1:
                continue  # nothing comes before it that could score it
            self.sampled.setdefault(node, (float(record.behaviour_logprobs[t]), version))

    def depth_first(self) -> list[Prefix]:
        rank = {node: i for i, node in enumerate(self.nodes)}
        return sorted(self.nodes, key=lambda node: [rank[node[:n]] for n in range(1, len(node) + 1)])

    def leaves(self) -> list[Prefix]:
        inner = {node[:-1] for node in self.nodes}
        return [node for node in self.depth_first() if node not in inner]

    def role(self, leaf: Prefix) -> str:
        ended = zip(self.calls.records, self.calls.sequences, strict=True)
        return next(record.role_class for record, sequence in ended if tuple(sequence) == leaf)

    def admit(self, order: Sequence[str], max_paths: int) -> tuple[list[Prefix], dict[Prefix, int]]:
        owner: dict[Prefix, int] = {}
        paths: list[Prefix] = []

        def unowned(leaf: Prefix) -> list[Prefix]:
            return [p for n in range(len(leaf)) if (p := leaf[:n + 1]) in self.sampled and p not in owner]

        while len(paths) < max_paths:
            classes = [[leaf for leaf in self.leaves() if self.role(leaf) == role and unowned(leaf)] for role in order]
            leaves = next((c for c in classes if c), None)
            if leaves is None:
                break
            tickets = [leaf for leaf in leaves for _ in unowned(leaf)]
            chosen = tickets[draw("run", self.calls.execution, len(paths), len(tickets))]
            owner.update(dict.fromkeys(unowned(chosen), len(paths)))
            paths.append(chosen)
        return paths, owner


def prefixes(tree: Tree) -> list[Prefix]:
    """Every token of the tree as the sequence that ends with it, depth-first."""
    parents, found = tree.token_parents(), []
    for i, token in enumerate(tree.ids.tolist()):
        found.append((*(found[parents[i]] if parents[i] >= 0 else ()), token))
    return found


def test_the_tree_is_that_of_the_definition() -> None:
    for seed in range(1000):
        calls = random_calls(seed)
        tree, slow = calls.tree(), SlowTrie(calls)
        nodes = prefixes(tree)
        assert nodes == slow.depth_first(), seed
        assert tree.token_depths().tolist() == [len(n) - 1 for n in nodes]
        exits = tree.token_exits()
        for i, node in enumerate(nodes):
            assert exits[i] - i == sum(other[:len(node)] == node for other in nodes)
        for number, sequence in enumerate(calls.sequences):
            assert tree.tokens(number).tolist() == sequence
        assert all(tree.exit[s] == s + 1 or sum(p == s for p in tree.parent) > 1 for s in range(tree.num_segments))


def test_targets_are_those_of_the_definition() -> None:
    for seed in range(1000):
        calls = random_calls(seed)
        tree, slow = calls.tree(), SlowTrie(calls)
        targets, nodes = find_targets(tree, POLICY), prefixes(tree)
        found = {nodes[i]: (float(targets.logprob[k]), int(targets.version[k])) for k, i in enumerate(targets.index)}
        assert found == slow.sampled, seed


def test_ownership_is_that_of_the_definition() -> None:
    for seed in range(1000):
        calls = random_calls(seed)
        tree, slow = calls.tree(), SlowTrie(calls)
        targets, nodes = find_targets(tree, POLICY), prefixes(tree)
        roles = leaf_roles(tree, RecordedRoles().classify(tree.calls))
        order, max_paths = ROLE_ORDERS[["paper", "announcement"][seed % 2]], 1 + seed % 6
        admission = admit(tree, targets, roles, order, max_paths, ("run", calls.execution))
        paths, owner = slow.admit(order, max_paths)
        assert [nodes[tree.bounds[p.leaf + 1] - 1] for p in admission.paths] == paths, seed
        segment_of = np.repeat(np.arange(tree.num_segments), np.diff(tree.bounds))
        found = {nodes[i]: admission.owner[segment_of[i]] for i in targets.index}
        assert {n: o for n, o in found.items() if o >= 0} == owner
        assert admission.num_owned == len(owner)
        assert sum(admission.drops.values()) == len(slow.sampled) - len(owner)
        last = [max(len(n) - 1 for n, o in owner.items() if o == number) for number in range(len(paths))]
        assert [p.last for p in admission.paths] == last


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_any_order_and_any_duplication_gives_one_tree(seed: int, data: st.DataObject) -> None:
    calls = random_calls(seed)
    expected = calls.tree()
    told = data.draw(st.permutations(calls.records))
    again = data.draw(st.lists(st.sampled_from(calls.records), max_size=6))
    at = data.draw(st.integers(0, len(told)))
    log = CallLog()
    for record in [*told[:at], *again, *told[at:]]:
        log.add(record)
    assert log.refusal is None
    assert not log.waiting
    tree = build_tree(log.ordered())
    assert [c.record.call for c in tree.calls] == [c.record.call for c in expected.calls]
    assert tree.ids.tobytes() == expected.ids.tobytes()
    assert (tree.bounds, tree.parent, tree.depth, tree.exit, tree.end) == (
        expected.bounds, expected.parent, expected.depth, expected.exit, expected.end)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_with_enough_paths_every_target_is_owned_exactly_once(seed: int) -> None:
    tree = random_calls(seed, num_ids=40).tree()
    targets = find_targets(tree, POLICY)
    roles = leaf_roles(tree, RecordedRoles().classify(tree.calls))
    admission = admit(tree, targets, roles, ROLES, 10_000, ("run", "x"))
    assert admission.num_owned == len(targets)
    assert admission.drops == {}


def test_one_call_more_changes_nothing_that_was_there() -> None:
    """Inserting a duplicate of every call leaves tree and targets alone; only the draws double."""
    for seed in range(50):
        calls = random_calls(seed)
        tree, targets = calls.tree(), find_targets(calls.tree(), POLICY)
        for record, sequence in list(zip(calls.records, calls.sequences, strict=True)):
            calls.call(sequence[:record.prompt_len], sequence[record.prompt_len:], model=record.model,
                       finish_reason=record.finish_reason, spans=record.spans)
        doubled = find_targets(calls.tree(), POLICY)
        assert calls.tree().ids.tolist() == tree.ids.tolist()
        assert doubled.index.tolist() == targets.index.tolist()
        assert doubled.logprob.tolist() == targets.logprob.tolist()
        assert doubled.num_drawn == 2 * targets.num_drawn
