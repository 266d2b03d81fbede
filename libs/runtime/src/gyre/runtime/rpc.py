"""gRPC servers and clients: health and reflection, a deadline on every call, trace context in metadata.

Errors map so: unusable argument INVALID_ARGUMENT, stale epoch or refused state FAILED_PRECONDITION, not now
UNAVAILABLE, too much RESOURCE_EXHAUSTED. A client call without its own deadline gets the channel's default; a server
refuses a call that has none, so that nothing waits for ever.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from gyre.runtime import telemetry

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024  # a prompt of a million token ids is 4 MB, gRPC's own limit
_COMMON = [("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES), ("grpc.keepalive_time_ms", 20_000),
           ("grpc.keepalive_timeout_ms", 10_000), ("grpc.keepalive_permit_without_calls", 1)]
# A server that had no CPU for a while sees queued pings arrive together; it must not hang up on live streams for that.
_SERVER = [*_COMMON, ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000), ("grpc.http2.max_ping_strikes", 0),
           ("grpc.so_reuseport", 0)]
_CLIENT = [*_COMMON, ("grpc.min_reconnect_backoff_ms", 100), ("grpc.initial_reconnect_backoff_ms", 100),
           ("grpc.max_reconnect_backoff_ms", 1000)]
_EXEMPT = ("/grpc.health.", "/grpc.reflection.")


class _RequireDeadline(grpc.aio.ServerInterceptor):
    """Refuses calls without a deadline; makes the caller's trace the parent of what the handler does."""

    async def intercept_service(self, continuation: Callable[..., Awaitable[Any]],
                                details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith(_EXEMPT):
            return handler
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _checked(handler.unary_unary, details), handler.request_deserializer, handler.response_serializer)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                _checked_stream(handler.unary_stream), handler.request_deserializer, handler.response_serializer)
        return handler


# gRPC reports "no deadline" as a remaining time of centuries in some versions and as None in others.
_FOREVER_S = 10 * 365 * 86400.0


async def _refuse_without_deadline(context: grpc.aio.ServicerContext) -> None:
    remaining = context.time_remaining()
    if remaining is None or remaining > _FOREVER_S:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no deadline: every call needs one")


def _checked(method: Callable[..., Awaitable[Any]], details: grpc.HandlerCallDetails) -> Callable[..., Awaitable[Any]]:
    name = details.method.lstrip("/")

    async def handle(request: Any, context: grpc.aio.ServicerContext) -> Any:
        await _refuse_without_deadline(context)
        parent = {k: v for k, v in context.invocation_metadata() or () if k == "traceparent"}
        if not parent:
            return await method(request, context)
        with telemetry.span(name, parent, telemetry.SpanKind.SERVER, rpc__system__name="grpc", rpc__method=name):
            return await method(request, context)

    return handle


def _checked_stream(method: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    async def handle(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        await _refuse_without_deadline(context)
        async for reply in method(request, context):
            yield reply

    return handle


class Server:
    """A gRPC server of one process: its services, health and reflection."""

    def __init__(self, listen: str, services: Sequence[tuple[str, Callable[[grpc.aio.Server], None]]]) -> None:
        self._listen = listen
        self._names = [name for name, _ in services]
        self._server = grpc.aio.server(options=_SERVER, interceptors=[_RequireDeadline()])
        self._health = health.aio.HealthServicer()
        for _, register in services:
            register(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        self.port = self._server.add_insecure_port(listen)

    async def start(self) -> None:
        """Listen; every service is NOT_SERVING until `set_serving(True)`."""
        await self.set_serving(False)
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def stop(self, grace_s: float = 2.0) -> None:
        await self.set_serving(False)
        await self._server.stop(grace_s)


class _Defaults(grpc.aio.UnaryUnaryClientInterceptor):
    """Adds the default deadline and the current trace context to unary calls."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    async def intercept_unary_unary(self, continuation: Callable[..., Awaitable[Any]],
                                    details: grpc.aio.ClientCallDetails, request: Any) -> Any:
        carrier = telemetry.inject()
        metadata = grpc.aio.Metadata(*(details.metadata or ()), *carrier.items()) if carrier else details.metadata
        timeout = self._timeout_s if details.timeout is None else details.timeout
        return await continuation(grpc.aio.ClientCallDetails(details.method, timeout, metadata, details.credentials,
                                                             details.wait_for_ready), request)


def channel(address: str, timeout_s: float = 10.0) -> grpc.aio.Channel:
    """A channel whose unary calls have a deadline of `timeout_s` unless they bring their own.

    Streaming calls must pass `timeout=` themselves; the server refuses them otherwise.
    """
    return grpc.aio.insecure_channel(address, options=_CLIENT, interceptors=[_Defaults(timeout_s)])
