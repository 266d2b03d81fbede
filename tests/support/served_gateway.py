"""A gateway over a real socket, with clients of one execution."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import anthropic
import httpx
import openai
import uvicorn
from gyre.rollout.gateway.dialects.base import Limits
from gyre.rollout.gateway.server import GatewayApp
from rollout_fakes import Bench


class Served:
    """A gateway on a port. `client` and `anthropic` are the official ones, with the key of one execution."""

    def __init__(self, bench: Bench, server: uvicorn.Server, port: int) -> None:
        self.bench, self.server = bench, server
        self.url = f"http://127.0.0.1:{port}"
        self.session = bench.open()
        self.key = bench.sessions.secret(self.session.spec.execution)
        self.client = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0)
        self.anthropic = anthropic.AsyncAnthropic(base_url=self.url, api_key=self.key, max_retries=0)
        self.http = httpx.AsyncClient(base_url=self.url, headers={"Authorization": f"Bearer {self.key}"})


async def serve(bench: Bench) -> AsyncIterator[Served]:
    listener = socket.create_server(("127.0.0.1", 0))
    app = GatewayApp(bench.sessions, bench.calls, Limits(max_body_bytes=100_000))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="warning", timeout_graceful_shutdown=1))
    task = asyncio.create_task(server.serve([listener]))
    served = Served(bench, server, listener.getsockname()[1])
    yield served
    await served.client.close()
    await served.anthropic.close()
    await served.http.aclose()
    server.should_exit = True
    await task
