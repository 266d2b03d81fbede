"""Golden values of the surrogates, worked by hand, and the gradients that matter."""

import math

import pytest
import torch
from gyre.trainer.loss import LossConfig, Targets, policy_loss


def targets(log_ratio: list[float], advantage: list[float], weight: list[float], path: list[int]) -> Targets:
    behaviour = torch.full((len(log_ratio),), -1.0, dtype=torch.float64)
    return Targets(
        (behaviour + torch.tensor(log_ratio, dtype=torch.float64)).requires_grad_(True),
        behaviour,
        torch.tensor(advantage, dtype=torch.float64),
        torch.tensor(weight, dtype=torch.float64),
        torch.tensor(path),
        max(path) + 1,
    )


def gradient(record: Targets, config: LossConfig) -> list[float]:
    (grad,) = torch.autograd.grad(policy_loss(record, config).loss, record.logprob_K)
    return grad.tolist()


def test_on_policy_the_loss_is_minus_the_weighted_advantage() -> None:
    record = targets([0.0, 0.0, 0.0], [1.0, 1.0, -2.0], [0.5, 0.5, 1.0], [0, 0, 1])
    for config in (LossConfig(), LossConfig(kind="gspo"), LossConfig(reference="proximal")):
        output = policy_loss(record, config)
        assert float(output.loss) == pytest.approx(1.0, abs=1e-12)
        assert gradient(record, config) == pytest.approx([-0.5, -0.5, 2.0], abs=1e-12)
        assert output.sums["ratio"] == pytest.approx(3.0)
        assert output.sums["clipped"] == output.sums["abs_dlogp"] == output.sums["kl_k3"] == 0.0


def test_token_clip_silences_only_moves_that_go_on_in_the_good_direction() -> None:
    """Ratios 1.3 and 0.7 against [0.8, 1.28], with both signs of the advantage."""
    up, down = math.log(1.3), math.log(0.7)
    record = targets([up, up, down, down], [1.0, -1.0, 1.0, -1.0], [1.0] * 4, [0, 1, 2, 3])
    output = policy_loss(record, LossConfig())
    assert float(output.loss) == pytest.approx(-1.28 + 1.3 - 0.7 + 0.8, abs=1e-12)
    assert gradient(record, LossConfig()) == pytest.approx([0.0, 1.3, -0.7, 0.0], abs=1e-12)
    assert output.sums["clipped"] == 2.0


def test_gspo_gates_a_whole_path_on_its_mean_ratio() -> None:
    """Path 0 has mean log-ratio 0.02 (over 1.005), path 1 has 0.001 (inside), although single tokens stray far."""
    record = targets([0.12, -0.08, 0.101, -0.099], [1.0] * 4, [0.25] * 4, [0, 0, 1, 1])
    output = policy_loss(record, LossConfig(kind="gspo"))
    weights = [math.exp(x) for x in (0.12, -0.08, 0.101, -0.099)]
    inside = math.exp(0.001)
    want = -0.25 * (1.005 * (weights[0] + weights[1]) + inside * (weights[2] + weights[3]))
    assert float(output.loss) == pytest.approx(want, rel=1e-12)
    assert gradient(record, LossConfig(kind="gspo")) == pytest.approx(
        [0.0, 0.0, -0.25 * inside * weights[2], -0.25 * inside * weights[3]], rel=1e-12
    )
    assert output.sums["clipped"] == 2.0


def test_gspo_still_pushes_a_path_with_negative_advantage_down_when_its_ratio_rose() -> None:
    record = targets([0.02], [-1.0], [1.0], [0])
    assert gradient(record, LossConfig(kind="gspo"))[0] == pytest.approx(math.exp(0.02) * math.exp(0.02), rel=1e-12)


def test_a_tokens_importance_weight_is_capped() -> None:
    record = targets([math.log(8.0), -math.log(8.0)], [1.0, 1.0], [1.0, 1.0], [0, 0])
    assert gradient(record, LossConfig(kind="gspo")) == pytest.approx([-5.0, -0.125], rel=1e-12)


def test_the_proximal_reference_takes_the_engine_mismatch_as_a_weight() -> None:
    record = targets([math.log(2.0), math.log(9.0)], [1.0, 1.0], [1.0, 1.0], [0, 1])
    config = LossConfig(reference="proximal")
    assert gradient(record, config) == pytest.approx([-2.0, -5.0], rel=1e-12)
    assert policy_loss(record, config).sums["ratio"] == pytest.approx(2.0)


def test_mismatch_metrics_compare_trainer_and_engine() -> None:
    record = targets([0.5, -0.5], [1.0, 1.0], [1.0, 1.0], [0, 1])
    sums = policy_loss(record, LossConfig()).sums
    assert sums["abs_dlogp"] == pytest.approx(1.0)
    assert sums["kl_k3"] == pytest.approx(math.exp(0.5) + math.exp(-0.5) - 2.0, rel=1e-12)


def test_the_loss_is_a_sum_so_it_does_not_depend_on_how_targets_are_packed() -> None:
    whole = targets([0.1, -0.1, 0.3], [1.0, 1.0, -1.0], [0.5, 0.5, 1.0], [0, 0, 1])
    parts = [targets([0.1, -0.1], [1.0, 1.0], [0.5, 0.5], [0, 0]), targets([0.3], [-1.0], [1.0], [0])]
    for config in (LossConfig(), LossConfig(kind="gspo")):
        total = sum(float(policy_loss(part, config).loss) for part in parts)
        assert float(policy_loss(whole, config).loss) == pytest.approx(total, rel=1e-12)
