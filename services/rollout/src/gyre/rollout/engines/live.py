"""One request of a hosted engine while it is in flight: what it has emitted, and what is wrong with what the host sends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from gyre.rollout.engines.base import (
    QUEUE_FULL,
    EngineBusy,
    EventStream,
    Finish,
    GenerateRequest,
    InvalidRequest,
    TokenEvent,
)
from gyre.rollout.engines.host import Call, Piece

_ROUNDING = 1e-3  # by so much a log-probability may lie above zero


@dataclass(frozen=True)
class HostedConfig:
    """`max_position`: the longest context. `end_wait_s`: how long the host may take to end a call it was told to end;
    after that it counts as broken."""

    max_position: int
    kv_tokens: int = 32_768
    max_running: int = 64
    max_waiting: int = 1024
    end_wait_s: float = 30.0
    held_s: float = 120.0  # longer than the host holds KV for a ticket


def check_request(request: GenerateRequest, lives: Mapping[str, Live], config: HostedConfig, vocab_size: int) -> None:
    """Raises InvalidRequest for what can never be served beside `lives`, EngineBusy for what cannot be now."""
    if request.request_id in lives:
        raise InvalidRequest(f"request_id: {request.request_id!r} is in flight already")
    _check_fields(request, min(config.max_position, config.kv_tokens), vocab_size)
    num_waiting = sum(not live.running for live in lives.values())
    if num_waiting >= config.max_waiting:
        raise EngineBusy(f"{QUEUE_FULL}: {num_waiting} requests; try another cell or later")


def _check_fields(request: GenerateRequest, longest: int, vocab_size: int) -> None:
    if len(request.prompt_ids) + request.max_tokens > longest:
        raise InvalidRequest(f"prompt_ids + max_tokens: exceed {longest}, the longest context")
    ids = request.prompt_ids
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise InvalidRequest(f"prompt_ids: every id must be in 0..{vocab_size - 1}")
    if request.temperature not in (0.0, 1.0) or (request.temperature and (request.top_p != 1.0 or request.top_k)):
        raise InvalidRequest(
            f"temperature: {request.temperature} with top_p {request.top_p} and top_k {request.top_k}: this engine reports one "
            "log-probability per token, so that of the policy and that of what was sampled must be the same; use "
            "temperature 1 with top_p 1 and top_k 0, or temperature 0, or engine.backend = 'torch'"
        )


@dataclass(slots=True, eq=False)
class Live:
    """`kept`: the tokens emitted here. `call_id`: of the call that is out, '' between calls. `ending`: what it ends with."""

    request: GenerateRequest
    stream: EventStream
    ticket: bytes
    kept: list[int] = field(default_factory=list)
    call_id: str = ""
    ending: Finish | None = None
    task: asyncio.Task[None] | None = None
    running: bool = False
    num_reused: int = 0

    @property
    def complete(self) -> Finish | None:
        """Set once nothing is left to sample, however the host ended the call."""
        if self.kept and self.kept[-1] in self.request.stop_token_ids:
            return Finish("stop", num_reused=self.num_reused)
        if len(self.kept) >= self.request.max_tokens:
            return Finish("length", num_reused=self.num_reused)
        return None

    def known(self) -> np.ndarray:
        """Prompt and output, int32 [T]."""
        return np.concatenate((self.request.prompt_ids, np.array(self.kept, np.int32)))

    def next_call(self, call_id: str, salt: str) -> Call:
        """What is left to do. A ticket is good for one call."""
        request, ticket = self.request, self.ticket
        self.call_id, self.ticket = call_id, b""
        return Call(
            call_id=call_id,
            prompt_ids=[*request.prompt_ids.tolist(), *self.kept],
            max_tokens=request.max_tokens - len(self.kept),
            temperature=request.temperature,
            stop_token_ids=request.stop_token_ids,
            seed=request.seed,
            salt=salt,
            ticket=ticket,
        )

    def emit(self, piece: Piece, version: int, vocab_size: int) -> str:
        """Passes tokens on, with consecutive indexes. Returns what is wrong with them, '' if nothing is."""
        if len(piece.ids) != len(piece.logprobs):
            return f"the host sent {len(piece.ids)} tokens with {len(piece.logprobs)} logprobs"
        for token_id, logprob in zip(piece.ids, piece.logprobs, strict=True):
            if self.complete is not None:
                return "the host went on after the end"
            if not 0 <= token_id < vocab_size or not math.isfinite(logprob) or logprob > _ROUNDING:
                return f"the host sent token {token_id} with logprob {logprob}"
            logprob = min(logprob, 0.0)
            index = self.request.num_emitted + len(self.kept)
            self.kept.append(token_id)
            behaviour = logprob if self.request.temperature else 0.0
            self.stream.push(TokenEvent(index, token_id, logprob, behaviour, version, version))
        return ""
