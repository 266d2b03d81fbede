"""Where an engine gets weights: read one-sided from the trainer core, or from the checkpoint they are durable in."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gyre.contracts.errors import EngineError
from gyre.transfer import RegionDescriptor, Transfer, TransferError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """Weights `version`, whose state must digest to `checksum`.

    `transfer` is a transfer descriptor as JSON text and may be empty; `checkpoint` is a Hugging Face directory.
    """

    version: int
    checksum: str
    transfer: str
    checkpoint: str


class WeightsLoader(Protocol):
    """Fetches a state dict. The engine verifies the checksum itself."""

    async def fetch(self, source: WeightsSource) -> Mapping[str, torch.Tensor]:
        """Raises EngineError if the weights cannot be had."""
        ...


class NoWeights:
    """For engines without a model."""

    async def fetch(self, source: WeightsSource) -> Mapping[str, torch.Tensor]:
        return {}


class PulledWeights:
    """Tries the core's memory first, since reading it costs no disk; a stale or unreachable region is no error."""

    def __init__(self, transfer: Transfer, timeout_s: float) -> None:
        self._transfer = transfer
        self._timeout_s = timeout_s

    async def fetch(self, source: WeightsSource) -> Mapping[str, torch.Tensor]:
        from gyre.policy.checkpoint import load_state
        from gyre.transfer.tensors import tensors_of

        if source.transfer:
            try:
                descriptor = RegionDescriptor.from_wire(json.loads(source.transfer))
                return tensors_of(await self._transfer.read(descriptor, timeout_s=self._timeout_s))
            except (TransferError, ValueError, KeyError) as error:
                log.warning("weights %d: not read from the core (%s); trying %s", source.version, error,
                            source.checkpoint)  # fmt: skip
        if not source.checkpoint:
            raise EngineError(f"weights {source.version}: neither a readable transfer region nor a checkpoint")
        try:
            return await asyncio.to_thread(load_state, Path(source.checkpoint))
        except (OSError, ValueError) as error:
            raise EngineError(f"weights {source.version}: {source.checkpoint}: {error}") from error
