"""What a worker starts from: the newest whole checkpoint, if it may go on from there; its ledger, if that is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from gyre.contracts.codec import decode_envelope, fact_of
from gyre.contracts.errors import CheckpointError, ConfigError
from gyre.contracts.events import Fact, GroupCompleted
from gyre.contracts.subjects import TABLE, TRAIN, TRAJ, filter_of
from gyre.policy.checkpoint import state_digest
from gyre.runtime.blobs import BlobStore
from gyre.runtime.bus import Bus, Received
from gyre.runtime.store import Store
from gyre.trainer.backends.base import Backend
from gyre.trainer.checkpoint import LEDGER_FILE, newest_checkpoint, restore_rng
from gyre.trainer.config import TrainerConfig
from gyre.trainer.core import TrainerCore, TrainerState
from gyre.trainer.recovery import rebuild

log = logging.getLogger(__name__)


class PublishedVersionLost(ConfigError):
    """Going on would publish other weights under a version that was published. Somebody has to decide."""


async def restore_weights(config: TrainerConfig, state: TrainerState, backend: Backend) -> int:
    """Load the newest whole checkpoint into the backend and return its version, 0 without one.

    Raises:
        CheckpointError: it is another run's.
        PublishedVersionLost: it is not the version that was published last, or has other weights.
    """
    found = await asyncio.to_thread(newest_checkpoint, config.checkpoints)
    if found is not None and found.position.get("run") != config.run:
        raise CheckpointError(
            f"{found.directory} belongs to run {found.position.get('run')!r}, this is {config.run!r}"
        )
    version, weights = (0, backend.weights()) if found is None else (found.version, found.weights)
    check_published(state, version, weights, config.checkpoints)
    if found is not None:
        backend.load_weights(found.weights)
        backend.load_optimizer_state(found.optimizer)
        restore_rng(found.optimizer)
    return version


def check_published(state: TrainerState, version: int, weights: Mapping[str, torch.Tensor], root: Path) -> None:
    """Raises PublishedVersionLost if engines may hold a version that this worker cannot go on from.

    A version that was published is never made again: the same members trained once more give other weights in the last
    bits at least, and tokens are labelled with versions. What was trained beyond it and never published is trained again.
    """
    if version < state.published:
        raise PublishedVersionLost(
            f"{root}: version {state.published} was published, but the newest whole checkpoint is version {version}; training "
            f"on from there would publish other weights under versions that engines already hold. Put version-"
            f"{state.published:06d} back from a copy, or start a new run from an older checkpoint (policy.checkpoint)"
        )
    if version == state.published and state.checksum and state_digest(weights) != state.checksum:
        raise PublishedVersionLost(
            f"{root}: the weights of version {version} are not those that were published under it; put the right ones back, or "
            "start a new run (policy.checkpoint)"
        )


async def rebuild_lost_ledger(store: Store, bus: Bus, blobs: BlobStore, config: TrainerConfig, core: TrainerCore) -> None:
    """If the store is empty although this run's trainers have spoken: put into it what they said and what was completed."""
    if store.snapshot() is not None or store.journal_length() or store.applied():
        return
    records = [row.record for row in TABLE if row.stream is TRAIN]
    said = _facts(await bus.read_all(TRAIN, [filter_of(config.run, record) for record in records]), blobs)
    if not said:
        return
    completed: dict[str, GroupCompleted] = {}
    state = core.initial()
    if config.is_core:
        groups = _facts(await bus.read_all(TRAJ, [filter_of(config.run, GroupCompleted)]), blobs)
        completed = {g.group: g for g in groups if isinstance(g, GroupCompleted) and g.purpose == "train"}
        found = await asyncio.to_thread(newest_checkpoint, config.checkpoints)
        if found is not None and (found.directory / LEDGER_FILE).is_file():
            state = core.restore((found.directory / LEDGER_FILE).read_bytes())
    log.warning("the ledger is lost: rebuilding it from %d facts and %d completed groups", len(said), len(completed))
    store.save_snapshot(core.snapshot(rebuild(state, config.cell, said, completed)))


def _facts(received: list[Received], blobs: BlobStore) -> list[Fact]:
    facts = []
    for message in received:
        envelope = decode_envelope(message.data)
        facts.append(fact_of(envelope, blobs.get(envelope.ref) if envelope.ref else None))
    return facts
