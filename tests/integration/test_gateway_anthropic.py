"""The gateway's Messages route over a real socket, asked by the official Anthropic client."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import anthropic
import pytest
from rollout_fakes import make_bench
from served_gateway import Served, serve

CALL_TEXT = 'Let me look.\n<tool_call>\n{"name": "sh", "arguments": {"cmd": "ls", "deep": 1.0}}\n</tool_call>'
SHELL = [{"name": "sh", "description": "runs it", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}]
HELLO = [{"role": "user", "content": "hello"}]
USE = {"model": "policy", "max_tokens": 512, "messages": HELLO, "tools": SHELL}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async for each in serve(make_bench(tmp_path, CALL_TEXT, "plain héllo")):
        yield each


def with_results(*blocks: dict, answer: anthropic.types.Message) -> list[dict]:
    said = [block.model_dump(exclude_none=True) for block in answer.content]
    return [*HELLO, {"role": "assistant", "content": said}, {"role": "user", "content": list(blocks)}]


async def test_a_call_and_its_tool_result_round_trip(served: Served) -> None:
    first = await served.anthropic.messages.create(**USE)
    assert (first.stop_reason, first.content[0].text) == ("tool_use", "Let me look.")
    use = first.content[1]
    assert (use.name, use.input) == ("sh", {"cmd": "ls", "deep": 1.0})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "a b"}]}
    messages = with_results(result, answer=first)
    second = await served.anthropic.messages.create(**{**USE, "messages": messages})
    assert (second.stop_reason, second.content[0].text) == ("end_turn", "plain héllo")
    one, two = (c.record for c in served.bench.records)
    assert two.keep_len == one.prompt_len + len(one.output_ids), "on exactly the ids that were sampled"
    usage = second.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == two.prompt_len
    assert (usage.cache_read_input_tokens, usage.output_tokens) == (two.keep_len, len(two.output_ids))


async def test_what_is_appended_to_the_last_message_does_not_fork_it(served: Served) -> None:
    """A compaction is asked for in a block behind the results; the next request has more of them, or none."""
    first = await served.anthropic.messages.create(**USE)
    result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "a b"}
    await served.anthropic.messages.create(**{**USE, "messages": with_results(result, answer=first)})
    asks = {"type": "text", "text": "Write a summary."}
    await served.anthropic.messages.create(**{**USE, "messages": with_results(result, asks, answer=first)})
    _, second, third = (c.record for c in served.bench.records)
    assert third.base_call == second.call and third.keep_len > second.keep_len, "the result is shared as well"


@pytest.mark.parametrize("tools", [SHELL, []])
async def test_a_stream_says_the_same_as_an_answer(served: Served, tools: list) -> None:
    async with served.anthropic.messages.stream(**{**USE, "tools": tools}) as stream:
        kinds = [event.type async for event in stream if event.type in ("message_start", "content_block_start", "message_stop")]
        answer = await stream.get_final_message()
    record = served.bench.records[0].record
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == record.prompt_len
    assert answer.usage.output_tokens == len(record.output_ids)
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    if tools:
        assert (answer.content[0].text.strip(), answer.stop_reason) == ("Let me look.", "tool_use")
        assert answer.content[1].input == {"cmd": "ls", "deep": 1.0}
    else:
        assert (answer.content[0].text, answer.stop_reason, len(answer.content)) == (CALL_TEXT, "end_turn", 1)


async def test_streamed_and_whole_answers_continue_each_other(served: Served) -> None:
    async with served.anthropic.messages.stream(**USE) as stream:
        first = await stream.get_final_message()
    result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "a b"}
    await served.anthropic.messages.create(**{**USE, "messages": with_results(result, answer=first)})
    one, two = (c.record for c in served.bench.records)
    assert two.keep_len == one.prompt_len + len(one.output_ids)


async def test_counting_says_what_the_call_then_takes_and_records_nothing(served: Served) -> None:
    counted = await served.anthropic.messages.count_tokens(model="policy", messages=HELLO, tools=SHELL)
    assert served.bench.records == []
    await served.anthropic.messages.create(**USE)
    assert counted.input_tokens == served.bench.records[0].record.prompt_len


async def test_errors_are_in_the_callers_form(served: Served) -> None:
    stranger = anthropic.AsyncAnthropic(base_url=served.url, api_key="gyre.x.y", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as wrong:
        await stranger.messages.create(**USE)
    assert wrong.value.body["error"]["type"] == "authentication_error"
    long = [{"role": "user", "content": "word " * 9000}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        await served.anthropic.messages.create(**{**USE, "messages": long})
    reply = await served.http.post("/v1/messages", json={"messages": [{"role": "user", "content": [{"type": "image"}]}]})
    assert (reply.status_code, reply.json()["type"]) == (400, "error")
    assert reply.json()["error"] == {"type": "invalid_request_error",
                                     "message": "messages[0].content[0]: 'image'; only text is served"}
    assert (await served.http.post("/v1/messages/batches", json={})).json()["type"] == "error"
    await stranger.close()


async def test_an_error_after_the_stream_began_is_an_event(served: Served) -> None:
    served.bench.refuse_commits = True
    reply = await served.http.post("/v1/messages?beta=true", json={**USE, "tools": [], "stream": True})
    assert reply.status_code == 200
    kind, _, data = reply.text.strip().split("\n\n")[-1].partition("\n")
    assert (kind, json.loads(data.removeprefix("data: "))["error"]["type"]) == ("event: error", "invalid_request_error")
