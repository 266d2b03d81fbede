"""How a state dict becomes the model that an engine runs: with this project's decoder, or with transformers' own code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from gyre.policy.checkpoint import state_digest
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from gyre.policy.model import ModelShape, PolicyModel
from gyre.rollout.engines.base import WeightsMismatch


@dataclass(frozen=True)
class Weights:
    """What is loaded. `checksum` is the announced one, `live_digest` that of the parameters as they are used."""

    version: int
    checksum: str
    live_digest: str


class Policy(Protocol):
    """Makes models of one shape."""

    @property
    def shape(self) -> ModelShape: ...

    @property
    def max_position(self) -> int: ...

    @property
    def num_parameters(self) -> int: ...

    def build(self, state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> PolicyModel:
        """A model on the CPU that owns its parameters. Raises ValueError naming the parameter that is wrong."""
        ...


class GyrePolicy:
    """Runs `gyre.policy.decoder.Decoder`."""

    def __init__(self, config: PolicyConfig) -> None:
        self.shape = config
        self.max_position = config.max_position
        with torch.device("meta"):
            self.num_parameters = sum(p.numel() for p in Decoder(config).parameters())

    def build(self, state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> PolicyModel:
        return Decoder.from_state(self.shape, state).to(dtype)


class TransformersPolicy:
    """Runs a model of transformers over this engine's cache. Needs the extra `transformers` of opengyre-policy."""

    def __init__(self, directory: Path) -> None:
        """`directory`: a checkpoint, of which only the configuration is read. Raises UnsupportedPolicy."""
        from gyre.policy.hf import Architecture

        self._architecture = Architecture(directory)
        self.shape = self._architecture.shape
        self.max_position = self._architecture.max_position
        self.num_parameters = self._architecture.num_parameters

    def build(self, state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> PolicyModel:
        return self._architecture.build(state, dtype)


def prepare(
    policy: Policy, version: int, checksum: str, state: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device
) -> tuple[PolicyModel, Weights]:
    """Verifies what arrived and builds a second model from it; nothing that is in use is touched.

    Raises:
        WeightsMismatch: `state` does not have this checksum, or does not fit the policy.
    """
    found = state_digest(state)
    if found != checksum:
        raise WeightsMismatch(f"checksum: weights {version} digest to {found}, announced was {checksum}")
    try:
        model = policy.build(state, dtype)
    except ValueError as error:
        raise WeightsMismatch(f"weights {version}: {error}") from error
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    to_device(model, device)
    return model, Weights(version, checksum, live_digest(model))


def live_digest(model: PolicyModel) -> str:
    """The checksum of a model's parameters as they are."""
    return state_digest(dict(model.named_parameters()))


def to_device(model: PolicyModel, device: torch.device) -> None:
    """Moves a model, in place."""
    assert isinstance(model, torch.nn.Module)
    model.to(device)
