"""A tree of any size, one path at a time: the same scores and gradients as a single pass, whatever the blocks."""

import numpy as np
import pytest
import torch
from gyre.contracts.microstep import MicroStep
from gyre.policy.decoder import Decoder
from gyre.trainer.depth_first import DepthFirst, blocks_of
from gyre.trainer.loss import LossConfig, policy_loss
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import expanded_loss, gradients, random_micro_step, relative_error, targets_of, tiny_decoder


def depth_first(decoder: Decoder, micro_step: MicroStep, config: LossConfig, block_tokens: int) -> tuple[float, dict]:
    """Loss, and every parameter's gradient added up from the pieces."""
    engine = DepthFirst(decoder, micro_step, config.temperature, block_tokens)
    logprob_K = engine.scores().logprob_K.requires_grad_()
    loss = policy_loss(targets_of(micro_step, logprob_K), config).loss
    (dlogprob_K,) = torch.autograd.grad(loss, [logprob_K])
    named = dict(decoder.named_parameters())
    sums = {name: torch.zeros_like(parameter) for name, parameter in named.items()}

    def add(grads):
        for name, grad in zip(sums, grads, strict=True):
            if grad is not None:
                sums[name].add_(grad)

    engine.gradients(dlogprob_K, list(named.values()), add)
    return loss.item(), sums


@pytest.mark.parametrize("kind", ["dapo", "gspo"])
@pytest.mark.parametrize("block_tokens", [1, 3, 7, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_it_has_the_loss_and_gradients_of_the_expanded_paths(seed: int, block_tokens: int, kind: str) -> None:
    micro_step, decoder, config = random_micro_step(seed), tiny_decoder(seed), LossConfig(kind=kind, aggregation="execution")
    want = expanded_loss(decoder, micro_step, config)
    loss, grads = depth_first(decoder, micro_step, config, block_tokens)
    assert abs(loss - want.item()) <= 1e-12 * abs(want.item())
    assert relative_error(grads, gradients(decoder, want)) < 1e-12


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), fork=st.floats(0.0, 0.9), block_tokens=st.integers(1, 20))
def test_blocks_are_a_partition_into_unbranched_pieces_that_score_every_target(seed: int, fork: float,
                                                                               block_tokens: int) -> None:
    micro_step = random_micro_step(seed, fork=fork)
    blocks = blocks_of(micro_step, block_tokens)
    assert [(a.end, a.start < a.end <= a.start + block_tokens) for a in blocks] == [
        (b.start, True) for b in [*blocks[1:]]] + [(micro_step.num_tokens, True)]
    parents = micro_step.parent.tolist()
    ends = {b.end - 1 for b in blocks}
    for block in blocks:
        assert parents[block.start + 1:block.end] == list(range(block.start, block.end - 1))
        assert parents[block.start] < 0 or parents[block.start] in ends
        assert all(block.start <= parents[micro_step.target[k]] < block.end for k in block.targets)
    assert sorted(np.concatenate([b.targets for b in blocks]).tolist()) == list(range(micro_step.num_targets))
