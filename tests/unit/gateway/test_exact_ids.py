"""The known ways in which text and sampled ids drift apart, with the ids that are right in each."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from gyre.rollout.attempt import Attempt
from gyre.rollout.gateway.messages import Message, ToolCall
from rollout_fakes import Bench, FakeEngine, ask, make_bench, sequences

EOS = 2
SHELL = ({"type": "function", "function": {"name": "sh", "parameters": {"type": "object"}}},)


class TableTokenizer:
    """Takes the longest piece there is; a message renders as its text, an answer is closed by the end token."""

    stop_ids = (EOS,)

    def __init__(self, pieces: Mapping[str, int], opening: str = ">") -> None:
        self._pieces = {"</s>": EOS, **pieces}
        self._texts = {i: text for text, i in self._pieces.items()}
        self._opening = opening

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            piece = max((p for p in self._pieces if text.startswith(p)), key=len)
            ids.append(self._pieces[piece])
            text = text[len(piece):]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(self._texts[i] for i in ids if not (skip_special_tokens and i in self.stop_ids))

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None,
               add_generation_prompt: bool = True, variables: Mapping[str, Any] | None = None) -> str:
        text = "".join(f"{self._opening}{m['content']}</s>" if m["role"] == "assistant" else m["content"] for m in messages)
        return text + (self._opening if add_generation_prompt else "")


def scripted(directory: Path, tokenizer: TableTokenizer, *outputs: list[int]) -> Bench:
    """A gateway whose engine samples `outputs` in turn; whatever does not end with EOS was cut by length."""
    said = list(outputs)
    scripts: dict[str, list[int]] = {}

    def script(attempt: Attempt) -> list[int]:
        return scripts.setdefault(attempt.request_id, said[min(len(scripts), len(said) - 1)])

    return make_bench(directory, engine=FakeEngine(script), tokenizer=tokenizer)


async def test_sampled_ids_stay_though_their_text_would_be_encoded_otherwise(tmp_path: Path) -> None:
    # " 2" was sampled as 220 17; the tokenizer would write 1001.
    tokenizer = TableTokenizer({"a": 11, "b": 12, "c": 13, ">": 40, "\n": 41, " ": 220, "2": 17, " 2": 1001, "x": 21,
                                "y": 22}, opening=">\n")
    bench = scripted(tmp_path, tokenizer, [220, 17, EOS])
    answer = await ask(bench, [Message("user", "abc")])
    assert (answer.message.content, tokenizer.encode(" 2")) == (" 2", [1001])
    await ask(bench, [Message("user", "abc"), answer.message, Message("user", "xy")])
    assert bench.engine.attempts[1].prompt.tolist() == [11, 12, 13, 40, 41, 220, 17, EOS, 21, 22, 40, 41]
    record = bench.records[1].record
    assert (record.keep_len, record.prompt_delta.tolist()) == (8, [21, 22, 40, 41])


async def test_the_end_token_of_a_cut_answer_is_context_and_was_never_sampled(tmp_path: Path) -> None:
    tokenizer = TableTokenizer({"a": 11, ">": 40, "l": 7, "o": 8, "x": 21})
    bench = scripted(tmp_path, tokenizer, [7, 8], [7, EOS])
    answer = await ask(bench, [Message("user", "a")], max_tokens=2)
    await ask(bench, [Message("user", "a"), answer.message, Message("user", "x")])
    assert bench.engine.attempts[1].prompt.tolist() == [11, 40, 7, 8, EOS, 21, 40]
    first, second = (c.record for c in bench.records)
    assert (first.output_ids.tolist(), first.finish_reason) == ([7, 8], "length")
    assert (second.base_call, second.keep_len, second.prompt_delta.tolist()) == (first.call, 4, [EOS, 21, 40])


async def test_thinking_that_is_dropped_forks_and_each_sampled_id_stays_once(tmp_path: Path) -> None:
    tokenizer = TableTokenizer({"a": 1, "b": 2, ">": 3, "<think>": 90, "</think>": 91, "o": 10, "k": 11, "!": 12,
                                "x": 20})
    bench = scripted(tmp_path, tokenizer, [90, 91, 10, 11], [12, EOS])
    answer = await ask(bench, [Message("user", "ab")], max_tokens=4)
    assert answer.message.content == "<think></think>ok"
    await ask(bench, [Message("user", "ab"), Message("assistant", "ok"), Message("user", "x")])
    first, second = (c.record for c in bench.records)
    assert (first.output_ids.tolist(), second.output_ids.tolist()) == ([90, 91, 10, 11], [12, EOS])
    assert (second.base_call, second.keep_len, second.prompt_delta.tolist()) == (first.call, 3, [10, 11, EOS, 20, 3])


@pytest.mark.parametrize("num_turns", [1, 3])
async def test_turns_with_tools_are_separated_as_the_template_separates_them(tmp_path: Path, num_turns: int) -> None:
    # The template writes a newline after an end of turn; no answer ever samples it.
    call_text = 'Look.\n<tool_call>\n{"name": "sh", "arguments": {"n": 1}}\n</tool_call>'
    bench = make_bench(tmp_path, *[call_text.replace("1", str(n)) for n in range(num_turns)], "done")
    messages = [Message("user", "hi")]
    for n in range(num_turns):
        answer = await ask(bench, messages, SHELL)
        messages += [answer.message, Message("tool", f"out {n}", tool_call_id=answer.message.tool_calls[0].id)]
    await ask(bench, messages, SHELL)
    plain = [{"role": m.role, "content": m.content, "tool_calls": [
        {"function": {"name": c.name, "arguments": {"n": n // 2}}} for c in m.tool_calls]} for n, m in enumerate(messages)]
    whole = bench.tokenizer.render(plain, tools=SHELL)
    last = list(sequences(bench).values())[-1][:bench.records[-1].record.prompt_len]
    assert bench.tokenizer.decode(last.tolist()) == whole
    for call in bench.records[1:]:
        assert bench.tokenizer.decode(call.record.prompt_delta.tolist()).startswith("\n<|im_start|>user\n<tool_response>")


async def test_an_answer_that_we_never_sampled_is_context_only(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "mine")
    demo = [Message("user", "hi"), Message("assistant", "not mine", (ToolCall("x1", "sh", '{"n":1}'),)),
            Message("tool", "out", tool_call_id="x1"), Message("user", "go on")]
    first = await ask(bench, demo, SHELL)
    await ask(bench, [*demo, first.message, Message("user", "more")], SHELL)
    one, two = (c.record for c in bench.records)
    assert "not mine" in bench.tokenizer.decode(one.prompt_delta.tolist())
    assert (one.keep_len, two.keep_len) == (0, one.prompt_len + len(one.output_ids))
    assert bench.tokenizer.decode(one.output_ids.tolist()) == "mine<|im_end|>"
    assert not one.evidence.replays and not two.evidence.replays
