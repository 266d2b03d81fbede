"""Whatever computes the gradient on a tree, it is that of the expanded paths; and the comparison can fail."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from exact import (
    ATTENTIONS,
    UNCLIPPED,
    WAYS,
    Result,
    by_attention,
    by_walking,
    check_equal,
    cut_runs,
    expanded,
)
from gyre.contracts.microstep import MicroStep
from gyre.policy.decoder import Decoder
from gyre.trainer.depth_first import DepthFirst, blocks_of
from gyre.trainer.flash_trees import FlashTrees
from gyre.trainer.flex_trees import FlexTrees
from gyre.trainer.loss import LossConfig, policy_loss
from gyre.trainer.runs import Run, check_trees, runs_of
from gyre.trainer.tree_forward import SegmentTrees, score_targets
from trees import FAMILIES, expand, gradients, hand_built, random_micro_step, targets_of, tiny_decoder

#: Parents, targets and the paths that own them.
SHAPES = {
    "one path": ([-1, 0, 1], [1, 2], [0, 0]),
    "a fork on the last token": ([-1, 0, 1, 1, 1], [1, 2, 3, 4], [0, 0, 1, 2]),
    "a fork on the root": ([-1, 0, 1, 0, 3], [1, 2, 3, 4], [0, 0, 1, 1]),
    "a fork on every token": ([-1, 0, 1, 2, 2, 1, 0], [1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 2, 3]),
    "forks on the last tokens of forks": ([-1, 0, 1, 2, 2, 1, 5, 5], [2, 3, 4, 5, 6, 7], [0, 0, 1, 2, 2, 3]),
    "several roots": ([-1, 0, 1, -1, 3, 3, -1, 6], [1, 2, 4, 5, 7], [0, 0, 1, 2, 3]),
    "roots without targets": ([-1, -1, 1, 2, -1], [2, 3], [1, 1]),
    "branches without targets": ([-1, 0, 1, 2, 1, 4], [1, 2], [0, 0]),
    "the same path twice": ([-1, 0, 1, 0, 3], [1, 2, 3, 4], [0, 0, 1, 1]),
    "twelve tokens": ([-1, 0, 1, 2, 3, 4, 5, 4, 2, 8, -1, 10], [1, 3, 5, 6, 7, 8, 9, 11], [0, 0, 0, 0, 1, 2, 2, 3]),
}


def shaped(name: str) -> MicroStep:
    micro_step = hand_built(*SHAPES[name])
    if name == "the same path twice":
        micro_step = replace(micro_step, ids=np.array([5, 6, 7, 6, 7], np.int32))
    check_trees(micro_step)
    return micro_step


def random_one(seed: int) -> MicroStep:
    return random_micro_step(seed, num_trees=2, tree_tokens=24, fork=0.3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_has_the_gradient_of_its_paths(name: str, way: str) -> None:
    micro_step, decoder = shaped(name), tiny_decoder()
    want = expanded(decoder, micro_step, UNCLIPPED)
    check_equal(WAYS[way](decoder, micro_step, UNCLIPPED), want, 1e-12)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_random_trees_have_it_in_every_family(family: str, tied: bool, way: str) -> None:
    for seed in (10, 11):
        micro_step, decoder = random_one(seed), tiny_decoder(seed, tied, family)
        assert decoder.config.num_kv_heads < decoder.config.num_heads
        assert (decoder.lm_head is None) == tied
        want = expanded(decoder, micro_step, UNCLIPPED)
        check_equal(WAYS[way](decoder, micro_step, UNCLIPPED), want, 1e-12)


def error_of(got: torch.Tensor, true: torch.Tensor) -> float:
    return float((got.double() - true).norm() / true.norm())


def error(got: Result, true: Result) -> float:
    """|got - true| / |true| over all parameters together."""
    apart = torch.stack([(got.grads[n].double() - g.double()).norm() for n, g in true.grads.items()]).norm()
    return float(apart / torch.stack([g.double().norm() for g in true.grads.values()]).norm())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_in_float32_it_is_the_same_to_five_digits(family: str, way: str) -> None:
    """Against the paths in float32, and parameter by parameter against those of the same weights in float64. There the
    paths themselves can be farther away (1.1e-5 in a norm of four weights); so far, and half as far again, is allowed."""
    for seed in range(3):
        micro_step, decoder = random_one(seed), tiny_decoder(seed, family=family).float()
        paths = expanded(decoder, micro_step, UNCLIPPED)
        got = WAYS[way](decoder, micro_step, UNCLIPPED)
        assert all(g.dtype == torch.float32 for g in got.grads.values())
        assert abs(got.loss - paths.loss) <= 1e-5 * abs(paths.loss) and error(got, paths) <= 1e-5
        truth = expanded(decoder.double(), micro_step, UNCLIPPED)
        for name, true in truth.grads.items():
            allowed = max(1e-5, 1.5 * error_of(paths.grads[name], true))
            assert error_of(got.grads[name], true) <= allowed, name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_it_is_as_near_to_the_truth_as_the_paths_are(family: str, way: str) -> None:
    micro_step = random_micro_step(5, num_trees=4, tree_tokens=60)
    decoder = tiny_decoder(family=family).to(torch.bfloat16)
    truth = expanded(tiny_decoder(family=family), micro_step, UNCLIPPED)
    paths = error(expanded(decoder, micro_step, UNCLIPPED), truth)
    assert 0 < error(WAYS[way](decoder, micro_step, UNCLIPPED), truth) <= 1.5 * paths


def test_every_cut_of_a_tree_of_twelve_tokens_gives_one_gradient() -> None:
    """All 64 sets of cuts inside its runs, on top of those that its forks make."""
    micro_step, decoder = shaped("twelve tokens"), tiny_decoder()
    want = expanded(decoder, micro_step, UNCLIPPED)
    runs, forks = runs_of(micro_step.parent), {b.start for b in blocks_of(micro_step, 100)}
    inside = [token for token in range(1, 12) if token not in forks]
    assert len(inside) == 6
    for chosen in range(2**len(inside)):
        cuts = [token for bit, token in enumerate(inside) if chosen >> bit & 1]
        pieces = cut_runs(runs, cuts)
        assert len(pieces) == len(runs) + len(cuts)
        check_equal(by_attention(lambda _, pieces=pieces: SegmentTrees(pieces))(decoder, micro_step, UNCLIPPED), want, 1e-12)
        check_equal(by_attention(lambda _, pieces=pieces: FlashTrees(pieces))(decoder, micro_step, UNCLIPPED), want, 1e-12)
        check_equal(by_walking(100, cuts)(decoder, micro_step, UNCLIPPED), want, 1e-12)


def test_a_sequence_that_flash_attention_cuts_by_itself_keeps_its_gradient() -> None:
    """500 tokens in a row, and a branch: the trunk goes in three pieces."""
    micro_step, decoder = hand_built([*range(-1, 499), 249, 500], [100, 300, 499, 500, 501], [0, 0, 0, 1, 1]), tiny_decoder()
    assert len(FlashTrees(runs_of(micro_step.parent))._runs) == 4
    want = expanded(decoder, micro_step, UNCLIPPED)
    check_equal(WAYS["flash"](decoder, micro_step, UNCLIPPED), want, 1e-12)


# ---------------------------------------------------------------- FlexAttention: forward only on a CPU


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", [*SHAPES, 20, 21, 22])
def test_flex_attention_scores_as_the_paths_do(name: str | int) -> None:
    micro_step = shaped(name) if isinstance(name, str) else random_one(name)
    for family in FAMILIES:
        decoder = tiny_decoder(family=family)
        with torch.no_grad():
            scores = score_targets(decoder, micro_step, FlexTrees(micro_step, "cpu"))
            loss = policy_loss(targets_of(micro_step, scores.logprob_K), UNCLIPPED).loss
        want = expanded(decoder, micro_step, UNCLIPPED)
        assert abs(loss.item() - want.loss) <= 1e-12 * abs(want.loss)


# ---------------------------------------------------------------- a sibling's tokens


def scorers(micro_step: MicroStep) -> dict[str, Callable[[Decoder], torch.Tensor]]:
    """logprob_K by everything that can give it."""
    by_name = ATTENTIONS | {"flex": lambda m: FlexTrees(m, "cpu")}
    return {name: lambda decoder, make=make: score_targets(decoder, micro_step, make(micro_step)).logprob_K
            for name, make in by_name.items()} | {
            f"walked-{size}": lambda decoder, size=size: DepthFirst(decoder, micro_step, 1.0, size).scores().logprob_K
            for size in (1, 5, 1000)}


def changed_beside(micro_step: MicroStep, path: int) -> MicroStep:
    """The same with another id at every token that is not on `path`."""
    on_path, token = set(), int(micro_step.target[micro_step.path == path][-1])
    while token >= 0:
        on_path.add(token)
        token = int(micro_step.parent[token])
    ids = [i if t in on_path else (i + 1) % 37 for t, i in enumerate(micro_step.ids.tolist())]
    return replace(micro_step, ids=np.array(ids, np.int32))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("seed", [31, 32, 33])
def test_a_siblings_tokens_change_no_score_of_a_path_by_a_single_bit(seed: int) -> None:
    micro_step, decoder = random_micro_step(seed, num_trees=1, tree_tokens=40, fork=0.4), tiny_decoder()
    paths = np.unique(micro_step.path)
    assert len(paths) > 1
    for path in paths.tolist():
        mine = torch.from_numpy(micro_step.path == path)
        others = scorers(changed_beside(micro_step, path))
        for name, scores in scorers(micro_step).items():
            with torch.no_grad():
                before, after = scores(decoder), others[name](decoder)
            assert torch.equal(before[mine], after[mine]), name
            assert not torch.equal(before[~mine], after[~mine]), name


@pytest.mark.parametrize("way", WAYS)
def test_a_siblings_tokens_change_nothing_of_a_paths_gradient(way: str) -> None:
    micro_step, decoder = random_micro_step(31, num_trees=1, tree_tokens=40, fork=0.4), tiny_decoder()
    path = int(np.bincount(micro_step.path).argmax())
    only = replace(micro_step, weight=np.where(micro_step.path == path, micro_step.weight, 0).astype(np.float32))
    want = WAYS[way](decoder, only, UNCLIPPED)
    check_equal(WAYS[way](decoder, changed_beside(only, path), UNCLIPPED), want, 1e-12)


# ---------------------------------------------------------------- what the comparison notices


def without_fork_labels(decoder: Decoder, micro_step: MicroStep, config: LossConfig) -> Result:
    """Scores a token only from the one that stands before it, so the first token of a later branch has no label."""
    kept = micro_step.parent[micro_step.target] == micro_step.target - 1
    return WAYS["dense"](decoder, replace(
        micro_step, target=micro_step.target[kept], path=micro_step.path[kept], logprob=micro_step.logprob[kept],
        version=micro_step.version[kept], weight=micro_step.weight[kept]), config)


def with_one_label_per_fork(decoder: Decoder, micro_step: MicroStep, config: LossConfig) -> Result:
    """Scores every token from the one that stands before it, also across branches."""
    attention = ATTENTIONS["dense"](micro_step)
    hidden = decoder(*(torch.from_numpy(x.astype(np.int64)) for x in (micro_step.ids, micro_step.position)), attention)
    ids = torch.from_numpy(micro_step.ids[micro_step.target].astype(np.int64))
    scores = torch.log_softmax(decoder.logits(hidden[torch.from_numpy(micro_step.target.astype(np.int64)) - 1]), -1)
    loss = policy_loss(targets_of(micro_step, scores.gather(1, ids[:, None])[:, 0]), config).loss
    return Result(loss.item(), gradients(decoder, loss))


def with_siblings_in_sight(decoder: Decoder, micro_step: MicroStep, config: LossConfig) -> Result:
    """Plain causal attention over the packed tokens."""
    return by_attention(lambda m: SegmentTrees([Run(0, m.num_tokens, ())]))(decoder, micro_step, config)


def at_packed_positions(decoder: Decoder, micro_step: MicroStep, config: LossConfig) -> Result:
    """Positions as they are packed, not depths."""
    return WAYS["dense"](decoder, replace(micro_step, position=np.arange(micro_step.num_tokens, dtype=np.int32)), config)


def with_every_path_its_own(decoder: Decoder, micro_step: MicroStep, config: LossConfig) -> Result:
    """A target of a shared prefix counted once for every path that holds it."""
    places = [(t, n) for n, p in enumerate(expand(micro_step)) for t in p.tokens if t in set(micro_step.target.tolist())]
    number = {int(t): k for k, t in enumerate(micro_step.target)}
    again = np.array([number[t] for t, _ in places])
    return WAYS["dense"](decoder, replace(
        micro_step, target=micro_step.target[again], path=np.array([n for _, n in places], np.int32),
        logprob=micro_step.logprob[again], version=micro_step.version[again], weight=micro_step.weight[again]), config)


def check_refused(got: Result, want: Result) -> None:
    with pytest.raises(AssertionError, match="loss|gradients"):
        check_equal(got, want, 1e-12)
    with pytest.raises(AssertionError, match="gradients"):
        check_equal(replace(got, loss=want.loss), want, 1e-5)


@pytest.mark.parametrize("wrong", [without_fork_labels, with_one_label_per_fork], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", [name for name in SHAPES if "fork" in name or name == "twelve tokens"])
def test_a_missing_fork_label_is_noticed(name: str, wrong: Callable[..., Result]) -> None:
    micro_step, decoder = shaped(name), tiny_decoder()
    check_refused(wrong(decoder, micro_step, UNCLIPPED), expanded(decoder, micro_step, UNCLIPPED))


WRONG = [without_fork_labels, with_one_label_per_fork, with_siblings_in_sight, at_packed_positions, with_every_path_its_own]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
def test_what_is_wrong_on_a_tree_is_noticed(wrong: Callable[..., Result]) -> None:
    for micro_step in (shaped("twelve tokens"), random_one(11)):
        decoder = tiny_decoder()
        check_refused(wrong(decoder, micro_step, UNCLIPPED), expanded(decoder, micro_step, UNCLIPPED))
