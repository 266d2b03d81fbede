"""One micro-step: fetch, verify, forward and backward on a worker thread."""

from __future__ import annotations

import asyncio
import logging

from gyre.contracts.errors import ContractError
from gyre.contracts.events import BlobRef, MicroStepRef
from gyre.contracts.microstep import MicroStep, micro_step_from_bytes
from gyre.runtime.blobs import BlobStore
from gyre.runtime.clock import Clock
from gyre.trainer.backends.base import Backend
from gyre.trainer.runs import check_trees

log = logging.getLogger(__name__)

FETCH_TRIES = 4
FETCH_PAUSE_S = 0.5


async def compute(backend: Backend, blobs: BlobStore, ref: MicroStepRef, clock: Clock) -> dict[str, float]:
    """Add the micro-step's gradient to the backend's sum and return its metric sums.

    A micro-step that stays unreadable is poison: it is reported, contributes nothing and counts as computed, because
    a step that can never end would hold up the run.
    """
    try:
        micro_step = await fetch(blobs, ref.blob, ref.digest, clock)
    except ContractError as error:
        log.error("micro-step %s contributes nothing: %s", ref.micro_step, error)
        return {"broken_micro_steps": 1.0}
    return await asyncio.to_thread(backend.accumulate, micro_step)


async def fetch(blobs: BlobStore, blob: BlobRef, digest: str, clock: Clock) -> MicroStep:
    """Read and verify; a store that lags is asked a few times. Raises ContractError."""
    for _ in range(FETCH_TRIES - 1):
        try:
            return await asyncio.to_thread(_read, blobs, blob, digest)
        except ContractError:
            await clock.sleep(FETCH_PAUSE_S)
    return await asyncio.to_thread(_read, blobs, blob, digest)


def _read(blobs: BlobStore, blob: BlobRef, digest: str) -> MicroStep:
    micro_step = micro_step_from_bytes(blobs.get(blob), digest)
    check_trees(micro_step)
    return micro_step
