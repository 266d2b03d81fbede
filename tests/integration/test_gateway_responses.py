"""The gateway's Responses route over a real socket, asked by the official OpenAI client."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rollout_fakes import make_bench
from served_gateway import Served, serve

CALL_TEXT = ('Let me look.\n<tool_call>\n{"name": "sh", "arguments": {"cmd": "ls"}}\n</tool_call>\n<tool_call>\n'
             '{"name": "agents.send", "arguments": {"to": "x"}}\n</tool_call>\n<tool_call>\n'
             '{"name": "patch", "arguments": {"input": "*** Begin"}}\n</tool_call>')
SHELL = {"type": "function", "name": "sh", "parameters": {"type": "object"}, "strict": False}
TOOLS = [SHELL, {"type": "namespace", "name": "agents", "description": "", "tools": [{**SHELL, "name": "send"}]},
         {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": ""}},
         {"type": "web_search"}]
HELLO = [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
         {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
USE = {"model": "policy", "input": HELLO, "tools": TOOLS, "store": False, "include": ["reasoning.encrypted_content"]}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async for each in serve(make_bench(tmp_path, CALL_TEXT, "plain héllo")):
        yield each


def with_results(output: list) -> list[dict]:
    said = [item.model_dump(exclude_none=True) for item in output]
    kinds = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
    results = [{"type": kinds[i["type"]], "call_id": i["call_id"], "output": "a b"} for i in said if i["type"] in kinds]
    return [*HELLO, {"type": "reasoning", "summary": [], "encrypted_content": "x"}, *said, *results]


async def check_continues(served: Served, output: list) -> None:
    """The items of an answer, sent back with results, continue on exactly the ids that were sampled."""
    text, shell, send, patch = output
    assert text.content[0].text.strip() == "Let me look."
    assert (shell.type, shell.name, json.loads(shell.arguments)) == ("function_call", "sh", {"cmd": "ls"})
    assert (send.type, send.namespace, send.name) == ("function_call", "agents", "send")
    assert json.loads(send.arguments) == {"to": "x"}
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "patch", "*** Begin")
    second = await served.client.responses.create(**{**USE, "input": with_results(output)})
    assert (second.status, second.output_text) == ("completed", "plain héllo")
    one, two = (c.record for c in served.bench.records)
    assert two.keep_len == one.prompt_len + len(one.output_ids)
    assert (second.usage.input_tokens, second.usage.output_tokens) == (two.prompt_len, len(two.output_ids))
    assert second.usage.input_tokens_details.cached_tokens == two.keep_len


async def test_an_answer_and_its_results_round_trip(served: Served) -> None:
    first = await served.client.responses.create(**USE)
    assert first.status == "completed"
    await check_continues(served, first.output)


async def test_a_streamed_answer_does_too(served: Served) -> None:
    async with served.client.responses.stream(**USE) as stream:
        kinds = [event.type async for event in stream]
        first = await stream.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
    await check_continues(served, first.output)


async def test_an_answer_that_was_cut_off_says_so_and_ends_as_others_do(served: Served) -> None:
    """What reads `response.incomplete` as a failure asks again, and would be given another sample."""
    few = {**USE, "tools": [], "max_output_tokens": 5, "stream": True}
    events = [e async for e in await served.client.responses.create(**few)]
    assert events[-1].type == "response.completed"
    assert (events[-1].response.status, events[-1].response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == CALL_TEXT[:5]
    assert [e.sequence_number for e in events] == list(range(len(events)))


async def test_an_error_after_the_stream_began_is_an_event(served: Served) -> None:
    served.bench.refuse_commits = True
    reply = await served.http.post("/v1/responses", json={**USE, "tools": [], "stream": True})
    assert reply.status_code == 200
    kind, _, data = reply.text.strip().split("\n\n")[-1].partition("\n")
    failed = json.loads(data.removeprefix("data: "))["response"]
    assert (kind, failed["status"], failed["error"]["code"]) == ("event: response.failed", "failed", "execution_ended")
