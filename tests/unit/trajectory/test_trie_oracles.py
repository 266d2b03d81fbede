"""Trees and targets with known answers: the published examples and bug reports of other projects, by their numbers."""

from collections.abc import Sequence
from typing import Any

import pytest
from executions import POLICY, RecordedRoles
from gyre.contracts.events import CallEvidence, VersionSpan
from gyre.trajectory.admission import admit
from gyre.trajectory.roles import ROLE_ORDERS, leaf_roles
from gyre.trajectory.targets import find_targets
from gyre.trajectory.tree import Tree


def paths(tree: Tree) -> list[list[int]]:
    """Token sequences of all leaves, depth-first."""
    return [[int(t) for s in tree.path(leaf) for t in tree.ids[tree.bounds[s]:tree.bounds[s + 1]]]
            for leaf in tree.leaves()]


def target_ids(tree: Tree) -> list[int]:
    return sorted(tree.ids[find_targets(tree, POLICY).index].tolist())


def masks(tree: Tree, leaves: Sequence[int]) -> list[list[int]]:
    """Expanded ownership masks if the paths to `leaves` are admitted in this order."""
    targets, owned, result = find_targets(tree, POLICY), set(), []
    for leaf in leaves:
        rows = [i for s in tree.path(leaf) for i in range(tree.bounds[s], tree.bounds[s + 1])]
        result.append([int(i in targets.index and i not in owned) for i in rows])
        owned |= set(rows)
    return result


def test_layout_of_three_paths(script: Any) -> None:
    """O1: ABCD, ABEF, AGH."""
    a, b, c, d, e, f, g, h = range(1, 9)
    tree = script().call([a, b, c, d], []).call([a, b, e, f], []).call([a, g, h], []).tree()
    assert tree.ids.tolist() == [a, b, c, d, e, f, g, h]
    assert tree.token_parents().tolist() == [-1, 0, 1, 2, 1, 4, 0, 6]
    assert tree.token_exits().tolist() == [8, 6, 4, 4, 6, 6, 8, 8]
    assert tree.token_depths().tolist() == [0, 1, 2, 3, 2, 3, 1, 2]
    assert (tree.num_tokens, tree.num_flat_tokens) == (8, 11)
    assert int((tree.token_depths() + 1).sum()) == 22
    assert sum(n * (n + 1) // 2 for n in (4, 4, 3)) == 26


def test_visibility_follows_from_exits(script: Any) -> None:
    """O17: two levels of forks; a cousin is not an ancestor."""
    tree = script().call([1, 2, 3, 4], []).call([1, 2, 3, 5], []).call([1, 2, 6, 7], []).call([1, 2, 6, 8], []).tree()
    exits, parents = tree.token_exits(), tree.token_parents()
    for q in range(tree.num_tokens):
        ancestors, at = set(), q
        while at >= 0:
            ancestors.add(at)
            at = int(parents[at])
        assert {k for k in range(tree.num_tokens) if k <= q < exits[k]} == ancestors


def test_a_continuation_is_one_path(script: Any) -> None:
    """O2, first half."""
    tree = script().call([1, 2, 3], [4, 5]).call([1, 2, 3, 4, 5, 6, 7], [8]).tree()
    assert paths(tree) == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert target_ids(tree) == [4, 5, 8]


def test_drift_in_an_output_forks_and_keeps_both(script: Any) -> None:
    """O2, second half, and O9: a re-rendered copy is context, the sampled original stays a target."""
    tree = script().call([1, 2, 3], [4, 5]).call([1, 2, 3, 99, 5, 6, 7], [8]).tree()
    assert paths(tree) == [[1, 2, 3, 4, 5], [1, 2, 3, 99, 5, 6, 7, 8]]
    assert target_ids(tree) == [4, 5, 8]


def test_drift_in_the_latest_output_is_never_masked_away(script: Any) -> None:
    """O9: others 'heal' [4, 5] into [45] and lose both targets; here the copy forks."""
    tree = script().call([1], [4, 5]).call([1, 45, 6], [7]).tree()
    assert paths(tree) == [[1, 4, 5], [1, 45, 6, 7]]
    assert target_ids(tree) == [4, 5, 7]


def test_two_turns_merge_with_their_logprobs(script: Any) -> None:
    """O3: SkyRL's step-wise merge."""
    tree = script().call([10], [20], logprobs=[-0.5]).call([10, 20, 30], [40, 41], logprobs=[-0.3, -0.4]).tree()
    targets = find_targets(tree, POLICY)
    assert paths(tree) == [[10, 20, 30, 40, 41]]
    assert targets.index.tolist() == [1, 3, 4]
    assert targets.logprob.tolist() == pytest.approx([-0.5, -0.3, -0.4])


def test_three_turns_merge(script: Any) -> None:
    tree = script().call([1], [2]).call([1, 2, 3], [4]).call([1, 2, 3, 4, 5], [6]).tree()
    assert masks(tree, tree.leaves()) == [[0, 1, 0, 1, 0, 1]]


def test_nothing_shared_is_two_roots(script: Any) -> None:
    """O4."""
    tree = script().call([1], [2]).call([9], [10]).tree()
    assert paths(tree) == [[1, 2], [9, 10]]
    assert tree.parent == (-1, -1)


def test_a_fork_token_has_a_label_per_child(script: Any) -> None:
    """O5: both first completion tokens are targets, scored at position 1."""
    tree = script().call([1, 2], [10, 11]).call([1, 2], [20, 21, 22]).tree()
    targets = find_targets(tree, POLICY)
    assert tree.ids.tolist() == [1, 2, 10, 11, 20, 21, 22]
    assert tree.token_depths().tolist() == [0, 1, 2, 3, 2, 3, 4]
    assert [tree.size(s) for s in range(tree.num_segments)] == [2, 2, 3]
    assert tree.ids[targets.index].tolist() == [10, 11, 20, 21, 22]
    assert tree.token_parents()[targets.index].tolist() == [1, 2, 1, 4, 5]


def test_an_empty_prompt_makes_roots_that_nothing_can_score(script: Any) -> None:
    tree = script().call([], [10, 11]).call([], [20]).tree()
    targets = find_targets(tree, POLICY)
    assert tree.token_depths().tolist() == [0, 1, 0]
    assert (tree.ids[targets.index].tolist(), targets.num_rootless) == ([11], 2)


def test_a_read_token_that_was_sampled_elsewhere_is_a_target(script: Any) -> None:
    """O6: draws 8, targets 5; a later prompt attaches to the longest path."""
    calls = script().call([1, 2], [3, 4]).call([1, 2, 3, 4, 5], [6]).call([1, 2], [3, 4, 5, 6, 7])
    targets = find_targets(calls.tree(), POLICY)
    assert paths(calls.tree()) == [[1, 2, 3, 4, 5, 6, 7]]
    assert (targets.num_drawn, target_ids(calls.tree())) == (8, [3, 4, 5, 6, 7])
    assert targets.call.tolist() == [0, 0, 2, 1, 2]
    longer = calls.call([1, 2, 3, 4, 5, 6, 7, 8], [9])
    assert paths(longer.tree()) == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]


def test_the_first_path_trains_the_shared_call(script: Any) -> None:
    """O8: two and three tool results after one call."""
    calls = script().call([1], [2, 3]).call([1, 2, 3, 50], [51]).call([1, 2, 3, 60], [61]).call([1, 2, 3, 70], [71])
    tree = calls.tree()
    assert masks(tree, tree.leaves()) == [[0, 1, 1, 0, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 1]]


def test_a_forged_assistant_message_is_context(script: Any) -> None:
    """O10 and C10."""
    tree = script().call([1, 80, 2], [3]).tree()
    assert masks(tree, tree.leaves()) == [[0, 0, 0, 1]]


def test_an_empty_output_has_no_target(script: Any) -> None:
    """O11."""
    tree = script().call([1, 2, 3], []).tree()
    assert paths(tree) == [[1, 2, 3]]
    assert len(find_targets(tree, POLICY)) == 0


def test_lengths_and_common_prefixes(script: Any) -> None:
    """O12: lengths 5 4 3 2 with adjacent common prefixes 3 2 1."""
    tree = script().call([1, 2, 3, 4, 5], []).call([1, 2, 3, 14], []).call([1, 2, 13], []).call([1, 12], []).tree()
    assert tree.num_tokens == 8
    assert len(tree.leaves()) == 4


def test_nothing_at_all_is_an_empty_tree(script: Any) -> None:
    for empty in (script(), script().call([], [])):
        tree = empty.tree()
        assert (tree.num_tokens, tree.num_segments, tree.leaves()) == (0, 0, [])
        assert len(find_targets(tree, POLICY)) == 0
        assert admit(tree, find_targets(tree, POLICY), {}, ROLE_ORDERS["paper"], 5, ("r", "x")).paths == ()
    both = script().call([], []).call([1, 2, 3], []).tree()
    assert paths(both) == [[1, 2, 3]]
    assert both.end == (-1, 0)


def test_interleaved_agents_are_two_chains(script: Any) -> None:
    """O16 and C7."""
    tree = (script().call([1, 2], [3]).call([7, 8], [9], lineage="sub", role_class="sub-agent")
            .call([1, 2, 3, 4], [5]).call([7, 8, 9, 10], [11], lineage="sub", role_class="sub-agent").tree())
    assert paths(tree) == [[1, 2, 3, 4, 5], [7, 8, 9, 10, 11]]
    roles = leaf_roles(tree, RecordedRoles().classify(tree.calls))
    assert list(roles.values()) == ["main", "sub-agent"]


def test_a_fork_at_a_tool_result(script: Any) -> None:
    """C6: 4 trained, the tree stores 9 tokens, flat 14 on the two rows."""
    tree = script().call([1, 2, 3], [10, 11]).call([1, 2, 3, 10, 11, 20], [12]).call([1, 2, 3, 10, 11, 21], [13]).tree()
    assert paths(tree) == [[1, 2, 3, 10, 11, 20, 12], [1, 2, 3, 10, 11, 21, 13]]
    assert [m[3:] for m in masks(tree, tree.leaves())] == [[1, 1, 0, 1], [0, 0, 0, 1]]
    assert (tree.num_tokens, sum(map(len, paths(tree)))) == (9, 14)


def test_dropped_thinking_keeps_every_sampled_token(script: Any) -> None:
    """C3: two rows, five trained tokens, each once."""
    tree = script().call([1, 2, 3], [90, 91, 10, 11]).call([1, 2, 3, 10, 11, 20], [12]).tree()
    assert len(paths(tree)) == 2
    assert target_ids(tree) == [10, 11, 12, 90, 91]


def test_a_truncated_turn(script: Any) -> None:
    """C2: the end-of-turn token 2 that the template adds is context."""
    tree = script().call([11, 40], [7, 8], finish_reason="length").call([11, 40, 7, 8, 2, 21, 40], [9]).tree()
    assert masks(tree, tree.leaves()) == [[0, 0, 1, 1, 0, 0, 0, 1]]


def test_compaction_is_a_new_branch_and_the_pasted_summary_is_context(script: Any) -> None:
    """C12: the summary [70, 71] is a target on the leaf that sampled it only."""
    tree = (script().call([1, 2], [3]).call([1, 2, 3, 60], [70, 71], role_class="main-summary")
            .call([1, 70, 71], [5]).tree())
    targets = find_targets(tree, POLICY)
    assert paths(tree) == [[1, 2, 3, 60, 70, 71], [1, 70, 71, 5]]
    found = [(int(tree.ids[i]), int(tree.token_depths()[i])) for i in targets.index]
    assert found == [(3, 2), (70, 4), (71, 5), (5, 3)]


def test_an_identical_resample_is_drawn_twice_and_counted_once(script: Any) -> None:
    tree = script().call([1], [2, 3], logprobs=[-0.1, -0.2]).call([1], [2, 3], logprobs=[-0.3, -0.4], version=1).tree()
    targets = find_targets(tree, POLICY)
    assert (targets.num_drawn, len(targets)) == (4, 2)
    assert targets.logprob.tolist() == pytest.approx([-0.1, -0.2])
    assert targets.version.tolist() == [0, 0]


def test_outputs_of_other_models_and_of_aborted_calls_are_context(script: Any) -> None:
    tree = (script().call([1], [2], model="judge").call([1], [3], finish_reason="abort")
            .call([1], [4], finish_reason="error").call([1], [5]).tree())
    targets = find_targets(tree, POLICY)
    assert target_ids(tree) == [5]
    assert (targets.num_without.get("unseen", 0), targets.num_drawn) == (2, 3)


def test_what_one_call_aborted_and_another_sampled_is_a_target(script: Any) -> None:
    tree = script().call([1], [2, 3], finish_reason="abort").call([1], [2]).tree()
    targets = find_targets(tree, POLICY)
    assert (target_ids(tree), targets.num_without.get("unseen", 0)) == ([2], 1)


def test_a_call_that_ends_at_a_fork_ends_above_it(script: Any) -> None:
    tree = script().call([1, 2], []).call([1, 2, 3], []).call([1, 2, 4], []).call([1], []).tree()
    assert tree.end == (0, 1, 2, 0)
    assert [tree.tokens(n).tolist() for n in range(4)] == [[1, 2], [1, 2, 3], [1, 2, 4], [1]]
    later = script().call([1, 2, 3, 4], []).call([1, 2], []).call([1, 2, 9], []).tree()
    assert later.end == (1, 0, 2)


def test_versions_within_one_output(script: Any) -> None:
    spans = (VersionSpan(0, 2, 4), VersionSpan(2, 5, 5))
    tree = script().call([1, 2], [3, 4, 5, 6, 7], spans=spans).call([1, 2, 3, 9], [8], version=6).tree()
    targets = find_targets(tree, POLICY)
    by_id = dict(zip(tree.ids[targets.index].tolist(), targets.version.tolist(), strict=True))
    assert by_id == {3: 4, 4: 4, 5: 5, 6: 5, 7: 5, 8: 6}


MAIN = ((781, 60), (849, 50), (919, 50), (1799, 420), (949, 40), (949, 40), (949, 30))
SUMMARY, QUESTIONS, ANSWERS = (599, 200), (199, 20), (799, 120)


@pytest.mark.parametrize(("ramps", "flat", "unique", "drawn", "counted"), [
    (MAIN, 7192, 2320, 690, 620), ((*MAIN, SUMMARY), 7892, 2520, 890, 820),
    ((*MAIN, SUMMARY, QUESTIONS), 8012, 2540, 910, 840), ((*MAIN, SUMMARY, QUESTIONS, ANSWERS), 8832, 2660, 1030, 960),
])
def test_a_recorded_session_with_context_summarisation(script: Any, ramps: tuple[tuple[int, int], ...], flat: int,
                                                       unique: int, drawn: int, counted: int) -> None:
    """O15: a Terminus-2 session (ATIF); its ids are ramps from 100 for prompts and from 1000 for outputs."""
    calls = script()
    for last, size in ramps:
        calls.call(range(100, last + 1), range(1000, 1000 + size))
    tree = calls.tree()
    targets = find_targets(tree, POLICY)
    assert (tree.num_flat_tokens, tree.num_tokens, targets.num_drawn, len(targets)) == (flat, unique, drawn, counted)


def test_three_draws_of_one_prompt_the_third_a_prefix(script: Any) -> None:
    """O15, steps 8 to 10: an 850-token prompt, outputs 40, 40, 30: 110 drawn, 40 counted once."""
    prompt, output = list(range(100, 950)), list(range(1000, 1040))
    tree = script().call(prompt, output).call(prompt, output).call(prompt, output[:30]).tree()
    targets = find_targets(tree, POLICY)
    assert (targets.num_drawn, len(targets), tree.num_tokens) == (110, 40, 890)


def test_a_chain_of_a_thousand_nested_forks_needs_no_recursion(script: Any) -> None:
    """Every call rolls back one token and goes on: the trunk forks at every depth."""
    calls, trunk = script(), [0]
    for turn in range(1200):
        calls.call(trunk, [2 * turn + 1, 2 * turn + 2], base=turn - 1)
        trunk = [*trunk, 2 * turn + 1]
    tree = calls.tree()
    assert len(tree.leaves()) == 1200
    assert max(tree.depth) == 1200
    assert tree.token_parents()[1] == 0


def test_a_rejected_compaction_is_evidence_and_owns_nothing(script: Any) -> None:
    """O7: rejected and accepted attempts share a prefix; trained are 2, 5 and 7, each once.

    The rejected branch must not claim what it shares: with one path per leaf, token 2 belongs to a branch that trains.
    """
    rejected = CallEvidence(tags={"x-gyre-trainable": "no"})
    calls = (script().call([1], [2]).call([1, 2, 3], [4], evidence=rejected, role_class="main-summary")
             .call([1, 2, 3], [5], role_class="main-summary").call([1, 2, 6], [7]))
    tree, targets = calls.tree(), find_targets(calls.tree(), POLICY)
    assert target_ids(tree) == [2, 5, 7]
    assert (targets.excluded, targets.num_without) == (("", "untrainable", "", ""), {"untrainable": 1})
    roles = leaf_roles(tree, RecordedRoles().classify(tree.calls))
    admission = admit(tree, targets, roles, ROLE_ORDERS["paper"], 5, ("run", "x"))
    trained = [int(tree.ids[i]) for s, owner in enumerate(admission.owner) if owner >= 0
               for i in targets.index[targets.offsets[s]:targets.offsets[s + 1]]]
    assert (sorted(trained), admission.drops) == ([2, 5, 7], {})
    last = {int(tree.ids[tree.bounds[leaf + 1] - 1]): leaf for leaf in tree.leaves()}
    assert last[4] not in {path.leaf for path in admission.paths}


def test_advantage_is_one_scalar_on_the_owned_targets_only(script: Any) -> None:
    """O14: prompt, sampled, observation with advantage 0.7 give 0, 0.7, 0. C25: masks 0 1 1 and 1 1 1 of one execution."""
    single = script().call([1], [2]).call([1, 2, 3], []).tree()
    assert [0.7 * m for m in masks(single, single.leaves())[0]] == [0, 0.7, 0]
    rows = script().call([1, 9], [2, 3]).call([1, 9], [4, 5, 6]).tree()
    assert masks(rows, rows.leaves()) == [[0, 0, 1, 1], [0, 0, 1, 1, 1]]
