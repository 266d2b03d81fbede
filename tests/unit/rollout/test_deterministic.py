"""In the deterministic mode a token's numbers are the same bits whatever else happened."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from gyre.rollout.engines.base import EventStream, GenerateRequest
from gyre.rollout.engines.moving import ExportOf
from gyre.rollout.torch_engine.kv import PagedKV
from gyre.rollout.torch_engine.sampler import Sampled
from gyre.rollout.torch_engine.scheduler import Scheduler, SchedulerConfig
from gyre.rollout.torch_engine.tiles import TILE, TiledRunner, tiles_of
from hypothesis import given, settings
from hypothesis import strategies as st
from row_fabric import Fabric
from stepped_engine import Stepped, ids_of, move, replay_of, started, tokens_of

torch.set_num_threads(1)
WIDE = PolicyConfig("qwen3", 300, 192, 330, 3, 6, 2, 32, qk_norm=True, max_position=256)


def exact(stream: EventStream) -> list[tuple[int, int, bytes, bytes]]:
    return [
        (e.index, e.token_id, np.float64(e.logprob).tobytes(), np.float64(e.behaviour_logprob).tobytes())
        for e in tokens_of(stream)
    ]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 70), st.integers(1, 50)), min_size=1, max_size=20))
def test_every_token_has_its_own_slot_behind_all_it_attends_to(rows: list[tuple[int, int]]) -> None:
    starts, counts = [start for start, _ in rows], [count for _, count in rows]
    seen: list[list[int]] = [[] for _ in rows]
    for tile in tiles_of(starts, counts):
        slots = [p % TILE for s in tile.segments for p in range(s.start, s.stop)]
        assert len(slots) == len(set(slots)) and tile.taken == sum(1 << s for s in slots)
        for segment in tile.segments:
            assert segment.start // TILE == (segment.stop - 1) // TILE
            seen[segment.row] += range(segment.start, segment.stop)
    assert seen == [list(range(start, start + count)) for start, count in rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", [4, 24])
def test_logits_are_equal_bits_in_any_company_and_any_chunks(dtype: torch.dtype, block_size: int) -> None:
    """A model that is wide enough for matrix products to change with the batch."""
    model = Decoder.create(WIDE, 3).to(dtype).requires_grad_(False)
    alone = forced_logits(model, SchedulerConfig(960, 200, block_size, 1, 1, 200, 200), 1, dtype)
    for seed, (kv_tokens, max_running, max_batch, chunk) in enumerate([(960, 8, 200, 200), (240, 4, 40, 7), (960, 8, 33, 16)]):
        config = SchedulerConfig(kv_tokens, 200, block_size, max_running, 16, max_batch, chunk)
        assert torch.equal(alone, forced_logits(model, config, 6, dtype, seed))


def forced_logits(model: Decoder, config: SchedulerConfig, num: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Logits of 24 steps of the first of `num` sequences, which are all told what to sample."""
    runner = TiledRunner(model, PagedKV(WIDE, config.kv_tokens // config.block_size, config.block_size, dtype,
                                        torch.device("cpu")))  # fmt: skip
    scheduler = Scheduler(config)
    scheduler.swap(0)
    rng = np.random.default_rng(seed)
    for number in range(num):
        prompt = np.arange(37, dtype=np.int32) if number == 0 else rng.integers(0, 300, rng.integers(1, 60)).astype(np.int32)
        scheduler.add(GenerateRequest(str(number), prompt, 24), EventStream())
    rows: list[torch.Tensor] = []
    while scheduler.has_work:
        batch = scheduler.schedule()
        assert batch is not None
        logits_RV = runner.run(batch, scheduler.slots)
        forced = []
        for place, row in enumerate(batch.yields):
            sequence = batch.rows[row]
            forced.append(sequence.num_known * 11 % 300)
            if sequence.request.request_id == "0":
                rows.append(logits_RV[place])
        scheduler.commit(batch, Sampled(forced, [0.0] * len(forced), [0.0] * len(forced)))
    return torch.stack(rows)


@pytest.mark.parametrize("seed", range(6))
async def test_streams_are_equal_bits_through_company_preemption_abort_and_moves(seed: int) -> None:
    rng = np.random.default_rng(seed)
    requests = [
        GenerateRequest(f"r{i}", ids_of(int(rng.integers(1, 60)), 10 * seed + i), int(rng.integers(5, 40)),
                        float(rng.choice([0.7, 1.0])), top_k=int(rng.choice([0, 5])), seed=i, namespace=f"n{i % 2}")
        for i in range(6)
    ]  # fmt: skip
    want = [await undisturbed(request) for request in requests]
    fabric = Fabric()
    a, b = await deterministic(fabric, "a"), await deterministic(fabric, "b")
    streams = [[a.submit(request)] for request in requests]
    await a.step(int(rng.integers(4, 12)))
    for number, request in enumerate(requests):
        if a._scheduler.find(request.request_id) is None:
            continue
        emitted, ticket = tokens_of(streams[number][0]), ""
        if number % 3 == 0:
            await move(a, b, ticket := f"t{number}", ExportOf(request.request_id))
        elif number % 3 == 1:
            a.abort(request.request_id)
        else:
            continue
        emitted = tokens_of(streams[number][0])
        streams[number].append(b.submit(replay_of(request, emitted, ticket)))
        await b.step(int(rng.integers(0, 3)))
    await a.run()
    await b.run()
    got = [[each for stream in parts for each in exact(stream)] for parts in streams]
    assert got == want
    assert a.load_report().num_preempted > 0 or seed != 0
    await a.close()
    await b.close()


async def deterministic(fabric: Fabric, owner: str, kv_tokens: int = 160) -> Stepped:
    config = SchedulerConfig(kv_tokens, 128, 4, 4, 16, 48, 12)
    return await started(fabric, owner, scheduler=config, is_deterministic=True)


async def undisturbed(request: GenerateRequest) -> list[tuple[int, int, bytes, bytes]]:
    engine = await started(Fabric(), "alone", scheduler=SchedulerConfig(512, 128, 4, 1, 1, 128, 128), is_deterministic=True)
    stream = engine.submit(request)
    await engine.run()
    await engine.close()
    return exact(stream)
