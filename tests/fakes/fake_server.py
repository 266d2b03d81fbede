"""What fakes of engine servers have in common: a real HTTP server over a tiny model, and a loop that computes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from tiny_model import TinyModel

Json = dict[str, Any]
Send = Callable[[Json], Awaitable[None]]


class FakeServer:
    """`gyre.rollout.engines.launched.Server`. Subclasses are the ASGI application; their requests have an event `news`."""

    dying_words = ""

    def __init__(self, policy: PolicyConfig) -> None:
        self.model = TinyModel(policy)
        self.policy = policy
        self.requests: list[Any] = []
        self.calls: list[tuple[str, Json]] = []
        self.died = asyncio.Event()
        self.resumed = asyncio.Event()
        self._web: uvicorn.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> str:
        """Starts serving with random weights, as `--load-format dummy` does."""
        self.model.load(Decoder.create(self.policy, 999).state_dict())
        self.resumed.set()
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(self, lifespan="off", log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        self._web = _Quiet(config)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._web.serve([listener])), loop.create_task(self._loop())]
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    def last_words(self) -> str:
        return self.dying_words

    async def stop(self) -> None:
        if self._web is not None:
            self._web.should_exit = self._web.force_exit = True
            self._tasks[1].cancel()
            await asyncio.wait(self._tasks)

    def die(self) -> None:
        """The process is gone."""
        self.died.set()
        for request in self.requests:
            request.news.set()

    async def _loop(self) -> None:
        raise NotImplementedError


class _Quiet(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


async def answer(send: Send, status: int, content: Json) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})
