"""Outside the deterministic mode tokens may differ by rounding; what they are drawn from may not.

Some thousand calls of one prompt, each with a seed of its own, are disturbed after they have begun. The counts of what
they said, as whole answers, are compared with what the policy itself predicts, by Pearson's chi-square.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from gyre.policy.attention import CausalAttention
from gyre.policy.checkpoint import state_digest
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from gyre.rollout.engines.base import EventStream, GenerateRequest
from gyre.rollout.engines.moving import ExportOf
from gyre.rollout.torch_engine.sampler import Sampled, SamplingRows
from gyre.rollout.torch_engine.scheduler import SchedulerConfig
from gyre.rollout.torch_engine.sequence import Batch
from row_fabric import Fabric
from stepped_engine import Stepped, finish_of, move, replay_of, tokens_of

torch.set_num_threads(1)
VOCAB, NUM_TOKENS, NUM_CALLS, NUM_AT_ONCE = 16, 3, 2000, 100
POLICY = PolicyConfig("qwen3", VOCAB, 16, 24, 2, 4, 2, 8, tie_word_embeddings=True, qk_norm=True, max_position=64)
PROMPT = np.array([3, 1, 4, 1, 5, 9, 2], dtype=np.int32)
ROOMY = SchedulerConfig(4096, 64, 4, NUM_AT_ONCE, NUM_AT_ONCE, 4096, 64)
TIGHT = replace(ROOMY, kv_tokens=NUM_AT_ONCE * 2 * 4)  # all calls hold 2 blocks each, and then all want a third
FABRIC, NUMBERS = Fabric(), itertools.count()

Answers = list[tuple[int, ...]]


def decoder() -> Decoder:
    """One that is neither sure nor indifferent."""
    made = Decoder.create(POLICY, 5).requires_grad_(False)
    made.model.embed_tokens.weight.mul_(12)
    return made


def predicted() -> np.ndarray:
    """float64 [V, V, V]: the probability of every answer of three tokens, by plain forwards."""
    pairs = list(itertools.product(range(VOCAB), repeat=2))
    rows = torch.tensor([[*PROMPT.tolist(), *pair] for pair in pairs])
    num, length = rows.shape
    with torch.inference_mode():
        made = decoder()
        logits = made.logits(made(rows.flatten(), torch.arange(length).repeat(num), CausalAttention([length] * num)))
    probs = torch.softmax(logits.double(), -1).view(VOCAB, VOCAB, length, VOCAB)[:, :, len(PROMPT) - 1 :].numpy()
    return probs[0, 0, 0][:, None, None] * probs[:, 0, 1][:, :, None] * probs[:, :, 2]


def chance(answers: Answers) -> float:
    """How likely counts are that fit the policy no better than these. Answers that are expected less than 5 times are one."""
    expected = predicted().flatten() * len(answers)
    counts = np.bincount(np.ravel_multi_index(np.array(answers).T, (VOCAB,) * NUM_TOKENS), minlength=VOCAB**NUM_TOKENS)
    often = expected >= 5
    want, got = (np.append(x[often], x[~often].sum()) for x in (expected, counts))
    assert want[-1] >= 5 and len(want) > 30
    statistic = ((got - want) ** 2 / want).sum()
    half = torch.tensor([(len(want) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


async def made(kind: type[Stepped] = Stepped, scheduler: SchedulerConfig = ROOMY) -> Stepped:
    engine = kind(FABRIC, f"engine-{next(NUMBERS)}", scheduler, policy=POLICY)
    state = decoder().state_dict()
    await engine.load_weights(1, state_digest(state), state)
    assert (await engine.probe()).ok
    engine.resume()
    return engine


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Stepped, Stepped]]:
    engines = await made(), await made()
    yield engines
    await asyncio.gather(*(engine.close() for engine in engines))


def question(seed: int, **fields: object) -> GenerateRequest:
    return GenerateRequest(f"r{seed}", PROMPT, NUM_TOKENS, seed=seed, namespace=f"n{seed}", **fields)  # type: ignore[arg-type]


def said(*streams: EventStream) -> tuple[int, ...]:
    events = [event for stream in streams for event in tokens_of(stream)]
    assert [event.index for event in events] == list(range(NUM_TOKENS))
    return tuple(event.token_id for event in events)


async def all_answers(ask: Callable[[list[GenerateRequest]], Awaitable[Answers]], **fields: object) -> Answers:
    """Of every call, some of them at a time."""
    answers: Answers = []
    for first in range(0, NUM_CALLS, NUM_AT_ONCE):
        answers += await ask([question(seed, **fields) for seed in range(first, first + NUM_AT_ONCE)])
    return answers


async def whole(engine: Stepped, **fields: object) -> Answers:
    """Nothing happens to them but what the engine does by itself."""

    async def ask(requests: list[GenerateRequest]) -> Answers:
        streams = [engine.submit(request) for request in requests]
        await engine.run()
        return [said(stream) for stream in streams]

    return await all_answers(ask, **fields)


async def begun(engine: Stepped, requests: list[GenerateRequest]) -> list[EventStream]:
    """The calls have said one token or two, half of them each."""
    half = len(requests) // 2
    streams = [engine.submit(request) for request in requests[:half]]
    await engine.step()
    streams += [engine.submit(request) for request in requests[half:]]
    await engine.step()
    assert [len(tokens_of(stream)) for stream in streams] == [2] * half + [1] * half
    return streams


async def test_undisturbed_calls_are_drawn_from_the_policy(pair: tuple[Stepped, Stepped]) -> None:
    assert chance(await whole(pair[0])) > 0.001


async def test_preempted_calls_are_drawn_from_the_policy() -> None:
    engine = await made(scheduler=TIGHT)
    answers = await whole(engine)
    assert engine.load_report().num_preempted >= NUM_CALLS // 4
    assert chance(answers) > 0.001
    await engine.close()


async def test_calls_that_were_ended_and_sent_again_are_drawn_from_the_policy(pair: tuple[Stepped, Stepped]) -> None:
    engine = pair[0]

    async def ask(requests: list[GenerateRequest]) -> Answers:
        first = await begun(engine, requests)
        for request in requests:
            engine.abort(request.request_id)
        rest = [engine.submit(replay_of(r, tokens_of(s))) for r, s in zip(requests, first, strict=True)]
        await engine.run()
        return [said(*streams) for streams in zip(first, rest, strict=True)]

    assert chance(await all_answers(ask)) > 0.001


async def test_calls_that_moved_to_another_engine_are_drawn_from_the_policy(pair: tuple[Stepped, Stepped]) -> None:
    source, destination = pair

    async def ask(requests: list[GenerateRequest]) -> Answers:
        first = await begun(source, requests)
        rest = []
        for request, stream in zip(requests, first, strict=True):
            ticket = f"t{request.request_id}"
            frozen = await move(source, destination, ticket, ExportOf(request.request_id))
            rest.append(destination.submit(replay_of(request, tokens_of(stream), ticket)))
            await source.moves.release(ticket)
            assert finish_of(stream).reason == "moved" and frozen.num_computed >= len(PROMPT)
        await destination.run()
        return [said(*streams) for streams in zip(first, rest, strict=True)]

    assert chance(await all_answers(ask)) > 0.001
    assert destination.load_report().num_tokens_prefilled == 0, "all of them went on with the KV they came with"


# ---------------------------------------------------------------- that the comparison can fail


class Repeats(Stepped):
    """Draws the second and third token with the noise of the first."""

    def _model_call(self, batch: Batch, rows: SamplingRows) -> Sampled:
        return super()._model_call(batch, replace(rows, positions_R=np.full_like(rows.positions_R, len(PROMPT))))


async def test_a_wrong_temperature_would_be_noticed(pair: tuple[Stepped, Stepped]) -> None:
    assert chance(await whole(pair[0], temperature=1.2)) < 1e-6


async def test_noise_that_is_used_again_would_be_noticed() -> None:
    engine = await made(Repeats)
    assert chance(await whole(engine)) < 1e-6
    await engine.close()


async def test_a_call_that_goes_on_from_its_prompt_alone_would_be_noticed(pair: tuple[Stepped, Stepped]) -> None:
    """As if what was said before were forgotten."""

    def forgot(answer: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
        return (answer[0], *other[:2])

    answers = await whole(pair[0])
    assert chance([forgot(a, b) for a, b in zip(answers, answers[1:] + answers[:1], strict=True)]) < 1e-6
