"""What is drawn and what is said about it."""

from __future__ import annotations

import numpy as np
import torch
from gyre.rollout.torch_engine.sampler import SamplingRows, sample, uniforms


def rows(num: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> SamplingRows:
    return SamplingRows(
        np.full(num, temperature), np.full(num, top_p), np.full(num, top_k), np.full(num, 7, np.uint64), np.arange(num)
    )


LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -6.0])


def frequencies(num: int, **fields: float) -> np.ndarray:
    drawn = sample(LOGITS.expand(num, -1), rows(num, **fields))  # type: ignore[arg-type]
    return np.bincount(drawn.token_ids, minlength=5) / num


def test_frequencies_are_the_probabilities() -> None:
    for temperature in (1.0, 0.5, 2.0):
        want = torch.softmax(LOGITS / temperature, -1).numpy()
        np.testing.assert_allclose(frequencies(40_000, temperature=temperature), want, atol=0.01)


def test_top_k_and_top_p_keep_the_best_and_renormalise() -> None:
    probs = torch.softmax(LOGITS, -1).numpy()
    want = np.where(np.arange(5) < 2, probs, 0)
    np.testing.assert_allclose(frequencies(20_000, top_k=2), want / want.sum(), atol=0.015)
    np.testing.assert_allclose(frequencies(20_000, top_p=0.7), want / want.sum(), atol=0.015)
    assert frequencies(100, top_p=1e-6)[0] == 1.0


def test_logprobs_are_untempered_and_behaviour_logprobs_are_of_what_was_sampled() -> None:
    drawn = sample(LOGITS.expand(64, -1), rows(64, temperature=0.5, top_k=3))
    untempered = torch.log_softmax(LOGITS, -1)
    behaviour = torch.log_softmax(LOGITS[:3] / 0.5, -1)
    np.testing.assert_allclose(drawn.logprobs, untempered[drawn.token_ids], rtol=1e-6)
    np.testing.assert_allclose(drawn.behaviour_logprobs, behaviour[drawn.token_ids], rtol=1e-5)


def test_greedy_rows_take_the_largest_beside_sampled_ones() -> None:
    mixed = rows(200)
    mixed.temperatures_R[::2] = 0
    drawn = sample(LOGITS.expand(200, -1), mixed)
    assert set(drawn.token_ids[::2]) == {0} and set(drawn.behaviour_logprobs[::2]) == {0.0}
    assert len(set(drawn.token_ids[1::2])) > 1


def test_noise_depends_on_seed_and_position_alone_and_is_uniform() -> None:
    seeds = np.repeat(np.arange(100, dtype=np.uint64), 100)
    positions = np.tile(np.arange(100), 100)
    noise = uniforms(seeds, positions)
    assert len(np.unique(noise)) == len(noise) and noise.min() >= 0 and noise.max() < 1
    np.testing.assert_allclose(np.histogram(noise, 10, (0, 1))[0] / len(noise), 0.1, atol=0.015)
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.03
    order = np.random.default_rng(0).permutation(len(noise))
    assert (uniforms(seeds[order], positions[order]) == noise[order]).all()


def test_what_is_said_of_a_row_does_not_depend_on_what_others_are_restricted_to() -> None:
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(1))
    alone = sample(logits[:1], rows(1))
    mixed = SamplingRows(np.ones(2), np.array([1.0, 0.5]), np.array([0, 3]), np.full(2, 7, np.uint64), np.arange(2))
    among = sample(logits, mixed)
    assert among.behaviour_logprobs[0] == alone.behaviour_logprobs[0] == alone.logprobs[0]
    assert among.token_ids[0] == alone.token_ids[0]
