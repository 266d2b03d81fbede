"""What adapters of engines that serve HTTP have in common: a server that has to come up, answers in JSON, and may die."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
from gyre.rollout.engines.host import HostError
from gyre.rollout.engines.launched import Server

log = logging.getLogger(__name__)

PLAIN_TEXT = 500  # characters of an answer that go into a message
HEALTH_S = 5.0


class EngineHttp:
    """One server, called `name` in messages. `call_s`: deadline of a call that is given no other."""

    def __init__(self, name: str, server: Server, call_s: float, poll_s: float) -> None:
        self.failed = asyncio.Event()
        self._name, self._server, self._call_s, self._poll_s = name, server, call_s, poll_s
        self._http: httpx.AsyncClient | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self, start_s: float) -> None:
        """Starts the server and waits until it answers `/health`. Raises HostError if it dies or takes longer."""
        url = await self._server.start()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(base_url=url, timeout=self._call_s, limits=limits, trust_env=False)
        self._watch = asyncio.get_running_loop().create_task(self._until_it_dies())
        try:
            async with asyncio.timeout(start_s):
                while not await self._answers():
                    if self._server.died.is_set():
                        raise HostError(f"{self._name} ended while it started: {self._server.last_words()}")
                    await asyncio.sleep(self._poll_s)
        except TimeoutError:
            raise HostError(f"{self._name} does not answer after {start_s} s: {self._server.last_words()}") from None

    @property
    def client(self) -> httpx.AsyncClient:
        """For what is more than a question and an answer. Raises HostError before the start."""
        if self._http is None:
            raise HostError(f"{self._name} has not been started")
        return self._http

    def streaming(self) -> httpx.Timeout:
        """A token may wait behind a long queue, so reading has no deadline."""
        return httpx.Timeout(self._call_s, read=None)

    async def status(self, method: str, route: str, body: Any = None, timeout_s: float | None = None) -> httpx.Response:
        """The answer, whatever its status. Raises HostError if there is none."""
        try:
            return await self.client.request(method, route, json=body, timeout=timeout_s or self._call_s)
        except httpx.HTTPError as error:
            raise HostError(f"{self._name}: {route}: {type(error).__name__}: {error}") from error

    async def ask(self, method: str, route: str, body: Any = None, timeout_s: float | None = None) -> dict[str, Any]:
        """The JSON object of an answer, {} for an empty or textual one. Raises HostError unless it says 200."""
        return self.content(route, await self.status(method, route, body, timeout_s))

    def content(self, route: str, answer: httpx.Response) -> dict[str, Any]:
        """See `ask`."""
        if answer.status_code != 200:
            raise HostError(self.refusal(route, answer))
        try:
            content = answer.json()
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}

    def refusal(self, route: str, answer: httpx.Response) -> str:
        """What an answer of another status says; its body must have been read."""
        return f"{self._name}: {route} answered {answer.status_code}: {answer.text[:PLAIN_TEXT]}"

    async def close(self) -> None:
        """Ends the server if it is ours."""
        if self._watch is not None:
            self._watch.cancel()
        if self._http is not None:
            await self._http.aclose()
        await self._server.stop()

    async def _answers(self) -> bool:
        try:
            return (await self.client.get("/health", timeout=HEALTH_S)).status_code == 200
        except httpx.HTTPError:
            return False

    async def _until_it_dies(self) -> None:
        await self._server.died.wait()
        log.error("%s's process has ended: %s", self._name, self._server.last_words())
        self.failed.set()
