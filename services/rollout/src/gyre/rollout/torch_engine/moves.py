"""Moves between engines: tickets and their leases. See `gyre.rollout.engines.moving`.

All of it happens while the model computes: blocks are taken that nobody writes to, and a request that decodes is stopped
at its last token, whatever becomes of the one that is being computed (whoever goes on draws the same one). Only a request
that is being prefilled is waited for, at the engine's boundary between two iterations. Leases run against a given clock and
are looked at in every iteration, in every load report and by a timer, so that they end without new traffic.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gyre.rollout.engines.base import GenerateRequest
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
from gyre.rollout.torch_engine.scheduler import Scheduler
from gyre.rollout.torch_engine.shipping import Shipping
from gyre.rollout.torch_engine.tickets import Export, Holding, Import, Published

_MAX_EPOCHS = 4096  # of tickets that are gone; a reservation of an older epoch may still be under way


@dataclass(slots=True)
class _Lease:
    lease_s: float
    due: float


class StagedMover:
    """`gyre.rollout.engines.moving.Mover` over a scheduler. `shipping` is None while the engine has no memory."""

    def __init__(
        self, scheduler: Scheduler, layout: str, boundary: asyncio.Lock, clock: Callable[[], float],
        is_open: Callable[[], bool],
    ) -> None:  # fmt: skip
        """`is_open`: whether reservations are taken (the engine admits requests)."""
        self.shipping: Shipping | None = None
        self._scheduler = scheduler
        self._layout = layout
        self._boundary = boundary
        self._clock = clock
        self._is_open = is_open
        self._exports: dict[str, Export] = {}
        self._imports: dict[str, Import] = {}
        self._leases: dict[str, _Lease] = {}
        self._quarantine: list[Import] = []
        self._epochs: OrderedDict[str, int] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_held(self) -> int:
        """Tickets that hold KV or room for it."""
        return len(self._leases)

    async def open_export(self, ticket: str, what: ExportOf, lease_s: float) -> Offer:
        """See `Mover.open_export`. Idempotent."""
        shipping = self._need_shipping()
        export = self._exports.get(ticket)
        if export is None:
            if ticket in self._imports:
                raise MoveRefused(f"ticket: {ticket!r} is that of a move to this engine")
            export = self._exports[ticket] = Export(self._scheduler, what)
        elif export.what != what:
            raise MoveRefused(f"ticket: {ticket!r} was given for {export.what}")
        self._renew(ticket, lease_s)
        return export.offer(ticket, self._layout, shipping.region, shipping.block_bytes)

    async def read_stage(self, ticket: str, first_block: int) -> Stage:
        """See `Mover.read_stage`."""
        export = self._export(ticket)
        blocks = export.full_blocks()
        if 0 <= first_block <= len(blocks):
            blocks = blocks[: first_block + self._need_shipping().max_stage]
        return await self._publish(ticket, export, first_block, blocks)

    async def freeze(self, ticket: str, first_block: int) -> Frozen:
        """See `Mover.freeze`."""
        export, shipping = self._export(ticket), self._need_shipping()
        if export.can_stop():
            holding = export.freeze(shipping.copy)
        else:
            async with self._boundary:
                holding = self._export(ticket).freeze(shipping.copy)
        tail = await self._publish(ticket, export, first_block, holding.chain.blocks)
        num = holding.chain.num_computed
        return Frozen(tail, len(holding.ids), num, holding.ids[num:].copy(), tokens_digest(holding.ids))

    async def reserve(self, reservation: Reservation) -> None:
        """See `Mover.reserve`."""
        ticket = reservation.ticket
        self._need_shipping()
        if not self._is_open():
            raise MoveRefused("this engine takes no requests")
        held = self._imports.get(ticket)
        if held is None or held.reservation != reservation:
            self._check(reservation)
            self._drop(ticket)
            self._imports[ticket] = Import(self._scheduler, reservation)
            self._remember(ticket, reservation.epoch)
        self._renew(ticket, reservation.lease_s)

    async def pull(self, ticket: str, region: str, stage: Stage, timeout_s: float) -> None:
        """See `Mover.pull`."""
        held = self._import(ticket)
        shipping = self._need_shipping()
        async with held.one_at_a_time:
            if held.is_dropped:
                raise TicketUnknown(f"ticket: {ticket!r} was dropped")
            held.grow(stage.first_block + len(stage.rows))
            indexes = held.missing(stage)
            if indexes:
                held.is_reading = True
                sums = tuple(stage.checksums[i] for i in indexes)
                try:
                    await shipping.fetch(region, stage.rows[indexes], sums, held.expect(stage, indexes), timeout_s)
                finally:
                    self._read_ended(held)
                if held.is_dropped:
                    raise TicketUnknown(f"ticket: {ticket!r} was dropped while its blocks were read")
                held.enter(stage)
        self._renew(ticket)

    async def commit(self, ticket: str, frozen: Frozen) -> None:
        """See `Mover.commit`."""
        held = self._import(ticket)
        async with held.one_at_a_time:
            if held.is_dropped:
                raise TicketUnknown(f"ticket: {ticket!r} was dropped")
            blocks, checksums = held.arrived()
            held.commit(frozen)
            self._need_shipping().arrived(blocks, checksums)
        self._renew(ticket)

    async def release(self, ticket: str) -> bool:
        """See `Mover.release`."""
        return self._drop(ticket)

    def find(self, request: GenerateRequest) -> Holding | None:
        """What the request's ticket holds, if it is of use: all there, and KV of exactly the tokens it begins with."""
        self.sweep()
        ticket = request.ticket.decode("utf-8", "replace")
        held = self._exports.get(ticket) or self._imports.get(ticket)
        holding = None if held is None else held.holding
        return holding if holding is not None and holding.fits(request) else None

    def adopted(self, request: GenerateRequest) -> None:
        """The chain that `find` gave belongs to a request now; the ticket is used."""
        self._drop(request.ticket.decode("utf-8", "replace"), keeps_chain=True)

    def void(self) -> None:
        """Every ticket is void: other weights come, or the memory goes."""
        for ticket in list(self._leases):
            self._drop(ticket)
        self._arm()

    def sweep(self) -> None:
        """Drops what nobody has asked for within its lease. A read that is going on has its own deadline."""
        now = self._clock()
        for ticket, lease in list(self._leases.items()):
            held = self._imports.get(ticket)
            if lease.due <= now and not (held is not None and held.is_reading):
                self._drop(ticket)

    def blocks_held(self) -> list[int]:
        """Every reference that tickets hold, also those of reads that outlived theirs. For tests and reports."""
        held = [block for export in self._exports.values() for block in export.references()]
        arriving = (*self._imports.values(), *self._quarantine)
        return held + [block for each in arriving for block in each.blocks]

    def _need_shipping(self) -> Shipping:
        if self.shipping is None:
            raise MoveRefused("this engine sleeps, or has no weights yet")
        return self.shipping

    def _export(self, ticket: str) -> Export:
        self.sweep()
        if ticket not in self._exports:
            raise TicketUnknown(f"ticket: {ticket!r} is not held here as an export")
        self._renew(ticket)
        return self._exports[ticket]

    def _import(self, ticket: str) -> Import:
        self.sweep()
        if ticket not in self._imports:
            raise TicketUnknown(f"ticket: {ticket!r} is not held here as a reservation")
        self._renew(ticket)
        return self._imports[ticket]

    def _check(self, reservation: Reservation) -> None:
        """Raises MoveRefused for one that does not fit this engine, or is older than one that was here."""
        if reservation.layout != self._layout:
            raise MoveRefused(f"layout: {reservation.layout!r} cannot be read here; this engine has {self._layout!r}")
        if reservation.weights_version != self._scheduler.version:
            raise MoveRefused(f"weights_version: {reservation.weights_version} differs from {self._scheduler.version} here")
        newest = self._epochs.get(reservation.ticket, -1)
        if reservation.epoch < newest:
            raise MoveRefused(f"epoch: {reservation.epoch} is over; epoch {newest} has reserved")
        if reservation.ticket in self._exports:
            raise MoveRefused(f"ticket: {reservation.ticket!r} is that of a move from this engine")

    async def _publish(self, ticket: str, export: Export, first: int, blocks: Sequence[int]) -> Stage:
        """Blocks from number `first` on as a stage; what was published before is not published again.

        Those before it have been read, or whoever asks would ask for them.
        """
        if not 0 <= first <= len(blocks):
            raise MoveRefused(f"first_block: {first} must be in 0..{len(blocks)}")
        numbered = dict(enumerate(blocks[first:], first))
        async with export.one_at_a_time:
            self._retract(export, [number for number in export.published if number < first])
            await self._publish_fresh(ticket, export, numbered)
            return export.stage(first, list(numbered.values()))

    def _retract(self, export: Export, numbers: Sequence[int]) -> None:
        rows = [export.published.pop(number).row for number in numbers]
        if self.shipping is not None:
            self.shipping.retract(rows)

    async def _publish_fresh(self, ticket: str, export: Export, numbered: Mapping[int, int]) -> None:
        known = export.published
        fresh = {n: b for n, b in numbered.items() if n not in known or known[n].block != b}
        if not fresh:
            return
        shipping = self._need_shipping()
        rows, sums = await shipping.publish(list(fresh.values()))
        if self._exports.get(ticket) is not export:
            shipping.retract(rows)
            raise TicketUnknown(f"ticket: {ticket!r} was dropped")
        shipping.retract([known[n].row for n in fresh if n in known])
        for (number, block), row, checksum in zip(fresh.items(), rows, sums, strict=True):
            known[number] = Published(block, row, checksum)

    def _read_ended(self, held: Import) -> None:
        held.read_ended()
        if held in self._quarantine:
            self._quarantine.remove(held)

    def _drop(self, ticket: str, keeps_chain: bool = False) -> bool:
        self._leases.pop(ticket, None)
        export, held = self._exports.pop(ticket, None), self._imports.pop(ticket, None)
        if export is not None:
            self._retract(export, list(export.published))
            export.drop(keeps_chain)
        if held is not None:
            held.drop(keeps_chain)
            if held.is_reading:
                self._quarantine.append(held)
        return export is not None or held is not None

    def _remember(self, ticket: str, epoch: int) -> None:
        self._epochs[ticket] = epoch
        self._epochs.move_to_end(ticket)
        if len(self._epochs) > _MAX_EPOCHS:
            self._epochs.popitem(last=False)

    def _renew(self, ticket: str, lease_s: float | None = None) -> None:
        """A new lease, or the one it has from now on."""
        if lease_s is None:
            if ticket not in self._leases:
                return
            lease_s = self._leases[ticket].lease_s
        self._leases[ticket] = _Lease(lease_s, self._clock() + lease_s)
        self._arm()

    def _arm(self) -> None:
        """One timer, for the lease that ends first."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._leases:
            wait_s = max(0.0, min(lease.due for lease in self._leases.values()) - self._clock())
            self._timer = asyncio.get_running_loop().call_later(wait_s + 0.01, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        self.sweep()
        self._arm()
