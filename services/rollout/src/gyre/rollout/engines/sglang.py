"""SGLang behind our contract: its HTTP server as a process beside this one, spoken to through `/generate`.

It has never been run here, only against a fake that copies its routes, fields and traps. What the adapter does about them:

- an abort matches ids by prefix: all ids are 32 hex digits;
- the last chunk of an aborted stream repeats a token: what is new is told by `completion_tokens` alone;
- an update that was refused its flush says so with `success: false` after the weights have changed: nothing is in flight
  when it comes, it does not flush, and the flush is asked for by itself;
- a load format of nothing means that of the server's start, `dummy`: it is named in every update;
- `ignore_eos` would ignore our stop tokens too: it stays off, and where the model's own end is not ours we go on;
- where it computed no number it answers a stop token of ours, and says so only in `matched`: an error;
- releasing memory while anything is in flight kills the scheduler: pause, flush, and only then release.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from gyre.rollout.engines.host import Call, Ended, Exported, HostError, Piece
from gyre.rollout.engines.http_client import EngineHttp
from gyre.rollout.engines.launched import Server
from gyre.rollout.engines.moving import Capabilities, MoveRefused

log = logging.getLogger(__name__)

_SEED_BITS = 2**63 - 1
_FLUSH_TRIES = 25


@dataclass(frozen=True)
class SgLangSettings:
    """`start_s`, `change_s` and `call_s` are deadlines: of the start, of a change of weights or memory, of a small call.

    `sleeps`: whether the server was started with a memory saver, so that memory can be released.
    """

    start_s: float = 900.0
    change_s: float = 300.0
    call_s: float = 30.0
    poll_s: float = 0.2
    sleeps: bool = True


class SgLangHost:
    """`gyre.rollout.engines.host.Host`. Cannot move a request (its roles are fixed by process): it is replayed."""

    def __init__(self, server: Server, settings: SgLangSettings) -> None:
        self.capabilities = Capabilities("replay", sleeps=settings.sleeps)
        self._http = EngineHttp("SGLang", server, settings.call_s, settings.poll_s)
        self.failed = self._http.failed
        self._settings = settings
        self._era = 0  # releases of the cache: part of every key, so that even a flush that failed lets nothing be hit

    async def start(self) -> None:
        """See `Host.start`."""
        await self._http.start(self._settings.start_s)

    async def generate(self, call: Call) -> AsyncIterator[Piece | Ended]:
        """See `Host.generate`."""
        seen = 0
        try:
            async for chunk in self._chunks(call):
                if "error" in chunk:
                    yield Ended("error", str(chunk["error"].get("message", chunk["error"])))
                    return
                piece, ended = parts_of(chunk, seen)
                if piece.ids:
                    seen += len(piece.ids)
                    yield piece
                if ended is not None:
                    yield ended
                    return
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            yield Ended("error", f"SGLang: {type(error).__name__}: {error}")
            return
        yield Ended("error", "SGLang's stream ended without a reason")

    async def abort(self, call_id: str) -> None:
        """See `Host.abort`."""
        await self._post("/abort_request", {"rid": call_id, "abort_all": False})

    async def hold(self) -> None:
        """See `Host.hold`. The mode that keeps requests would keep KV of old weights with them."""
        await self._post("/pause_generation", {"mode": "abort"}, self._settings.change_s)

    async def go_on(self) -> None:
        """See `Host.go_on`."""
        await self._post("/continue_generation", {})

    async def update(self, version: int, directory: Path) -> str:
        """See `Host.update`."""
        wanted = {
            "model_path": str(directory),
            "load_format": "auto",
            "flush_cache": False,
            "abort_all_requests": False,
            "weight_version": str(version),
        }
        answer = await self._post("/update_weights_from_disk", wanted, self._settings.change_s)
        if answer.get("success") is not True:
            raise HostError(f"SGLang did not take weights {version}: {answer.get('message', answer)}")
        found = await self.fingerprint()
        if found != str(version):
            raise HostError(f"SGLang says that it serves weights {found!r}, given were {version}")
        return found

    async def fingerprint(self) -> str:
        """See `Host.fingerprint`: the version it says it serves. What it computes with them, the golden check tells."""
        return str((await self._info("model_info")).get("weight_version", ""))

    async def reset_cache(self) -> None:
        """See `Host.reset_cache`. A flush is refused while a request is in flight, which an ended one may be for a turn."""
        for _ in range(_FLUSH_TRIES):
            if await self._flushed():
                return
            await asyncio.sleep(self._settings.poll_s)
        raise HostError("SGLang does not flush its cache: it says that requests are in flight")

    async def release(self) -> int:
        """See `Host.release`."""
        if not self._settings.sleeps:
            return 0
        held = (await self._info("server_info")).get("memory_usage") or {}
        self._era += 1
        await self._post("/release_memory_occupation", {}, self._settings.change_s)
        gigabytes = sum(float(held.get(part, 0.0)) for part in ("weight", "kvcache", "graph"))
        return int(gigabytes * 2**30)

    async def restore(self) -> bool:
        """See `Host.restore`. Weights that were dropped are not what they were."""
        if not self._settings.sleeps:
            return True
        await self._post("/resume_memory_occupation", {}, self._settings.change_s)
        return False

    async def export(self, call: Call) -> Exported:
        """See `Host.export`."""
        raise MoveRefused("SGLang cannot hand over the KV of a request; replay it")

    async def drop(self, ticket: bytes) -> None:
        """See `Host.drop`."""

    async def close(self) -> None:
        """See `Host.close`."""
        await self._http.close()

    async def _chunks(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        """The events of one streamed call."""
        body = {
            "rid": call.call_id,
            "input_ids": call.prompt_ids,
            "sampling_params": sampling_of(call),
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "stream": True,
            "extra_key": f"{self._era}/{call.salt}",
        }
        async with self._http.client.stream("POST", "/generate", json=body, timeout=self._http.streaming()) as answer:
            if answer.status_code != 200:
                await answer.aread()
                yield {"error": {"message": self._http.refusal("/generate", answer)}}
                return
            async for line in answer.aiter_lines():
                if line.startswith("data:") and (text := line[5:].strip()) != "[DONE]":
                    yield json.loads(text)

    async def _flushed(self) -> bool:
        return (await self._http.status("POST", "/flush_cache")).status_code == 200

    async def _post(self, route: str, body: dict[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        return await self._http.ask("POST", route, body, timeout_s)

    async def _info(self, what: str) -> dict[str, Any]:
        """`/model_info` or `/server_info`; older servers put `get_` before both."""
        answer = await self._http.status("GET", f"/{what}")
        if answer.status_code == 404:
            answer = await self._http.status("GET", f"/get_{what}")
        return self._http.content(f"/{what}", answer)


def sampling_of(call: Call) -> dict[str, Any]:
    """`sampling_params`; -1 turns top-k off."""
    return {
        "max_new_tokens": call.max_tokens,
        "temperature": call.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "stop_token_ids": list(call.stop_token_ids),
        "ignore_eos": False,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "sampling_seed": call.seed & _SEED_BITS,
    }


def parts_of(chunk: dict[str, Any], seen: int) -> tuple[Piece, Ended | None]:
    """What is new in a chunk, whether it holds everything so far or only what came last, and how it ended.

    `completion_tokens` counts; the chunk's own lists may repeat what was there. Raises KeyError, TypeError or ValueError
    for what is no chunk.
    """
    info = chunk["meta_info"]
    num_new = int(info["completion_tokens"]) - seen
    ids: Sequence[int] = chunk.get("output_ids") or []
    entries = info.get("output_token_logprobs") or []
    finish = info.get("finish_reason")
    problem = ""
    if num_new < 0 or num_new > min(len(ids), len(entries)):
        problem = f"{info['completion_tokens']} tokens after {seen}, with {len(ids)} ids and {len(entries)} logprobs"
        num_new = 0
    ids = list(ids[len(ids) - num_new :])
    entries = entries[len(entries) - num_new :]
    if not problem and [entry[1] for entry in entries] != ids:
        problem, ids, entries = f"logprobs are of other tokens than {ids[:8]}", [], []
    ended = None if finish is None else _ended(finish, int(info.get("cached_tokens") or 0))
    if problem or (ended is not None and ended.reason == "error"):
        return Piece([], []), Ended("error", f"SGLang: {problem}") if problem else ended
    return Piece(ids, [float(entry[0]) for entry in entries]), ended


def _ended(finish: dict[str, Any], num_reused: int) -> Ended:
    kind = finish.get("type")
    if isinstance(finish.get("matched"), str):  # we send no stop strings: "NaN happened", and the token is made up
        return Ended("error", f"SGLang: {finish}")
    if kind in ("stop", "length"):
        return Ended(kind, num_reused=num_reused)
    if kind == "abort" and finish.get("status_code") in (None, 200):
        return Ended("abort", str(finish.get("message") or ""), num_reused)
    return Ended("error", f"SGLang: {finish}")
