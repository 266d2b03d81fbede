"""The calls by which requests leave an engine and arrive at one, over gRPC.

NOT_FOUND: the ticket is not held. FAILED_PRECONDITION: this move cannot be. Whatever is asked is done to its end, also
when the caller goes away meanwhile: it will ask again or release the ticket, and an engine is never left in between.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import grpc
import grpc.aio
from gyre.contracts.errors import EngineError
from gyre.proto.rollout.v1 import engine_pb2 as pb
from gyre.proto.rollout.v1 import engine_pb2_grpc as pb_grpc
from gyre.rollout.engine_cell import EngineCell
from gyre.rollout.engine_wire import (
    frozen_message,
    frozen_of,
    offer_message,
    opaque_frozen,
    reservation_of,
    stage_message,
    stage_of,
)
from gyre.rollout.engines.moving import ExportOf, Frozen, Mover, MoveRefused, TicketUnknown

log = logging.getLogger(__name__)

MAX_REMEMBERED = 1024  # tickets of engines of kind `ticket` whose freeze may be asked again

Context = grpc.aio.ServicerContext
Result = TypeVar("Result")


class EngineMoves(pb_grpc.EngineServiceServicer):
    """The moving half of the engine's service."""

    def __init__(self, cell: EngineCell) -> None:
        self._cell = cell
        self._opaque: OrderedDict[str, Frozen] = OrderedDict()
        self._exporting: dict[str, asyncio.Task[Frozen]] = {}
        self._working: set[asyncio.Task[Any]] = set()

    async def OpenExport(self, request: pb.OpenExportRequest, context: Context) -> pb.Offer:
        what = ExportOf(request.request_id, request.namespace)

        async def open_export(mover: Mover) -> pb.Offer:
            self._cell.check_export(request.epoch)
            return offer_message(await mover.open_export(request.ticket, what, request.lease_s))

        return await self._done(context, self._staged(open_export))

    async def ReadStage(self, request: pb.ReadStageRequest, context: Context) -> pb.Stage:
        async def read_stage(mover: Mover) -> pb.Stage:
            return stage_message(await mover.read_stage(request.ticket, request.first_block))

        return await self._done(context, self._staged(read_stage))

    async def Freeze(self, request: pb.FreezeRequest, context: Context) -> pb.Frozen:
        return frozen_message(await self._done(context, self._freeze(request)))

    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveResponse:
        await self._done(context, self._staged(lambda mover: mover.reserve(reservation_of(request))))
        return pb.ReserveResponse()

    async def Pull(self, request: pb.PullRequest, context: Context) -> pb.PullResponse:
        async def pull(mover: Mover) -> None:
            await mover.pull(request.ticket, request.region, stage_of(request.stage), request.timeout_s)

        await self._done(context, self._staged(pull))
        return pb.PullResponse()

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResponse:
        async def commit(mover: Mover) -> None:
            await mover.commit(request.ticket, frozen_of(request.frozen))

        await self._done(context, self._staged(commit))
        return pb.CommitResponse()

    async def ReleaseTicket(self, request: pb.ReleaseTicketRequest, context: Context) -> pb.ReleaseTicketResponse:
        return pb.ReleaseTicketResponse(found=await self._done(context, self._release(request.ticket)))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._working.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("a step of a move: %s", error)  # whoever asked was told, or is gone

    async def _staged(self, ask: Callable[[Mover], Awaitable[Result]]) -> Result:
        mover = self._cell.engine.mover
        if mover is None:
            raise MoveRefused("this engine does not move requests in stages")
        return await ask(mover)

    async def _freeze(self, request: pb.FreezeRequest) -> Frozen:
        self._cell.check_export(request.epoch)
        mover = self._cell.engine.mover
        if mover is not None:
            return await mover.freeze(request.ticket, request.first_block)
        if request.ticket in self._opaque:
            return self._opaque[request.ticket]
        exporting = self._exporting.get(request.ticket)
        if exporting is None:
            exporting = asyncio.get_running_loop().create_task(self._export(request))
            self._exporting[request.ticket] = exporting
        return await asyncio.shield(exporting)

    async def _export(self, request: pb.FreezeRequest) -> Frozen:
        """Ends a request, or takes a prefix, for a ticket that is remembered from then on; whoever asks meanwhile waits for
        this one."""
        engine = self._cell.engine
        try:
            if request.request_id:
                frozen = opaque_frozen(await engine.export_ticket(request.request_id))
            else:
                prefix = await engine.export_prefix(request.namespace)
                frozen = opaque_frozen(prefix.ticket, prefix.ids)
            self._opaque[request.ticket] = frozen
        finally:
            del self._exporting[request.ticket]
        while len(self._opaque) > MAX_REMEMBERED:
            self._opaque.popitem(last=False)
        return frozen

    async def _release(self, ticket: bytes) -> bool:
        """The name of a ticket, or of an engine of kind `ticket` also the ticket itself."""
        name = ticket.decode(errors="replace")
        mover = self._cell.engine.mover
        if mover is not None:
            return await mover.release(name)
        if name in self._exporting:
            await asyncio.wait([self._exporting[name]])
        frozen = self._opaque.pop(name, None)
        await self._cell.engine.release_ticket(ticket if frozen is None else frozen.opaque)
        return frozen is not None

    async def _done(self, context: Context, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work`, which goes on if the caller does not wait for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._working.add(task)
        task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(task)
        except TicketUnknown as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except EngineError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        raise AssertionError("abort raises")
