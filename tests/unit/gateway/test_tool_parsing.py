"""Tool calls out of sampled text; what is broken stays text."""

import json

import pytest
from gyre.rollout.gateway.tools import OPEN, parse_tool_calls, safe_length
from hypothesis import given
from hypothesis import strategies as st

ONE = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def test_text_without_calls_is_text() -> None:
    assert parse_tool_calls("hello <b>", "c") == ("hello <b>", ())


def test_several_calls_and_the_text_before_them() -> None:
    content, calls = parse_tool_calls(f"Let me see.\n{ONE}\n{ONE}", "c")
    assert content == "Let me see."
    assert [(c.name, json.loads(c.arguments)) for c in calls] == [("f", {"a": 1})] * 2
    assert calls[0].id != calls[1].id
    assert calls == parse_tool_calls(f"{ONE}{ONE}", "c")[1], "ids depend on the call and the place alone"


def test_arguments_that_are_text_stay_as_sampled() -> None:
    _, [call] = parse_tool_calls('<tool_call>{"name": "f", "arguments": "{ \\"a\\":1}"}</tool_call>', "c")
    assert call.arguments == '{ "a":1}'


def test_a_call_cut_off_before_its_closing_tag_counts() -> None:
    assert len(parse_tool_calls(ONE.removesuffix("</tool_call>"), "c")[1]) == 1


@pytest.mark.parametrize("text", [
    "<tool_call>", "<tool_call>{", '<tool_call>{"name": 3}</tool_call>', "<tool_call>[]</tool_call>",
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', '<tool_call>{"name": "f"} and more',
    "<tool_call>" + "[" * 100_000, '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', '<tool_call>{"name": "\\udfff"}</tool_call>',
])
def test_broken_calls_stay_text(text: str) -> None:
    assert parse_tool_calls(text, "c") == (text, ())


def test_what_follows_a_broken_call_stays_text_too() -> None:
    content, calls = parse_tool_calls(f"{ONE}<tool_call>oops", "c")
    assert len(calls) == 1
    assert content == "<tool_call>oops"


@given(st.text(alphabet="<tool_call>x{}", max_size=30))
def test_streamed_text_never_shows_a_part_of_a_tag(text: str) -> None:
    shown = ""
    for end in range(len(text) + 1):
        length = safe_length(text[:end])
        assert length >= len(shown) or text[:end].find(OPEN) >= 0
        shown = text[:length]
        assert OPEN not in shown
    assert text.startswith(shown)
