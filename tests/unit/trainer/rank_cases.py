"""Backends of several ranks, what each can do exactly, and the one process that they are held against."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gyre.runtime.config import OptimizerConfig
from gyre.trainer.backends.torch import TorchBackend
from gyre.trainer.loss import LossConfig
from trees import tiny_decoder

KINDS = [("torch", 0), ("fsdp", 2), ("fsdp", 3)]
if importlib.util.find_spec("deepspeed"):
    KINDS += [("deepspeed", stage) for stage in (1, 2, 3)]
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 3e-2}


def fits(kind: str, stage: int, dtype: str) -> bool:
    """What DeepSpeed can do exactly."""
    return kind != "deepspeed" or dtype == "float32" or (dtype == "bfloat16" and stage > 1)


def alone(dtype: str = "float64", tied: bool = True, loss: dict[str, float] | None = None) -> TorchBackend:
    optimizer = OptimizerConfig(learning_rate=0.01, weight_decay=0.1)
    return TorchBackend(tiny_decoder(tied=tied).to(getattr(torch, dtype)), LossConfig(**(loss or {})), optimizer)


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


WIDEST = [(kind, stage, "float64" if fits(kind, stage, "float64") else "float32") for kind, stage in KINDS]
