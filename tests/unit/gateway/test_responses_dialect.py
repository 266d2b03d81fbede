"""What is read out of a body of OpenAI Responses, and what is refused."""

import json

import pytest
from gyre.rollout.gateway.dialects.base import Limits
from gyre.rollout.gateway.dialects.responses import RESPONSES
from gyre.rollout.gateway.messages import CallRefused, Message, ToolCall


def parsed(**body: object):
    return RESPONSES.parse(json.dumps({"input": "hi", **body}).encode(), Limits())


def test_items_of_one_answer_are_one_message() -> None:
    items = [
        {"role": "user", "content": "one"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "sh", "arguments": "{}", "id": "fc"},
        {"type": "function_call", "call_id": "c2", "name": "send", "namespace": "agents", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "a"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "b"}]},
        {"type": "custom_tool_call", "call_id": "c3", "name": "patch", "input": "***"},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": "done"},
    ]
    assert parsed(input=items).messages == (
        Message("user", "one"),
        Message("assistant", "I look.", (ToolCall("c1", "sh", "{}"), ToolCall("c2", "agents.send", "{}"))),
        Message("tool", "a", tool_call_id="c1"), Message("tool", "b", tool_call_id="c2"),
        Message("assistant", "", (ToolCall("c3", "patch", '{"input":"***"}'),)), Message("tool", "done", tool_call_id="c3"),
    )


def test_what_stands_before_the_first_user_is_one_system_text() -> None:
    items = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"},
             {"role": "developer", "content": "later"}]
    system = Message("system", "You are an agent.\n\nBe brief.")
    assert parsed(instructions="You are an agent.", input=items).messages == (
        system, Message("user", "hi"), Message("system", "later"))


def test_tools_get_the_form_that_templates_know() -> None:
    shell = {"type": "function", "name": "sh", "description": "runs it", "parameters": {"type": "object"}, "strict": True}
    request = parsed(tools=[shell, {"type": "namespace", "name": "n", "tools": [shell]}, {"type": "custom", "name": "patch"},
                            {"type": "web_search"}])
    assert [t["function"]["name"] for t in request.tools] == ["sh", "n.sh", "patch"]
    assert request.tools[0] == {"type": "function", "function": {"name": "sh", "description": "runs it",
                                                                 "parameters": {"type": "object"}}}
    assert request.tools[2]["function"]["parameters"]["required"] == ["input"]
    assert request.free_tools == ("patch",)
    assert parsed(tools=[shell], tool_choice="none").tools == ()


@pytest.mark.parametrize(("body", "says"), [
    ({"input": []}, "input: at least one item"),
    ({"input": [3]}, r"input\[0\]: an object was expected"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\].type: 'item_reference'; use message"),
    ({"input": [{"role": "tool", "content": "x"}]}, r"input\[0\].role: 'tool'; use one of"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, r"input\[0\].content\[0\]: 'input_image'; only text"),
    ({"input": [{"type": "function_call", "call_id": "c"}]}, r"input\[0\].name: None; text"),
    ({"previous_response_id": "r"}, "previous_response_id: nothing is stored here; send the whole input"),
    ({"conversation": "c"}, "conversation: nothing is stored"),
    ({"tool_choice": "required"}, "tool_choice: 'required'; constrained"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format: 'json_schema'; constrained"),
    ({"background": True}, "background: is not served"),
    ({"max_output_tokens": -1}, "max_output_tokens: -1; a positive"),
    ({"tools": [{"type": "computer", "name": "c"}]}, r"tools\[0\].type: 'computer'; use function, custom or namespace"),
    ({"tools": [{"type": "function"}]}, r"tools\[0\].name: None; text"),
])
def test_what_cannot_be_served_is_refused_by_name(body: dict, says: str) -> None:
    with pytest.raises(CallRefused, match=says):
        parsed(**body)


def test_what_a_harness_may_not_decide_is_ignored() -> None:
    wishes = {"temperature": 0.1, "reasoning": {"effort": "high"}, "include": ["x"], "parallel_tool_calls": False,
              "text": {"verbosity": "low"}, "truncation": "auto", "client_metadata": {"a": "b"}}
    assert parsed(**wishes) == parsed()
