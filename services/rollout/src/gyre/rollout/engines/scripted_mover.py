"""How the scripted engine moves requests: the whole protocol of `moving.py` with blocks of token ids and no bytes.

A "block" is nothing but its ids, so a pull has nothing to read; everything that can be refused, repeated, run out or
verified in a real engine can be here too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from gyre.rollout.engines.moving import (
    ExportOf,
    Frozen,
    MoveRefused,
    Offer,
    Reservation,
    Stage,
    TicketUnknown,
    tokens_digest,
)


class Host(Protocol):
    """What the mover needs of its engine."""

    @property
    def version(self) -> int:
        """Of the loaded weights."""
        ...

    @property
    def is_asleep(self) -> bool: ...

    @property
    def num_free(self) -> int:
        """Tokens there is room for."""
        ...

    def find(self, what: ExportOf) -> tuple[str, np.ndarray, int]:
        """(namespace, known ids, tokens that may become known). Raises MoveRefused."""
        ...

    def freeze(self, request_id: str) -> None:
        """End a request with `Finish("moved")`."""
        ...

    def keep_prefix(self, namespace: str, ids: np.ndarray) -> None:
        """From now on these ids are found again in the namespace."""
        ...


@dataclass(slots=True)
class _Export:
    what: ExportOf
    version: int
    lease_s: float
    until: float
    namespace: str
    stopped: np.ndarray | None = None  # all ids, once it is frozen


@dataclass(slots=True)
class _Import:
    reservation: Reservation
    until: float
    blocks: list[np.ndarray] = field(default_factory=list)
    committed: np.ndarray | None = None


class ScriptedMover:
    """`gyre.rollout.engines.moving.Mover`. Leases run out by `now`, whether or not anybody asks."""

    def __init__(self, host: Host, layout: str, block_tokens: int, now: Callable[[], float]) -> None:
        self._host, self._layout, self._size, self._now = host, layout, block_tokens, now
        self._exports: dict[str, _Export] = {}
        self._imports: dict[str, _Import] = {}

    @property
    def num_held(self) -> int:
        """Tickets that are held now."""
        self._expire()
        return len(self._exports) + len(self._imports)

    @property
    def num_tokens_held(self) -> int:
        """Tokens whose room is taken by what has moved away or will arrive."""
        self._expire()
        stopped = sum(len(e.stopped) for e in self._exports.values() if e.stopped is not None)
        return stopped + sum(i.reservation.num_tokens for i in self._imports.values())

    def clear(self) -> None:
        """Everything is dropped: the engine sleeps, or its weights have changed."""
        self._exports.clear()
        self._imports.clear()

    def holds(self, ticket: bytes) -> bool:
        """Whether `take` could succeed."""
        self._expire()
        name = ticket.decode(errors="replace")
        arrived, left = self._imports.get(name), self._exports.get(name)
        return (arrived is not None and arrived.committed is not None) or (left is not None and left.stopped is not None)

    def take(self, ticket: bytes, ids: np.ndarray) -> int:
        """Use a ticket for a request with these ids: how many of them need not be computed; 0 if it does not fit."""
        if not self.holds(ticket):
            return 0
        name = ticket.decode()
        held = self._imports[name].committed if name in self._imports else self._exports[name].stopped
        if held is None or not np.array_equal(held, ids):
            return 0
        self._imports.pop(name, None)
        self._exports.pop(name, None)
        return len(ids) - 1

    # ------------------------------------------------------------ source

    async def open_export(self, ticket: str, what: ExportOf, lease_s: float) -> Offer:
        """See `Mover.open_export`."""
        self._expire()
        namespace, ids, most = self._host.find(what)
        export = self._exports.setdefault(ticket, _Export(what, self._host.version, lease_s, 0.0, namespace))
        if export.what != what or export.stopped is not None:
            raise MoveRefused(f"ticket {ticket!r} is another move's")
        export.until = self._now() + lease_s
        return Offer(ticket, self._layout, export.version, namespace, len(ids), most, "", 4 * self._size)

    async def read_stage(self, ticket: str, first_block: int) -> Stage:
        """See `Mover.read_stage`."""
        export = self._export(ticket)
        ids = self._ids(export)
        num_full = (len(ids) - 1) // self._size
        return self._stage(ids, first_block, max(num_full, first_block), export.version)

    async def freeze(self, ticket: str, first_block: int) -> Frozen:
        """See `Mover.freeze`."""
        export = self._export(ticket)
        ids = self._ids(export)
        if export.stopped is None and export.what.request_id:
            self._host.freeze(export.what.request_id)
            export.stopped = ids
        num_computed = len(ids) - 1
        tail = self._stage(ids[:num_computed], first_block, -(-num_computed // self._size), export.version)
        return Frozen(tail, len(ids), num_computed, ids[num_computed:], tokens_digest(ids))

    # ------------------------------------------------------------ destination

    async def reserve(self, reservation: Reservation) -> None:
        """See `Mover.reserve`."""
        self._expire()
        held = self._imports.get(reservation.ticket)
        if held is not None and held.reservation != reservation:
            raise MoveRefused(f"ticket {reservation.ticket!r} is reserved for epoch {held.reservation.epoch} already")
        if self._host.is_asleep or reservation.layout != self._layout:
            raise MoveRefused(f"layout: {reservation.layout!r}, here it is {self._layout!r}")
        if reservation.weights_version != self._host.version:
            raise MoveRefused(f"weights_version: {reservation.weights_version}, here it is {self._host.version}")
        if held is None and reservation.num_tokens > self._host.num_free:
            raise MoveRefused(f"num_tokens: {reservation.num_tokens}, there is room for {self._host.num_free}")
        held = self._imports.setdefault(reservation.ticket, _Import(reservation, 0.0))
        held.until = self._now() + reservation.lease_s

    async def pull(self, ticket: str, region: str, stage: Stage, timeout_s: float) -> None:
        """See `Mover.pull`."""
        held = self._import(ticket)
        blocks = _split(stage.token_ids, self._size)
        if len(blocks) != len(stage.rows) or stage.first_block > len(held.blocks):
            raise MoveRefused(f"stage of {len(blocks)} blocks at {stage.first_block}, {len(held.blocks)} are here")
        if any(_checksum(block) != wanted for block, wanted in zip(blocks, stage.checksums, strict=True)):
            raise MoveRefused("checksums: a block is not what the source has")
        held.blocks[stage.first_block:] = blocks

    async def commit(self, ticket: str, frozen: Frozen) -> None:
        """See `Mover.commit`."""
        held = self._import(ticket)
        computed = np.concatenate([*held.blocks, np.empty(0, np.int32)]).astype(np.int32)
        ids = np.concatenate((computed, frozen.known_ids))
        if len(computed) != frozen.num_computed or len(ids) != frozen.num_known:
            raise MoveRefused(f"{len(computed)} tokens are here, {frozen.num_computed} were computed")
        if tokens_digest(ids) != frozen.digest:
            raise MoveRefused("digest: the tokens are not those of the source")
        held.committed = ids
        self._host.keep_prefix(held.reservation.namespace, ids)

    async def release(self, ticket: str) -> bool:
        """See `Mover.release`."""
        self._expire()
        return (self._exports.pop(ticket, None) or self._imports.pop(ticket, None)) is not None

    # ------------------------------------------------------------ both

    def _export(self, ticket: str) -> _Export:
        self._expire()
        export = self._exports.get(ticket)
        if export is None:
            raise TicketUnknown(f"ticket {ticket!r} is not held")
        if export.version != self._host.version:
            raise MoveRefused(f"weights {export.version} were replaced by {self._host.version}")
        export.until = self._now() + export.lease_s
        return export

    def _import(self, ticket: str) -> _Import:
        self._expire()
        held = self._imports.get(ticket)
        if held is None:
            raise TicketUnknown(f"ticket {ticket!r} is not held")
        held.until = self._now() + held.reservation.lease_s
        return held

    def _ids(self, export: _Export) -> np.ndarray:
        return export.stopped if export.stopped is not None else self._host.find(export.what)[1]

    def _stage(self, ids: np.ndarray, first: int, end: int, version: int) -> Stage:
        blocks = _split(ids[first * self._size:end * self._size], self._size)
        rows = np.arange(first, first + len(blocks), dtype=np.int64)
        parts = np.concatenate([*blocks, np.empty(0, np.int32)]).astype(np.int32)
        return Stage(first, rows, tuple(map(_checksum, blocks)), parts, np.full(len(blocks), version, np.int64))

    def _expire(self) -> None:
        now = self._now()
        for held in (self._exports, self._imports):
            for ticket in [ticket for ticket, entry in held.items() if entry.until < now]:
                del held[ticket]


def _split(ids: np.ndarray, size: int) -> list[np.ndarray]:
    return [ids[start:start + size] for start in range(0, len(ids), size)]


def _checksum(block: np.ndarray) -> bytes:
    return hashlib.blake2b(block.astype("<i4", copy=False).tobytes(), digest_size=16).digest()
