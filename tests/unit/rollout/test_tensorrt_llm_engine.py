"""TensorRT-LLM's traps, one test each, against a fake that has them. What every engine does is in the conformance suite."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from engine_steps import POLICY, ask, collect, ids_of, load, plain, some
from fake_tensorrt_llm import DisaggregatedParams, Flavour, Logprob, World, make_package
from gyre.contracts.errors import EngineError
from gyre.policy.checkpoint import state_digest
from gyre.policy.decoder import Decoder
from gyre.rollout.engines.base import (
    AdmissionClosed,
    GenerateRequest,
    InvalidRequest,
    TokenEvent,
    WeightsMismatch,
)
from gyre.rollout.engines.host import HostError
from gyre.rollout.engines.hosted import HostedEngine
from gyre.rollout.engines.moving import MoveRefused
from gyre.rollout.engines.tensorrt_llm import tokens_of
from gyre.rollout.engines.tensorrt_llm_surface import surface_of
from gyre.rollout.engines.tensorrt_llm_tickets import Ticket
from hosted_engines import hosted, tensorrt_host

OLD = Flavour(pauses=False, simple_logprobs=False, sleep_config=False, torch_sampler=False)


async def serving(world: World, version: int = 3, **settings: float) -> HostedEngine:
    engine = hosted(tensorrt_host(world, **settings), POLICY)
    await load(engine, version)
    return engine


@pytest.mark.parametrize("flavour", [Flavour(), OLD, Flavour(simple_logprobs=False), replace(OLD, torch_sampler=True)])
async def test_every_kind_of_installation_gives_the_policys_logprobs(flavour: Flavour) -> None:
    engine = await serving(World(POLICY, flavour))
    request = ask("a")
    tokens, finish = await collect(engine.submit(request))
    assert finish.reason == "length"
    assert [t.logprob for t in tokens] == pytest.approx(plain(3, request, tokens), abs=1e-4)
    assert all(t.behaviour_logprob == t.logprob for t in tokens)
    await engine.close()


async def test_greedy_tokens_have_the_policys_logprob_and_a_behaviour_of_certainty() -> None:
    engine = await serving(World(POLICY))
    tokens, _ = await collect(engine.submit(ask("a", temperature=0.0)))
    assert all(t.behaviour_logprob == 0.0 and t.logprob < 0 for t in tokens)
    await engine.close()


async def test_a_temperature_whose_logprobs_cannot_both_be_had_is_refused_by_name() -> None:
    engine = await serving(World(POLICY))
    with pytest.raises(InvalidRequest, match=r"temperature: 0\.7"):
        engine.submit(ask("a", temperature=0.7))
    with pytest.raises(InvalidRequest, match=r"top_p 0\.5"):
        engine.submit(ask("a", top_p=0.5))
    await engine.close()


async def test_an_engine_of_which_no_number_gives_logprobs_does_not_start() -> None:
    world = World(POLICY, OLD)
    host = tensorrt_host(world)
    host._submit = lambda *_, **__: SimpleNamespace()  # type: ignore[method-assign]
    with pytest.raises(HostError, match="no logprob of the sampled token"):
        await host.start()


async def test_prefixes_are_forgotten_before_their_memory_is_released() -> None:
    """The index outlives the memory: without the reset a hit after waking reads garbage."""
    world = World(POLICY)
    engine = await serving(world)
    before, _ = await collect(engine.submit(ask("before", length=40)))
    await engine.sleep()
    release = next(i for i, call in enumerate(world.calls) if call.startswith("release") and "kv_cache" in call)
    assert "reset_prefix_cache" in world.calls[release - 3 : release]
    await engine.wake()
    assert (await engine.probe()).ok
    engine.resume()
    after, finish = await collect(engine.submit(ask("after", length=40)))
    assert ids_of(after) == ids_of(before)
    assert [t.logprob for t in after] == pytest.approx([t.logprob for t in before], abs=1e-5)
    await engine.close()


@pytest.mark.parametrize("remembers_releases", [True, False])
async def test_a_reset_that_does_nothing_costs_memory_and_without_our_salt_the_answer(remembers_releases: bool) -> None:
    world = World(POLICY)
    engine = await serving(world)
    before, _ = await collect(engine.submit(ask("before", length=40)))
    world.engines[0].executor.reset_prefix_cache = lambda: None
    await engine.sleep()
    engine._host._era *= remembers_releases  # type: ignore[attr-defined]
    await engine.wake()
    assert (await engine.probe()).ok
    engine.resume()
    after, finish = await collect(engine.submit(ask("after", length=40)))
    assert (ids_of(after) == ids_of(before)) is remembers_releases
    assert (finish.num_reused == 0) is remembers_releases
    await engine.close()


async def test_a_prefix_index_that_outlived_its_memory_fails_the_probe() -> None:
    world = World(POLICY)
    engine = await serving(world)
    model = world.engines[0].executor.model
    model.match = lambda salt, ids: (len(ids) // 2, False)
    probe = await engine.probe()
    assert not probe.ok and "predictions differ" in probe.detail
    with pytest.raises(AdmissionClosed):
        engine.submit(ask("a"))
    await engine.close()


async def test_weights_that_changed_behind_our_back_fail_the_probe() -> None:
    world = World(POLICY)
    engine = await serving(world)
    next(world.engines[0].executor.model.decoder.parameters()).add_(0.5)
    probe = await engine.probe()
    assert not probe.ok and "fingerprint" in probe.detail
    await engine.close()


@pytest.mark.parametrize("flavour", [Flavour(), OLD])
async def test_an_update_does_not_wait_for_long_requests_and_loses_none_of_their_tokens(flavour: Flavour) -> None:
    engine = await serving(World(POLICY, flavour))
    streams = [engine.submit(ask(f"r{i}", max_tokens=120, seed=i)) for i in range(3)]
    await some(streams[0], 5)
    async with asyncio.timeout(10):
        await load(engine, 4)
    for stream in streams:
        tokens, finish = await collect(stream)
        assert finish.reason == "length"
    assert engine.load_report().num_tokens_sampled == 360
    await engine.close()


async def test_requests_that_come_during_an_update_wait_for_the_new_weights() -> None:
    engine = await serving(World(POLICY))
    state = Decoder.create(POLICY, 4).state_dict()
    swap = asyncio.create_task(engine.load_weights(4, state_digest(state), state))
    while not engine._chores.changing:
        await asyncio.sleep(0)
    late = engine.submit(ask("late"))
    await swap
    tokens, _ = await collect(late)
    assert {t.weights_version for t in tokens} == {4}
    await engine.close()


async def test_prefixes_of_old_weights_are_not_hit_under_new_ones() -> None:
    engine = await serving(World(POLICY))
    await collect(engine.submit(ask("a", length=40)))
    _, again = await collect(engine.submit(ask("b", length=40)))
    await load(engine, 4)
    tokens, first = await collect(engine.submit(ask("c", length=40)))
    assert again.num_reused > 0 and first.num_reused == 0
    assert [t.logprob for t in tokens] == pytest.approx(plain(4, ask("c", length=40), tokens), abs=1e-4)
    await engine.close()


async def test_prefixes_are_shared_within_a_namespace_alone() -> None:
    engine = await serving(World(POLICY))
    await collect(engine.submit(ask("a", length=40, namespace="one")))
    _, other = await collect(engine.submit(ask("b", length=40, namespace="two")))
    _, same = await collect(engine.submit(ask("c", length=40, namespace="one")))
    assert other.num_reused == 0 and same.num_reused > 0
    await engine.close()


async def test_weights_with_another_checksum_change_nothing() -> None:
    engine = await serving(World(POLICY))
    with pytest.raises(WeightsMismatch):
        await engine.load_weights(4, "0" * 64, Decoder.create(POLICY, 4).state_dict())
    tokens, _ = await collect(engine.submit(ask("a")))
    assert {t.weights_version for t in tokens} == {3}
    await engine.close()


async def test_an_update_that_breaks_half_way_ends_the_engine_and_not_the_readers() -> None:
    world = World(POLICY)
    engine = await serving(world)
    stream = engine.submit(ask("a", max_tokens=200))
    await some(stream, 3)
    world.breaks_update = True
    state = Decoder.create(POLICY, 4).state_dict()
    with pytest.raises(EngineError, match="illegal memory access"):
        await engine.load_weights(4, state_digest(state), state)
    _, finish = await collect(stream)
    assert finish.reason == "error" and engine.failed.is_set()
    with pytest.raises(AdmissionClosed):
        engine.resume()
    await engine.close()


async def test_an_aborted_request_keeps_what_was_sampled_and_no_more() -> None:
    """A cancelled output has one logprob too many."""
    engine = await serving(World(POLICY))
    whole, _ = await collect(engine.submit(ask("whole", max_tokens=60)))
    stream = engine.submit(ask("cut", max_tokens=60))
    first = await some(stream, 4)
    engine.abort("cut")
    rest, finish = await collect(stream)
    got = [*first, *rest]
    assert finish.reason == "abort" and len(got) < 60
    assert ids_of(got) == ids_of(whole[: len(got)])
    await engine.close()


async def test_a_stop_token_that_is_trimmed_apart_from_its_logprob_is_an_error_and_not_a_shift() -> None:
    engine = await serving(World(POLICY, Flavour(trims_apart=True)))
    whole, _ = await collect(engine.submit(ask("whole")))
    ids = ids_of(whole)
    stop = ids[5]
    tokens, finish = await collect(engine.submit(ask("a", stop_token_ids=(stop,))))
    # tokens are counted as they come, so the stop token was seen before it was trimmed away
    assert finish.reason in ("stop", "error")
    assert ids_of(tokens) == ids[: len(tokens)]
    await engine.close()


def test_lengths_that_differ_at_the_end_are_named() -> None:
    output = SimpleNamespace(token_ids=[1, 2], logprobs=[-0.1, -0.2, -0.3], finish_reason="stop")
    assert tokens_of(output, 0, last=True) == ([], [], "2 token ids but 3 logprobs")
    lagging = SimpleNamespace(token_ids=[1, 2], logprobs=[-0.1], finish_reason=None)
    assert tokens_of(lagging, 0, last=False) == ([1], [-0.1], "")
    other = SimpleNamespace(token_ids=[1], logprobs=[{5: Logprob(-0.1)}], finish_reason="length")
    assert tokens_of(other, 0, last=True)[2] == "no logprob of the sampled token 1"


async def test_long_prompts_are_accepted_and_settings_for_several_gpus_are_made() -> None:
    world = World(POLICY)
    engine = await serving(world)
    arguments = world.engines[0].kwargs
    assert arguments["max_input_len"] == 256 and arguments["allreduce_strategy"] == "NCCL"
    assert arguments["kv_cache_config"].enable_block_reuse and arguments["kv_cache_config"].max_tokens == 1024
    await engine.close()


async def test_sleep_leaves_weights_behind_and_the_next_probe_loads_them_again() -> None:
    world = World(POLICY)
    engine = await serving(world)
    updates = world.calls.count("gyre_update")
    await engine.sleep()
    await engine.wake()
    await load(engine, 4)  # newer ones come first: the old ones are not loaded for nothing
    assert world.calls.count("gyre_update") == updates + 1
    await engine.sleep()
    await engine.wake()
    assert (await engine.probe()).ok and world.calls.count("gyre_update") == updates + 2
    await engine.close()


@pytest.mark.parametrize("flavour", [Flavour(), Flavour(first_logprob_lost=True), Flavour(simple_logprobs=False)])
async def test_a_moved_request_counts_the_token_of_its_export_once(flavour: Flavour) -> None:
    world = World(POLICY, flavour)
    source, destination = await serving(world), await serving(world)
    whole, _ = await collect(source.submit(ask("whole", max_tokens=40)))
    stream = source.submit(ask("a", max_tokens=40))
    first = await some(stream, 6)
    ticket = await source.export_ticket("a")
    rest, finish = await collect(stream)
    moved = [*first, *rest]
    assert finish.reason == "moved" and source.load_report().num_running == 0
    tokens, finish = await collect(destination.submit(continued(moved, 40, ticket)))
    every = [*moved, *tokens]
    assert finish.reason == "length" and [t.index for t in every] == list(range(40))
    assert ids_of(every) == ids_of(whole)
    assert [t.logprob for t in every] == pytest.approx([t.logprob for t in whole], abs=1e-5)
    assert finish.num_reused == 10 + len(moved) - 1
    await source.close()
    await destination.close()


def continued(moved: list[TokenEvent], max_tokens: int, ticket: bytes, **fields: object) -> GenerateRequest:
    ids = np.array(ids_of(moved), np.int32)
    prompt = np.concatenate((ask("a").prompt_ids, ids))
    rest = max_tokens - len(moved)
    return GenerateRequest("a", prompt, rest, seed=11, num_emitted=len(moved), ticket=ticket, **fields)  # type: ignore[arg-type]


async def moved_away(source: HostedEngine) -> tuple[list[TokenEvent], bytes]:
    stream = source.submit(ask("a", max_tokens=40))
    first = await some(stream, 6)
    ticket = await source.export_ticket("a")
    rest, _ = await collect(stream)
    return [*first, *rest], ticket


async def test_a_transfer_that_is_lost_ends_in_a_replay_within_its_deadline() -> None:
    world = World(POLICY)
    source, destination = await serving(world), await serving(world, transfer_timeout_s=0.05)
    moved, ticket = await moved_away(source)
    world.lose_transfers = True
    tokens, finish = await collect(destination.submit(continued(moved, 40, ticket)))
    assert finish.reason == "length" and len(tokens) == 40 - len(moved) and finish.num_reused == 0
    await source.close()
    await destination.close()


async def test_a_ticket_that_does_not_fit_is_ignored_and_the_tokens_are_computed() -> None:
    world = World(POLICY)
    source, destination = await serving(world), await serving(world)
    moved, ticket = await moved_away(source)
    request = continued(moved, 40, ticket)
    others = [
        replace(request, request_id="other tokens", prompt_ids=request.prompt_ids[:-1], max_tokens=request.max_tokens),
        replace(request, request_id="other namespace", namespace="elsewhere"),
        replace(request, request_id="no ticket", ticket=b"\x00garbage"),
        replace(request, request_id="other layout", ticket=ticket.replace(b"tensorrt_llm/tiny", b"tensorrt_llm/huge")),
    ]
    for other in others:
        _, finish = await collect(destination.submit(other))
        assert finish.reason == "length", other.request_id
    await load(destination, 4)
    tokens, _ = await collect(destination.submit(request))
    assert {t.weights_version for t in tokens} == {4}
    await source.close()
    await destination.close()


async def test_what_cannot_move_is_refused_and_goes_on_or_is_replayed() -> None:
    engine = await serving(World(POLICY, Flavour(moves=False)))
    assert engine.capabilities.migration == "replay"
    stream = engine.submit(ask("a"))
    with pytest.raises(MoveRefused):
        await engine.export_ticket("a")
    assert (await collect(stream))[1].reason == "length"
    with pytest.raises(MoveRefused, match="not in flight"):
        await engine.export_ticket("unknown")
    await engine.close()


async def test_an_export_that_fails_changes_nothing_and_the_request_goes_on() -> None:
    world = World(POLICY)
    engine = await serving(world)
    whole, _ = await collect(engine.submit(ask("whole", max_tokens=60)))
    stream = engine.submit(ask("a", max_tokens=60))
    first = await some(stream, 4)
    world.refuses_context_only = True
    with pytest.raises(MoveRefused, match="did not export"):
        await engine.export_ticket("a")
    rest, finish = await collect(stream)
    assert finish.reason == "length" and ids_of([*first, *rest]) == ids_of(whole)
    await engine.close()


async def test_a_paused_engine_takes_back_what_nobody_fetched() -> None:
    engine = await serving(World(POLICY))
    engine.pause()
    with pytest.raises(AdmissionClosed):
        engine.submit(ask("new"))
    engine.resume()
    moved, ticket = await moved_away(engine)
    assert engine.load_report().num_held == 1
    engine.pause()
    tokens, finish = await collect(engine.submit(continued(moved, 40, ticket)))
    assert finish.reason == "length" and len(tokens) == 40 - len(moved) and finish.num_reused > 0
    assert engine.load_report().num_held == 0
    await engine.close()


async def test_a_request_that_ends_with_the_token_of_its_export_is_not_moved() -> None:
    engine = await serving(World(POLICY))
    stream = engine.submit(ask("a", max_tokens=200))
    await some(stream, 3)
    live = engine._lives["a"]
    live.request = replace(live.request, max_tokens=len(live.kept) + 2)
    with pytest.raises(MoveRefused, match="has ended"):
        while True:
            await engine.export_ticket("a")
    assert (await collect(stream))[1].reason in ("length", "error")
    await engine.close()


def test_a_ticket_is_plain_text_and_comes_back_whole() -> None:
    params = {"opaque_state": b"\x00\xff", "first_gen_tokens": [5], "first_gen_log_probs": [{5: Logprob(-0.5, 1)}]}
    ticket = Ticket("layout", "3/ns", "digest", 5, params)
    again = Ticket.from_bytes(ticket.to_bytes())
    assert again.params["opaque_state"] == b"\x00\xff" and again.first == 5
    with pytest.raises(MoveRefused, match="not a ticket"):
        Ticket.from_bytes(b"{}")


def test_what_an_installation_lacks_is_named() -> None:
    assert "AsyncLLM" in surface_of(SimpleNamespace()).problem
    package = make_package(World(POLICY))
    assert surface_of(package).problem == "" and surface_of(package).moves
    package.AsyncLLM = package.LLM
    assert "setup_async, release" in surface_of(package).problem
    package = make_package(World(POLICY))
    package.LLM.generate_async = lambda self, inputs: None
    assert "cache_salt" in surface_of(package).problem


def test_parameters_that_are_no_request_type_are_refused() -> None:
    with pytest.raises(ValueError, match="Unknown request type"):
        DisaggregatedParams("sideways")
