"""Two ranks of one cell do exactly what one process does, however weights and gradients are cut between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Ranks
from gyre.runtime.config import OptimizerConfig
from gyre.trainer.backends.torch import TorchBackend
from gyre.trainer.loss import LossConfig
from trees import random_micro_step, tiny_decoder

KINDS = [("torch", 0), ("fsdp", 2), ("fsdp", 3)]
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2}


def alone(dtype: str = "float64", tied: bool = True) -> TorchBackend:
    optimizer = OptimizerConfig(learning_rate=0.01, weight_decay=0.1)
    return TorchBackend(tiny_decoder(tied=tied).to(getattr(torch, dtype)), LossConfig(), optimizer)


def exported(backend: Any) -> dict[str, np.ndarray]:
    arrays = {n: np.zeros(shape, dtype) for n, (shape, dtype) in backend.gradient_shapes().items()}
    backend.export_gradients(arrays)
    return arrays


def apart(got: Mapping[str, Any], want: Mapping[str, Any]) -> float:
    """|got - want| / |want| over all tensors together."""
    assert got.keys() == want.keys()
    a, b = (np.concatenate([np.asarray(x[n], np.float64).ravel() for n in want]) for x in (got, want))
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-300))


def wide(state: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {n: t.double().numpy() for n, t in state.items()}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("kind, stage", KINDS)
def test_two_ranks_are_one(two_ranks: Ranks, kind: str, stage: int, dtype: str, tied: bool) -> None:
    """Metrics, sums, norms and weights over three updates; some micro-steps have one tree, some more than there are ranks."""
    tolerance, one = TOLERANCE[dtype], alone(dtype, tied)
    with two_ranks.lead(kind, dtype, stage, tied=tied) as two:
        for step in range(3):
            for seed in range(3):
                micro_step = random_micro_step(10 * step + seed, num_trees=1 + seed, tree_tokens=40)
                want, got = one.accumulate(micro_step), two.accumulate(micro_step)
                assert got.keys() == want.keys()
                assert all(math.isclose(got[n], want[n], rel_tol=10 * tolerance, abs_tol=10 * tolerance) for n in want)
            assert apart(exported(two), exported(one)) < tolerance
            assert two.update(0.125, 0.01, 0.5) == pytest.approx(one.update(0.125, 0.01, 0.5), rel=tolerance)
        assert apart(wide(two.weights()), wide(one.weights())) < tolerance
        assert {t.dtype for t in two.weights().values()} == {getattr(torch, dtype)}
