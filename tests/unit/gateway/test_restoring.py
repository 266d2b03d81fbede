"""A tool call that a harness wrote anew is the one that was sampled; one that says something else is not."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from gyre.rollout.gateway.messages import ChatRequest, Message, ToolCall, canonical_json
from gyre.rollout.gateway.restore import SampledToolCalls
from rollout_fakes import Bench, ask, make_bench, sequences

SHELL = ({"type": "function", "function": {"name": "sh", "parameters": {"type": "object"}}},)
HI = Message("user", "hi")


def call_text(arguments: str, more: str = "") -> str:
    return f'Look.\n<tool_call>\n{{"name": "sh"{arguments}}}\n</tool_call>{more}'


TWO = call_text(', "arguments": {"b": 1,"a": "ü"}')


def result(call: ToolCall, text: str = "out") -> Message:
    return Message("tool", text, tool_call_id=call.id)


def assert_continues(bench: Bench, number: int = 1) -> None:
    """Call `number` goes on with the whole of the call before it, on its exact ids."""
    before, after = bench.records[number - 1].record, bench.records[number].record
    ids = sequences(bench)
    assert (after.base_call, after.keep_len) == (before.call, len(ids[before.call]))
    assert (ids[after.call][:after.keep_len] == ids[before.call]).all()


@pytest.mark.parametrize(("sampled", "sent"), [
    (', "arguments": {"b": 1,"a": "ü"}', '{"a": "\\u00fc", "b": 1}'), (', "arguments": {"b": 1,"a": "ü"}', '{"b":1,"a":"ü"}'),
    (', "arguments": {"b": 1.0}', '{"b": 1}'), (', "arguments": {}', ""), (', "arguments": {}', " "), ("", ""), ("", "{}"),
    (', "arguments": ""', "{}")])
async def test_key_order_white_space_and_empty_arguments_do_not_fork(tmp_path: Path, sampled: str, sent: str) -> None:
    bench = make_bench(tmp_path, call_text(sampled), "done")
    answer = await ask(bench, [HI], SHELL)
    [call] = answer.message.tool_calls
    await ask(bench, [HI, Message("assistant", "Look. ", (replace(call, arguments=sent),)), result(call)], SHELL)
    assert_continues(bench)
    assert call_text(sampled) in bench.tokenizer.decode(sequences(bench)[bench.records[1].record.call].tolist())


@pytest.mark.parametrize("sent", ['{"b": 2, "a": "ü"}', '{"b": true, "a": "ü"}', '{"b": "1", "a": "ü"}', '{"b": 1}', "{}", "",
                                  '{"b": 1, "a": "ü"'])
async def test_arguments_that_say_something_else_fork(tmp_path: Path, sent: str) -> None:
    bench = make_bench(tmp_path, TWO, "done")
    [call] = (await ask(bench, [HI], SHELL)).message.tool_calls
    await ask(bench, [HI, Message("assistant", "Look.", (replace(call, arguments=sent),)), result(call)], SHELL)
    first = bench.records[0].record
    assert first.prompt_len <= bench.records[1].record.keep_len < first.prompt_len + len(first.output_ids)


async def test_ids_that_a_harness_makes_up_anew_every_turn_do_not_fork(tmp_path: Path) -> None:
    texts = [TWO.replace("1", str(n)) for n in range(3)]
    bench = make_bench(tmp_path, *texts, "done")
    history: list[Message] = [HI]
    for turn in range(4):
        sent: list[Message] = []
        for number, message in enumerate(history):
            calls = tuple(ToolCall(f"{turn}-{number}", c.name, json.dumps(json.loads(c.arguments))) for c in message.tool_calls)
            sent.append(replace(message, tool_calls=calls,
                                tool_call_id=f"{turn}-{number - 1}" if message.role == "tool" else ""))
        answer = await ask(bench, sent, SHELL)
        if turn:
            assert_continues(bench, turn)
        history += [answer.message, Message("tool", f"out {turn}")]
    assert "out 2" in bench.tokenizer.decode(bench.records[3].record.prompt_delta.tolist())


async def test_an_unknown_id_is_not_guessed_where_two_calls_say_the_same(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, TWO, TWO, "done")
    first = (await ask(bench, [HI], SHELL)).message
    history = [HI, first, result(first.tool_calls[0])]
    second = (await ask(bench, history, SHELL)).message
    assert second.tool_calls[0].id != first.tool_calls[0].id
    stranger = replace(second, tool_calls=(replace(second.tool_calls[0], id="new"),))
    request = ChatRequest((*history, stranger), SHELL)
    assert bench.open().read(request) == request


def sampled(*calls: ToolCall) -> SampledToolCalls:
    memory = SampledToolCalls()
    memory.add(calls)
    return memory


def saying(*calls: ToolCall) -> Message:
    return Message("assistant", "", calls)


ONE = ToolCall("call_1", "sh", '{"cmd":  "ls"}')


def test_an_unknown_id_stands_for_the_only_call_that_says_the_same_and_its_result_follows() -> None:
    stranger = ToolCall("x", "sh", '{"cmd":"ls"}')
    messages = (saying(stranger), Message("tool", "out", tool_call_id="x"), Message("tool", "other", tool_call_id="y"))
    assert sampled(ONE).restored(messages) == (
        saying(ONE), Message("tool", "out", tool_call_id="call_1"), Message("tool", "other", tool_call_id="y"))


@pytest.mark.parametrize("calls", [
    (ToolCall("x", "sh", '{"cmd":"ls -l"}'),), (ToolCall("x", "other", ONE.arguments),),
    (ToolCall("x", "sh", ONE.arguments), ToolCall("y", "sh", ONE.arguments)),
    (ToolCall("x", "sh", ONE.arguments), ONE), (ToolCall("", "sh", '{"cmd":"ls"}'),)])
def test_a_call_that_could_be_anothers_stays_as_it_was_sent(calls: tuple[ToolCall, ...]) -> None:
    messages = tuple(saying(c) for c in calls)
    assert sampled(ONE).restored(messages) == messages


def test_messages_without_tool_calls_are_not_copied() -> None:
    messages = (HI, Message("assistant", "ok"))
    assert sampled(ONE).restored(messages) is messages
    assert sampled().restored(messages) is messages


def test_json_that_says_the_same_has_one_spelling() -> None:
    assert canonical_json('{"b": [1, 2.0], "a": null}') == canonical_json('{ "a":null,"b":[1.0,2]}')
    assert canonical_json("") == canonical_json(" \n") == canonical_json("{}") == "{}"
    assert canonical_json("true") != canonical_json("1") != canonical_json('"1"')
    assert canonical_json("{broken") == "{broken"
    assert canonical_json("[" * 100_000) == "[" * 100_000
    assert canonical_json('"\\ud800"') == '"\\ud800"'
