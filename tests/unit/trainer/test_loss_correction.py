"""Importance weights of the trainer over the engine: golden values, what each mode does, and where it is applied."""

import math

import pytest
import torch
from gyre.trainer.correction import Paths, correct, importance_weights
from gyre.trainer.loss import LossConfig, policy_loss
from records import gradient, targets

GAP = [0.0, 0.9, -0.5]
OTHER = [0.3, 0.1]


def paths(num: int = 1) -> Paths:
    path = torch.tensor([0, 0, 0] + [1, 1] * (num > 1))
    return Paths(path, num, torch.ones(len(path), dtype=torch.bool))


def weights(**options: object) -> list[float]:
    gap = torch.tensor(GAP + OTHER, dtype=torch.float64)
    return correct(gap, paths(2), LossConfig(kind="rloo", **options)).factor_K.tolist()  # type: ignore[arg-type]


def test_weights_by_target_by_path_and_by_the_geometric_mean_of_a_path() -> None:
    gap = torch.tensor(GAP, dtype=torch.float64)
    assert importance_weights(gap, paths(), "token").clamp(max=2).tolist() == pytest.approx([1.0, 2.0, 0.606531], abs=5e-7)
    assert importance_weights(gap, paths(), "sequence").tolist() == pytest.approx([1.491825] * 3, abs=5e-7)
    assert importance_weights(gap, paths(), "geometric").tolist() == pytest.approx([1.142631] * 3, abs=5e-7)


def test_truncate_caps_the_weight_and_keeps_every_target() -> None:
    small = [math.exp(0.3), math.exp(0.1)]
    assert weights(correction="truncate", correction_high=2.0) == pytest.approx([1.0, 2.0, math.exp(-0.5), *small])
    assert weights(correction="truncate", correction_level="sequence", correction_high=1.45) == pytest.approx(
        [1.45] * 3 + [1.45] * 2
    )
    assert weights(correction="truncate", correction_level="geometric") == pytest.approx(
        [math.exp(0.4 / 3)] * 3 + [math.exp(0.2)] * 2
    )


def test_mask_drops_targets_or_whole_paths() -> None:
    bounds = {"correction": "mask", "correction_low": 0.7, "correction_high": 2.0}
    assert weights(**bounds) == pytest.approx([1.0, 0.0, 0.0, math.exp(0.3), math.exp(0.1)])
    bounds |= {"correction_level": "sequence", "correction_high": 1.4919}
    assert weights(**bounds) == pytest.approx([math.exp(0.4)] * 5)
    bounds |= {"correction_low": 1.2, "correction_level": "geometric"}
    assert weights(**bounds) == pytest.approx([0.0] * 3 + [math.exp(0.2)] * 2)


def test_where_the_ratio_is_the_weight_already_a_mask_only_drops() -> None:
    record = targets([0.1, 0.9], [1.0, -1.0], [1.0, 1.0], [0, 1])
    config = LossConfig(kind="grpo", correction="mask", correction_high=2.0)
    assert gradient(record, config) == pytest.approx([-math.exp(0.1), 0.0])
    proximal = LossConfig(kind="grpo", reference="proximal", correction="mask", correction_high=2.0)
    assert gradient(record, proximal) == pytest.approx([-math.exp(0.1), 0.0])
    near = targets([0.1, 0.2], [1.0, -1.0], [1.0, 1.0], [0, 1])
    assert gradient(near, proximal) == pytest.approx([-math.exp(0.1), math.exp(0.2)])


def test_a_dropped_target_leaves_denominators_and_regularisers_as_they_were() -> None:
    config = LossConfig(kind="reinforce", correction="mask", correction_high=2.0, kl_coefficient=1.0, kl_estimator="k1")
    record = targets([0.0, 0.9], [1.0, 1.0], [0.5, 0.5], [0, 0], reference=[0.0, 0.0])
    assert gradient(record, config) == pytest.approx([-0.5 + 0.5, 0.5])
    assert policy_loss(record, config).sums["masked"] == 1.0


def test_the_effective_sample_size_comes_from_two_sums_that_add_up() -> None:
    """Weights 1, 2 and 3: (1 + 2 + 3)^2 / (1 + 4 + 9) = 36 / 14."""
    record = targets([0.0, math.log(2.0), math.log(3.0)], [1.0] * 3, [1 / 3] * 3, [0, 0, 0])
    sums = policy_loss(record, LossConfig(kind="grpo")).sums
    assert (sums["weight"], sums["weight_squared"]) == pytest.approx((6.0, 14.0))
    capped = policy_loss(record, LossConfig(kind="rloo", correction="truncate", correction_high=2.0)).sums
    assert (capped["weight"], capped["weight_squared"], capped["truncated"]) == pytest.approx((5.0, 9.0, 1.0))


def test_mismatch_metrics_compare_trainer_and_engine() -> None:
    record = targets([0.5, -0.25], [1.0, 1.0], [1.0, 1.0], [0, 1])
    sums = policy_loss(record, LossConfig(kind="grpo")).sums
    assert sums["abs_dlogp"] == pytest.approx(0.75)
    assert sums["max_abs_dlogp"] == pytest.approx(0.5)
    assert sums["kl_k1"] == pytest.approx(-0.25)
    assert sums["kl_k3"] == pytest.approx(math.exp(0.5) - 1.5 + math.exp(-0.25) - 0.75, rel=1e-12)
