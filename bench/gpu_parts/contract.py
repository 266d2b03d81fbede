"""The engine contract in one pass over a real engine, whatever it is: what must hold is asserted, with what was found.

The conformance suite (tests/unit/rollout) asserts far more, over policies that are too small for other people's kernels.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np
import torch
from gyre.policy.checkpoint import state_digest
from gyre.rollout.engines.base import AdmissionClosed, Engine, EventStream, Finish, GenerateRequest, TokenEvent

STREAM_S = 120.0
LONG = 160  # tokens of a request that is meant to be cut


class Broken(AssertionError):
    """The engine does not do what the contract says."""


async def serve(engine: Engine, version: int, state: Mapping[str, torch.Tensor]) -> None:
    """Loads, probes, opens admission."""
    await engine.load_weights(version, state_digest(state), state)
    probe = await engine.probe()
    _must(probe.ok and probe.version == version, f"the probe of weights {version}: {probe}")
    engine.resume()


async def collect(stream: EventStream) -> tuple[list[TokenEvent], Finish]:
    """All tokens, and how it ended; indexes are checked."""
    tokens: list[TokenEvent] = []
    async with asyncio.timeout(STREAM_S):
        async for event in stream:
            if isinstance(event, Finish):
                indexes = [t.index for t in tokens]
                _must(indexes == list(range(indexes[0], indexes[0] + len(tokens))) if tokens else True, f"indexes {indexes}")
                return tokens, event
            tokens.append(event)
    raise Broken("a stream ended without a Finish")


def request(name: str, vocab: int, length: int, max_tokens: int, **fields: object) -> GenerateRequest:
    """A prompt that depends on `name` alone."""
    rng = np.random.default_rng(list(name.encode()))
    prompt = rng.integers(0, vocab, length).astype(np.int32)
    return GenerateRequest(name, prompt, max_tokens, **{"seed": 7, **fields})  # type: ignore[arg-type]


async def check(engine: Engine, vocab: int, version: int, state: Mapping[str, torch.Tensor], length: int = 48) -> int:
    """Runs the checks on a serving engine under weights `version`; returns how many. Leaves it serving `version + 1`."""
    tokens, finish = await collect(engine.submit(request("whole", vocab, length, 24)))
    _must(finish.reason == "length" and len(tokens) == 24, f"{len(tokens)} tokens, {finish}")
    wrong = [t for t in tokens if t.logprob > 0 or t.weights_version != version or not 0 <= t.token_id < vocab]
    _must(not wrong, f"tokens {wrong[:3]}")
    await _stops(engine, vocab, length)
    await _aborts(engine, vocab, length)
    await _pauses(engine, vocab, length)
    stream = engine.submit(request("swap", vocab, length, LONG))
    first = await stream.take()
    await serve(engine, version + 1, state)
    rest, finish = await collect(stream)
    versions = [t.weights_version for t in [*(e for e in first if isinstance(e, TokenEvent)), *rest]]
    _must(len(versions) == LONG and versions == sorted(versions), f"{len(versions)} tokens over a swap, {finish}")
    cut = engine.submit(request("asleep", vocab, length, LONG))
    await engine.sleep()
    _must((await collect(cut))[1].reason == "abort", "a request outlived sleep")
    await engine.wake()
    _must((await engine.probe()).ok, "the probe after waking")
    engine.resume()
    again, _ = await collect(engine.submit(request("awake", vocab, length, 8)))
    _must(len(again) == 8 and again[0].weights_version == version + 1, "tokens after waking")
    return 6


async def _stops(engine: Engine, vocab: int, length: int) -> None:
    greedy, _ = await collect(engine.submit(request("stop", vocab, length, 16, temperature=0.0)))
    stop = greedy[3].token_id
    first = [t.token_id for t in greedy].index(stop)
    tokens, finish = await collect(engine.submit(request("stop", vocab, length, 16, temperature=0.0, stop_token_ids=(stop,))))
    _must(finish.reason == "stop" and tokens[-1].token_id == stop, f"{finish} after {len(tokens)} tokens")
    _must(len(tokens) <= 16 and len(tokens) >= min(first, 1), f"{len(tokens)} tokens until the stop token")
    _must(all(t.behaviour_logprob == 0 for t in tokens), "greedy tokens have a behaviour of certainty")


async def _aborts(engine: Engine, vocab: int, length: int) -> None:
    stream = engine.submit(request("abort", vocab, length, LONG))
    first = [e for e in await stream.take() if isinstance(e, TokenEvent)]
    _must(engine.abort("abort"), "abort of a request in flight")
    rest, finish = await collect(stream)
    num = len(first) + len(rest)
    _must(finish.reason == "abort" and num < LONG, f"{finish} after {num} tokens")


async def _pauses(engine: Engine, vocab: int, length: int) -> None:
    running = engine.submit(request("running", vocab, length, 16))
    engine.pause()
    try:
        engine.submit(request("late", vocab, length, 4))
        raise Broken("a paused engine took a request")
    except AdmissionClosed:
        pass
    _must((await collect(running))[1].reason == "length", "a request in flight was not finished")
    engine.resume()


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)
