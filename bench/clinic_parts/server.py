"""A light OpenAI Chat Completions endpoint over asyncio streams, in front of the batched generator.

Every execution has its own key. A call that continues the last one extends its token ids; nothing is tokenised again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from clinic_parts.generation import Generator, Request
from clinic_parts.learning import Context
from gyre.policy.tokenizer import ChatTokenizer

Messages = list[dict[str, str]]


class Session:
    """One execution as the endpoint sees it: its contexts, and the call during which it is to be killed."""

    def __init__(self, slot: int, kill_at: int | None, kill: Callable[[], None]) -> None:
        self.slot, self.kill_at, self.kill = slot, kill_at, kill
        self.contexts: list[Context] = []
        self.num_calls = 0
        self._known: Messages = []

    def prompt(self, tokenizer: ChatTokenizer, messages: Messages) -> list[int]:
        """Token ids of the call's prompt; opens a new context unless the messages extend the last call's."""
        if self.contexts and messages[: len(self._known)] == self._known:
            context = self.contexts[-1]
            if context.ids[-1] not in tokenizer.stop_ids:
                context.given(list(tokenizer.stop_ids))
            context.given(tokenizer.encode(tokenizer.render(messages[len(self._known) :])))
        else:
            self.contexts.append(Context())
            self.contexts[-1].given(tokenizer.encode(tokenizer.render(messages)))
        self._known = messages
        return list(self.contexts[-1].ids)

    def answered(self, request: Request, text: str) -> None:
        self.contexts[-1].answered(request.output, request.logprobs)
        self._known = [*self._known, {"role": "assistant", "content": text}]
        self.num_calls += 1


class ChatServer:
    """Serves calls of registered sessions; `decode` must run beside it."""

    def __init__(self, generator: Generator, tokenizer: ChatTokenizer) -> None:
        self.generator, self.tokenizer = generator, tokenizer
        self.sessions: dict[str, Session] = {}
        self._waiting: dict[int, asyncio.Future[Request]] = {}
        self._work = asyncio.Event()

    async def start(self) -> tuple[asyncio.Server, str]:
        """The listening server and its base URL."""
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, backlog=256)
        return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"

    async def decode(self) -> None:
        """The engine's loop: steps while there is anything to do."""
        while True:
            await self._work.wait()
            for request in self.generator.step():
                future = self._waiting.pop(request.slot)
                if not future.done():
                    future.set_result(request)
            if not self._waiting:
                self._work.clear()
            await asyncio.sleep(0)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
                body = json.loads(await reader.readexactly(int(fields["content-length"])))
                answer = await self._call(fields["authorization"].removeprefix("bearer "), body)
                if answer is None:
                    return
                writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\n\r\n".encode() + answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    async def _call(self, key: str, body: dict[str, Any]) -> bytes | None:
        """The answer, or None if this is the call that the execution does not survive."""
        session = self.sessions[key]
        if session.num_calls + 1 == session.kill_at:
            session.kill()
            return None
        prompt = session.prompt(self.tokenizer, body["messages"])
        request = Request(session.slot, prompt, body["max_tokens"])
        self.generator.submit(request)
        self._waiting[session.slot] = asyncio.get_running_loop().create_future()
        self._work.set()
        await self._waiting[session.slot]
        text = self.tokenizer.decode(request.output, skip_special_tokens=True)
        session.answered(request, text)
        message = {"role": "assistant", "content": text}
        return json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
