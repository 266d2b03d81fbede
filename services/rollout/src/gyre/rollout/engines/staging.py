"""Weights for an engine that reads files: verified, then laid down as a Hugging Face checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from gyre.policy.checkpoint import save_checkpoint, state_digest
from gyre.policy.config import PolicyConfig
from gyre.rollout.engines.base import WeightsMismatch


class StagedWeights:
    """Checkpoints below `directory`, which should be fast (memory, if there is some to spare): one for each version that is
    in use. `source` is where tokenizer files come from; a host may want them beside the weights."""

    def __init__(
        self, directory: Path, policy: PolicyConfig, source: Path | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self._directory = directory
        self._policy = policy
        self._source = source
        self._dtype = dtype

    def directory(self, version: int) -> Path:
        """Where a staged version lies."""
        return self._directory / f"v{version}"

    def stage(self, version: int, checksum: str, state: Mapping[str, torch.Tensor]) -> Path:
        """Verifies and writes. Raises WeightsMismatch if `state` has another checksum or does not fit the policy."""
        found = state_digest(state)
        if found != checksum:
            raise WeightsMismatch(f"checksum: weights {version} digest to {found}, announced was {checksum}")
        place = self.directory(version)
        tensors = state if self._dtype is None else {name: tensor.to(self._dtype) for name, tensor in state.items()}
        try:
            save_checkpoint(place, self._policy, tensors)
        except ValueError as error:
            raise WeightsMismatch(f"weights {version}: {error}") from error
        for file in self._others():
            shutil.copyfile(file, place / file.name)
        return place

    def keep_only(self, version: int) -> None:
        """Removes every other version."""
        for place in self._directory.glob("v*"):
            if place != self.directory(version):
                shutil.rmtree(place, ignore_errors=True)

    def _others(self) -> list[Path]:
        """What a checkpoint holds besides weights and `config.json`."""
        if self._source is None or not self._source.is_dir():
            return []
        skipped = {".safetensors", ".bin", ".pt"}
        files = (f for f in self._source.iterdir() if f.is_file() and f.suffix not in skipped)
        return [f for f in files if f.name != "config.json" and not f.name.endswith(".safetensors.index.json")]

