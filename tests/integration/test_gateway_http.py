"""The gateway over a real socket, asked by the official OpenAI client."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
from rollout_fakes import make_bench
from served_gateway import Served, serve

CALL_TEXT = 'Let me look.\n<tool_call>\n{"name": "sh", "arguments": {"cmd": "ls"}}\n</tool_call>'
SHELL = [{"type": "function", "function": {"name": "sh", "parameters": {"type": "object"}}}]
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async for each in serve(make_bench(tmp_path, CALL_TEXT, "plain héllo")):
        yield each


async def test_a_call_and_its_tool_result_round_trip(served: Served) -> None:
    first = await served.client.chat.completions.create(model="policy", messages=HELLO, tools=SHELL)
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    [call] = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("sh", '{"cmd": "ls"}')
    messages = [*HELLO, choice.message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": call.id, "content": "a b"}]
    second = await served.client.chat.completions.create(model="policy", messages=messages, tools=SHELL)
    assert second.choices[0].message.content == "plain héllo"
    assert second.choices[0].finish_reason == "stop"
    one, two = (c.record for c in served.bench.records)
    assert two.keep_len == one.prompt_len + len(one.output_ids)
    assert second.usage.prompt_tokens == two.prompt_len
    assert second.usage.completion_tokens == len(two.output_ids)
    assert second.usage.prompt_tokens_details.cached_tokens == two.keep_len


@pytest.mark.parametrize("tools", [SHELL, None])
async def test_a_stream_says_the_same_as_an_answer(served: Served, tools: list | None) -> None:
    options = {"model": "policy", "messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    text, calls, reason, usage = "", [], None, None
    async for chunk in await served.client.chat.completions.create(**options, **({"tools": tools} if tools else {})):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            calls += choice.delta.tool_calls or []
            reason = choice.finish_reason or reason
    record = served.bench.records[0].record
    assert (usage.prompt_tokens, usage.completion_tokens) == (record.prompt_len, len(record.output_ids))
    if tools:
        assert (text.strip(), reason, calls[0].function.arguments) == ("Let me look.", "tool_calls", '{"cmd": "ls"}')
    else:
        assert (text, reason, calls) == (CALL_TEXT, "stop", [])


async def test_the_terminal_event_waits_for_the_commit(served: Served) -> None:
    bench = served.bench
    bench.commits.clear()
    task = asyncio.create_task(served.client.chat.completions.create(model="policy", messages=HELLO))
    await bench.commit_asked.wait()
    done, _ = await asyncio.wait({task}, timeout=0.05)
    assert not done
    bench.commits.set()
    assert (await task).choices[0].message.content


async def test_a_stalled_stream_goes_on_where_it_paused(served: Served) -> None:
    bench = served.bench
    bench.router.set_admitting(0, False)
    stream = asyncio.create_task(served.client.chat.completions.create(model="policy", messages=HELLO, stream=True))
    while not served.session.pending:
        await asyncio.sleep(0.001)
    bench.router.set_admitting(0, True)
    text = "".join([c.choices[0].delta.content or "" async for c in await stream])
    assert text == CALL_TEXT


async def test_a_client_that_gave_up_gets_the_same_answer_on_retry(served: Served) -> None:
    served.bench.engine.gate.clear()
    with pytest.raises(openai.APITimeoutError):
        await served.client.with_options(timeout=0.05).chat.completions.create(model="policy", messages=HELLO)
    served.bench.engine.gate.set()
    answer = await served.client.chat.completions.create(model="policy", messages=HELLO)
    assert len(served.bench.records) == 1
    assert answer.id == "chatcmpl-" + served.bench.records[0].answer.id
    assert served.session.deliveries.undelivered == ()


async def test_an_answer_that_nobody_waited_for_is_undelivered(served: Served) -> None:
    served.bench.engine.gate.clear()
    with pytest.raises(openai.APITimeoutError):
        await served.client.with_options(timeout=0.05).chat.completions.create(model="policy", messages=HELLO)
    served.bench.engine.gate.set()
    while not served.bench.records or served.session.pending:
        await asyncio.sleep(0.001)
    assert served.session.deliveries.undelivered == (served.bench.records[0].record.call,)
    await served.client.chat.completions.create(model="policy", messages=[*HELLO, *HELLO])
    assert served.session.deliveries.undelivered == (served.bench.records[0].record.call,)


async def test_what_a_request_says_of_itself_is_recorded(served: Served) -> None:
    await served.client.chat.completions.create(
        model="policy", messages=HELLO, prompt_cache_key="conv", metadata={"user_id": "u"}, extra_body={"session_id": "s"},
        extra_headers={"X-Gyre-Role-Class": "sub-agent", "X-Gyre-Lineage": "helper", "X-Session-ID": "t"})
    record = served.bench.records[0].record
    assert (record.role_class, record.lineage) == ("sub-agent", "helper")
    assert record.evidence.tags == {
        "x-gyre-role-class": "sub-agent", "x-gyre-lineage": "helper", "x-session-id": "t", "metadata.user_id": "u",
        "session_id": "s", "prompt_cache_key": "conv"}
    with pytest.raises(openai.BadRequestError, match="X-Gyre-Trainable"):
        await served.client.chat.completions.create(model="policy", messages=HELLO,
                                                    extra_headers={"X-Gyre-Trainable": "perhaps"})


async def test_errors_come_in_openai_form(served: Served) -> None:
    for options, field in (({"n": 2}, "n"), ({"stop": ["x"]}, "stop"), ({"tool_choice": "required"}, "tool_choice"),
                           ({"messages": []}, "messages"), ({"max_tokens": 0}, "max_tokens"),
                           ({"messages": [{"role": "alien", "content": ""}]}, "messages[0].role"),
                           ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
                           ({"response_format": {"type": "json_object"}}, "response_format")):
        with pytest.raises(openai.BadRequestError) as caught:
            await served.client.chat.completions.create(**({"model": "m", "messages": HELLO} | options))
        assert field in caught.value.message
    stranger = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="gyre.x.y", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        await stranger.chat.completions.create(model="m", messages=HELLO)
    await stranger.close()
    served.bench.sessions.close(served.session.spec.execution)
    with pytest.raises(openai.ConflictError, match="has ended"):
        await served.client.chat.completions.create(model="m", messages=HELLO)


async def test_an_error_after_the_stream_began_is_an_event(served: Served) -> None:
    served.bench.refuse_commits = True
    request = {"model": "m", "messages": HELLO, "stream": True}
    reply = await served.http.post("/v1/chat/completions", json=request)
    assert reply.status_code == 200
    assert reply.text.endswith("data: [DONE]\n\n")
    assert '"code":"execution_ended"' in reply.text.split("\n\n")[-3]


async def test_routes(served: Served) -> None:
    http = served.http
    assert (await http.head("/")).status_code == (await http.get("/health")).status_code == 200
    models = await served.client.models.list()
    assert [(m.id, m.max_model_len) for m in models.data] == [("policy", 8192)]
    for path in ("/v1/responses/compact", "/v1/messages/batches", "/v1/completions"):
        reply = await http.post(path, json={})
        assert reply.status_code == 501
        assert "/v1/chat/completions" in reply.json()["error"]["message"]
    assert (await http.get("/nothing")).status_code == 404
    assert (await http.get("/v1/chat/completions")).status_code == 405
    assert (await http.post("/v1/chat/completions", content=b"x" * 100_001)).status_code == 413

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b"x" * 1000

    assert (await http.post("/v1/chat/completions", content=endless())).status_code == 413
    assert (await http.post("/v1/chat/completions", content=b"[" * 50_000)).status_code == 400
    assert (await http.post("/v1/chat/completions", content=b"\xff")).status_code == 400
