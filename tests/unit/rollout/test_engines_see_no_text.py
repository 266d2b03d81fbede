"""Token ids go to an engine and come back: nothing that is said between us and any engine is text to be read."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest
from engine_steps import POLICY, ask, collect, load, some
from fake_sglang import FakeSgLang
from fake_tensorrt_llm import World, make_package
from fake_vllm import FakeVllm
from google.protobuf.descriptor import FieldDescriptor
from gyre.proto.rollout.v1 import engine_pb2 as pb
from gyre.rollout.attempt import Attempt, Chunk
from gyre.rollout.engines.base import Finish, GenerateRequest, TokenEvent
from gyre.rollout.engines.host import Call, Ended, Piece
from gyre.rollout.engines.hosted import HostedEngine
from gyre.rollout.engines.server_process import ServerPlace
from gyre.rollout.engines.sglang_server import server_command as sglang_command
from gyre.rollout.engines.tensorrt_llm_surface import TensorRtSettings, engine_arguments, surface_of
from gyre.rollout.engines.vllm_server import Preparer, VllmBuild
from gyre.rollout.engines.vllm_server import server_command as vllm_command
from gyre.runtime.config import EngineConfig
from hosted_engines import hosted, make_sglang_over, make_vllm_over, tensorrt_host

STOPS = (7, 9)

#: The fields that may be text, and all of them are names or say how something ended.
NAMES = {GenerateRequest: {"request_id", "namespace"}, TokenEvent: set(), Finish: {"reason", "detail"},
         Call: {"call_id", "salt"}, Piece: set(), Ended: {"reason", "detail"},
         Attempt: {"request_id", "namespace"}, Chunk: {"finish", "detail"}}  # fmt: skip


@pytest.mark.parametrize("kind", NAMES, ids=lambda kind: kind.__name__)
def test_no_message_to_or_from_an_engine_has_a_text(kind: type) -> None:
    hints = typing.get_type_hints(kind)
    fields = [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else list(hints)
    texts = {name for name in fields if may_be_text(hints[name])}
    assert texts == NAMES[kind]


def may_be_text(hint: Any) -> bool:
    if isinstance(hint, str) or hint in (str, Any, object):
        return True
    return any(may_be_text(part) for part in typing.get_args(hint))


def test_nor_has_what_goes_over_the_wire() -> None:
    def texts(message: Any) -> set[str]:
        return {field.name for field in message.DESCRIPTOR.fields if field.type == FieldDescriptor.TYPE_STRING}

    assert texts(pb.GenerateRequest) == {"request_id", "namespace"}
    assert texts(pb.TokenChunk) == {"finish", "detail"}


async def sent(engine: HostedEngine, server: FakeVllm | FakeSgLang, route: str) -> dict[str, Any]:
    """What a server is sent for a call with stop tokens."""
    await load(engine, 3)
    await collect(engine.submit(ask("q", stop_token_ids=STOPS)))
    await engine.close()
    return next(body for at, body in reversed(server.calls) if at == route)


def texts_in(value: Any, place: str = "") -> set[str]:
    """The places of all texts."""
    if isinstance(value, dict):
        return {found for name, each in value.items() for found in texts_in(each, f"{place}/{name}")}
    if isinstance(value, list):
        return {found for each in value for found in texts_in(each, place)}
    return {place} if isinstance(value, str) else set()


async def test_vllm_is_sent_ids_and_told_not_to_make_text_of_them() -> None:
    server = FakeVllm(POLICY)
    body = await sent(make_vllm_over(server, POLICY), server, "/inference/v1/generate")
    assert body["token_ids"] == ask("q").prompt_ids.tolist()
    assert texts_in(body) == {"/request_id", "/cache_salt"}
    sampling = body["sampling_params"]
    assert sampling["detokenize"] is False and sampling["stop_token_ids"] == list(STOPS)
    assert not {"stop", "bad_words", "structured_outputs"} & sampling.keys()


async def test_sglang_is_sent_ids_and_told_not_to_make_text_of_them() -> None:
    server = FakeSgLang(POLICY)
    body = await sent(make_sglang_over(server, POLICY), server, "/generate")
    assert body["input_ids"] == ask("q").prompt_ids.tolist() and "text" not in body
    assert texts_in(body) == {"/rid", "/extra_key"}
    sampling = body["sampling_params"]
    assert sampling["stop_token_ids"] == list(STOPS) and sampling["no_stop_trim"] is True
    assert not {"stop", "stop_regex", "json_schema", "regex", "ebnf"} & sampling.keys()


async def test_tensorrt_llm_is_given_ids_and_told_not_to_make_text_of_them() -> None:
    world = World(POLICY, step_s=0.001)
    engine = hosted(tensorrt_host(world), POLICY)
    await load(engine, 3)
    stream = engine.submit(ask("q", max_tokens=100, stop_token_ids=(31,)))
    await some(stream, 1)
    (result,) = world.engines[-1].executor.running
    assert result.prompt_token_ids == ask("q").prompt_ids.tolist()
    sampling = dataclasses.asdict(result.asked.params_of)
    assert sampling["detokenize"] is False and sampling["stop_token_ids"] == [31]
    assert sampling["include_stop_str_in_output"] is True, "of the stop token: there is no stop string"
    assert texts_in(sampling) == {"/logprobs_mode"}
    await engine.close()


def test_every_engine_is_started_without_a_tokenizer(tmp_path: Any) -> None:
    config = EngineConfig()
    build, place = VllmBuild("0.32.0", True, True), ServerPlace("127.0.0.1", tmp_path / "log", tmp_path)
    vllm = vllm_command("python", build, Preparer(tmp_path, POLICY, "float32", (32,)), "float32", 64, config, place, 8123)  # type: ignore[arg-type]
    assert "--skip-tokenizer-init" in vllm.arguments
    assert "--skip-tokenizer-init" in sglang_command("python", "model", "127.0.0.1", 8123, "float32", 64, config, 1)
    package = make_package(World(POLICY))
    settings = TensorRtSettings("tiny", 64, 1024, 4, 64, "float32", 1, 4)
    assert engine_arguments(package, surface_of(package), settings)["skip_tokenizer_init"] is True
