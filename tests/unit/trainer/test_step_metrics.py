"""Sums of micro-steps become a step's metrics: divided once, whoever computed which."""

import logging

import numpy as np
import pytest
from fakes import ref_to
from gyre.contracts.events import BlobRef
from gyre.runtime.config import OptimizerConfig
from gyre.trainer.backends.torch import TorchBackend
from gyre.trainer.claims import ClaimTable
from gyre.trainer.loss import LossConfig
from gyre.trainer.metrics import add_sums, clip_warning, means, of_one_micro_step, sampling_versions
from gyre.trainer.reduce import apply_update
from trees import random_micro_step, tiny_decoder


def test_sums_add_up_and_of_maxima_the_largest_counts() -> None:
    totals: dict[str, float] = {}
    for sums in ({"ratio": 2.0, "max_abs_dlogp": -1.0}, {"ratio": 3.0, "max_abs_dlogp": -2.0, "clipped": 1.0}):
        add_sums(totals, sums)
    assert totals == {"ratio": 5.0, "max_abs_dlogp": -1.0, "clipped": 1.0}


def test_a_micro_step_in_parts_counts_once_under_its_slowest_way() -> None:
    assert of_one_micro_step({"loss": 1.0, "checkpointed": 2.0, "depth_first": 3.0}) == {"loss": 1.0, "depth_first": 1.0}
    assert of_one_micro_step({"loss": 1.0, "checkpointed": 2.0}) == {"loss": 1.0, "checkpointed": 1.0}
    assert of_one_micro_step({"loss": 1.0}) == {"loss": 1.0}


def test_a_steps_metrics_are_means_shares_maxima_and_counts() -> None:
    totals = {"ratio": 10.0, "clipped": 2.0, "max_abs_dlogp": 0.7, "weight": 6.0, "weight_squared": 14.0,
              "sampled_under_3": 1.0, "sampled_under_5": 7.0, "broken_micro_steps": 1.0}  # fmt: skip
    found = means(totals, num_targets=8, version=5)
    assert found == pytest.approx({
        "ratio": 1.25, "clipped": 0.25, "max_abs_dlogp": 0.7, "ess": 36 / 14 / 8, "staleness": 0.25, "max_staleness": 2.0,
        "staleness_0": 7 / 8, "staleness_2": 1 / 8, "broken_micro_steps": 1.0,
    })  # fmt: skip


def test_equal_weights_are_an_effective_sample_of_everything() -> None:
    assert means({"weight": 8.0, "weight_squared": 8.0}, 8, 0)["ess"] == 1.0
    assert means({}, 0, 0) == {}


def test_targets_are_counted_by_the_version_they_were_sampled_under() -> None:
    assert sampling_versions(np.array([4, 2, 4], np.int32)) == {"sampled_under_2": 1.0, "sampled_under_4": 2.0}


def test_a_clip_that_acts_on_more_than_half_of_the_targets_is_worth_a_warning() -> None:
    assert clip_warning({"clipped": 0.5}, "gspo", (0.005, 0.005)) == clip_warning({}, "gspo", (0.005, 0.005)) == ""
    said = clip_warning({"clipped": 0.625}, "gspo", (0.005, 0.005))
    assert "62 %" in said and "loss.clip_low = 0.005 and loss.clip_high = 0.005" in said


def test_a_step_that_drops_every_target_is_no_update(caplog: pytest.LogCaptureFixture) -> None:
    """AdamW would still move the weights by their decay."""
    caplog.set_level(logging.ERROR)
    config = LossConfig(kind="reinforce", correction="mask", correction_low=1e8, correction_high=1e9)
    backend = TorchBackend(tiny_decoder(), config, OptimizerConfig(weight_decay=0.1))
    before = {n: w.clone() for n, w in backend.weights().items()}
    table = ClaimTable(1, 0, "core", 1.0)
    micro_step = random_micro_step(0)
    table.add((ref_to(micro_step, BlobRef("m0", "0" * 32, 1)),))
    table.claim("core", 0.0)
    table.complete("core", micro_step.micro_step, backend.accumulate(micro_step), 0.0)
    update = apply_update(backend, table, 1.0, 0.01, 1.0)
    assert (update.updated, update.loss, update.grad_norm) == (False, 0.0, 0.0)
    assert update.metrics["masked"] == 1.0 and "not_finite" not in update.metrics
    assert all((before[n] == w).all() for n, w in backend.weights().items())
    assert not caplog.records
