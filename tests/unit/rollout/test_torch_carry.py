"""carry = "keep": what an execution computed stays its own when the weights change, and every token says so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from gyre.policy.attention import CausalAttention
from gyre.policy.decoder import Decoder
from gyre.rollout.engines.base import GenerateRequest
from gyre.rollout.engines.moving import ExportOf, MoveRefused
from row_fabric import Fabric
from stepped_engine import POLICY, SMALL, Stepped, copy, finish_of, ids_of, move, replay_of, started, state_of, tokens_of

torch.set_num_threads(1)
KEEPING = replace(SMALL, keeps=True)
REQUEST = GenerateRequest("r", ids_of(10, 1), 20, seed=7, namespace="x")


@pytest.fixture
async def engine() -> AsyncIterator[Stepped]:
    engine = await started(Fabric(), "a", scheduler=KEEPING)
    yield engine
    await engine.close()
    engine.check_blocks(is_idle=True)


async def test_an_execution_goes_on_over_its_own_blocks_and_says_so(engine: Stepped) -> None:
    stream = engine.submit(REQUEST)
    await engine.step(6)
    before = engine.load_report().num_tokens_prefilled
    await engine.load(2)
    await engine.run()
    assert engine.load_report().num_tokens_prefilled == before
    assert [(e.weights_version, e.kv_version) for e in tokens_of(stream)] == [(1, 1)] * 6 + [(2, 1)] * 14


class Recorded:
    """Attention that keeps each layer's keys and values, and goes on from those of an earlier pass."""

    def __init__(self, before: list[tuple[torch.Tensor, torch.Tensor]] | None = None) -> None:
        self.before = before
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        self.layers.append((k_TKD, v_TKD))
        if self.before is None:
            return CausalAttention([len(q_THD)])(layer, q_THD, k_TKD, v_TKD)
        k_SKD, v_SKD = (torch.cat(pair) for pair in zip(self.before[layer], (k_TKD, v_TKD), strict=True))
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_THD, k_SKD, v_SKD))
        return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1)


async def test_the_first_kept_token_is_that_of_new_weights_over_old_keys(engine: Stepped) -> None:
    stream = engine.submit(REQUEST)
    await engine.step(1)
    await engine.load(2)
    await engine.step(1)
    old, new = tokens_of(stream)
    assert (old.weights_version, new.weights_version, new.kv_version) == (1, 2, 1)
    first, second = (Decoder.from_state(POLICY, state_of(version)) for version in (1, 2))
    with torch.inference_mode():
        recorded = Recorded()
        first(torch.from_numpy(REQUEST.prompt_ids).long(), torch.arange(10), recorded)
        hidden = second(torch.tensor([old.token_id]), torch.tensor([10]), Recorded(recorded.layers))
        want = torch.log_softmax(second.logits(hidden)[0], -1)[new.token_id]
    assert abs(new.logprob - float(want)) < 1e-4


async def test_its_next_turn_finds_what_was_kept_and_nobody_else_does(engine: Stepped) -> None:
    first = engine.submit(REQUEST)
    await engine.run()
    shared = engine.submit(replace(REQUEST, request_id="shared", namespace=""))
    await engine.run()
    await engine.load(2)
    longer = np.concatenate((REQUEST.prompt_ids, [e.token_id for e in tokens_of(first)], ids_of(3, 4))).astype(np.int32)
    turns = {ns: engine.submit(GenerateRequest(f"turn {ns}", longer, 4, namespace=ns)) for ns in ("x", "y", "")}
    await engine.run()
    assert [finish_of(turns[ns]).num_reused for ns in ("x", "y", "")] == [28, 0, 0]
    assert {e.kv_version for e in tokens_of(turns["x"])} == {1}
    assert {e.kv_version for ns in ("y", "") for e in tokens_of(turns[ns])} == {2}
    assert finish_of(shared).reason == "length"


async def test_what_belongs_to_no_execution_is_computed_again(engine: Stepped) -> None:
    stream = engine.submit(replace(REQUEST, namespace=""))
    await engine.step(6)
    await engine.load(2)
    await engine.run()
    assert [(e.weights_version, e.kv_version) for e in tokens_of(stream)] == [(1, 1)] * 6 + [(2, 2)] * 14


async def test_a_preempted_execution_finds_its_blocks_after_a_swap(engine: Stepped) -> None:
    requests = [GenerateRequest(f"r{i}", ids_of(40, i), 30, seed=i, namespace=f"n{i}") for i in range(4)]
    streams = [engine.submit(r) for r in requests]
    while not engine.load_report().num_preempted:
        await engine.step()
    await engine.load(2)
    await engine.run()
    for stream in streams:
        labels = [(e.weights_version, e.kv_version) for e in tokens_of(stream)]
        assert labels == sorted(labels) and all(kv <= weights for weights, kv in labels)


async def test_kept_blocks_move_with_their_versions_and_only_between_engines_that_keep(engine: Stepped) -> None:
    fabric = Fabric()
    a, b = await started(fabric, "a", scheduler=KEEPING), await started(fabric, "b", 2, scheduler=KEEPING)
    strict = await started(fabric, "c", 2)
    first = a.submit(REQUEST)
    await a.step(8)
    await a.load(2)
    await a.step(4)
    with pytest.raises(MoveRefused, match="computed under weights"):
        await copy(a, strict, "t", ExportOf("r"))
    frozen = await move(a, b, "u", ExportOf("r"))
    assert frozen.tail.kv_versions.tolist() == [2]
    second = b.submit(replay_of(REQUEST, tokens_of(first), "u"))
    await b.run()
    assert finish_of(second).num_reused == frozen.num_computed
    assert {(e.weights_version, e.kv_version) for e in tokens_of(second)} == {(2, 1)}
    for each in (a, b, strict):
        await each.close()


async def test_sleep_keeps_nothing(engine: Stepped) -> None:
    stream = engine.submit(REQUEST)
    await engine.run()
    assert finish_of(stream).reason == "length"
    await engine.sleep()
    await engine.wake()
    assert (await engine.probe()).ok
    engine.resume()
    again = engine.submit(replace(REQUEST, request_id="again"))
    await engine.run()
    assert finish_of(again).num_reused == 0
    assert [e.token_id for e in tokens_of(again)] == [e.token_id for e in tokens_of(stream)]
