"""What every engine does, whichever backend it is."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest
import torch
from gyre.policy.checkpoint import state_digest
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from gyre.rollout.engines.base import (
    AdmissionClosed,
    Engine,
    EngineBusy,
    EventStream,
    Finish,
    GenerateRequest,
    InvalidRequest,
    TokenEvent,
)
from gyre.rollout.engines.scripted import ScriptedConfig, ScriptedEngine, seeded_script
from gyre.rollout.engines.torch import TorchEngine, TorchEngineConfig
from gyre.rollout.torch_engine.scheduler import SchedulerConfig
from hosted_engines import make_sglang, make_tensorrt

torch.set_num_threads(1)
VOCAB = 32
POLICY = PolicyConfig("qwen3", VOCAB, 16, 24, 2, 4, 2, 8, tie_word_embeddings=True, qk_norm=True, max_position=256)
MAX_RUNNING, MAX_WAITING = 4, 4
DEVICE = torch.device(os.environ.get("GYRE_TEST_DEVICE", "cpu"))  # `make test-gpu` says cuda


def weights(seed: int) -> dict[str, torch.Tensor]:
    return Decoder.create(POLICY, seed).state_dict()


def make_torch() -> Engine:
    scheduler = SchedulerConfig(1024, 256, 8, MAX_RUNNING, MAX_WAITING, 64, 16)
    return TorchEngine(POLICY, TorchEngineConfig(scheduler, device=DEVICE, min_interval_s=0.0))


def make_threaded() -> Engine:
    scheduler = SchedulerConfig(1024, 256, 8, MAX_RUNNING, MAX_WAITING, 64, 16)
    return TorchEngine(POLICY, TorchEngineConfig(scheduler, device=DEVICE, min_interval_s=0.0, thread_from_parameters=0))


def make_scripted() -> Engine:
    return ScriptedEngine(seeded_script(VOCAB), ScriptedConfig(1024, MAX_RUNNING, MAX_WAITING))


def make_tensorrt_llm() -> Engine:
    return make_tensorrt(POLICY)


def make_sg_lang() -> Engine:
    return make_sglang(POLICY)


async def load(engine: Engine, version: int) -> None:
    state = weights(version)
    await engine.load_weights(version, state_digest(state), state)
    assert (await engine.probe()).ok
    engine.resume()


MAKERS = {
    "torch": make_torch,
    "torch-threaded": make_threaded,
    "scripted": make_scripted,
    "tensorrt-llm": make_tensorrt_llm,
    "sglang": make_sg_lang,
}


@pytest.fixture(params=list(MAKERS.values()), ids=list(MAKERS))
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    make: Callable[[], Engine] = request.param
    engine = make()
    await load(engine, 3)
    yield engine
    await engine.close()


def prompt(length: int, start: int = 1) -> np.ndarray:
    return ((np.arange(length) * 5 + start) % VOCAB).astype(np.int32)


def ask(name: str, length: int = 10, max_tokens: int = 12, **fields: object) -> GenerateRequest:
    return GenerateRequest(name, prompt(length), max_tokens, **{"seed": 11, **fields})  # type: ignore[arg-type]


async def collect(stream: EventStream) -> tuple[list[TokenEvent], Finish]:
    tokens: list[TokenEvent] = []
    async with asyncio.timeout(20):
        async for event in stream:
            if isinstance(event, Finish):
                return tokens, event
            tokens.append(event)
    raise AssertionError("the stream ended without a Finish")


async def test_a_request_yields_indexed_tokens_and_one_finish(engine: Engine) -> None:
    tokens, finish = await collect(engine.submit(ask("a")))
    assert finish.reason == "length"
    assert [t.index for t in tokens] == list(range(12))
    assert all(0 <= t.token_id < VOCAB and t.logprob <= 0 and t.weights_version == 3 for t in tokens)


async def test_a_stop_token_ends_the_stream_and_is_part_of_it(engine: Engine) -> None:
    tokens, _ = await collect(engine.submit(ask("a")))
    stop = tokens[4].token_id
    again, finish = await collect(engine.submit(ask("b", stop_token_ids=(stop,))))
    first = [t.token_id for t in tokens].index(stop)
    assert finish.reason == "stop"
    assert [t.token_id for t in again] == [t.token_id for t in tokens[: first + 1]]


async def test_the_same_seed_gives_the_same_tokens_in_whatever_company(engine: Engine) -> None:
    alone, _ = await collect(engine.submit(ask("alone")))
    company = [engine.submit(ask(f"c{i}", length=5 + 3 * i, seed=i)) for i in range(3)]
    among, _ = await collect(engine.submit(ask("among")))
    for stream in company:
        await collect(stream)
    other, _ = await collect(engine.submit(ask("other", seed=12)))
    assert [t.token_id for t in among] == [t.token_id for t in alone] != [t.token_id for t in other]


async def test_a_replay_continues_with_the_same_tokens_and_indexes(engine: Engine) -> None:
    whole, _ = await collect(engine.submit(ask("whole")))
    emitted = np.array([t.token_id for t in whole[:5]], dtype=np.int32)
    rest = GenerateRequest("rest", np.concatenate((prompt(10), emitted)), 7, seed=11, num_emitted=5)
    tokens, finish = await collect(engine.submit(rest))
    assert [(t.index, t.token_id) for t in tokens] == [(t.index, t.token_id) for t in whole[5:]]
    assert finish.reason == "length"


async def test_an_aborted_request_keeps_what_it_emitted(engine: Engine) -> None:
    stream = engine.submit(ask("a", max_tokens=200))
    first = await stream.take()
    assert engine.abort("a") and not engine.abort("a")
    tokens, finish = await collect(stream)
    assert finish.reason == "abort"
    assert [t.index for t in [*first, *tokens] if isinstance(t, TokenEvent)] == list(range(len(first) + len(tokens)))
    assert engine.load_report().num_running == engine.load_report().num_waiting == 0


async def test_a_paused_engine_refuses_new_requests_and_finishes_old_ones(engine: Engine) -> None:
    running = engine.submit(ask("old"))
    engine.pause()
    with pytest.raises(AdmissionClosed):
        engine.submit(ask("new"))
    assert (await collect(running))[1].reason == "length"
    engine.resume()
    assert (await collect(engine.submit(ask("new"))))[1].reason == "length"


async def test_more_requests_than_slots_are_all_served(engine: Engine) -> None:
    streams = [engine.submit(ask(f"r{i}", length=4 + i, seed=i)) for i in range(MAX_WAITING)]
    results = [await collect(streams.pop(0))]  # by now the rest has left the waiting queue
    streams += [engine.submit(ask(f"s{i}", seed=i)) for i in range(MAX_WAITING)]
    results += [await collect(stream) for stream in streams]
    assert all(len(tokens) == 12 and finish.reason == "length" for tokens, finish in results)
    assert engine.load_report().num_tokens_sampled == 12 * len(results)


async def test_a_full_queue_refuses_with_its_size(engine: Engine) -> None:
    for index in range(MAX_WAITING):
        engine.submit(ask(f"r{index}", max_tokens=200))
    with pytest.raises(EngineBusy, match="queue full"):
        engine.submit(ask("one-too-many"))


async def test_requests_that_can_never_be_served_are_refused_by_name(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens"):
        engine.submit(ask("long", max_tokens=5000))
    with pytest.raises(InvalidRequest, match="temperature"):
        ask("cold", temperature=-1.0)
    with pytest.raises(InvalidRequest, match="prompt_ids"):
        GenerateRequest("empty", np.zeros(0, dtype=np.int32), 1)
    engine.submit(ask("twice", max_tokens=200))
    with pytest.raises(InvalidRequest, match="in flight"):
        engine.submit(ask("twice"))


async def test_sleep_ends_what_is_in_flight_and_wake_needs_a_probe(engine: Engine) -> None:
    before, _ = await collect(engine.submit(ask("before")))
    stream = engine.submit(ask("cut", max_tokens=200))
    await engine.sleep()
    assert (await collect(stream))[1].reason == "abort"
    assert engine.load_report().asleep and not engine.load_report().admitting
    assert not (await engine.probe()).ok
    await engine.wake()
    with pytest.raises(AdmissionClosed):
        engine.resume()
    probe = await engine.probe()
    assert probe.ok and probe.version == 3
    engine.resume()
    after, _ = await collect(engine.submit(ask("after")))
    assert [t.token_id for t in after] == [t.token_id for t in before]


async def test_a_weights_swap_labels_every_token_with_its_version(engine: Engine) -> None:
    stream = engine.submit(ask("a", max_tokens=200))
    await stream.take()
    await load(engine, 4)
    events = await stream.take()
    while not any(isinstance(e, TokenEvent) and e.weights_version == 4 for e in events):
        events += await stream.take()
    engine.abort("a")
    versions = [e.weights_version for e in events if isinstance(e, TokenEvent)]
    assert versions == sorted(versions) and set(versions) <= {3, 4}
    assert engine.load_report().version == 4


async def test_close_ends_every_stream(engine: Engine) -> None:
    streams = [engine.submit(ask(f"r{i}", max_tokens=200)) for i in range(3)]
    await engine.close()
    assert [(await collect(stream))[1].reason for stream in streams] == ["abort"] * 3
    with pytest.raises(AdmissionClosed):
        engine.submit(ask("late"))
