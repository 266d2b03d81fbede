"""One engine process over gRPC: the router's `EnginePeer` and the keeper's `EngineControl`."""

from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import numpy as np
from gyre.contracts.errors import EngineError
from gyre.contracts.events import WeightsPublished
from gyre.proto.rollout.v1 import engine_pb2 as pb
from gyre.proto.rollout.v1.engine_pb2_grpc import EngineServiceStub
from gyre.rollout.attempt import Attempt, Chunk, EngineFull, EngineGone, EngineRefused
from gyre.rollout.engine_wire import frozen_message, frozen_of, offer_of, reservation_message, stage_message, stage_of
from gyre.rollout.engines.base import QUEUE_FULL
from gyre.rollout.engines.moving import ExportOf, Frozen, MoveRefused, Offer, Reservation, Stage, TicketUnknown

_REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE)
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


@dataclass(frozen=True, slots=True)
class Observed:
    """What an engine says of itself. `kv_tokens_total` 0: it did not say."""

    version: int
    asleep: bool
    admitting: bool
    migration: str = "replay"
    layout: str = ""
    kv_tokens_free: int = 0
    kv_tokens_total: int = 0


class GrpcEngine:
    """The engine behind one channel. `slow_timeout_s` bounds waking, sleeping and loading weights."""

    def __init__(self, channel: grpc.aio.Channel, slow_timeout_s: float = 600.0) -> None:
        self._stub = EngineServiceStub(channel)
        self._slow_timeout_s = slow_timeout_s

    async def generate(self, attempt: Attempt) -> AsyncIterator[Chunk]:
        """See `EngineClient.generate`. Leaving the iterator early aborts the request on the engine."""
        sampling = attempt.sampling
        request = pb.GenerateRequest(
            request_id=attempt.request_id, prompt_ids=attempt.prompt.astype("<i4", copy=False).tobytes(),
            max_tokens=attempt.max_tokens, temperature=sampling.temperature, top_p=sampling.top_p,
            top_k=sampling.top_k, stop_token_ids=attempt.stop_ids, seed=sampling.seed, namespace=attempt.namespace,
            num_emitted=attempt.num_emitted, ticket=attempt.ticket)
        call = self._stub.Generate(request, timeout=attempt.timeout_s)
        try:
            async for message in call:
                yield _chunk(message)
        except grpc.aio.AioRpcError as error:
            raise _failure(error)(f"{error.code().name}: {error.details()}") from error
        finally:
            call.cancel()

    async def observe(self) -> Observed:
        """Raises EngineGone."""
        report = await self._ask(self._stub.GetLoad(pb.GetLoadRequest(), timeout=5.0))
        return Observed(report.version, report.asleep, report.admitting, report.migration or "replay", report.layout,
                        report.kv_tokens_free, report.kv_tokens_total)

    async def set_admission(self, open_: bool) -> None:
        """Raises EngineGone."""
        await self._ask(self._stub.SetAdmission(pb.SetAdmissionRequest(open=open_), timeout=10.0))

    async def sleep(self, epoch: int) -> None:
        """Raises EngineGone, or EngineError if the engine refuses."""
        await self._ask(self._stub.Sleep(pb.SleepRequest(epoch=epoch), timeout=self._slow_timeout_s))

    async def wake(self, epoch: int, weights: WeightsPublished) -> tuple[int, str]:
        """(version, checksum) the engine verified. Raises EngineGone, or EngineError if the engine refuses."""
        request = pb.WakeRequest(epoch=epoch, weights=_weights(weights))
        reply = await self._ask(self._stub.Wake(request, timeout=self._slow_timeout_s))
        return reply.version, reply.checksum

    async def load(self, weights: WeightsPublished) -> tuple[int, str]:
        """(version, checksum) the engine verified. Raises EngineGone, or EngineError if the engine refuses."""
        request = pb.LoadWeightsRequest(weights=_weights(weights))
        reply = await self._ask(self._stub.LoadWeights(request, timeout=self._slow_timeout_s))
        return reply.version, reply.checksum

    async def probe(self) -> tuple[int, str, bool]:
        """(version, checksum, ok). Raises EngineGone."""
        reply = await self._ask(self._stub.Probe(pb.ProbeRequest(), timeout=self._slow_timeout_s))
        return reply.version, reply.checksum, reply.ok

    async def open_export(self, ticket: str, what: ExportOf, epoch: int, lease_s: float, timeout_s: float) -> Offer:
        """See `EnginePeer`."""
        request = pb.OpenExportRequest(ticket=ticket, epoch=epoch, request_id=what.request_id,
                                       namespace=what.namespace, lease_s=lease_s)
        return offer_of(ticket, await _moving(self._stub.OpenExport(request, timeout=timeout_s)))

    async def read_stage(self, ticket: str, first_block: int, timeout_s: float) -> Stage:
        """See `EnginePeer`."""
        request = pb.ReadStageRequest(ticket=ticket, first_block=first_block)
        return stage_of(await _moving(self._stub.ReadStage(request, timeout=timeout_s)))

    async def freeze(self, ticket: str, first_block: int, what: ExportOf, epoch: int, timeout_s: float) -> Frozen:
        """See `EnginePeer`."""
        request = pb.FreezeRequest(ticket=ticket, first_block=first_block, request_id=what.request_id,
                                   namespace=what.namespace, epoch=epoch)
        return frozen_of(await _moving(self._stub.Freeze(request, timeout=timeout_s)))

    async def reserve(self, reservation: Reservation, timeout_s: float) -> None:
        """See `EnginePeer`."""
        await _moving(self._stub.Reserve(reservation_message(reservation), timeout=timeout_s))

    async def pull(self, ticket: str, region: str, stage: Stage, timeout_s: float) -> None:
        """See `EnginePeer`. The engine gives up a little earlier, so that its own reason arrives."""
        request = pb.PullRequest(ticket=ticket, region=region, stage=stage_message(stage), timeout_s=0.9 * timeout_s)
        await _moving(self._stub.Pull(request, timeout=timeout_s))

    async def commit(self, ticket: str, frozen: Frozen, timeout_s: float) -> None:
        """See `EnginePeer`."""
        await _moving(self._stub.Commit(pb.CommitRequest(ticket=ticket, frozen=frozen_message(frozen)), timeout=timeout_s))

    async def release(self, ticket: bytes, timeout_s: float) -> bool:
        """See `EnginePeer`."""
        reply = await _moving(self._stub.ReleaseTicket(pb.ReleaseTicketRequest(ticket=ticket), timeout=timeout_s))
        return reply.found

    async def _ask(self, call: grpc.aio.UnaryUnaryCall) -> object:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise (EngineGone if error.code() in _GONE else EngineError)(f"{error.code().name}: {error.details()}") from error


async def _moving(call: Awaitable[Any]) -> Any:
    """The answer to one call of a move. Raises EngineGone, TicketUnknown or MoveRefused."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        kind = EngineGone if error.code() in _GONE else MoveRefused
        if error.code() == grpc.StatusCode.NOT_FOUND:
            kind = TicketUnknown
        raise kind(f"{error.code().name}: {error.details()}") from error


def _failure(error: grpc.aio.AioRpcError) -> type[EngineError]:
    """What a call that ended early means. gRPC itself also says RESOURCE_EXHAUSTED, of a message that is too large."""
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return EngineFull if (error.details() or "").startswith(QUEUE_FULL) else EngineRefused
    return EngineRefused if error.code() in _REFUSED else EngineGone


def _weights(weights: WeightsPublished) -> pb.WeightsRef:
    return pb.WeightsRef(version=weights.version, checksum=weights.checksum, transfer=weights.transfer,
                         checkpoint=weights.checkpoint)


def _chunk(message: pb.TokenChunk) -> Chunk:
    return Chunk(message.index, np.frombuffer(message.token_ids, "<i4"), np.frombuffer(message.logprobs, "<f4"),
                 np.frombuffer(message.behaviour_logprobs, "<f4"), tuple(message.versions), message.finish,
                 message.detail, tuple(message.kv_versions), message.num_reused)
