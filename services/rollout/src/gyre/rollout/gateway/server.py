"""The gateway's HTTP surface: routes only. An ASGI application, because a call must cost little.

A harness that disconnects does not end its call: it may retry and is then owed the same answer.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from gyre.rollout.gateway.calls import Calls
from gyre.rollout.gateway.dialects import anthropic, chat
from gyre.rollout.gateway.dialects.anthropic import ANTHROPIC
from gyre.rollout.gateway.dialects.base import AnswerEvents, Dialect, Limits, Opening
from gyre.rollout.gateway.dialects.chat import CHAT
from gyre.rollout.gateway.dialects.responses import RESPONSES
from gyre.rollout.gateway.evidence import read_evidence
from gyre.rollout.gateway.messages import CallRefused, ChatRequest
from gyre.rollout.gateway.session import PendingCall, Session, Sessions

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Headers = dict[bytes, bytes]

JSON = [(b"content-type", b"application/json")]
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
          (b"x-accel-buffering", b"no")]
KEEPALIVE_S = 15.0
KEEPALIVE = b": keepalive\n\n"
DIALECTS = {"/v1/chat/completions": CHAT, "/v1/messages": ANTHROPIC, "/v1/responses": RESPONSES}
COUNT_TOKENS = "/v1/messages/count_tokens"
SERVED = (*(f"POST {path}" for path in DIALECTS), f"POST {COUNT_TOKENS}", "GET /v1/models", "GET /health")


class GatewayApp:
    """The ASGI application."""

    def __init__(self, sessions: Sessions, calls: Calls, limits: Limits) -> None:
        self._sessions = sessions
        self._calls = calls
        self._limits = limits
        self._routes: dict[tuple[str, str], Callable[[Headers, Receive, Send], Awaitable[None]]] = {
            ("POST", path): partial(self._call, dialect) for path, dialect in DIALECTS.items()}
        self._routes[("POST", COUNT_TOKENS)] = self._count
        self._routes[("GET", "/v1/models")] = self._models
        for path in ("/", "/health", "/v1"):
            for method in ("GET", "HEAD"):
                self._routes[(method, path)] = self._health

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        method, path = scope["method"], scope["path"].rstrip("/") or "/"
        handler = self._routes.get((method, path))
        try:
            if handler is None:
                raise self._unserved(method, path)
            await handler(dict(scope["headers"]), receive, send)
        except CallRefused as error:
            spoken = next((d for route, d in DIALECTS.items() if path.startswith(route)), CHAT)
            await _respond(send, error.status, spoken.error(error))

    def _unserved(self, method: str, path: str) -> CallRefused:
        served = ", ".join(SERVED)
        if any(known == path for _, known in self._routes):
            return CallRefused(405, f"{method} {path}: served are {served}")
        if path.startswith("/v1/"):
            return CallRefused(501, f"{method} {path} is not served yet; served are {served}", "not_implemented_error",
                               "not_implemented")
        return CallRefused(404, f"{method} {path}: served are {served}", code="not_found")

    # ------------------------------------------------------------ routes

    async def _health(self, headers: Headers, receive: Receive, send: Send) -> None:
        await _respond(send, 200, msgspec.json.encode({"status": "ok", "executions": len(self._sessions)}))

    async def _models(self, headers: Headers, receive: Receive, send: Send) -> None:
        self._session(headers)
        settings = self._calls.settings
        await _respond(send, 200, chat.models_body(settings.model, settings.max_context))

    async def _count(self, headers: Headers, receive: Receive, send: Send) -> None:
        """How many tokens a prompt would have. Nothing is sampled or recorded."""
        session = self._session(headers)
        request = ANTHROPIC.parse(await _body(headers, receive, self._limits.max_body_bytes), self._limits)
        await _respond(send, 200, anthropic.count_body(self._calls.count(session, request)))

    async def _call(self, dialect: Dialect, headers: Headers, receive: Receive, send: Send) -> None:
        session = self._session(headers)
        try:
            request = dialect.parse(await _body(headers, receive, self._limits.max_body_bytes), self._limits)
            key, pending = self._calls.start(session, request, read_evidence(headers, request))
        except CallRefused:
            session.num_errors += 1
            raise
        gone = asyncio.ensure_future(receive())
        try:
            if request.stream:
                await self._stream(dialect, pending, request, send)
            else:
                answer = await asyncio.shield(pending.result)
                await _respond(send, 200, dialect.answer(self._opening(pending, request), answer))
            _delivered(session, key, pending, gone)
        finally:
            gone.cancel()

    async def _stream(self, dialect: Dialect, pending: PendingCall, request: ChatRequest, send: Send) -> None:
        """The answer as server-sent events; an error becomes the status before the first one and an event after it."""
        events: AnswerEvents | None = None
        num_shown, started = 0, False

        async def write(data: bytes, more: bool = True) -> None:
            nonlocal started
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
            await send({"type": "http.response.body", "body": data, "more_body": more})

        while not pending.result.done():
            text = await _growth(pending, num_shown)
            if text:
                events = events or dialect.events(self._opening(pending, request))
                num_shown += len(text)
                await write(events.text(text))
            elif not pending.result.done():
                await write(KEEPALIVE)
        error = pending.result.exception()
        if error is not None and not started:
            raise error
        events = events or dialect.events(self._opening(pending, request))
        end = events.error(error) if isinstance(error, CallRefused) else events.end(pending.result.result())
        await write(end, more=False)

    def _opening(self, pending: PendingCall, request: ChatRequest) -> Opening:
        return Opening(pending.answer_id, pending.created, self._calls.settings.model, request, pending.usage)

    def _session(self, headers: Headers) -> Session:
        """The session of the key, which comes as a bearer's or, with Anthropic's clients, as `x-api-key`."""
        key = headers.get(b"x-api-key")
        authorization = headers.get(b"authorization", b"") if key is None else b"Bearer " + key
        return self._sessions.authenticate(authorization.decode("latin-1"))


def _delivered(session: Session, key: bytes, pending: PendingCall, gone: asyncio.Future[dict[str, Any]]) -> None:
    """Note that the answer reached its connection, unless that was lost before the last byte was sent."""
    failed = pending.result.done() and pending.result.exception() is not None
    lost = gone.done() and not gone.cancelled() and gone.result()["type"] == "http.disconnect"
    if not failed and not lost:
        session.delivered(key)


async def _growth(pending: PendingCall, num_shown: int) -> str:
    """More text, or nothing after a while or at the end."""
    try:
        async with asyncio.timeout(KEEPALIVE_S):
            return await pending.growth(num_shown)
    except TimeoutError:
        return ""


async def _body(headers: Headers, receive: Receive, limit: int) -> bytes:
    """The whole body. Raises CallRefused: 413 if it passes `limit` bytes, 415 if it is compressed."""
    if headers.get(b"content-encoding", b"identity") != b"identity":
        raise CallRefused(415, "Content-Encoding: compressed bodies are not served")
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > limit:
        raise CallRefused(413, f"body: {int(length)} bytes, at most {limit}", code="request_too_large")
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CallRefused(400, "body: the connection was lost")
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise CallRefused(413, f"body: at most {limit} bytes", code="request_too_large")
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


async def _respond(send: Send, status: int, body: bytes) -> None:
    headers = [*JSON, (b"content-length", str(len(body)).encode())]
    if status == 429:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
