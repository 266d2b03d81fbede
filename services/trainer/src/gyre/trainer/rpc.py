"""TrainerService: the core's side, and the client a satellite uses."""

from __future__ import annotations

import grpc
import grpc.aio
from gyre.contracts.events import BlobRef, MicroStepRef
from gyre.proto.common.v1 import status_pb2
from gyre.proto.trainer.v1 import service_pb2 as pb
from gyre.proto.trainer.v1 import service_pb2_grpc as pb_grpc
from gyre.runtime import rpc
from gyre.trainer.claims import Verdict
from gyre.trainer.config import RPC_TIMEOUT_S
from gyre.trainer.coordinator import Admission, Coordinator
from gyre.trainer.satellite import CoreUnreachable
from gyre.trainer.status import StatusSource
from gyre.trainer.weights import WeightsTicket

SERVICE = pb.DESCRIPTOR.services_by_name["TrainerService"].full_name

_TO_WIRE = {
    Verdict.WORK: pb.ClaimResponse.VERDICT_WORK,
    Verdict.WAIT: pb.ClaimResponse.VERDICT_WAIT,
    Verdict.REDUCE: pb.ClaimResponse.VERDICT_REDUCE,
    Verdict.STALE: pb.ClaimResponse.VERDICT_STALE,
}
_FROM_WIRE = {wire: verdict for verdict, wire in _TO_WIRE.items()}
RETRY_AFTER_S = 0.25


class TrainerService(pb_grpc.TrainerServiceServicer):
    """`coordinator` is None in a satellite, which only tells its status."""

    def __init__(self, status: StatusSource, coordinator: Coordinator | None) -> None:
        self._status = status
        self._coordinator = coordinator

    async def Join(self, request: pb.JoinRequest, context: grpc.aio.ServicerContext) -> pb.JoinResponse:
        answer = await (await self._core(context)).join(request.cell, request.worker)
        if answer.ticket is None:
            return pb.JoinResponse(accepted=False, reason=answer.reason, retry_after_s=RETRY_AFTER_S)
        ticket = answer.ticket
        return pb.JoinResponse(
            accepted=True, step=answer.step, attempt=answer.attempt, version=ticket.version, checksum=ticket.checksum,
            transfer=ticket.transfer,
        )  # fmt: skip

    async def Leave(self, request: pb.LeaveRequest, context: grpc.aio.ServicerContext) -> pb.LeaveResponse:
        core = await self._core(context)
        core.leave(request.worker)
        await core.completed()
        return pb.LeaveResponse()

    async def Claim(self, request: pb.ClaimRequest, context: grpc.aio.ServicerContext) -> pb.ClaimResponse:
        core = await self._core(context)
        most = max(request.max_micro_steps, 1)
        verdict, refs = await core.claim(request.worker, request.step, request.attempt, most)
        if not refs:
            return pb.ClaimResponse(verdict=_TO_WIRE[verdict])
        first, *more = (_work(ref) for ref in refs)
        return pb.ClaimResponse(
            verdict=_TO_WIRE[verdict], micro_step=first.micro_step, digest=first.digest, blob_path=first.blob_path,
            blob_size=first.blob_size, more=more,
        )  # fmt: skip

    async def Heartbeat(
        self, request: pb.HeartbeatRequest, context: grpc.aio.ServicerContext
    ) -> pb.HeartbeatResponse:
        core = await self._core(context)
        return pb.HeartbeatResponse(accepted=core.heartbeat(request.worker, request.step, request.attempt))

    async def Complete(self, request: pb.CompleteRequest, context: grpc.aio.ServicerContext) -> pb.CompleteResponse:
        core = await self._core(context)
        accepted = core.complete(
            request.worker, request.step, request.attempt, request.micro_step, dict(request.metrics)
        )
        await core.completed()
        return pb.CompleteResponse(accepted=accepted)

    async def Offer(self, request: pb.OfferRequest, context: grpc.aio.ServicerContext) -> pb.OfferResponse:
        core = await self._core(context)
        accepted = core.offer(
            request.worker, request.step, request.attempt, frozenset(request.micro_steps), request.transfer
        )
        await core.completed()
        return pb.OfferResponse(accepted=accepted)

    async def GetStatus(
        self, request: status_pb2.StatusRequest, context: grpc.aio.ServicerContext
    ) -> status_pb2.Status:
        return self._status.status()

    async def _core(self, context: grpc.aio.ServicerContext) -> Coordinator:
        if self._coordinator is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not the core: ask the worker of cell 0")
        assert self._coordinator is not None
        return self._coordinator


class CoreClient:
    """The core over gRPC; an unreachable or refusing core raises `CoreUnreachable`."""

    def __init__(self, address: str) -> None:
        self._stub = pb_grpc.TrainerServiceStub(rpc.channel(address, RPC_TIMEOUT_S))

    async def join(self, cell: int, epoch: int, worker: str) -> Admission:
        answer = await self._call(self._stub.Join, pb.JoinRequest(cell=cell, epoch=epoch, worker=worker))
        if not answer.accepted:
            return Admission(-1, 0, None, answer.reason)
        ticket = WeightsTicket(answer.version, answer.checksum, answer.transfer)
        return Admission(answer.step, answer.attempt, ticket)

    async def leave(self, cell: int, worker: str) -> None:
        await self._call(self._stub.Leave, pb.LeaveRequest(cell=cell, worker=worker))

    async def claim(
        self, worker: str, step: int, attempt: int, most: int
    ) -> tuple[Verdict, tuple[MicroStepRef, ...]]:
        request = pb.ClaimRequest(worker=worker, step=step, attempt=attempt, max_micro_steps=most)
        answer = await self._call(self._stub.Claim, request)
        verdict = _FROM_WIRE.get(answer.verdict, Verdict.WAIT)
        return verdict, tuple(_ref(work) for work in (answer, *answer.more)) if verdict is Verdict.WORK else ()

    async def heartbeat(self, worker: str, step: int, attempt: int) -> bool:
        request = pb.HeartbeatRequest(worker=worker, step=step, attempt=attempt)
        return (await self._call(self._stub.Heartbeat, request)).accepted

    async def complete(
        self, worker: str, step: int, attempt: int, micro_step: str, seconds: float, sums: dict[str, float]
    ) -> bool:
        request = pb.CompleteRequest(
            worker=worker, step=step, attempt=attempt, micro_step=micro_step, seconds=seconds, metrics=sums
        )
        return (await self._call(self._stub.Complete, request)).accepted

    async def offer(
        self, worker: str, step: int, attempt: int, micro_steps: frozenset[str], transfer: str
    ) -> bool:
        request = pb.OfferRequest(
            worker=worker, step=step, attempt=attempt, micro_steps=sorted(micro_steps), transfer=transfer
        )
        return (await self._call(self._stub.Offer, request)).accepted

    @staticmethod
    async def _call(method: grpc.aio.UnaryUnaryMultiCallable, request: object) -> object:
        try:
            return await method(request)
        except grpc.aio.AioRpcError as error:
            raise CoreUnreachable(f"core: {error.code().name}: {error.details()}") from error


def _work(ref: MicroStepRef) -> pb.Work:
    return pb.Work(micro_step=ref.micro_step, digest=ref.digest, blob_path=ref.blob.path, blob_size=ref.blob.size)


def _ref(work: pb.Work | pb.ClaimResponse) -> MicroStepRef:
    """What a satellite needs to fetch and verify it; what it costs is the core's business."""
    blob = BlobRef(work.blob_path, work.digest, work.blob_size)
    return MicroStepRef(work.micro_step, work.digest, 0.0, 0, 0, 0, blob)
