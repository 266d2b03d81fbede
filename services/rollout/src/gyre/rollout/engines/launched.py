"""The servers that adapters speak to: one that we start and end, or one that runs already."""

from __future__ import annotations

import asyncio
from typing import Protocol

from gyre.rollout.engines.server_process import ServerCommand, ServerProcess


class Server(Protocol):
    """The process that serves."""

    died: asyncio.Event

    async def start(self) -> str:
        """Starts it and returns its base URL; it need not answer yet."""
        ...

    def last_words(self) -> str:
        """For the message of whoever finds it dead."""
        ...

    async def stop(self) -> None:
        """Ends it."""
        ...


class LaunchedServer:
    """A server that we start and end."""

    def __init__(self, url: str, command: ServerCommand) -> None:
        self.died = asyncio.Event()
        self._url = url
        self._command = command
        self._process: ServerProcess | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """See `Server.start`."""
        self._process = await ServerProcess.start(self._command)
        self._watch = asyncio.get_running_loop().create_task(self._until_it_ends(self._process))
        return self._url

    def last_words(self) -> str:
        """See `Server.last_words`."""
        return "it was not started" if self._process is None else self._process.last_words()

    async def stop(self) -> None:
        """See `Server.stop`."""
        if self._watch is not None:
            self._watch.cancel()
        if self._process is not None:
            await self._process.stop()

    async def _until_it_ends(self, process: ServerProcess) -> None:
        await process.ended()
        self.died.set()


class RunningServer:
    """A server that somebody else started; it is never ended, and its death shows as calls that fail."""

    def __init__(self, url: str) -> None:
        self.died = asyncio.Event()
        self._url = url

    async def start(self) -> str:
        """See `Server.start`."""
        return self._url

    def last_words(self) -> str:
        """See `Server.last_words`."""
        return f"its log is where {self._url} was started"

    async def stop(self) -> None:
        """See `Server.stop`."""
