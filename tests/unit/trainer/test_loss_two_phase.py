"""dL/dlogp and dL/dentropy per target stand for the loss: both ways give every parameter the same gradient."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gyre.contracts.errors import ConfigError
from gyre.policy.checkpoint import save_checkpoint
from gyre.policy.decoder import Decoder
from gyre.runtime.config import CheckpointConfig, OptimizerConfig
from gyre.trainer.backends.launch import open_backend
from gyre.trainer.backends.torch import TorchBackend
from gyre.trainer.config import TrainerConfig
from gyre.trainer.loss import LossConfig, loss_gradient, policy_loss
from gyre.trainer.step import MembershipRules
from gyre.trainer.tree_forward import DenseTrees, score_targets
from gyre.trainer.tree_training import targets_of
from records import ALL_LOSSES, targets
from trees import TINY, expanded_loss, gradients, random_micro_step, relative_error, tiny_decoder


def name(config: LossConfig) -> str:
    return "-".join((config.kind, config.reference, config.correction, config.correction_level, str(config.kl_coefficient)))


@pytest.mark.parametrize("config", ALL_LOSSES, ids=name)
def test_two_phases_give_every_parameter_the_gradient_of_one(config: LossConfig) -> None:
    micro_step = near_policy(random_micro_step(3, num_trees=4), seed=1)
    decoder, reference = tiny_decoder(), tiny_decoder(7)
    attention = DenseTrees(micro_step)
    with torch.no_grad():
        reference_K = score_targets(reference, micro_step, attention).logprob_K
    scores = score_targets(decoder, micro_step, attention, entropy_gradient=True)
    direct = policy_loss(targets_of(micro_step, scores.logprob_K, scores.entropy_K, reference_K), config)
    want = gradients(decoder, direct.loss)

    with torch.no_grad():
        frozen = score_targets(decoder, micro_step, attention)
    output, dlogprob_K, dentropy_K = loss_gradient(
        targets_of(micro_step, frozen.logprob_K, frozen.entropy_K, reference_K), config
    )
    again = score_targets(decoder, micro_step, attention, entropy_gradient=True)
    weighted = (dlogprob_K * again.logprob_K).sum()
    if dentropy_K is not None:
        weighted = weighted + (dentropy_K * again.entropy_K).sum()
    assert (dentropy_K is None) == (config.entropy_coefficient == 0)
    assert not output.loss.requires_grad and output.sums == pytest.approx(direct.sums, rel=1e-12)
    assert output.loss.item() == pytest.approx(direct.loss.item(), rel=1e-12)
    assert relative_error(gradients(decoder, weighted), want) < 1e-12


def near_policy(micro_step: object, seed: int) -> object:
    """The micro-step with behaviour log-probs near those of the tiny policy, so that clips and masks act on some only."""
    with torch.no_grad():
        logprob = score_targets(tiny_decoder(), micro_step, DenseTrees(micro_step)).logprob_K.numpy()
    noise = np.random.default_rng(seed).normal(0.0, 0.4, len(logprob))
    return replace(micro_step, logprob=(logprob + noise).astype(np.float32))


def test_the_record_that_is_asked_stays_as_it_was() -> None:
    micro_step = random_micro_step(0)
    scores = score_targets(tiny_decoder(), micro_step, DenseTrees(micro_step))
    record = targets_of(micro_step, scores.logprob_K.detach(), scores.entropy_K)
    loss_gradient(record, LossConfig(kind="grpo", entropy_coefficient=0.1))
    assert not record.logprob_K.requires_grad and record.entropy_K is not None and not record.entropy_K.requires_grad


def test_every_target_has_the_advantage_of_its_own_execution() -> None:
    micro_step = random_micro_step(5, num_trees=3)
    advantage_K = micro_step.advantage[micro_step.tree[micro_step.target]]
    _, dlogprob_K, _ = loss_gradient(
        targets_of(micro_step, torch.zeros(micro_step.num_targets, dtype=torch.float64)), LossConfig(kind="reinforce")
    )
    np.testing.assert_allclose(dlogprob_K.numpy(), -(advantage_K * micro_step.weight), rtol=1e-6)


def test_an_advantage_reaches_what_counts_and_nothing_else() -> None:
    """Rows with masks [0, 1, 1] and [1, 1, 1] and A = 1 have the advantages [0, 1, 1] and [1, 1, 1]."""
    record = targets([0.0] * 6, [1.0] * 6, [0.0, 0.5, 0.5, 1 / 3, 1 / 3, 1 / 3], [0, 0, 0, 1, 1, 1])
    for kind in ("grpo", "gspo", "reinforce", "cispo"):
        _, dlogprob_K, _ = loss_gradient(record, LossConfig(kind=kind, aggregation="token"))  # type: ignore[arg-type]
        assert dlogprob_K.tolist() == pytest.approx([0, -1, -1, -1, -1, -1], rel=1e-12)


@pytest.mark.parametrize("kind", ["grpo", "gspo", "rloo"])
def test_the_backends_gradient_holds_kl_and_entropy(kind: str) -> None:
    """The KL is to the policy the backend was made with, also after its weights have changed."""
    config = LossConfig(kind=kind, kl_coefficient=0.5, kl_estimator="k2", entropy_coefficient=0.2)  # type: ignore[arg-type]
    backend = TorchBackend(tiny_decoder(), config, OptimizerConfig())
    changed = tiny_decoder(4)
    backend.load_weights(changed.state_dict())
    micro_step = random_micro_step(2)
    sums = backend.accumulate(micro_step)
    arrays = {n: np.zeros(shape, dtype) for n, (shape, dtype) in backend.gradient_shapes().items()}
    backend.export_gradients(arrays)

    attention = DenseTrees(micro_step)
    with torch.no_grad():
        reference_K = score_targets(tiny_decoder(), micro_step, attention).logprob_K
    scores = score_targets(changed, micro_step, attention, entropy_gradient=True)
    output = policy_loss(targets_of(micro_step, scores.logprob_K, scores.entropy_K, reference_K), config)
    got = {n: torch.from_numpy(a) for n, a in arrays.items()}
    assert relative_error(got, gradients(changed, output.loss)) < 1e-12
    assert sums["reference_kl_k3"] > 0


def test_a_kl_and_an_entropy_on_the_tree_are_those_of_its_expanded_paths() -> None:
    config = LossConfig(kind="dapo", kl_coefficient=0.7, entropy_coefficient=0.3)
    micro_step, decoder, reference = random_micro_step(9), tiny_decoder(), tiny_decoder(3)
    attention = DenseTrees(micro_step)
    with torch.no_grad():
        reference_K = score_targets(reference, micro_step, attention).logprob_K
    scores = score_targets(decoder, micro_step, attention, entropy_gradient=True)
    got = policy_loss(targets_of(micro_step, scores.logprob_K, scores.entropy_K, reference_K), config).loss
    want = expanded_loss(decoder, micro_step, config, reference)
    assert got.item() == pytest.approx(want.item(), rel=1e-12)
    assert relative_error(gradients(decoder, got), gradients(decoder, want)) < 1e-12


def test_a_kl_may_be_to_a_policy_from_elsewhere_with_the_same_vocabulary(tmp_path: Path) -> None:
    for number, decoder in enumerate((tiny_decoder(), tiny_decoder(3), Decoder.create(replace(TINY, vocab_size=5), 0))):
        save_checkpoint(tmp_path / str(number), decoder.config, decoder.state_dict())
    loss, micro_step = LossConfig(kl_coefficient=0.5, temperature=0.7), random_micro_step(2)
    config = TrainerConfig(
        1, 2, "r", "cpu", tmp_path / "0", tmp_path, tmp_path / "cells", "", 1, MembershipRules(1, 0), loss.resolved(),
        OptimizerConfig(compute_dtype="float64"), CheckpointConfig())

    def sums(reference: str | None) -> dict[str, float]:
        placed = replace(config, reference=reference and tmp_path / reference)
        return open_backend(placed, None).backend.accumulate(micro_step)

    attention = DenseTrees(micro_step)
    with torch.no_grad():
        logprob_K, reference_K = (score_targets(tiny_decoder(s), micro_step, attention, 0.7).logprob_K for s in (0, 3))
    assert sums("1")["reference_kl_k1"] == pytest.approx((logprob_K - reference_K).sum().item(), rel=1e-12)
    assert sums(None)["reference_kl_k1"] == 0.0
    with pytest.raises(ConfigError, match="loss.kl_reference = .* has 5 tokens in its vocabulary, the policy 37"):
        sums("2")
