"""One engine process over gRPC: the router's `EngineClient` and the keeper's `EngineControl`."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import grpc.aio
import numpy as np
from gyre.contracts.errors import EngineError
from gyre.contracts.events import WeightsPublished
from gyre.proto.rollout.v1 import engine_pb2 as pb
from gyre.proto.rollout.v1.engine_pb2_grpc import EngineServiceStub
from gyre.rollout.router import Attempt, Chunk, EngineGone, EngineRefused

_REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE)


@dataclass(frozen=True, slots=True)
class Observed:
    """What an engine says of itself."""

    version: int
    asleep: bool
    admitting: bool


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
            num_emitted=attempt.num_emitted)
        call = self._stub.Generate(request, timeout=attempt.timeout_s)
        try:
            async for message in call:
                yield _chunk(message)
        except grpc.aio.AioRpcError as error:
            kind = EngineRefused if error.code() in _REFUSED else EngineGone
            raise kind(f"{error.code().name}: {error.details()}") from error
        finally:
            call.cancel()

    async def observe(self) -> Observed:
        """Raises EngineGone."""
        report = await self._ask(self._stub.GetLoad(pb.GetLoadRequest(), timeout=5.0))
        return Observed(report.version, report.asleep, report.admitting)

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

    async def _ask(self, call: grpc.aio.UnaryUnaryCall) -> object:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            gone = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            raise (EngineGone if gone else EngineError)(f"{error.code().name}: {error.details()}") from error


def _weights(weights: WeightsPublished) -> pb.WeightsRef:
    return pb.WeightsRef(version=weights.version, checksum=weights.checksum, transfer=weights.transfer,
                         checkpoint=weights.checkpoint)


def _chunk(message: pb.TokenChunk) -> Chunk:
    return Chunk(message.index, np.frombuffer(message.token_ids, "<i4"), np.frombuffer(message.logprobs, "<f4"),
                 np.frombuffer(message.behaviour_logprobs, "<f4"), tuple(message.versions), message.finish,
                 message.detail)
