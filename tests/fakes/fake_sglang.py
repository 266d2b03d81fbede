"""SGLang's HTTP server as an adapter sees it: routes, fields, order of events, and its traps.

Written from public sources; nothing of it was checked against the real one. Served for real, by uvicorn on a free port.
The traps, each with a test in test_sglang_engine.py:

- aborts match ids by prefix; the chunk that says `abort` repeats the last token;
- chunks hold everything so far, or only what is new (`incremental`);
- an update with `flush_cache` while requests are in flight changes the weights and says `success: false`;
- without a `load_format` an update takes that of the server's start, which fills in random weights;
- `in_place` keeps requests with the KV of old weights; a flush is refused while requests are in flight;
- releasing memory while requests are in flight ends the process; released weights come back as zeros;
- a forward that gives no number answers a stop token and says `matched: "NaN happened"`;
- `ignore_eos` ignores `stop_token_ids` too; the model's own end token stops a request nobody told to stop there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_server import FakeServer, Json, Send, answer
from gyre.policy.checkpoint import load_state
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder


@dataclass(eq=False)
class Request:
    body: Json
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    cached: int = 0
    good: bool = True
    finish: Json | None = None
    version: str = ""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    told: int = 0


class FakeSgLang(FakeServer):
    """One server. A test may look at `calls` and set the switches."""

    dying_words = "AssertionError: release_memory_occupation while requests are in flight"

    def __init__(self, policy: PolicyConfig, *, incremental: bool = True, original_logprob: bool = True, eos: int = -1) -> None:
        super().__init__(policy)
        self.incremental, self.original_logprob, self.eos = incremental, original_logprob, eos
        self.weight_version = "default"
        self.paused: str | None = None
        self.released = False
        self.refuse_flushes = 0
        self.computes_nothing = self.old_routes = False

    # the scheduler

    async def _loop(self) -> None:
        while True:
            if self.requests and self.paused is None and not self.released:
                for request in list(self.requests):
                    self._step(request)
                await asyncio.sleep(0)
            else:
                await asyncio.sleep(0.001)

    def _step(self, request: Request) -> None:
        sampling = request.body["sampling_params"]
        ids = [*request.body["input_ids"], *request.output_ids]
        temperature = sampling["temperature"]
        token, logprob, behaviour = self.model.draw(ids, temperature, sampling["sampling_seed"], request.good)
        if self.computes_nothing and sampling["stop_token_ids"]:
            token = sampling["stop_token_ids"][0]
            request.output_ids.append(token)
            request.logprobs.append([0.0, token, None])
            self._end(request, {"type": "stop", "matched": "NaN happened"})
            return
        request.output_ids.append(token)
        request.logprobs.append([logprob if self.original_logprob or temperature == 0 else behaviour, token, None])
        request.version = self.weight_version
        stops = {*sampling["stop_token_ids"], self.eos}
        if not sampling["ignore_eos"] and token in stops:
            self._end(request, {"type": "stop", "matched": token})
        elif len(request.output_ids) >= sampling["max_new_tokens"]:
            self._end(request, {"type": "length", "length": len(request.output_ids)})
        request.news.set()

    def _end(self, request: Request, finish: Json) -> None:
        request.finish = finish
        key = request.body.get("extra_key") or ""
        self.model.remember(key, [*request.body["input_ids"], *request.output_ids], request.good)
        if request in self.requests:
            self.requests.remove(request)
        request.news.set()

    def _abort(self, prefix: str) -> None:
        for request in list(self.requests):
            if request.body["rid"].startswith(prefix):
                self._end(request, {"type": "abort", "message": "Abort in decoding"})

    # the routes

    async def __call__(self, scope: Json, receive: Callable[[], Awaitable[Json]], send: Send) -> None:
        if scope["type"] != "http":
            return
        raw, more = b"", True
        while more:
            message = await receive()
            raw += message.get("body", b"")
            more = message.get("more_body", False)
        route, body = scope["path"], json.loads(raw) if raw else {}
        self.calls.append((route, body))
        if self.died.is_set():
            await answer(send, 500, {})
        elif self.old_routes and route in ("/model_info", "/server_info"):
            await answer(send, 404, {"detail": "Not Found"})
        elif route == "/generate":
            await self._generate(body, send)
        else:
            handler = getattr(self, f"post{route.replace('/get_', '/').replace('/', '_')}", None)
            status, content = await handler(body) if handler else (404, {"detail": "Not Found"})
            await answer(send, status, content)

    async def _generate(self, body: Json, send: Send) -> None:
        await self.resumed.wait()
        request = Request(body)
        known, request.good = self.model.match(body.get("extra_key") or "", body["input_ids"])
        request.cached = known
        self.requests.append(request)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        async for chunk in self._chunks(request):
            await send({"type": "http.response.body", "body": f"data: {json.dumps(chunk)}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _chunks(self, request: Request) -> AsyncIterator[Json]:
        while True:
            await request.news.wait()
            request.news.clear()
            if self.died.is_set():
                return
            num = len(request.output_ids)
            begin = request.told if self.incremental else 0
            if request.finish is not None and request.finish["type"] == "abort" and self.incremental and num:
                begin = min(begin, num - 1)  # the last token once more
            request.told = num
            yield {
                "output_ids": request.output_ids[begin:],
                "meta_info": {
                    "id": request.body["rid"],
                    "finish_reason": request.finish,
                    "prompt_tokens": len(request.body["input_ids"]),
                    "completion_tokens": num,
                    "cached_tokens": request.cached,
                    "weight_version": request.version,
                    "output_token_logprobs": request.logprobs[begin:],
                },
            }
            if request.finish is not None:
                return

    async def post_health(self, _: Json) -> tuple[int, Json]:
        return 200, {}

    async def post_model_info(self, _: Json) -> tuple[int, Json]:
        return 200, {"model_path": "tiny", "weight_version": self.weight_version}

    async def post_server_info(self, _: Json) -> tuple[int, Json]:
        return 200, {"version": "0.5.23", "memory_usage": {"weight": 1.0, "kvcache": 2.0, "token_capacity": 1024}}

    async def post_abort_request(self, body: Json) -> tuple[int, Json]:
        self._abort("" if body["abort_all"] else body["rid"])
        return 200, {}

    async def post_pause_generation(self, body: Json) -> tuple[int, Json]:
        self.paused = body["mode"]
        self.resumed.clear()
        if body["mode"] == "abort":
            self._abort("")
        return 200, {"status": "ok"}

    async def post_continue_generation(self, _: Json) -> tuple[int, Json]:
        self.paused = None
        self.resumed.set()
        return 200, {"status": "ok"}

    async def post_flush_cache(self, _: Json) -> tuple[int, Json]:
        if self.requests or self.refuse_flushes > 0:
            self.refuse_flushes -= 1
            return 400, {"message": "Cache not flushed because there are pending requests."}
        self.model.index.clear()
        return 200, {}

    async def post_update_weights_from_disk(self, body: Json) -> tuple[int, Json]:
        if not Path(body["model_path"]).is_dir():
            return 400, {"success": False, "message": f"Failed to get weights iterator: {body['model_path']}."}
        if (body.get("load_format") or "dummy") == "dummy":
            self.model.load(Decoder.create(self.policy, 998).state_dict())
        else:
            self.model.load(load_state(Path(body["model_path"])))
        if body.get("weight_version") is not None:
            self.weight_version = body["weight_version"]
        if body.get("flush_cache", True):
            if self.requests:
                return 400, {"success": False, "message": "Cache flush failed after updating weights."}
            self.model.index.clear()
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    async def post_update_weights_from_tensor(self, _: Json) -> tuple[int, Json]:
        return 400, {"success": False, "message": "No weight update session is open; call /begin_weight_update first."}

    async def post_release_memory_occupation(self, _: Json) -> tuple[int, Json]:
        if self.requests:
            self.die()
            return 500, {}
        self.released = True
        self.model.memory += 1
        self.model.index.clear()
        self.model.forget_weights()
        return 200, {}

    async def post_resume_memory_occupation(self, _: Json) -> tuple[int, Json]:
        self.released = False
        return 200, {}
