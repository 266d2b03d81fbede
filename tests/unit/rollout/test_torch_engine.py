"""The built-in engine computes what the decoder computes, whatever is cached, chunked, preempted or swapped."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from gyre.policy.attention import CausalAttention
from gyre.policy.checkpoint import state_digest
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from gyre.rollout.engines.base import (
    AdmissionClosed,
    EventStream,
    Finish,
    GenerateRequest,
    InvalidRequest,
    TokenEvent,
    WeightsMismatch,
)
from gyre.rollout.engines.torch import TorchEngine, TorchEngineConfig
from gyre.rollout.torch_engine.kv import PagedKV
from gyre.rollout.torch_engine.probe import predictions_agree
from gyre.rollout.torch_engine.runner import Runner
from gyre.rollout.torch_engine.scheduler import SchedulerConfig

torch.set_num_threads(1)
VOCAB = 48
POLICIES = {
    "qwen3-gqa": PolicyConfig("qwen3", VOCAB, 32, 48, 2, 4, 2, 8, qk_norm=True, max_position=512),
    "qwen2-tied": PolicyConfig("qwen2", VOCAB, 32, 48, 2, 4, 1, 8, qkv_bias=True, tie_word_embeddings=True),
    "llama": PolicyConfig("llama", VOCAB, 32, 48, 3, 4, 4, 8, max_position=512),
}
POLICY = POLICIES["qwen3-gqa"]


def decoder_of(policy: PolicyConfig, seed: int) -> Decoder:
    """Wide logits, so that a wrong context shows."""
    decoder = Decoder.create(policy, seed).requires_grad_(False)
    decoder.model.embed_tokens.weight.mul_(30)
    if decoder.lm_head is not None:
        decoder.lm_head.weight.mul_(30)
    return decoder


async def start(
    policy: PolicyConfig, scheduler: SchedulerConfig, version: int = 1, threaded: bool = False
) -> tuple[TorchEngine, Decoder]:
    limit = 0 if threaded else 10**9
    engine = TorchEngine(policy, TorchEngineConfig(scheduler, min_interval_s=0.0, thread_from_parameters=limit))
    return engine, await load(engine, policy, version)


async def load(engine: TorchEngine, policy: PolicyConfig, version: int) -> Decoder:
    decoder = decoder_of(policy, version)
    await engine.load_weights(version, state_digest(decoder.state_dict()), decoder.state_dict())
    probe = await engine.probe()
    assert probe.ok, probe.detail
    engine.resume()
    return decoder


def ids_of(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


async def collect(stream: EventStream) -> list[TokenEvent]:
    async with asyncio.timeout(60):
        return [event async for event in stream if isinstance(event, TokenEvent)]


def plain_logprobs(decoder: Decoder, prompt: np.ndarray, tokens: list[int]) -> np.ndarray:
    ids = torch.from_numpy(np.concatenate((prompt, np.array(tokens, dtype=np.int32)))).long()
    with torch.inference_mode():
        hidden = decoder(ids, torch.arange(len(ids)), CausalAttention([len(ids)]))
        logp = torch.log_softmax(decoder.logits(hidden), dim=-1)
    return logp[torch.arange(len(prompt) - 1, len(ids) - 1), ids[len(prompt) :]].numpy()


def assert_true_logprobs(decoder: Decoder, prompt: np.ndarray, events: list[TokenEvent]) -> None:
    want = plain_logprobs(decoder, prompt, [e.token_id for e in events])
    np.testing.assert_allclose([e.logprob for e in events], want, atol=1e-4)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
async def test_logprobs_are_those_of_a_plain_forward(policy: PolicyConfig) -> None:
    """Long and short prompts, chunked prefills beside decodes, several attention groups in one batch."""
    engine, decoder = await start(policy, SchedulerConfig(4096, 512, 16, 8, 64, 96, 40))
    prompts = [ids_of(n, n) for n in (3, 17, 130, 300, 16, 64, 1, 33, 270)]
    streams = [
        engine.submit(GenerateRequest(f"r{i}", p, 20, seed=i, namespace=str(i), stop_token_ids=()))
        for i, p in enumerate(prompts)
    ]
    for prompt, stream in zip(prompts, streams, strict=True):
        events = await collect(stream)
        assert len(events) == 20
        assert_true_logprobs(decoder, prompt, events)
    await engine.close()


async def test_a_session_that_continues_reuses_its_prefix_and_nobody_elses() -> None:
    engine, decoder = await start(POLICY, SchedulerConfig(2048, 512, 16, 8, 64))
    first = ids_of(70, 1)
    events = await collect(engine.submit(GenerateRequest("a", first, 10, namespace="x")))
    longer = np.concatenate((first, np.array([e.token_id for e in events], dtype=np.int32), ids_of(9, 2)))
    reused = engine.load_report().num_tokens_reused
    assert_true_logprobs(
        decoder, longer, await collect(engine.submit(GenerateRequest("b", longer, 10, namespace="x")))
    )
    assert engine.load_report().num_tokens_reused - reused == 64
    await collect(engine.submit(GenerateRequest("c", longer, 10, namespace="y")))
    assert engine.load_report().num_tokens_reused - reused == 64
    await engine.close()


async def test_a_prefix_of_other_weights_is_never_reused() -> None:
    engine, _ = await start(POLICY, SchedulerConfig(2048, 512, 16, 8, 64))
    prompt = ids_of(70, 1)
    await collect(engine.submit(GenerateRequest("a", prompt, 10, namespace="x")))
    decoder = await load(engine, POLICY, 2)
    events = await collect(engine.submit(GenerateRequest("b", prompt, 10, namespace="x")))
    assert_true_logprobs(decoder, prompt, events)
    assert {e.weights_version for e in events} == {2}
    await engine.close()


async def test_a_prompt_that_comes_again_after_a_swap_is_that_of_a_fresh_engine() -> None:
    """Nobody emptied the cache, but what it holds belongs to other weights."""
    prompt, (engine, _) = ids_of(70, 1), await start(POLICY, SchedulerConfig(2048, 512, 16, 8, 64))
    fresh, _ = await start(POLICY, SchedulerConfig(2048, 512, 16, 8, 64), version=2)
    for name in "ab":
        await collect(engine.submit(GenerateRequest(name, prompt, 10, namespace="x")))
    assert engine.load_report().num_tokens_reused == 64
    await load(engine, POLICY, 2)
    streams = [each.submit(GenerateRequest("c", prompt, 10, namespace="x")) for each in (engine, fresh)]
    again, want = [[event async for event in stream] for stream in streams]
    assert again == want and isinstance(again[-1], Finish) and again[-1].num_reused == 0
    await engine.close()
    await fresh.close()


def test_one_long_context_does_not_pad_the_short_ones() -> None:
    """8192 tokens beside 31 times 200, where blocks are gathered (bfloat16, GPUs): what is gathered is what there is."""
    runner = Runner(decoder_of(POLICY, 1), PagedKV(POLICY, 1, 16, torch.float32, torch.device("cpu")))
    contexts, (rows, ones, table) = np.array([8192] + [200] * 31), (np.arange(32), np.ones(32, int), np.zeros((32, 512), int))
    groups = runner._groups(rows, ones, contexts - 1, table)
    assert sum(len(group.blocks_M) for group in groups) == 8192 // 16 + 31 * 13
    alike = runner._groups(rows, ones, np.linspace(256, 8000, 32).astype(int), table)
    needed = sum(-(-(int(n) + 1) // 16) for n in np.linspace(256, 8000, 32))
    assert sum(len(group.blocks_M) for group in alike) < 2 * needed


async def test_a_request_that_lives_through_a_swap_is_rebuilt_under_the_new_weights() -> None:
    engine, old = await start(POLICY, SchedulerConfig(2048, 512, 16, 8, 64, 64, 32))
    prompt = ids_of(90, 5)
    stream = engine.submit(GenerateRequest("a", prompt, 400))
    events = [e for e in await stream.take() if isinstance(e, TokenEvent)]
    new = await load(engine, POLICY, 2)
    events += await collect(stream)
    num_old = sum(e.weights_version == 1 for e in events)
    assert 0 < num_old < len(events) == 400
    assert [e.weights_version for e in events] == [1] * num_old + [2] * (400 - num_old)
    tokens = [e.token_id for e in events]
    before, after = plain_logprobs(old, prompt, tokens), plain_logprobs(new, prompt, tokens)
    want = np.concatenate((before[:num_old], after[num_old:]))
    np.testing.assert_allclose([e.logprob for e in events], want, atol=1e-4)
    await engine.close()


async def test_a_full_pool_preempts_and_recomputes_without_changing_a_token() -> None:
    prompts = [ids_of(20 + i, i) for i in range(6)]
    small, decoder = await start(POLICY, SchedulerConfig(160, 512, 8, 6, 64))
    large, _ = await start(POLICY, SchedulerConfig(4096, 512, 8, 6, 64))
    tokens = []
    for engine in (small, large):
        streams = [engine.submit(GenerateRequest(f"r{i}", p, 50, seed=i)) for i, p in enumerate(prompts)]
        results = [await collect(s) for s in streams]
        for prompt, events in zip(prompts, results, strict=True):
            assert_true_logprobs(decoder, prompt, events)
        tokens.append([[e.token_id for e in events] for events in results])
    assert small.load_report().num_preempted > 0 == large.load_report().num_preempted
    assert tokens[0] == tokens[1]
    assert small.load_report().kv_tokens_free == small.load_report().kv_tokens_total == 160
    await small.close()
    await large.close()


async def test_weights_with_another_checksum_or_shape_change_nothing() -> None:
    engine, _ = await start(POLICY, SchedulerConfig(1024, 512))
    other = decoder_of(POLICY, 9).state_dict()
    with pytest.raises(WeightsMismatch, match="checksum"):
        await engine.load_weights(2, "0" * 64, other)
    cut = {k: v for k, v in other.items() if k != "model.norm.weight"}
    with pytest.raises(WeightsMismatch, match="model.norm.weight"):
        await engine.load_weights(2, state_digest(cut), cut)
    report = engine.load_report()
    assert (report.version, report.admitting) == (1, True)
    await engine.close()


async def test_a_probe_notices_weights_that_changed_in_memory() -> None:
    engine, _ = await start(POLICY, SchedulerConfig(1024, 512))
    assert engine._runner is not None
    engine._runner.model.model.norm.weight[3] = 5.0
    probe = await engine.probe()
    assert not probe.ok and "digest" in probe.detail
    with pytest.raises(AdmissionClosed):
        engine.resume()
    await engine.close()


def test_a_probe_notices_a_decoder_that_is_not_finite() -> None:
    decoder = decoder_of(POLICY, 1)
    decoder.model.norm.weight[0] = float("nan")
    runner = Runner(decoder, PagedKV(POLICY, 1, 16, torch.float32, torch.device("cpu")))
    assert "finite" in predictions_agree(runner, 512)


async def test_ids_outside_the_vocabulary_are_refused() -> None:
    engine, _ = await start(POLICY, SchedulerConfig(1024, 512))
    with pytest.raises(InvalidRequest, match="prompt_ids"):
        engine.submit(GenerateRequest("a", np.array([VOCAB], dtype=np.int32), 1))
    await engine.close()


async def test_a_failing_model_call_ends_every_request_with_its_reason() -> None:
    engine, _ = await start(POLICY, SchedulerConfig(1024, 512))
    assert engine._runner is not None
    del engine._runner.cache.pool, engine._runner.cache._places
    streams = [engine.submit(GenerateRequest(f"r{i}", ids_of(5, i), 5)) for i in range(3)]
    for stream in streams:
        (finish,) = await stream.take()
        assert isinstance(finish, Finish) and finish.reason == "error" and "AttributeError" in finish.detail
    with pytest.raises(AdmissionClosed, match="failed"):
        engine.submit(GenerateRequest("late", ids_of(5, 1), 5))
    await engine.close()


async def test_sleep_frees_the_cache() -> None:
    engine, _ = await start(POLICY, SchedulerConfig(1024, 512))
    assert await engine.sleep() >= 1024 * 2 * 2 * 2 * 8 * 4  # tokens * layers * (k, v) * heads * size * bytes
    assert engine._runner is None
    await engine.close()


@pytest.mark.parametrize("threaded", [False, True])
async def test_aborts_at_any_moment_leave_the_others_untouched(threaded: bool) -> None:
    """Aborted sequences give their slots and blocks to newcomers, also while the model runs in its thread."""
    engine, decoder = await start(POLICY, SchedulerConfig(768, 512, 8, 6, 64), threaded=threaded)
    kept = {f"k{i}": ids_of(30 + i, i) for i in range(4)}
    streams = {name: engine.submit(GenerateRequest(name, p, 60, seed=1)) for name, p in kept.items()}
    for number in range(40):
        engine.submit(GenerateRequest(f"x{number}", ids_of(25, number), 60))
        for _ in range(number % 5):
            await asyncio.sleep(0)
        assert engine.abort(f"x{number}")
    for name, prompt in kept.items():
        events = await collect(streams[name])
        assert len(events) == 60
        assert_true_logprobs(decoder, prompt, events)
    report = engine.load_report()
    assert report.kv_tokens_free == report.kv_tokens_total and report.num_running == report.num_waiting == 0
    await engine.close()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.5), (torch.float64, 1e-4)])
async def test_weights_are_verified_as_announced_and_served_in_the_engines_dtype(
    dtype: torch.dtype, tolerance: float
) -> None:
    engine = TorchEngine(POLICY, TorchEngineConfig(SchedulerConfig(1024, 512), dtype, min_interval_s=0.0))
    decoder = Decoder.create(POLICY, 4)
    await engine.load_weights(4, state_digest(decoder.state_dict()), decoder.state_dict())
    probe = await engine.probe()
    assert probe.ok and probe.checksum == state_digest(decoder.state_dict()), probe.detail
    engine.resume()
    prompt = ids_of(40, 3)
    events = await collect(engine.submit(GenerateRequest("a", prompt, 20)))
    want = plain_logprobs(decoder, prompt, [e.token_id for e in events])
    np.testing.assert_allclose([e.logprob for e in events], want, atol=tolerance)
    await engine.close()
