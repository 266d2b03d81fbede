"""A request that moves between two engines goes on as if it had not, whatever goes wrong on the way."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gyre.rollout.engines.base import AdmissionClosed, GenerateRequest
from gyre.rollout.engines.moving import Capabilities, ExportOf, MoveRefused, TicketUnknown
from gyre.rollout.engines.torch import TorchEngine, TorchEngineConfig
from gyre.rollout.torch_engine.scheduler import SchedulerConfig
from gyre.rollout.torch_engine.shipping import Staged
from gyre.transfer import Address, Transfer, TransferConfig, row_checksum
from row_fabric import Fabric
from stepped_engine import (
    BLOCK,
    POLICY,
    SMALL,
    Stepped,
    copy,
    finish_of,
    ids_of,
    move,
    replay_of,
    reservation_of,
    started,
    tokens_of,
)

torch.set_num_threads(1)
REQUEST = GenerateRequest("r", ids_of(10, 1), 20, seed=7, namespace="x")
THIS = ExportOf(request_id="r")


class Pair:
    """Two engines of the same weights."""

    def __init__(self, a: Stepped, b: Stepped) -> None:
        self.a, self.b = a, b

    def check(self, is_idle: bool = True) -> None:
        for engine in (self.a, self.b):
            engine.check_blocks(is_idle)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    fabric = Fabric()
    a, b = await started(fabric, "a"), await started(fabric, "b")
    yield Pair(a, b)
    await a.close()
    await b.close()
    a.check_blocks(is_idle=True)
    b.check_blocks(is_idle=True)


async def undisturbed(request: GenerateRequest, version: int = 1) -> list[tuple[int, int, object]]:
    engine = await started(Fabric(), "alone", version)
    stream = engine.submit(request)
    await engine.run()
    await engine.close()
    return [(e.index, e.token_id, pytest.approx(e.logprob, abs=1e-3)) for e in tokens_of(stream)]


def pairs(*streams: object) -> list[tuple[int, int, float]]:
    """(index, token, its log-probability: a context with a hole may well yield the same token)"""
    return [(e.index, e.token_id, e.logprob) for stream in streams for e in tokens_of(stream)]  # type: ignore[arg-type]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4, 6, 7, 8, 18, 19])
async def test_a_request_moves_at_every_token_without_computing_anything_again(pair: Pair, num_steps: int) -> None:
    """Not even started, within its prompt, on a block's border, behind it, before its last token."""
    first = pair.a.submit(REQUEST)
    await pair.a.step(num_steps)
    frozen = await move(pair.a, pair.b, "t", THIS)
    assert finish_of(first).reason == "moved"
    second = pair.b.submit(replay_of(REQUEST, tokens_of(first), "t"))
    await pair.b.run()
    assert pairs(first, second) == await undisturbed(REQUEST)
    assert finish_of(second).num_reused == frozen.num_computed
    computed_twice = pair.b.load_report().num_tokens_prefilled
    assert computed_twice == (0 if num_steps > 0 else 10)
    assert await pair.a.moves.release("t") and not await pair.b.moves.release("t")
    pair.check()


@pytest.mark.parametrize("writes_first", [True, False])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5, 6, 19])
async def test_a_request_that_decodes_is_stopped_while_the_model_runs(pair: Pair, num_steps: int, writes_first: bool) -> None:
    """Within a block and on its border. The token that is being computed is lost here and drawn there; the model still
    writes to its block, before the tail is read or after it."""
    first = pair.a.submit(REQUEST)
    await pair.a.step(num_steps)
    await pair.a.begin()
    region, num_blocks = await copy(pair.a, pair.b, "t", THIS)
    frozen = await pair.a.moves.freeze("t", num_blocks)
    assert finish_of(first).reason == "moved" and frozen.num_known == frozen.num_computed + 1 == 10 + num_steps
    pair.check(is_idle=False)
    if writes_first:
        await pair.a.end()
    await pair.b.moves.pull("t", region, frozen.tail, 5.0)
    await pair.a.end()
    await pair.b.moves.commit("t", frozen)
    second = pair.b.submit(replay_of(REQUEST, tokens_of(first), "t"))
    await pair.b.run()
    assert pairs(first, second) == await undisturbed(REQUEST)
    assert pair.b.load_report().num_tokens_prefilled == 0
    await pair.a.moves.release("t")
    pair.check()


async def test_a_request_that_is_being_prefilled_is_waited_for(pair: Pair) -> None:
    pair.a.submit(REQUEST)
    await pair.a.begin()
    await pair.a.moves.open_export("t", THIS, 30.0)
    freezing = asyncio.create_task(pair.a.moves.freeze("t", 0))
    await asyncio.sleep(0.01)
    assert not freezing.done()
    await pair.a.end()
    assert (await freezing).num_computed == 10


async def test_blocks_the_model_writes_to_are_nobody_elses_until_it_is_through(pair: Pair) -> None:
    """A request is aborted while the model runs, and a move arrives and takes all there is."""
    arriving = GenerateRequest("other", ids_of(30, 2), 8, seed=3, namespace="x")
    source = pair.b.submit(arriving)
    await pair.b.step(4)
    pair.a.submit(REQUEST)
    await pair.a.begin()
    pair.a.abort("r")
    pool = pair.a._scheduler.pool
    assert pool.num_available == pool.num_blocks - 3
    offer = await pair.b.moves.open_export("t", ExportOf("other"), 30.0)
    await pair.a.moves.reserve(reservation_of("t", pair.b, "x", 32 * BLOCK))
    await pair.a.moves.reserve(reservation_of("u", pair.b, "x", 5 * BLOCK))
    assert pool.num_available == 0
    stage = await pair.b.moves.read_stage("t", 0)
    await pair.a.moves.pull("t", offer.region, stage, 5.0)
    await pair.a.end()
    assert pool.num_available == 3
    frozen = await pair.b.moves.freeze("t", len(stage.rows))
    await pair.a.moves.pull("t", offer.region, frozen.tail, 5.0)
    await pair.a.moves.commit("t", frozen)
    rest = pair.a.submit(replay_of(arriving, tokens_of(source), "t"))
    await pair.a.run()
    assert pairs(source, rest) == await undisturbed(arriving)
    await pair.b.moves.release("t")
    await pair.a.moves.release("u")
    pair.check()


async def test_what_has_arrived_is_not_summed_again_when_it_moves_on(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the same tokens are cached already, so that what arrives is not filed."""
    summed: list[int] = []
    monkeypatch.setattr("gyre.rollout.torch_engine.shipping.row_checksum", lambda row: summed.append(1) or row_checksum(row))
    streams = [pair.a.submit(REQUEST)]
    await pair.a.step(2)
    sides = [pair.a, pair.b]
    for number in range(4):
        at, other = sides[number % 2], sides[1 - number % 2]
        summed.clear()
        await move(at, other, f"t{number}", THIS)
        assert len(summed) == (3 if number == 0 else 1), "the last block is not full"
        emitted = [e for stream in streams for e in tokens_of(stream)]
        streams.append(other.submit(replay_of(REQUEST, emitted, f"t{number}")))
        await other.step()
        await at.moves.release(f"t{number}")
    sides[0].abort("r")


async def test_the_request_goes_on_while_its_blocks_are_copied(pair: Pair) -> None:
    stream = pair.a.submit(REQUEST)
    await pair.a.step(3)
    region, arrived = await copy(pair.a, pair.b, "t", THIS)
    for _ in range(3):
        await pair.a.step(3)
        stage = await pair.a.moves.read_stage("t", arrived)
        await pair.b.moves.pull("t", region, stage, 5.0)
        arrived += len(stage.rows)
    frozen = await pair.a.moves.freeze("t", arrived)
    assert len(tokens_of(stream)) == 12 and arrived == 5 and len(frozen.tail.rows) == 1
    await pair.b.moves.pull("t", region, frozen.tail, 5.0)
    await pair.b.moves.commit("t", frozen)
    rest = pair.b.submit(replay_of(REQUEST, tokens_of(stream), "t"))
    await pair.b.run()
    assert pairs(stream, rest) == await undisturbed(REQUEST)


async def test_every_step_may_be_repeated(pair: Pair) -> None:
    first = pair.a.submit(REQUEST)
    await pair.a.step(5)
    for _ in range(2):
        region, arrived = await copy(pair.a, pair.b, "t", THIS)
    assert pair.b.rows.num_read == arrived
    frozen, again = await pair.a.moves.freeze("t", arrived), await pair.a.moves.freeze("t", arrived)
    assert again.tail.checksums == frozen.tail.checksums and again.digest == frozen.digest
    for _ in range(2):
        await pair.b.moves.pull("t", region, frozen.tail, 5.0)
        await pair.b.moves.commit("t", frozen)
    with pytest.raises(MoveRefused, match="digest"):
        await pair.b.moves.commit("t", replace(frozen, digest=b"0" * 16))
    second = pair.b.submit(replay_of(REQUEST, tokens_of(first), "t"))
    await pair.b.run()
    assert pairs(first, second) == await undisturbed(REQUEST)


async def test_if_the_destination_refuses_the_source_goes_on(pair: Pair) -> None:
    """Also when it is paused: its cell is leaving, but the request was there before."""
    first = pair.a.submit(REQUEST)
    await pair.a.step(6)
    offer = await pair.a.moves.open_export("t", THIS, 30.0)
    await pair.b.moves.reserve(reservation_of("other", pair.a, "x", 128))
    with pytest.raises(MoveRefused, match="room"):
        await pair.b.moves.reserve(reservation_of("t", pair.a, "x", 40))
    frozen = await pair.a.moves.freeze("t", 0)
    assert offer.num_tokens == 16 and frozen.num_computed == 15
    pair.a.pause()
    second = pair.a.submit(replay_of(REQUEST, tokens_of(first), "t"))
    with pytest.raises(AdmissionClosed):
        pair.a.submit(GenerateRequest("new", ids_of(4, 1), 3))
    await pair.a.run()
    assert pairs(first, second) == await undisturbed(REQUEST)
    assert finish_of(second).num_reused == 15
    pair.a.check_blocks(is_idle=True)


async def test_a_ticket_is_used_once_and_one_of_no_use_is_ignored(pair: Pair) -> None:
    first = pair.a.submit(REQUEST)
    await pair.a.step(6)
    await move(pair.a, pair.b, "t", THIS)
    rest = replay_of(REQUEST, tokens_of(first), "t")
    other = replace(rest, prompt_ids=ids_of(16, 5), request_id="other")
    elsewhere = replace(rest, namespace="y", request_id="elsewhere")
    streams = [pair.b.submit(r) for r in (other, elsewhere, rest, replace(rest, request_id="again"))]
    unknown = pair.b.submit(replace(rest, ticket=b"\xff\x00?", request_id="unknown"))
    await pair.b.run()
    assert [finish_of(s).num_reused for s in streams] == [0, 0, 15, 12]
    want = await undisturbed(REQUEST)
    for stream in (*streams[1:], unknown):
        assert pairs(first, stream) == want
    assert pairs(streams[0]) == await undisturbed(replace(other, ticket=b""))


async def test_leases_end_without_any_traffic(pair: Pair) -> None:
    first = pair.a.submit(REQUEST)
    await pair.a.step(6)
    await move(pair.a, pair.b, "t", THIS)
    await pair.b.moves.reserve(reservation_of("u", pair.a, "x", 40))
    assert pair.a.load_report().num_held == 1 and pair.b.load_report().num_held == 2
    pair.a.clock.now = pair.b.clock.now = 29.0
    await pair.a.moves.read_stage("t", 0)  # whoever asks again renews
    pair.a.clock.now = pair.b.clock.now = 31.0
    assert pair.a.load_report().num_held == 1 and pair.b.load_report().num_held == 0
    pair.a.clock.now = 60.0
    assert pair.a.load_report().num_held == 0
    pair.check()
    with pytest.raises(TicketUnknown):
        await pair.b.moves.commit("t", await _any_frozen(pair.a))
    late = pair.b.submit(replay_of(REQUEST, tokens_of(first), "t"))
    await pair.b.run()
    assert pairs(first, late) == await undisturbed(REQUEST)


async def test_a_lease_ends_although_nobody_asks() -> None:
    engine = await started(Fabric(), "a", clock=time.monotonic)
    engine.submit(REQUEST)
    await engine.step(6)
    await engine.moves.open_export("t", THIS, 0.01)
    await engine.moves.freeze("t", 0)
    async with asyncio.timeout(5):
        while engine.moves.num_held:
            await asyncio.sleep(0)
    engine.check_blocks(is_idle=True)
    await engine.close()


async def _any_frozen(engine: Stepped) -> object:
    engine.submit(replace(REQUEST, request_id="any"))
    await engine.step(1)
    await engine.moves.open_export("any", ExportOf("any"), 30.0)
    return await engine.moves.freeze("any", 0)


async def test_a_newer_epoch_takes_the_reservation_over_and_an_older_one_is_refused(pair: Pair) -> None:
    await pair.b.moves.reserve(reservation_of("t", pair.a, "x", 24, epoch=3))
    await pair.b.moves.reserve(reservation_of("t", pair.a, "x", 24, epoch=3))
    await pair.b.moves.reserve(reservation_of("t", pair.a, "x", 30, epoch=4))
    assert len(pair.b.moves.blocks_held()) == 8
    await pair.b.moves.release("t")
    with pytest.raises(MoveRefused, match="epoch"):
        await pair.b.moves.reserve(reservation_of("t", pair.a, "x", 24, epoch=3))


async def test_what_does_not_fit_is_refused_by_name(pair: Pair) -> None:
    good = reservation_of("t", pair.a, "x", 24)
    for wrong, name in ((replace(good, layout="other"), "layout"), (replace(good, weights_version=2), "weights_version")):
        with pytest.raises(MoveRefused, match=name):
            await pair.b.moves.reserve(wrong)
    with pytest.raises(MoveRefused, match="in flight"):
        await pair.a.moves.open_export("t", ExportOf("nobody"), 30.0)
    with pytest.raises(MoveRefused, match="namespace"):
        await pair.a.moves.open_export("t", ExportOf(namespace="nobody"), 30.0)
    with pytest.raises(TicketUnknown):
        await pair.a.moves.read_stage("t", 0)
    assert not await pair.a.moves.release("t")


async def test_a_ticket_of_other_weights_is_void_and_its_request_is_computed(pair: Pair) -> None:
    """Nothing that was computed under the old weights is reused, on either side."""
    first = pair.a.submit(REQUEST)
    await pair.a.step(6)
    await move(pair.a, pair.b, "t", THIS)
    await pair.a.load(2)
    await pair.b.load(2)
    pair.check()
    rest = replay_of(REQUEST, tokens_of(first), "t")
    streams = [engine.submit(rest) for engine in (pair.a, pair.b)]
    await pair.a.run()
    await pair.b.run()
    for stream in streams:
        assert finish_of(stream).num_reused == 0
        assert {e.weights_version for e in tokens_of(stream)} == {e.kv_version for e in tokens_of(stream)} == {2}
        assert pairs(stream) == await undisturbed(replace(rest, ticket=b""), 2)


async def test_sleep_voids_tickets_and_stops_serving_the_memory(pair: Pair) -> None:
    pair.a.submit(REQUEST)
    await pair.a.step(6)
    region, arrived = await copy(pair.a, pair.b, "t", THIS)
    stage = await pair.a.moves.read_stage("t", 0)
    await pair.a.sleep()
    await pair.b.moves.reserve(reservation_of("u", pair.b, "x", 24))
    with pytest.raises(MoveRefused, match="not read"):
        await pair.b.moves.pull("u", region, stage, 5.0)
    with pytest.raises(MoveRefused, match="sleeps"):
        await pair.a.moves.open_export("v", THIS, 30.0)
    pair.a.check_blocks(is_idle=True)


async def test_blocks_that_are_being_read_into_are_not_given_to_anyone_else(pair: Pair) -> None:
    pair.a.submit(REQUEST)
    await pair.a.step(9)
    offer = await pair.a.moves.open_export("t", THIS, 30.0)
    stage = await pair.a.moves.read_stage("t", 0)
    await pair.b.moves.reserve(reservation_of("t", pair.a, "x", 24))
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    pair.b.rows.reading = lambda: gate
    pull = asyncio.ensure_future(pair.b.moves.pull("t", offer.region, stage, 5.0))
    await asyncio.sleep(0)
    pair.b.clock.now = 100.0  # the lease does not end under a read
    assert pair.b.load_report().num_held == 1
    assert await pair.b.moves.release("t")
    assert len(pair.b.moves.blocks_held()) == 6
    pair.b.check_blocks()
    gate.set_result(None)
    with pytest.raises(TicketUnknown):
        await pull
    pair.b.check_blocks(is_idle=True)


async def test_blocks_that_arrive_changed_are_refused_and_the_request_goes_on_at_the_source(pair: Pair) -> None:
    first = pair.a.submit(REQUEST)
    await pair.a.step(9)
    offer = await pair.a.moves.open_export("t", THIS, 30.0)
    frozen = await pair.a.moves.freeze("t", 0)
    await pair.b.moves.reserve(reservation_of("t", pair.a, "x", 40))
    bad = replace(frozen.tail, rows=frozen.tail.rows[::-1].copy())
    with pytest.raises(MoveRefused, match="not as described"):
        await pair.b.moves.pull("t", offer.region, bad, 5.0)
    with pytest.raises(MoveRefused, match="have arrived"):
        await pair.b.moves.commit("t", frozen)
    await pair.b.moves.pull("t", offer.region, frozen.tail, 5.0)
    with pytest.raises(MoveRefused, match="digest"):
        await pair.b.moves.commit("t", replace(frozen, known_ids=frozen.known_ids + 1))
    second = pair.a.submit(replay_of(REQUEST, tokens_of(first), "t"))
    await pair.a.run()
    assert pairs(first, second) == await undisturbed(REQUEST)


async def test_pinned_blocks_outlive_their_request_and_pressure(pair: Pair) -> None:
    pair.a.submit(REQUEST)
    await pair.a.step(6)
    offer = await pair.a.moves.open_export("t", THIS, 30.0)
    stage = await pair.a.moves.read_stage("t", 0)
    pair.a.abort("r")
    for number in range(6):
        pair.a.submit(GenerateRequest(f"p{number}", ids_of(50, number), 40, seed=1))
    await pair.a.run()
    assert pair.a.load_report().num_preempted > 0
    await pair.b.moves.reserve(reservation_of("t", pair.a, "x", 40))
    await pair.b.moves.pull("t", offer.region, stage, 5.0)
    with pytest.raises(MoveRefused, match="has ended"):
        await pair.a.moves.freeze("t", 3)


async def test_the_prefix_of_an_execution_that_waits_moves_and_its_next_turn_finds_it(pair: Pair) -> None:
    first = pair.a.submit(REQUEST)
    await pair.a.run()
    frozen = await move(pair.a, pair.b, "t", ExportOf(namespace="x"))
    assert frozen.num_computed == 28 and len(frozen.known_ids) == 0
    longer = np.concatenate((REQUEST.prompt_ids, [e.token_id for e in tokens_of(first)], ids_of(5, 3))).astype(np.int32)
    turn = GenerateRequest("turn", longer, 8, seed=8, namespace="x")
    by_ticket = pair.b.submit(replace(turn, ticket=b"t"))
    await pair.b.run()
    by_prefix = pair.b.submit(turn)
    await pair.b.run()
    assert finish_of(by_ticket).num_reused == 28 and finish_of(by_prefix).num_reused >= 28
    want = await undisturbed(turn)
    assert pairs(by_ticket) == want and pairs(by_prefix) == want
    await move(pair.b, pair.a, "u", ExportOf(namespace="x"))  # and on, from where it is now
    assert await pair.a.moves.release("u")


async def test_requests_that_wait_or_were_preempted_take_along_what_is_computed(pair: Pair) -> None:
    requests = [GenerateRequest(f"r{i}", ids_of(40, i), 30, seed=i, namespace=f"n{i}") for i in range(4)]
    streams = [pair.a.submit(r) for r in requests]
    await pair.a.step(12)
    while not pair.a.load_report().num_preempted:
        await pair.a.step()
    reused = []
    for number, request in enumerate(requests):
        if pair.a._scheduler.find(request.request_id) is None:
            continue
        frozen = await move(pair.a, pair.b, f"t{number}", ExportOf(request.request_id))
        await pair.a.moves.release(f"t{number}")
        rest = pair.b.submit(replay_of(request, tokens_of(streams[number]), f"t{number}"))
        await pair.b.run()
        assert pairs(streams[number], rest) == await undisturbed(request)
        reused.append(finish_of(rest).num_reused)
        assert reused[-1] == frozen.num_computed
    assert any(num % BLOCK == 0 and num > 0 for num in reused)
    pair.check()


async def test_requests_that_bring_their_blocks_cannot_lock_each_other_out(pair: Pair) -> None:
    """Together they hold the whole pool and each wants one block more."""
    requests = [GenerateRequest(f"r{i}", ids_of(37, i), 60, seed=i, namespace=f"n{i}") for i in range(4)]
    rests = []
    for number, request in enumerate(requests):
        source = await started(Fabric(), "source") if number < 0 else pair.a
        stream = source.submit(request)
        await source.step(6)
        offer = await source.moves.open_export(f"t{number}", ExportOf(request.request_id), 30.0)
        frozen = await source.moves.freeze(f"t{number}", 0)
        await pair.b.moves.reserve(reservation_of(f"t{number}", source, request.namespace, frozen.num_known))
        await pair.b.moves.pull(f"t{number}", offer.region, frozen.tail, 5.0)
        await pair.b.moves.commit(f"t{number}", frozen)
        await source.moves.release(f"t{number}")
        rests.append((request, stream, replay_of(request, tokens_of(stream), f"t{number}")))
    assert pair.b._scheduler.pool.num_available == 0
    streams = [pair.b.submit(rest) for _, _, rest in rests]
    await pair.b.run()
    for (request, first, _), second in zip(rests, streams, strict=True):
        assert pairs(first, second) == await undisturbed(request)
    pair.check()


async def test_a_reservation_grows_if_more_became_known_than_was_expected(pair: Pair) -> None:
    first = pair.a.submit(REQUEST)
    await pair.a.step(1)
    offer = await pair.a.moves.open_export("t", THIS, 30.0)
    await pair.b.moves.reserve(reservation_of("t", pair.a, "x", offer.num_tokens))
    assert len(pair.b.moves.blocks_held()) == 3
    await pair.a.step(10)
    frozen = await pair.a.moves.freeze("t", 0)
    await pair.b.moves.pull("t", offer.region, frozen.tail, 5.0)
    await pair.b.moves.commit("t", frozen)
    second = pair.b.submit(replay_of(REQUEST, tokens_of(first), "t"))
    await pair.b.run()
    assert pairs(first, second) == await undisturbed(REQUEST)
    assert finish_of(second).num_reused == 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("way", ["shm", "tcp"])
async def test_blocks_are_read_from_another_process_memory(way: str, dtype: torch.dtype, tmp_path: Path) -> None:
    configs = [
        TransferConfig(name, tmp_path if way == "shm" else None, Address("127.0.0.1", 0), backends=(way,)) for name in "ab"
    ]
    with Transfer(configs[0]) as one, Transfer(configs[1]) as two:
        a, b = [await started(Fabric(), "", transfer=each, dtype=dtype) for each in (one, two)]
        whole = b.submit(REQUEST)
        await b.run()
        first = a.submit(REQUEST)
        await a.step(9)
        frozen = await move(a, b, "t", THIS)
        second = b.submit(replay_of(REQUEST, tokens_of(first), "t"))
        await b.run()
        assert pairs(first, second) == pairs(whole)
        assert finish_of(second).num_reused == frozen.num_computed == 18
        assert len(list(tmp_path.rglob("*.region"))) == (2 if way == "shm" else 0)
        memory = weakref.ref(a._runner.cache)  # type: ignore[union-attr]
        await a.sleep()
        assert memory() is None, "somebody holds on to the memory"
        assert len(list(tmp_path.rglob("*.region"))) == (1 if way == "shm" else 0)
        await a.wake()
        await b.load(1)
        await a.close()
        await b.close()


async def test_blocks_of_a_device_move_through_host_memory(pair: Pair) -> None:
    for engine in (pair.a, pair.b):
        assert engine._runner is not None
        engine.moves.shipping = Staged(engine._runner.cache, engine.rows, 7)
    first = pair.a.submit(REQUEST)
    await pair.a.step(9)
    await move(pair.a, pair.b, "t", THIS)
    second = pair.b.submit(replay_of(REQUEST, tokens_of(first), "t"))
    await pair.b.run()
    assert pairs(first, second) == await undisturbed(REQUEST)
    await pair.a.moves.release("t")
    long = pair.a.submit(GenerateRequest("long", ids_of(60, 1), 10))
    await pair.a.step(9)
    await pair.a.moves.open_export("u", ExportOf("long"), 30.0)
    with pytest.raises(MoveRefused, match="staging"):
        await pair.a.moves.freeze("u", 0)
    rest = pair.a.submit(replay_of(GenerateRequest("long", ids_of(60, 1), 10), tokens_of(long), "u"))
    await pair.a.run()
    assert finish_of(rest).num_reused > 60


async def test_what_an_engine_can_do_is_said_before_it_has_weights() -> None:
    plain = TorchEngine(POLICY, TorchEngineConfig(SMALL))
    assert plain.capabilities == Capabilities("replay") and plain.mover is None
    staged = Stepped(Fabric(), "a")
    assert staged.capabilities.migration == "staged"
    other = Stepped(Fabric(), "b", SchedulerConfig(160, 128, 8))
    assert staged.capabilities.layout != other.capabilities.layout
    with pytest.raises(MoveRefused):
        await staged.moves.open_export("t", THIS, 30.0)
