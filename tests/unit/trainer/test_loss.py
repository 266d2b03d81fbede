"""Golden values of the losses, worked by hand, and the gradients that matter."""

import math

import pytest
import torch
from gyre.runtime.losses import KINDS
from gyre.trainer.loss import LossConfig, Targets, policy_loss
from records import ALL_LOSSES, gradient, targets, value


def batch_g() -> Targets:
    """Two rows of 6 and 2 targets with log-ratios +-0.3, advantages +1 and -1."""
    log_ratio = [0.3, -0.3, 0.3, -0.3, 0.3, -0.3, 0.3, 0.3]
    return targets(log_ratio, [1.0] * 6 + [-1.0] * 2, [1 / 6] * 6 + [1 / 2] * 2, [0] * 6 + [1] * 2)


@pytest.mark.parametrize("config, want", [
    (LossConfig(kind="dapo", aggregation="execution"), 0.169725),
    (LossConfig(kind="dapo"), -0.420342),
    (LossConfig(kind="dr_grpo", clip_high=0.28, constant_length=6), -0.280228),
    (LossConfig(kind="gspo", correction="none", clip_low=0.2, clip_high=0.28), 0.174929),
])
def test_the_means_of_one_batch_under_every_aggregation(config: LossConfig, want: float) -> None:
    """Equal to TRL 1.16 on the same batch (`make test-trl` compares whole random batches)."""
    scaled = value(batch_g(), config) * config.scale(num_executions=2, num_targets=8)
    assert scaled == pytest.approx(want, abs=5e-7)


@pytest.mark.parametrize("aggregation, want", [("execution", 0.5), ("token", 0.2), ("constant", 0.1)])
def test_two_targets_of_loss_1_beside_eight_of_loss_0(aggregation: str, want: float) -> None:
    """verl's example: token-mean 0.2, seq-mean-token-mean 0.5, seq-mean-token-sum-norm (width 10) 0.1."""
    length = 10 if aggregation == "constant" else 0
    config = LossConfig(kind="grpo", aggregation=aggregation, constant_length=length)  # type: ignore[arg-type]
    record = targets([0.0] * 10, [-1.0] * 2 + [0.0] * 8, [1 / 2] * 2 + [1 / 8] * 8, [0] * 2 + [1] * 8)
    assert value(record, config) * config.scale(2, 10) == pytest.approx(want, rel=1e-12)


def test_sums_over_targets_and_over_executions_are_the_same_sum_before_the_scale() -> None:
    """verl's token-sum 2 and seq-mean-token-sum 1 of that example."""
    record = targets([0.0] * 10, [-1.0] * 2 + [0.0] * 8, [1 / 2] * 2 + [1 / 8] * 8, [0] * 2 + [1] * 8)
    config = LossConfig(kind="grpo", aggregation="constant", constant_length=1)
    assert value(record, config) == pytest.approx(2.0)
    assert value(record, config) * config.scale(2, 10) == pytest.approx(1.0)


@pytest.mark.parametrize("ratio, advantage, want, slope", [
    (1.5, 1.0, -1.28, 0.0), (0.5, 1.0, -0.5, -0.5), (0.5, -1.0, 0.8, 0.0), (1.5, -1.0, 1.5, 1.5), (5.0, -1.0, 3.0, 0.0),
    (2.9, -1.0, 2.9, 2.9), (5.0, 1.0, -1.28, 0.0),
])  # fmt: skip
def test_single_targets_under_asymmetric_and_dual_clip(ratio: float, advantage: float, want: float, slope: float) -> None:
    config = LossConfig(kind="dapo", dual_clip=3.0)
    record = targets([math.log(ratio)], [advantage], [1.0], [0])
    assert value(record, config) == pytest.approx(want, rel=1e-12)
    assert gradient(record, config) == pytest.approx([slope], rel=1e-12)
    assert policy_loss(record, config).sums["clipped"] == float(slope == 0.0)


def test_the_clip_silences_only_moves_that_go_on_in_the_good_direction() -> None:
    """Ratios 1.3 and 0.7 against [0.8, 1.2], with both signs of the advantage."""
    up, down = math.log(1.3), math.log(0.7)
    record = targets([up, up, down, down], [1.0, -1.0, 1.0, -1.0], [1.0] * 4, [0, 1, 2, 3])
    config = LossConfig(kind="grpo")
    assert value(record, config) == pytest.approx(-1.2 + 1.3 - 0.7 + 0.8, abs=1e-12)
    assert gradient(record, config) == pytest.approx([0.0, 1.3, -0.7, 0.0], abs=1e-12)
    assert policy_loss(record, config).sums["clipped"] == 2.0


def test_on_policy_every_loss_has_the_gradient_of_minus_the_weighted_advantage() -> None:
    record = targets([0.0, 0.0, 0.0], [1.0, 1.0, -2.0], [0.5, 0.5, 1.0], [0, 0, 1])
    for kind in KINDS:
        config = LossConfig(kind=kind, aggregation="execution")
        assert gradient(record, config) == pytest.approx([-0.5, -0.5, 2.0], abs=1e-12), kind
        sums = policy_loss(record, config).sums
        assert sums["ratio"] == pytest.approx(3.0)
        assert sums["clipped"] == sums["abs_dlogp"] == sums["kl_k3"] == 0.0


def test_gspo_gates_a_whole_path_on_its_mean_ratio() -> None:
    """Path 0 has mean log-ratio 0.02 (over 1.005), path 1 has 0.001 (inside), although single tokens stray far."""
    record = targets([0.12, -0.08, 0.101, -0.099], [1.0] * 4, [0.25] * 4, [0, 0, 1, 1])
    config = LossConfig(kind="gspo")
    weights = [math.exp(x) for x in (0.12, -0.08, 0.101, -0.099)]
    inside = math.exp(0.001)
    want = -0.25 * (1.005 * (weights[0] + weights[1]) + inside * (weights[2] + weights[3]))
    assert value(record, config) == pytest.approx(want, rel=1e-12)
    assert gradient(record, config) == pytest.approx([0.0, 0.0, -0.25 * inside * weights[2], -0.25 * inside * weights[3]])
    sums = policy_loss(record, config).sums
    assert sums["clipped"] == 2.0
    assert sums["ratio"] == pytest.approx(2 * math.exp(0.02) + 2 * inside)


def test_gspo_still_pushes_a_path_with_negative_advantage_down_when_its_ratio_rose() -> None:
    record = targets([0.02], [-1.0], [1.0], [0])
    assert gradient(record, LossConfig(kind="gspo"))[0] == pytest.approx(math.exp(0.02) * math.exp(0.02), rel=1e-12)


def test_gspo_caps_a_tokens_importance_weight() -> None:
    record = targets([math.log(8.0), -math.log(8.0)], [1.0, 1.0], [1.0, 1.0], [0, 0])
    assert gradient(record, LossConfig(kind="gspo")) == pytest.approx([-5.0, -0.125], rel=1e-12)


def test_cispo_bounds_the_weight_and_silences_nothing() -> None:
    record = targets([math.log(8.0), math.log(0.5)], [1.0, -1.0], [1.0, 1.0], [0, 1])
    assert gradient(record, LossConfig(kind="cispo")) == pytest.approx([-5.0, 0.5], rel=1e-12)
    assert gradient(record, LossConfig(kind="cispo", clip_low=0.2, clip_high=0.28)) == pytest.approx([-1.28, 0.8], rel=1e-12)
    assert policy_loss(record, LossConfig(kind="cispo")).sums["clipped"] == 1.0


def test_the_policy_gradient_takes_no_ratio() -> None:
    record = targets([3.0, -3.0], [1.0, -2.0], [1.0, 0.5], [0, 1])
    for kind in ("rloo", "reinforce"):
        assert gradient(record, LossConfig(kind=kind)) == [-1.0, 1.0]  # type: ignore[arg-type]


def test_the_proximal_reference_has_ratio_1_and_takes_the_engine_mismatch_as_a_capped_weight() -> None:
    record = targets([math.log(2.0), math.log(9.0)], [1.0, 1.0], [1.0, 1.0], [0, 1])
    config = LossConfig(kind="grpo", reference="proximal")
    assert gradient(record, config) == pytest.approx([-2.0, -5.0], rel=1e-12)
    sums = policy_loss(record, config).sums
    assert (sums["ratio"], sums["clipped"], sums["truncated"]) == (2.0, 0.0, 1.0)


# ---------------------------------------------------------------- what does not count


def test_a_target_of_weight_0_may_hold_anything() -> None:
    """[1, NaN] with mask [1, 0] is 1, and the gradient of what does not count is 0."""
    for config in ALL_LOSSES:
        nan = float("nan")
        record = targets([0.0, nan], [-1.0, nan], [1.0, 0.0], [0, 0], entropy=[1.0, nan], reference=[0.0, nan])
        alone = targets([0.0], [-1.0], [1.0], [0], entropy=[1.0], reference=[0.0])
        assert value(record, config) == pytest.approx(value(alone, config), rel=1e-12)
        assert gradient(record, config) == pytest.approx([*gradient(alone, config), 0.0], rel=1e-12)
        assert policy_loss(record, config).sums == pytest.approx(policy_loss(alone, config).sums)


def test_advantages_of_what_does_not_count_do_not_enter_a_path() -> None:
    """Advantages [1, 1, 10, 10] under the mask [1, 1, 0, 0] are a loss of -1, not -11."""
    record = targets([0.0, 0.0, 0.3, 0.3], [1.0, 1.0, 10.0, 10.0], [0.5, 0.5, 0.0, 0.0], [0, 0, 0, 0])
    for kind in ("grpo", "gspo"):
        assert value(record, LossConfig(kind=kind)) == pytest.approx(-1.0, rel=1e-12)  # type: ignore[arg-type]


def test_nothing_to_train_is_0_and_not_nan() -> None:
    nothing = targets([], [], [], [])
    masked = targets([0.1, 0.2], [1.0, 1.0], [0.0, 0.0], [0, 0], entropy=[1.0, 1.0], reference=[0.0, 0.0])
    for config in ALL_LOSSES:
        if not config.trains_zero_advantage:
            assert value(nothing, config) == 0.0
        assert (value(masked, config), gradient(masked, config)) == (0.0, [0.0, 0.0])
        assert all(math.isfinite(v) for v in policy_loss(masked, config).sums.values())
        assert LossConfig(kind="grpo", aggregation=config.resolved().aggregation, constant_length=9).scale(0, 0) == 0.0


def test_a_huge_log_ratio_without_advantage_is_0_and_finite() -> None:
    for kind in KINDS:
        for far in (1e3, -1e3):
            record = targets([far], [0.0], [1.0], [0])
            config = LossConfig(kind=kind)
            assert (value(record, config), gradient(record, config)) == (0.0, [0.0])
            assert all(math.isfinite(v) for v in policy_loss(record, config).sums.values())


@pytest.mark.parametrize("config", ALL_LOSSES, ids=lambda c: f"{c.kind}-{c.reference}-{c.correction}-{c.correction_level}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_loss_is_finite_for_log_ratios_up_to_50(config: LossConfig, dtype: torch.dtype) -> None:
    far = [50.0, -50.0, 50.0, -50.0, 0.0, 50.0, -50.0]
    record = targets(far, [1.0, 1.0, -1.0, -1.0, 1.0, -1.0, 1.0], [0.1] * 7, [0, 0, 1, 1, 2, 2, 3],
                     entropy=[1.0] * 7, reference=far, dtype=dtype)  # fmt: skip
    output = policy_loss(record, config)
    assert torch.isfinite(output.loss) and all(map(math.isfinite, gradient(record, config)))
    assert all(map(math.isfinite, output.sums.values()))


# ---------------------------------------------------------------- regularisers


def test_the_estimators_of_the_kl_to_a_reference_policy() -> None:
    """log pi - log ref = 0.5: k1 = 0.5, k2 = 0.125, k3 = e^-0.5 - 1 + 0.5, with gradients 1, 0.5 and 1 - e^-0.5."""
    record = targets([0.0], [0.0], [1.0], [0], reference=[0.5])
    wants = {"k1": (0.5, 1.0), "k2": (0.125, 0.5), "k3": (math.exp(-0.5) - 0.5, 1 - math.exp(-0.5))}
    for estimator, (want, slope) in wants.items():
        config = LossConfig(kl_coefficient=2.0, kl_estimator=estimator)  # type: ignore[arg-type]
        assert value(record, config) == pytest.approx(2 * want, rel=1e-12)
        assert gradient(record, config) == pytest.approx([2 * slope], rel=1e-12)
        assert policy_loss(record, config).sums["reference_kl_k1"] == pytest.approx(0.5)
        assert policy_loss(record, config).sums["reference_kl_k3"] == pytest.approx(wants["k3"][0])


def test_entropy_is_rewarded_with_the_weight_of_its_target() -> None:
    record = targets([0.0, 0.0], [0.0, 0.0], [0.5, 0.25], [0, 1], entropy=[2.0, 4.0])
    assert value(record, LossConfig(entropy_coefficient=0.1)) == pytest.approx(-0.2, rel=1e-12)
    assert value(record, LossConfig(kind="dapo", entropy_coefficient=0.1)) == pytest.approx(-0.6, rel=1e-12)


def test_a_term_without_what_it_needs_is_refused() -> None:
    record = targets([0.0], [1.0], [1.0], [0])
    with pytest.raises(ValueError, match="kl_coefficient"):
        policy_loss(record, LossConfig(kl_coefficient=0.1))
    with pytest.raises(ValueError, match="entropy_coefficient"):
        policy_loss(record, LossConfig(entropy_coefficient=0.1))


# ---------------------------------------------------------------- packing


@pytest.mark.parametrize("config", ALL_LOSSES, ids=lambda c: f"{c.kind}-{c.reference}-{c.correction}-{c.correction_level}")
def test_the_loss_is_a_sum_so_it_does_not_depend_on_how_paths_are_packed(config: LossConfig) -> None:
    far, advantage, weight, path = [0.1, -0.1, 0.3, 0.004], [1.0, 1.0, -1.0, 0.5], [0.5, 0.5, 1.0, 1.0], [0, 0, 1, 2]
    entropy, reference = [1.0, 2.0, 0.5, 0.1], [0.2, -0.3, 0.1, 0.0]
    whole = targets(far, advantage, weight, path, entropy=entropy, reference=reference)
    parts = [targets(far[a:b], advantage[a:b], weight[a:b], [p - path[a] for p in path[a:b]], entropy=entropy[a:b],
                     reference=reference[a:b]) for a, b in ((0, 2), (2, 3), (3, 4))]  # fmt: skip
    assert value(whole, config) == pytest.approx(sum(value(part, config) for part in parts), rel=1e-12)
    assert gradient(whole, config) == pytest.approx([g for part in parts for g in gradient(part, config)], rel=1e-12)
