"""SGLang's traps, one test each, against a fake server that has them. What every engine does is in the conformance suite."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from engine_steps import POLICY, ask, collect, ids_of, load, plain, some
from fake_sglang import FakeSgLang
from gyre.contracts.errors import EngineError
from gyre.policy.checkpoint import state_digest
from gyre.policy.decoder import Decoder
from gyre.rollout.engines.base import AdmissionClosed, InvalidRequest
from gyre.rollout.engines.host import Ended, Piece
from gyre.rollout.engines.hosted import HostedEngine
from gyre.rollout.engines.moving import MoveRefused
from gyre.rollout.engines.sglang import SgLangHost, SgLangSettings, parts_of
from gyre.rollout.engines.sglang_server import ENVIRONMENT, server_command
from gyre.runtime.config import EngineConfig, EngineServerConfig
from hosted_engines import hosted, make_sglang_over


@pytest.fixture
async def server() -> FakeSgLang:
    return FakeSgLang(POLICY)


@pytest.fixture
async def engine(server: FakeSgLang) -> AsyncIterator[HostedEngine]:
    engine = make_sglang_over(server, POLICY)
    await load(engine, 3)
    yield engine
    await engine.close()


def routes(server: FakeSgLang) -> list[str]:
    return [route for route, _ in server.calls]


@pytest.mark.parametrize("incremental", [True, False])
async def test_chunks_that_grow_and_chunks_that_add_give_the_same_tokens(incremental: bool) -> None:
    engine = make_sglang_over(FakeSgLang(POLICY, incremental=incremental), POLICY)
    await load(engine, 3)
    tokens, finish = await collect(engine.submit(ask("a", max_tokens=30)))
    assert finish.reason == "length" and [t.index for t in tokens] == list(range(30))
    assert [t.logprob for t in tokens] == pytest.approx(plain(3, ask("a"), tokens), abs=1e-4)
    assert all(t.behaviour_logprob == t.logprob for t in tokens)
    await engine.close()


@pytest.mark.parametrize("incremental", [True, False])
async def test_the_token_that_an_aborted_stream_repeats_is_counted_once(incremental: bool) -> None:
    engine = make_sglang_over(FakeSgLang(POLICY, incremental=incremental), POLICY)
    await load(engine, 3)
    whole, _ = await collect(engine.submit(ask("whole", max_tokens=80)))
    stream = engine.submit(ask("cut", max_tokens=80))
    first = await some(stream, 4)
    engine.abort("cut")
    rest, finish = await collect(stream)
    got = [*first, *rest]
    assert finish.reason == "abort" and 4 <= len(got) < 80
    assert ids_of(got) == ids_of(whole[: len(got)]) and [t.index for t in got] == list(range(len(got)))
    await engine.close()


async def test_an_abort_ends_no_other_request_whose_name_begins_alike(engine: HostedEngine, server: FakeSgLang) -> None:
    long = engine.submit(ask("job-1", max_tokens=100))
    other = engine.submit(ask("job-10", max_tokens=40))
    await some(other, 2)
    engine.abort("job-1")
    assert (await collect(other))[1].reason == "length"
    assert (await collect(long))[1].reason == "abort"
    rids = [body["rid"] for route, body in server.calls if route == "/generate"]
    assert {len(rid) for rid in rids} == {32} and len(set(rids)) == len(rids)


async def test_nothing_is_in_flight_when_weights_change_and_the_flush_is_asked_for_by_itself(
    engine: HostedEngine, server: FakeSgLang
) -> None:
    stream = engine.submit(ask("a", max_tokens=120))
    await some(stream, 3)
    server.calls.clear()
    await load(engine, 4)
    order = [r for r in routes(server) if r not in ("/generate", "/model_info")]
    assert order[:4] == ["/pause_generation", "/update_weights_from_disk", "/flush_cache", "/continue_generation"]
    update = dict(server.calls)["/update_weights_from_disk"]
    assert update["flush_cache"] is False and update["load_format"] == "auto" and update["weight_version"] == "4"
    assert dict(server.calls)["/pause_generation"] == {"mode": "abort"}
    tokens, finish = await collect(stream)
    assert finish.reason == "length" and {t.weights_version for t in tokens} <= {3, 4}


async def test_an_update_that_says_no_leaves_an_engine_nobody_trusts(engine: HostedEngine, server: FakeSgLang) -> None:
    async def changed_and_refused(body: dict) -> tuple[int, dict]:
        server.weight_version = body["weight_version"]
        return 400, {"success": False, "message": "Cache flush failed after updating weights."}

    server.post_update_weights_from_disk = changed_and_refused  # type: ignore[method-assign]
    state = Decoder.create(POLICY, 4).state_dict()
    with pytest.raises(EngineError, match="Cache flush failed"):
        await engine.load_weights(4, state_digest(state), state)
    assert engine.failed.is_set()
    with pytest.raises(AdmissionClosed):
        engine.submit(ask("a"))


async def test_weights_that_did_not_arrive_are_noticed(engine: HostedEngine, server: FakeSgLang) -> None:
    async def says_yes(_: dict) -> tuple[int, dict]:
        return 200, {"success": True, "message": "Succeeded to update model weights."}

    server.post_update_weights_from_disk = says_yes  # type: ignore[method-assign]
    state = Decoder.create(POLICY, 4).state_dict()
    with pytest.raises(EngineError, match="serves weights '3', given were 4"):
        await engine.load_weights(4, state_digest(state), state)


async def test_random_weights_under_the_right_version_fail_the_probe(engine: HostedEngine, server: FakeSgLang) -> None:
    server.model.load(Decoder.create(POLICY, 998).state_dict())
    probe = await engine.probe()
    assert not probe.ok and "predictions differ" in probe.detail


async def test_prefixes_of_old_weights_and_of_other_namespaces_are_not_hit(engine: HostedEngine, server: FakeSgLang) -> None:
    await collect(engine.submit(ask("a", length=40)))
    _, same = await collect(engine.submit(ask("b", length=40)))
    _, elsewhere = await collect(engine.submit(ask("c", length=40, namespace="other")))
    await load(engine, 4)
    tokens, later = await collect(engine.submit(ask("d", length=40)))
    assert same.num_reused > 0 and elsewhere.num_reused == later.num_reused == 0
    assert [t.logprob for t in tokens] == pytest.approx(plain(4, ask("d", length=40), tokens), abs=1e-4)
    keys = {body["extra_key"] for route, body in server.calls if route == "/generate"}
    assert {"0/3/", "0/3/other", "0/4/"} <= keys


async def test_memory_is_released_after_a_pause_and_a_flush_and_the_server_lives(
    engine: HostedEngine, server: FakeSgLang
) -> None:
    before, _ = await collect(engine.submit(ask("before", length=40)))
    stream = engine.submit(ask("cut", max_tokens=150))
    await some(stream, 2)
    server.refuse_flushes = 2
    server.calls.clear()
    freed = await engine.sleep()
    assert (await collect(stream))[1].reason == "abort"
    assert routes(server)[0] == "/pause_generation" and routes(server)[-1] == "/release_memory_occupation"
    assert routes(server).count("/flush_cache") == 3 and freed == 3 * 2**30
    await engine.wake()
    assert not server.died.is_set() and (await engine.probe()).ok
    engine.resume()
    after, _ = await collect(engine.submit(ask("after", length=40)))
    assert ids_of(after) == ids_of(before)


async def test_the_models_own_end_token_ends_only_who_asked_for_it() -> None:
    plain_engine = make_sglang_over(FakeSgLang(POLICY), POLICY)
    await load(plain_engine, 3)
    whole, _ = await collect(plain_engine.submit(ask("whole", max_tokens=30)))
    await plain_engine.close()
    eos = whole[5].token_id
    engine = make_sglang_over(FakeSgLang(POLICY, eos=eos), POLICY)
    await load(engine, 3)
    tokens, finish = await collect(engine.submit(ask("a", max_tokens=30)))
    assert finish.reason == "length" and ids_of(tokens) == ids_of(whole)
    tokens, finish = await collect(engine.submit(ask("b", max_tokens=30, stop_token_ids=(eos,))))
    assert finish.reason == "stop" and tokens[-1].token_id == eos
    await engine.close()


async def test_a_server_that_dies_ends_its_requests_and_the_engine(engine: HostedEngine, server: FakeSgLang) -> None:
    stream = engine.submit(ask("a", max_tokens=200))
    await some(stream, 2)
    server.die()
    _, finish = await collect(stream)
    assert finish.reason == "error"
    async with asyncio.timeout(5):
        await engine.failed.wait()
    assert not (await engine.probe()).ok


async def test_a_stop_token_that_was_made_up_for_want_of_a_number_is_an_error(engine: HostedEngine, server: FakeSgLang) -> None:
    server.computes_nothing = True
    tokens, finish = await collect(engine.submit(ask("a", stop_token_ids=(7,))))
    assert finish.reason == "error" and "NaN happened" in finish.detail and tokens == []


async def test_a_server_with_older_routes_serves_too() -> None:
    server = FakeSgLang(POLICY)
    server.old_routes = True
    engine = make_sglang_over(server, POLICY)
    await load(engine, 3)
    assert await engine.sleep() == 3 * 2**30
    await engine.wake()
    assert (await engine.probe()).ok
    await engine.close()


async def test_memory_of_a_server_that_cannot_sleep_stays_and_its_weights_too() -> None:
    server = FakeSgLang(POLICY)
    engine = hosted(SgLangHost(server, SgLangSettings(20.0, 20.0, 10.0, 0.005, sleeps=False)), POLICY)
    await load(engine, 3)
    assert await engine.sleep() == 0 and not engine.capabilities.sleeps
    await engine.wake()
    assert (await engine.probe()).ok and "/release_memory_occupation" not in routes(server)
    await engine.close()


async def test_what_it_cannot_do_is_refused_by_name(engine: HostedEngine) -> None:
    with pytest.raises(InvalidRequest, match=r"temperature: 0\.6"):
        engine.submit(ask("a", temperature=0.6))
    assert engine.capabilities.migration == "replay"
    with pytest.raises(MoveRefused):
        await engine.export_ticket("a")


def chunk(ids: list[int], num: int, logprobs: list[list[object]], finish: dict | None = None) -> dict:
    info = {"completion_tokens": num, "output_token_logprobs": logprobs, "finish_reason": finish, "cached_tokens": 8}
    return {"output_ids": ids, "meta_info": info}


def test_chunks_are_counted_and_checked() -> None:
    assert parts_of(chunk([5], 1, [[-0.5, 5, None]]), 0) == (Piece([5], [-0.5]), None)
    both = [[-0.5, 5, None], [-0.25, 6, None]]
    assert parts_of(chunk([5, 6], 2, both, {"type": "length"}), 1) == (Piece([6], [-0.25]), Ended("length", "", 8))
    repeated = chunk([6], 2, both[1:], {"type": "abort", "message": "Abort in decoding"})
    assert parts_of(repeated, 2) == (Piece([], []), Ended("abort", "Abort in decoding", 8))
    _, lost = parts_of(chunk([7], 4, [[-0.5, 7, None]]), 1)
    assert lost is not None and "4 tokens after 1, with 1 ids" in lost.detail
    _, other = parts_of(chunk([7], 1, [[-0.5, 8, None]]), 0)
    assert other is not None and "of other tokens" in other.detail
    _, refused = parts_of(chunk([], 0, [], {"type": "abort", "status_code": 400, "message": "too long"}), 0)
    assert refused is not None and refused.reason == "error"


def test_the_server_starts_with_weights_of_its_own_and_a_users_arguments_come_last() -> None:
    config = EngineConfig(server=EngineServerConfig(arguments=("--mem-fraction-static", "0.6")))
    command = server_command("python", "model", "host", 1234, "bfloat16", 4096, config, 1)
    assert command[:3] == ["python", "-m", "sglang.launch_server"] and command[-2:] == ["--mem-fraction-static", "0.6"]
    assert "--enable-memory-saver" in command and command[command.index("--load-format") + 1] == "dummy"
    assert ENVIRONMENT["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "1"
