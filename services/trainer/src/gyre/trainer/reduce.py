"""The reduction: other workers' gradient sums are read one-sided, checked and added, in cell order; then one update.

G = sum over micro-steps of g_m, whoever computed them; it is scaled once, by 1 / M or what else the loss is a mean
over, and clipped after that.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from gyre.trainer.backends.base import Backend
from gyre.trainer.claims import ClaimTable
from gyre.trainer.metrics import means
from gyre.trainer.weights import descriptor_of, descriptor_text
from gyre.transfer import Transfer, TransferError

log = logging.getLogger(__name__)


GRADIENTS = "gradients"  # a worker's region: registered once, its contents replaced step by step
STAMP = "stamp"
STAMP_BYTES = 32


def stamp_of(step: int, attempt: int, micro_steps: Iterable[str]) -> np.ndarray:
    """Says what a buffer is the sum of; lies beside the sums and is read with them, so it cannot be another's."""
    text = "\0".join([str(step), str(attempt), *sorted(micro_steps)])
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=STAMP_BYTES).digest(), np.uint8)


def staging_for(backend: Backend) -> dict[str, np.ndarray]:
    """Host memory for one worker's gradient sum and its stamp."""
    sums = {n: np.zeros(shape, dtype) for n, (shape, dtype) in backend.gradient_shapes().items()}
    return {**sums, STAMP: np.zeros(STAMP_BYTES, np.uint8)}


def export_sum(transfer: Transfer, backend: Backend, step: int, attempt: int, micro_steps: Iterable[str]) -> str:
    """Put this worker's sum where the core can read it; returns the descriptor as text."""
    region = transfer.find(GRADIENTS) or transfer.register(GRADIENTS, staging_for(backend))
    with region.rewriting() as arrays:
        backend.export_gradients(arrays)
        arrays[STAMP][...] = stamp_of(step, attempt, micro_steps)
    return descriptor_text(transfer.describe(GRADIENTS))


def withdraw_sum(transfer: Transfer) -> None:
    """What is in the buffer is not offered any more: reads of it fail until the next export."""
    region = transfer.find(GRADIENTS)
    if region is not None:
        region.open_for_writing()


async def add_offers(
    table: ClaimTable, transfer: Transfer, backend: Backend, staging: Mapping[str, np.ndarray], timeout_s: float
) -> bool:
    """Add every offered buffer to the core's sum; False if one could not be read and its worker was revoked.

    A buffer is added whole after its checksums passed, so a failed read leaves the sum as it was: the workers added
    before it are settled, and the micro-steps of the failed one are computed again by whoever claims them.
    """
    for offer in table.offers:
        try:
            descriptor = descriptor_of(offer.transfer)
            await transfer.read(descriptor, into=staging, names=list(staging), timeout_s=timeout_s)
            if not np.array_equal(staging[STAMP], stamp_of(table.step, table.attempt, table.done_by(offer.worker))):
                raise TransferError("the buffer is the sum of other micro-steps, or of another attempt")
        except TransferError as error:
            log.warning("step %d attempt %d: %s revoked: %s", table.step, table.attempt, offer.worker, error)
            table.revoke(offer.worker)
            return False
        if not table.stands(offer):
            return False
        backend.add_gradients(staging)
        table.settle(offer.worker)
    return True


@dataclass(frozen=True)
class Update:
    """What one update did. `updated` is False when the gradient was 0 (nothing to train) or not finite."""

    updated: bool
    loss: float
    grad_norm: float
    learning_rate: float
    num_targets: int
    num_tokens: int
    metrics: dict[str, float]


def apply_update(
    backend: Backend, table: ClaimTable, scale: float, learning_rate: float, max_grad_norm: float
) -> Update:
    """Scale the complete sum (0: there is none), clip, update. Nothing to train: the step counts without an update."""
    totals = table.totals()
    num_targets, num_tokens = int(totals.pop("num_targets", 0)), int(totals.pop("num_tokens", 0))
    loss = totals.pop("loss", 0.0)
    if scale == 0.0 or table.num_micro_steps == 0:
        backend.zero_gradients()
        return Update(False, 0.0, 0.0, learning_rate, 0, 0, {})
    norm = backend.update(scale, learning_rate, max_grad_norm)
    metrics = means(totals, num_targets, table.step)
    is_finite = math.isfinite(norm)
    if not is_finite:
        log.error("step %d: the gradient is not finite, the update is skipped", table.step)
        metrics["not_finite"] = 1.0
    return Update(
        is_finite and norm > 0.0, loss * scale, norm if is_finite else 0.0, learning_rate, num_targets, num_tokens, metrics
    )
