"""The gradient on the tree is the gradient of the expanded paths, in every attention, to float64 precision."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gyre.contracts.microstep import MicroStep
from gyre.policy.attention import Attention
from gyre.policy.decoder import Decoder
from gyre.trainer.flash_trees import FlashTrees, has_kernel
from gyre.trainer.loss import LossConfig, policy_loss
from gyre.trainer.runs import BrokenTree, check_trees, runs_of
from gyre.trainer.tree_forward import LOGITS_CHUNK, DenseTrees, SegmentTrees, choose_attention, score_targets
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import (
    expanded_loss,
    gradients,
    hand_built,
    random_micro_step,
    relative_error,
    targets_of,
    tiny_decoder,
)

CONFIGS = [LossConfig(kind="grpo"), LossConfig(kind="gspo"), LossConfig(kind="grpo", reference="proximal", temperature=0.7)]


def attentions(micro_step: MicroStep) -> list[Attention]:
    runs = runs_of(micro_step.parent)
    return [DenseTrees(micro_step), SegmentTrees(runs), FlashTrees(runs)]


def tree_loss(decoder: Decoder, micro_step: MicroStep, attention: Attention, config: LossConfig) -> torch.Tensor:
    scores = score_targets(decoder, micro_step, attention, config.temperature)
    return policy_loss(targets_of(micro_step, scores.logprob_K), config).loss


@pytest.mark.parametrize("config", CONFIGS, ids=["grpo", "gspo", "proximal"])
@pytest.mark.parametrize("seed", range(6))
def test_the_tree_has_the_loss_and_gradients_of_its_expanded_paths(seed: int, config: LossConfig) -> None:
    micro_step, decoder = random_micro_step(seed), tiny_decoder(seed)
    check_trees(micro_step)
    want = expanded_loss(decoder, micro_step, config)
    want_grads = gradients(decoder, want)
    for attention in attentions(micro_step):
        got = tree_loss(decoder, micro_step, attention, config)
        assert abs((got - want).item()) <= 1e-12 * abs(want.item())
        assert relative_error(gradients(decoder, got), want_grads) < 1e-12


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), fork=st.floats(0.0, 0.9), num_trees=st.integers(1, 4))
def test_all_attentions_score_any_forest_alike(seed: int, fork: float, num_trees: int) -> None:
    micro_step, decoder = random_micro_step(seed, num_trees=num_trees, fork=fork), tiny_decoder()
    check_trees(micro_step)
    dense, *others = (score_targets(decoder, micro_step, a).logprob_K for a in attentions(micro_step))
    for other in others:
        torch.testing.assert_close(dense, other, rtol=0, atol=1e-12)


def test_a_fork_on_a_last_token_scores_one_label_per_child() -> None:
    """Root 0-1, three children of 1: each is a target, all are scored by the hidden state of token 1."""
    micro_step, decoder = hand_built([-1, 0, 1, 1, 1], [2, 3, 4], [0, 1, 2]), tiny_decoder()
    for attention in attentions(micro_step):
        got = tree_loss(decoder, micro_step, attention, LossConfig())
        torch.testing.assert_close(got, expanded_loss(decoder, micro_step, LossConfig()), rtol=1e-12, atol=0)


def test_a_siblings_tokens_change_nothing_and_an_ancestors_change_everything_below() -> None:
    """DFS 0-1-(2-3)-(4-5): tokens 2,3 and 4,5 are siblings' subtrees."""
    micro_step, decoder = hand_built([-1, 0, 1, 2, 1, 4], [3, 5], [0, 1]), tiny_decoder()

    def scores(ids: np.ndarray) -> list[torch.Tensor]:
        changed = replace(micro_step, ids=ids)
        return [score_targets(decoder, changed, a).logprob_K for a in attentions(changed)]

    before = scores(micro_step.ids)
    sibling, ancestor = micro_step.ids.copy(), micro_step.ids.copy()
    sibling[2], ancestor[0] = 30, 31
    for old, new in zip(before, scores(sibling), strict=True):
        assert old[1] == new[1] and old[0] != new[0]
    for old, new in zip(before, scores(ancestor), strict=True):
        assert (old != new).all()


def test_runs_carry_their_ancestors_as_ranges() -> None:
    """The published example ABCD, ABEF, AGH in depth-first order A B C D E F G H."""
    runs = runs_of(np.array([-1, 0, 1, 2, 1, 4, 0, 6]))
    assert [(r.start, r.end, r.ancestors) for r in runs] == [
        (0, 4, ()), (4, 6, ((0, 2),)), (6, 8, ((0, 1),)),
    ]  # fmt: skip


class Heads:
    """A decoder that notes how many rows of logits it was asked for at a time, backward's repetitions included."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self.config, self.rows = decoder, decoder.config, []
        self.parameters = decoder.parameters

    def __call__(self, *args: object) -> torch.Tensor:
        return self._decoder(*args)

    def logits(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(hidden_TE))
        return self._decoder.logits(hidden_TE)


def test_logits_are_made_for_targets_only_and_in_chunks() -> None:
    """2,500 tokens in a row, a branch, and 2,202 targets: two chunks, each made once more by backward."""
    targets = [*range(300, 2500), 2500, 2501]
    micro_step = hand_built([*range(-1, 2499), 1000, 2500], targets, [0] * 2200 + [1, 1])
    decoder, config = tiny_decoder(), LossConfig(kind="reinforce")
    model = Heads(decoder)
    got = tree_loss(model, micro_step, SegmentTrees(runs_of(micro_step.parent)), config)
    assert model.rows == [LOGITS_CHUNK, len(targets) - LOGITS_CHUNK]
    got_grads = gradients(decoder, got)
    assert sorted(model.rows) == sorted(2 * [LOGITS_CHUNK, len(targets) - LOGITS_CHUNK])
    want = expanded_loss(decoder, micro_step, config)
    assert abs((got - want).item()) <= 1e-12 * abs(want.item())
    assert relative_error(got_grads, gradients(decoder, want)) < 1e-12


def test_short_trees_go_dense_and_long_ones_go_by_run() -> None:
    assert isinstance(choose_attention(random_micro_step(1)), DenseTrees)
    chain = hand_built([*range(-1, 2999), 0], [2], [0])
    assert isinstance(choose_attention(chain), FlashTrees if has_kernel("cpu") else SegmentTrees)


@pytest.mark.parametrize(
    ("array", "index", "value"), [("parent", 3, 9), ("position", 3, 7), ("exit", 1, 4), ("target", 0, 0)]
)
def test_arrays_that_describe_no_tree_are_refused_by_name(array: str, index: int, value: int) -> None:
    micro_step = hand_built([-1, 0, 1, 2, 1, 4], [3, 5], [0, 1])
    broken = getattr(micro_step, array).copy()
    broken[index] = value
    with pytest.raises(BrokenTree, match=array if array != "parent" else "parent|position"):
        check_trees(replace(micro_step, **{array: broken}))
