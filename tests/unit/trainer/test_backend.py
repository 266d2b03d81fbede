"""Gradient sums, the update and the learning rate."""

import math

import numpy as np
import pytest
import torch
from gyre.runtime.config import OptimizerConfig
from gyre.trainer.backends.torch import TorchBackend
from gyre.trainer.config import learning_rate
from gyre.trainer.loss import LossConfig, policy_loss
from gyre.trainer.tree_forward import DenseTrees, score_targets
from trees import gradients, random_micro_step, targets_of, tiny_decoder


def backend(dtype: torch.dtype = torch.float64, **options: float) -> TorchBackend:
    return TorchBackend(tiny_decoder().to(dtype), LossConfig(), OptimizerConfig(learning_rate=0.01, **options))


def exported(trainer: TorchBackend) -> dict[str, np.ndarray]:
    arrays = {n: np.zeros(shape, dtype) for n, (shape, dtype) in trainer.gradient_shapes().items()}
    trainer.export_gradients(arrays)
    return arrays


def test_the_sum_over_micro_steps_does_not_depend_on_who_computes_which() -> None:
    micro_steps = [random_micro_step(seed) for seed in range(6)]
    alone = backend()
    for micro_step in micro_steps:
        alone.accumulate(micro_step)
    core, satellite = backend(), backend()
    for index in (0, 3, 4):
        core.accumulate(micro_steps[index])
    for index in (5, 1, 2):
        satellite.accumulate(micro_steps[index])
    core.add_gradients(exported(satellite))
    for name, want in exported(alone).items():
        np.testing.assert_allclose(exported(core)[name], want, rtol=1e-12, atol=1e-15)


def test_the_update_is_adamw_on_the_scaled_clipped_gradient() -> None:
    trainer, micro_step = backend(weight_decay=0.1), random_micro_step(1)
    reference = tiny_decoder()
    loss = policy_loss(targets_of(micro_step, score_targets(reference, micro_step, DenseTrees(micro_step)).logprob_K),
                       LossConfig()).loss  # fmt: skip
    grads = gradients(reference, loss / 4)
    norm = math.sqrt(sum(float((g**2).sum()) for g in grads.values()))
    trainer.accumulate(micro_step)
    assert trainer.update(0.25, 0.01, norm / 2) == pytest.approx(norm, rel=1e-12)
    for name, parameter in reference.named_parameters():
        g = grads[name] / 2
        decay = 1 - 0.01 * (0.1 if parameter.ndim >= 2 else 0.0)
        want = parameter.detach() * decay - 0.01 * g / (g.abs() + 1e-8)  # first AdamW step: m/c1 = g, sqrt(v/c2) = |g|
        torch.testing.assert_close(trainer.weights()[name], want, rtol=1e-9, atol=1e-12)


def test_an_update_leaves_zeroed_gradients() -> None:
    trainer = backend()
    trainer.accumulate(random_micro_step(0))
    trainer.update(1.0, 0.01, 1.0)
    assert all(not array.any() for array in exported(trainer).values())


def test_a_gradient_that_is_not_finite_changes_no_weight() -> None:
    trainer = backend()
    before = {n: w.clone() for n, w in trainer.weights().items()}
    trainer.add_gradients({n: np.full(a.shape, np.nan) for n, a in exported(trainer).items()})
    assert math.isnan(trainer.update(1.0, 0.01, 1.0))
    for name, want in before.items():
        assert torch.equal(trainer.weights()[name], want)


def test_bfloat16_weights_have_float32_sums_and_masters_that_do_not_lose_small_updates() -> None:
    trainer = backend(torch.bfloat16)
    assert all(dtype == np.float32 for _, dtype in trainer.gradient_shapes().values())
    for step in range(20):
        trainer.accumulate(random_micro_step(step))
        trainer.update(1.0, 1e-5, 1.0)
    masters = {n: t for n, t in trainer.optimizer_state().items() if n.startswith("master.")}
    assert all(t.dtype == torch.float32 for t in masters.values())
    name = "model.layers.0.mlp.up_proj.weight"
    assert trainer.weights()[name].dtype == torch.bfloat16
    moved = masters[f"master.{name}"] - tiny_decoder().to(torch.bfloat16).state_dict()[name].float()
    assert float(moved.abs().max()) > 1e-5


def test_a_satellite_has_no_optimizer() -> None:
    satellite = TorchBackend(tiny_decoder(), LossConfig(), None)
    with pytest.raises(RuntimeError, match="only the core"):
        satellite.update(1.0, 0.01, 1.0)


def test_the_learning_rate_warms_up_and_decays_to_its_final_ratio() -> None:
    def rates(schedule: str) -> list[float]:
        config = OptimizerConfig(learning_rate=1.0, schedule=schedule, warmup_steps=2, final_ratio=0.1)  # type: ignore[arg-type]
        return [learning_rate(step, config, 7) for step in range(7)]

    assert rates("constant") == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates("linear") == pytest.approx([0.5, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1])
    cosine = rates("cosine")
    assert cosine[:3] == pytest.approx([0.5, 1.0, 1.0]) and cosine[4] == pytest.approx(0.55)
    assert cosine[6] == pytest.approx(0.1)
