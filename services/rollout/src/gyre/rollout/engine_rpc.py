"""The engine over gRPC: bytes at the edge, coalesced token chunks, errors as status codes.

INVALID_ARGUMENT: the request can never be served. UNAVAILABLE: admission is closed or the devices are taken; try again
or elsewhere. RESOURCE_EXHAUSTED: the queue is full. FAILED_PRECONDITION: a stale epoch, or weights that do not verify.
The calls that move requests are in `engine_moves.py`.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NoReturn

import grpc
import grpc.aio
import numpy as np
from gyre.contracts.errors import EngineError
from gyre.proto.common.v1 import status_pb2
from gyre.proto.rollout.v1 import engine_pb2 as pb
from gyre.rollout.engine_cell import DevicesTaken, EngineCell
from gyre.rollout.engine_moves import EngineMoves
from gyre.rollout.engines.base import (
    AdmissionClosed,
    EngineBusy,
    Event,
    Finish,
    GenerateRequest,
    InvalidRequest,
    TokenEvent,
)
from gyre.rollout.engines.weights import WeightsSource

SERVICE = "gyre.proto.rollout.v1.EngineService"

_CODES: tuple[tuple[type[EngineError], grpc.StatusCode], ...] = (
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (AdmissionClosed, grpc.StatusCode.UNAVAILABLE),
    (DevicesTaken, grpc.StatusCode.UNAVAILABLE),
    (EngineBusy, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (EngineError, grpc.StatusCode.FAILED_PRECONDITION),
)

Context = grpc.aio.ServicerContext


class EngineRpc(EngineMoves):
    """`flush_s`: how long a sampled token may wait for company; the terminal event waits for nothing."""

    def __init__(self, cell: EngineCell, flush_s: float, status: Callable[[], status_pb2.Status]) -> None:
        super().__init__(cell)
        self._flush_s = flush_s
        self._status = status

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.TokenChunk]:
        """Streams tokens; a caller that goes away aborts its request."""
        engine = self._cell.engine
        try:
            stream = engine.submit(_request_of(request))
        except EngineError as error:
            await _refuse(context, error)
        try:
            while True:
                chunk = _chunk_of(await stream.take(self._flush_s))
                yield chunk
                if chunk.finish:
                    return
        finally:
            engine.abort(request.request_id)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        return pb.AbortResponse(found=self._cell.engine.abort(request.request_id))

    async def SetAdmission(self, request: pb.SetAdmissionRequest, context: Context) -> pb.SetAdmissionResponse:
        try:
            self._cell.engine.resume() if request.open else self._cell.engine.pause()
        except EngineError as error:
            await _refuse(context, error)
        return pb.SetAdmissionResponse()

    async def LoadWeights(self, request: pb.LoadWeightsRequest, context: Context) -> pb.LoadWeightsResponse:
        try:
            probe = await self._cell.load_weights(_source_of(request.weights))
        except EngineError as error:
            await _refuse(context, error)
        return pb.LoadWeightsResponse(version=probe.version, checksum=probe.checksum)

    async def Sleep(self, request: pb.SleepRequest, context: Context) -> pb.SleepResponse:
        try:
            freed = await self._cell.sleep(request.epoch)
        except EngineError as error:
            await _refuse(context, error)
        return pb.SleepResponse(freed_bytes=freed)

    async def Wake(self, request: pb.WakeRequest, context: Context) -> pb.WakeResponse:
        try:
            probe = await self._cell.wake(request.epoch, _source_of(request.weights))
        except EngineError as error:
            await _refuse(context, error)
        return pb.WakeResponse(version=probe.version, checksum=probe.checksum)

    async def Probe(self, request: pb.ProbeRequest, context: Context) -> pb.ProbeResponse:
        probe = await self._cell.engine.probe()
        return pb.ProbeResponse(version=probe.version, checksum=probe.checksum, ok=probe.ok, detail=probe.detail)

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.LoadReport:
        report, can = self._cell.load_report(), self._cell.engine.capabilities
        return pb.LoadReport(
            num_running=report.num_running, num_waiting=report.num_waiting, kv_tokens_free=report.kv_tokens_free,
            kv_tokens_total=report.kv_tokens_total, version=report.version, asleep=report.asleep,
            admitting=report.admitting, num_tokens_sampled=report.num_tokens_sampled,
            num_tokens_prefilled=report.num_tokens_prefilled, num_tokens_reused=report.num_tokens_reused,
            migration=can.migration, layout=can.layout, num_preempted=report.num_preempted, num_held=report.num_held,
        )  # fmt: skip

    async def GetStatus(self, request: status_pb2.StatusRequest, context: Context) -> status_pb2.Status:
        return self._status()


async def _refuse(context: Context, error: EngineError) -> NoReturn:
    code = next(code for kind, code in _CODES if isinstance(error, kind))
    await context.abort(code, str(error))
    raise AssertionError("abort raises")


def _request_of(request: pb.GenerateRequest) -> GenerateRequest:
    if len(request.prompt_ids) % 4:
        raise InvalidRequest(f"prompt_ids: {len(request.prompt_ids)} bytes are not whole little-endian int32")
    return GenerateRequest(
        request_id=request.request_id,
        prompt_ids=np.frombuffer(request.prompt_ids, dtype="<i4").astype(np.int32, copy=False),
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop_token_ids=tuple(request.stop_token_ids),
        seed=request.seed,
        namespace=request.namespace,
        num_emitted=request.num_emitted,
        ticket=request.ticket,
    )


def _source_of(weights: pb.WeightsRef) -> WeightsSource:
    return WeightsSource(weights.version, weights.checksum, weights.transfer, weights.checkpoint)


def _chunk_of(events: Sequence[Event]) -> pb.TokenChunk:
    """`events` hold at least one event and a `Finish` at most as the last one."""
    last = events[-1]
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    finish = last if isinstance(last, Finish) else None
    num = len(tokens)
    is_carried = any(t.kv_version != t.weights_version for t in tokens)
    return pb.TokenChunk(
        index=tokens[0].index if tokens else 0,
        token_ids=struct.pack(f"<{num}i", *(t.token_id for t in tokens)),
        logprobs=struct.pack(f"<{num}f", *(t.logprob for t in tokens)),
        behaviour_logprobs=struct.pack(f"<{num}f", *(t.behaviour_logprob for t in tokens)),
        versions=[t.weights_version for t in tokens],
        finish=finish.reason if finish else "",
        detail=finish.detail if finish else "",
        kv_versions=[t.kv_version for t in tokens] if is_carried else [],
        num_reused=finish.num_reused if finish else 0,
    )
