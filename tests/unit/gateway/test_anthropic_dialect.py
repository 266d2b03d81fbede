"""What is read out of a body of Anthropic Messages, and what is refused."""

import json

import pytest
from gyre.rollout.gateway.dialects.anthropic import ANTHROPIC
from gyre.rollout.gateway.dialects.base import Limits, Opening
from gyre.rollout.gateway.evidence import read_evidence
from gyre.rollout.gateway.messages import Answer, CallRefused, Message, ToolCall, Usage

BILLING = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=0f3a1;"


def parsed(**body: object):
    return ANTHROPIC.parse(json.dumps({"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **body}).encode(),
                           Limits())


def text(*texts: str) -> list[dict]:
    return [{"type": "text", "text": t, "cache_control": {"type": "ephemeral"}} for t in texts]


def test_a_system_text_comes_first_without_the_line_that_says_whom_to_bill() -> None:
    """That line differs from request to request; left in, no two prompts would share a prefix."""
    request = parsed(system=text(BILLING, "You are an agent.", "Be brief."))
    assert request.messages[0] == Message("system", "You are an agent.\nBe brief.")
    assert parsed(system=text("You are an agent.", "Be brief.")).messages == request.messages
    assert parsed(system=BILLING + "\nYou are an agent.\nBe brief.").messages == request.messages
    assert parsed(system=text(BILLING)).messages == parsed().messages
    assert request.tags == {}
    mine = parsed(system=text(BILLING + " cc_is_subagent=true"), metadata={"user_id": "u"})
    assert mine.tags == {"metadata.user_id": "u", "cc_is_subagent": "true"}
    assert read_evidence({}, mine).tags == mine.tags


def test_results_and_what_stands_behind_them_are_messages_of_their_own() -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": text("a", "b"), "is_error": False}
    use = {"type": "tool_use", "id": "t1", "name": "sh", "input": {"cmd": "ls"}}
    messages = [
        {"role": "user", "content": text("one", "", "two")},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, *text("I look."), use]},
        {"role": "user", "content": [result, *text("remember", "this")]},
        {"role": "system", "content": "later"},
        {"role": "user", "content": [result]},
        {"role": "user", "content": ""},
    ]
    assert parsed(messages=messages).messages == (
        Message("user", "one\ntwo"),
        Message("assistant", "I look.", (ToolCall("t1", "sh", '{"cmd":"ls"}'),)),
        Message("tool", "a\nb", tool_call_id="t1"), Message("user", "remember\nthis"),
        Message("system", "later"), Message("tool", "a\nb", tool_call_id="t1"), Message("user", ""),
    )


def test_tools_get_the_form_that_templates_know() -> None:
    tool = {"name": "sh", "description": "runs it", "input_schema": {"type": "object"}, "cache_control": {}, "type": "custom"}
    function = {"name": "sh", "description": "runs it", "parameters": {"type": "object"}}
    assert parsed(tools=[tool]).tools == ({"type": "function", "function": function},)
    assert parsed(tools=[tool], tool_choice={"type": "none"}).tools == ()
    assert parsed(tools=[tool], tool_choice={"type": "auto", "disable_parallel_tool_use": True}).tools


@pytest.mark.parametrize(("body", "says"), [
    ({"messages": []}, "messages: at least one"),
    ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\].role: 'tool'; use one of user, assistant, system"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, r"messages\[0\].content\[0\]: 'document'; only text"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, r"messages\[0\].content\[0\]: a block with a type"),
    ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content: text was expected, not int"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
     r"messages\[0\].content\[0\].content\[0\]: 'image'"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t"}]}]},
     r"content\[0\]: expected {type: tool_use"),
    ({"max_tokens": 0}, "max_tokens: 0; a positive integer"),
    ({"tool_choice": {"type": "any"}}, "tool_choice.type: 'any'; constrained decoding"),
    ({"stop_sequences": ["x"]}, "stop_sequences: is not served"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format: constrained decoding"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\].type: 'web_search_20250305'; tools of"),
    ({"tools": [{"description": "x"}]}, r"tools\[0\]: expected {name"),
    ({"system": [{"type": "image"}]}, r"system\[0\]: 'image'; only text"),
])
def test_what_cannot_be_served_is_refused_by_name(body: dict, says: str) -> None:
    with pytest.raises(CallRefused, match=says):
        parsed(**body)


def test_what_a_harness_may_not_decide_is_ignored() -> None:
    wishes = {"temperature": 0.2, "top_p": 0.5, "top_k": 3, "thinking": {"type": "adaptive"}, "service_tier": "auto",
              "context_management": {"edits": []}, "output_config": {"effort": "high"}, "betas": ["x"]}
    assert parsed(**wishes) == parsed()


@pytest.mark.parametrize(("arguments", "read"), [('{"a": [1]}', {"a": [1]}), ("", {}), ('"ls"', {"arguments": "ls"}),
                                                 ("ls", {"arguments": "ls"})])
def test_arguments_are_an_object_on_this_wire(arguments: str, read: dict) -> None:
    call = ToolCall("t", "sh", arguments)
    answer = Answer("x-0000", "c", Message("assistant", "", (call,)), "tool_calls", Usage(9, 4, 5))
    body = json.loads(ANTHROPIC.answer(Opening(answer.id, 0, "policy", parsed(), answer.usage), answer))
    assert body["content"] == [{"type": "tool_use", "id": "t", "name": "sh", "input": read}]
    assert (body["id"], body["stop_reason"]) == ("msg_x-0000", "tool_use")
    usage = {"input_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 5, "output_tokens": 4}
    assert body["usage"] == usage
