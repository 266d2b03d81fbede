"""From call records to gradients: what trajectory packs trains exactly as the calls' own contexts, one by one.

The oracle never sees a tree: it takes each admitted path's ids from a call that spelled them, finds the targets by
comparing whole contexts, and runs plain causal passes. Segments of zero length come out of the records themselves: an
answer of no tokens, a call that continues by nothing, a context asked twice, a path that adds no token of its own.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from executions import POLICY, RecordedRoles, Script, random_calls
from gyre.contracts.digest import bytes_digest
from gyre.contracts.microstep import MicroStep, micro_step_from_bytes
from gyre.policy.attention import CausalAttention
from gyre.policy.decoder import Decoder
from gyre.trainer.loss import LossConfig, Targets, policy_loss
from gyre.trainer.runs import check_trees
from gyre.trajectory.admission import admit
from gyre.trajectory.packing import Budget, Member, Pack, micro_step, pack
from gyre.trajectory.roles import ROLE_ORDERS, leaf_roles
from gyre.trajectory.targets import find_targets

sys.path.insert(0, str(Path(__file__).parents[1] / "unit/trainer"))

from exact import UNCLIPPED, WAYS, Result, check_equal  # noqa: E402
from trees import gradients, tiny_decoder  # noqa: E402

WIDE, NARROW = Budget(10**9, 10**12), Budget(1, 1)  # all in one micro-step; every path in one of its own
#: A ratio per path, so that it matters which path owns a target; wide enough to silence nothing.
PER_PATH = LossConfig(kind="gspo", clip_low=0.9999, clip_high=1000.0)


@dataclass(frozen=True)
class Told:
    """An execution's calls, and what is trained of them."""

    calls: Script
    member: Member


def told(calls: Script, run: str = "run", advantage: float = 0.7) -> Told:
    tree = calls.tree()
    targets = find_targets(tree, POLICY)
    roles = leaf_roles(tree, RecordedRoles().classify(tree.calls))
    admission = admit(tree, targets, roles, ROLE_ORDERS["paper"], 0, (run, calls.execution))
    return Told(calls, Member(calls.execution, advantage, tree, targets, admission))


def sampled(calls: Script) -> dict[tuple[int, ...], float]:
    """Context up to and with each target -> behaviour log-prob of the first call that sampled it there."""
    found: dict[tuple[int, ...], float] = {}
    for record, sequence in zip(calls.records, calls.sequences, strict=True):
        if record.model == "policy" and record.finish_reason not in ("abort", "error"):
            for place, logprob in enumerate(record.behaviour_logprobs.tolist(), record.prompt_len):
                if place:
                    found.setdefault(tuple(sequence[:place + 1]), logprob)
    return found


def owned_paths(one: Told) -> Iterator[tuple[list[int], dict[int, float]]]:
    """Ids of each admitted path, as a call spelled them, and depth -> log-prob of the targets that it owns."""
    left, tree = sampled(one.calls), one.member.tree
    for path in one.member.admission.paths:
        end = tree.depth[path.leaf] + tree.size(path.leaf)
        ids = next(s for n, s in enumerate(one.calls.sequences) if len(s) == end and tree.end[n] == path.leaf)
        own = [depth for depth in range(1, len(ids)) if tuple(ids[:depth + 1]) in left]
        yield ids, {depth: left.pop(tuple(ids[:depth + 1])) for depth in own}
    assert not left, "every target is on an admitted path"


def expanded(decoder: Decoder, all_told: list[Told], config: LossConfig) -> Result:
    """Every admitted path of every execution by itself."""
    logprobs, behaviour, advantage, weight, numbers, num_paths = [], [], [], [], [], 0
    for one in all_told:
        paths = list(owned_paths(one))
        total = sum(len(own) for _, own in paths)
        for ids, own in paths:
            ids_T = torch.tensor(ids)
            hidden = decoder(ids_T, torch.arange(len(ids)), CausalAttention([len(ids)]))
            scores = torch.log_softmax(decoder.logits(hidden), -1)
            logprobs += [scores[depth - 1, ids[depth]] for depth in own]
            behaviour += own.values()
            advantage += [one.member.advantage] * len(own)
            weight += [1 / total] * len(own)
            numbers += [num_paths] * len(own)
            num_paths += 1
    constants = (torch.tensor(x, dtype=torch.float32).double() for x in (behaviour, advantage, weight))
    targets = Targets(torch.stack(logprobs), *constants, torch.tensor(numbers), num_paths)
    loss = policy_loss(targets, config).loss
    return Result(loss.item(), gradients(decoder, loss))


def summed(decoder: Decoder, micro_steps: list[MicroStep], way: str, config: LossConfig) -> Result:
    """Read back from bytes, as a worker does it."""
    results = []
    for step in micro_steps:
        data = step.to_bytes()
        read = micro_step_from_bytes(data, bytes_digest(data))
        check_trees(read)
        results.append(WAYS[way](decoder, read, config))
    names = results[0].grads
    return Result(sum(r.loss for r in results), {n: torch.stack([r.grads[n] for r in results]).sum(0) for n in names})


def packed(all_told: list[Told], budget: Budget) -> list[MicroStep]:
    members = [one.member for one in all_told]
    return [micro_step("g", number, one, members) for number, one in enumerate(pack(members, budget))]


CASES: dict[str, Callable[[], Script]] = {
    "an answer of no tokens": lambda: Script().call([1, 2], [3, 4]).call([1, 2, 3, 4, 5], []).call([1, 2, 3, 4, 6], [7, 8]),
    "an answer of no tokens between two": lambda: Script().call([1, 2], [3]).call([1, 2, 3], []).call([1, 2, 3], [4, 5]),
    "a call that continues by nothing": lambda: Script().call([1, 2], [3]).call([1, 2, 3], [4, 5]).call([1, 2, 3], [6]),
    "a context asked twice and answered alike": lambda: Script().call([1, 2], [3, 4]).call([1, 2], [3, 4]).call(
        [1, 2, 3, 4, 5], [6]),
    "a context asked again and again": lambda: Script().call([1, 2], [3, 4]).call([1, 2], [5]).call([1, 2], [6, 7, 8]),
    "an answer inside an earlier one": lambda: Script().call([1, 2], [3, 4, 5, 6]).call([1, 2], [3, 4]).call(
        [1, 2, 3, 4], [7]),
    "an answer inside an earlier prompt": lambda: Script().call([1, 2, 3, 4, 5], [6]).call([1, 2], [3, 4]),
    "contexts of no tokens": lambda: Script().call([], [1, 2, 3]).call([], [4, 5, 6]).call([], []).call([], [1, 2, 7]),
    "several roots": lambda: Script().call([1, 2], [3, 4]).call([5, 6], [7]).call([8], [9, 10]).call([5, 6, 7, 1], [2]),
    "branches that nobody sampled": lambda: Script().call([1, 2], [3, 4]).call([1, 2, 3, 4, 9, 9], []).call(
        [1, 2, 3, 4, 5], [6]).call([1, 2, 3, 8], [8], model="judge"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_what_a_story_holds_of_length_zero_changes_no_gradient(name: str, way: str) -> None:
    one, decoder = told(CASES[name]()), tiny_decoder()
    for config in (UNCLIPPED, PER_PATH):
        want = expanded(decoder, [one], config)
        for budget in (WIDE, NARROW):
            check_equal(summed(decoder, packed([one], budget), way, config), want, 1e-12)


def test_the_stories_of_length_zero_are_what_they_say() -> None:
    def shape(name: str) -> tuple[int, int, int]:
        one = told(CASES[name]())
        (step,) = packed([one], WIDE)
        return one.member.tree.num_tokens, step.num_tokens, step.num_targets

    assert shape("an answer of no tokens") == (8, 7, 4), "the context of the empty answer is not trained"
    assert shape("an answer of no tokens between two") == (5, 5, 3)
    assert shape("a context asked twice and answered alike") == (6, 6, 3), "each target once"
    assert shape("an answer inside an earlier prompt") == (6, 6, 3), "what one call read, another sampled"
    assert shape("contexts of no tokens") == (7, 7, 5), "no context scores the first token of a root"


def one_that_adds_nothing() -> Told:
    """Two admitted paths: the first owns what both share and then goes on for two tokens that nobody sampled."""
    for number in range(50):
        one = told(CASES["branches that nobody sampled"](), run=f"run{number}")
        lasts = [path.last for path in one.member.admission.paths]
        if lasts == [3, 5]:
            return one
    raise AssertionError("no draw began with the other path")


@pytest.mark.parametrize("way", WAYS)
def test_a_path_that_adds_no_token_of_its_own_owns_what_it_sampled(way: str) -> None:
    one, decoder = one_that_adds_nothing(), tiny_decoder()
    (step,) = packed([one], WIDE)
    assert step.parent.tolist() == [-1, 0, 1, 2, 3, 4], "one chain: the first path ends inside the second"
    assert (step.target.tolist(), step.path.tolist()) == ([2, 3, 5], [0, 0, 1])
    for config in (UNCLIPPED, PER_PATH):
        want = expanded(decoder, [one], config)
        for budget in (WIDE, NARROW):
            check_equal(summed(decoder, packed([one], budget), way, config), want, 1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_random_groups_have_the_gradient_of_their_calls(way: str) -> None:
    decoder, num_empty = tiny_decoder(), 0
    for seed in range(3):
        group = [told(random_calls(100 * seed + n, num_ids=5), advantage=0.5 - n) for n in range(3)]
        group = [one for one in group if one.member.admission.paths]
        num_empty += sum(not len(r.output_ids) or r.keep_len == r.prompt_len for one in group for r in one.calls.records)
        for config in (UNCLIPPED, PER_PATH):
            want = expanded(decoder, group, config)
            for budget in (WIDE, Budget(60, 10**9)):
                check_equal(summed(decoder, packed(group, budget), way, config), want, 1e-12)
    assert num_empty > 5


def divisions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every division of `items` into sets."""
    if not items:
        yield []
        return
    first, *others = items
    for rest in divisions(others):
        yield [[first], *rest]
        for place in range(len(rest)):
            yield [*rest[:place], [first, *rest[place]], *rest[place + 1:]]


def test_every_division_of_a_tree_of_twelve_tokens_between_its_paths_sums_to_one_gradient() -> None:
    """Four paths behind forks on last tokens, a branch of one token and a root of its own: 15 divisions."""
    calls = Script().call([1, 2], [3, 4]).call([1, 2, 3, 4], [5, 6]).call([1, 2, 3, 4], [7]).call([1, 2, 8], [9, 10]).call(
        [11], [12])
    one, decoder = told(calls), tiny_decoder()
    assert one.member.tree.num_tokens == 12 and len(one.member.admission.paths) == 4
    for config in (UNCLIPPED, PER_PATH):
        want = expanded(decoder, [one], config)
        found = list(divisions([0, 1, 2, 3]))
        assert len(found) == 15
        for division in found:
            steps = [micro_step("g", n, Pack({0: tuple(part)}), [one.member]) for n, part in enumerate(division)]
            for way in ("segment", "walked-5", "trained-whole"):
                check_equal(summed(decoder, steps, way, config), want, 1e-12)
