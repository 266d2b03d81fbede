"""What tests of hosted engines do with them, whichever fake is below."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import torch
from gyre.policy.attention import CausalAttention
from gyre.policy.checkpoint import state_digest
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from gyre.rollout.engines.base import EventStream, Finish, GenerateRequest, TokenEvent
from gyre.rollout.engines.hosted import HostedEngine

VOCAB = 32
POLICY = PolicyConfig("qwen3", VOCAB, 16, 24, 2, 4, 2, 8, tie_word_embeddings=True, qk_norm=True, max_position=256)


async def load(engine: HostedEngine, version: int) -> None:
    state = Decoder.create(POLICY, version).state_dict()
    await engine.load_weights(version, state_digest(state), state)
    probe = await engine.probe()
    assert probe.ok, probe.detail
    engine.resume()


def ask(name: str, length: int = 10, max_tokens: int = 12, **fields: object) -> GenerateRequest:
    prompt = ((np.arange(length) * 5 + 1) % VOCAB).astype(np.int32)
    return GenerateRequest(name, prompt, max_tokens, **{"seed": 11, **fields})  # type: ignore[arg-type]


async def collect(stream: EventStream) -> tuple[list[TokenEvent], Finish]:
    async with asyncio.timeout(20):
        events = [event async for event in stream]
    assert isinstance(events[-1], Finish)
    return [e for e in events if isinstance(e, TokenEvent)], events[-1]


async def some(stream: EventStream, num: int) -> list[TokenEvent]:
    """At least `num` tokens, of which none is the last."""
    events: list[Any] = []
    while len(events) < num:
        events += await stream.take()
    return events


def ids_of(tokens: list[TokenEvent]) -> list[int]:
    return [t.token_id for t in tokens]


def plain(version: int, request: GenerateRequest, tokens: list[TokenEvent]) -> list[float]:
    """Log-probabilities of the tokens by a plain forward of these weights."""
    ids = [*request.prompt_ids.tolist(), *ids_of(tokens)]
    decoder, ids_T = Decoder.create(POLICY, version), torch.tensor(ids)
    with torch.inference_mode():
        logits = decoder.logits(decoder(ids_T, torch.arange(len(ids)), CausalAttention([len(ids)])))
    every = torch.log_softmax(logits[:-1], -1).gather(1, ids_T[1:, None]).squeeze(1).tolist()
    return every[len(request.prompt_ids) - 1 :]
