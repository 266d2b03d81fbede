"""Anthropic Messages on the wire <-> our messages. Pure: bytes and records in, bytes and records out.

A message of blocks becomes several of ours: each result of a tool is a message of its own, and what a harness writes
behind it in the same message (a reminder, the request of a compaction) is another. So a request that appends to its last
message still begins with the messages of the call before. What changes from turn to turn without meaning anything to the
model is left out: cache marks, thoughts of other models, the line that says whom to bill.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from gyre.rollout.gateway.dialects.base import (
    Dialect,
    Limits,
    Opening,
    read_list,
    read_object,
    read_positive,
    read_tags,
    read_text,
    refuse_fields,
)
from gyre.rollout.gateway.evidence import BILLING
from gyre.rollout.gateway.messages import Answer, CallRefused, ChatRequest, Message, StopReason, ToolCall, Usage

MAX_BLOCKS = 4096  # of one message
THOUGHTS = ("thinking", "redacted_thinking")
_BILLING_LINE = re.compile(rf"^[ \t]*{BILLING}:[^\n]*\n?", re.MULTILINE)
_STOP_REASONS: dict[StopReason, str] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error",
          409: "invalid_request_error", 413: "request_too_large", 415: "invalid_request_error", 429: "rate_limit_error",
          501: "invalid_request_error", 503: "overloaded_error"}


def parse(body: bytes, limits: Limits) -> ChatRequest:
    """The request in a body; also that of a body that only wants its tokens counted.

    Raises:
        CallRefused: 400, names the field that is wrong.
    """
    data = read_object(body)
    choice = _refuse_unsupported(data)
    wire = read_list(data, "messages", limits.max_messages)
    if not wire:
        raise CallRefused(400, "messages: at least one is needed")
    system = _texts(data.get("system"), "system")
    messages = [Message("system", text)] if (text := _BILLING_LINE.sub("", system).strip("\n")) else []
    for index, value in enumerate(wire):
        messages += _messages(value, f"messages[{index}]")
    tools = read_list(data, "tools", limits.max_tools)
    tags = read_tags(data, "metadata.user_id")
    if any("cc_is_subagent=true" in line for line in _BILLING_LINE.findall(system)):
        tags["cc_is_subagent"] = "true"
    return ChatRequest(
        messages=tuple(messages),
        tools=() if choice == "none" else tuple(_tool(t, f"tools[{i}]") for i, t in enumerate(tools)),
        max_tokens=read_positive(data, "max_tokens"),
        stream=data.get("stream") is True,
        model=str(data.get("model", "")),
        tags=tags,
    )


def _refuse_unsupported(data: Mapping[str, Any]) -> str:
    """The kind of tool choice that is wished, if all that is wished can be served. Raises CallRefused."""
    choice = data.get("tool_choice")
    kind = choice.get("type", "auto") if isinstance(choice, dict) else "auto"
    if kind not in ("auto", "none"):
        raise CallRefused(400, f"tool_choice.type: {kind!r}; constrained decoding is not served, use auto")
    output = data.get("output_config")
    if isinstance(output, dict) and output.get("format"):
        raise CallRefused(400, "output_config.format: constrained decoding is not served; leave it out")
    refuse_fields(data, "stop_sequences", "mcp_servers", "container", "output_format")
    return str(kind)


def _tool(value: object, where: str) -> Mapping[str, Any]:
    """A tool in the form in which chat templates are given them."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise CallRefused(400, f"{where}: expected {{name, description, input_schema}}")
    if value.get("type") not in (None, "custom"):
        raise CallRefused(400, f"{where}.type: {value['type']!r}; tools of the provider are not served, only the harness's own")
    function = {"name": value["name"], "description": read_text(value.get("description"), f"{where}.description"),
                "parameters": value.get("input_schema") or {"type": "object"}}
    return {"type": "function", "function": function}


def _messages(value: object, where: str) -> list[Message]:
    if not isinstance(value, dict):
        raise CallRefused(400, f"{where}: an object was expected, not {type(value).__name__}")
    role = value.get("role")
    content = value.get("content")
    if role == "user":
        return list(_of_user(_blocks(content, f"{where}.content")))
    if role == "assistant":
        return [_of_assistant(_blocks(content, f"{where}.content"))]
    if role == "system":
        return [Message("system", _texts(content, f"{where}.content"))]
    raise CallRefused(400, f"{where}.role: {role!r}; use one of user, assistant, system")


def _blocks(content: object, where: str) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """(type, block, where it stands); a plain text is one block."""
    if not isinstance(content, list):
        content = [{"type": "text", "text": read_text(content, where)}]
    if len(content) > MAX_BLOCKS:
        raise CallRefused(400, f"{where}: {len(content)} blocks, at most {MAX_BLOCKS}")
    for index, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise CallRefused(400, f"{where}[{index}]: a block with a type was expected")
        yield block["type"], block, f"{where}[{index}]"


def _texts(content: object, where: str) -> str:
    """Text that may be written as blocks. Raises CallRefused for a block of anything else."""
    return "\n".join(filter(None, (_text(kind, block, at) for kind, block, at in _blocks(content, where))))


def _text(kind: str, block: Mapping[str, Any], where: str) -> str:
    if kind != "text":
        raise CallRefused(400, f"{where}: {kind!r}; only text is served")
    return read_text(block.get("text"), f"{where}.text")


def _of_user(blocks: Iterator[tuple[str, Mapping[str, Any], str]]) -> Iterator[Message]:
    texts: list[str] = []
    num = 0
    for kind, block, where in blocks:
        num += 1
        if kind != "tool_result":
            texts.append(_text(kind, block, where))
            continue
        if any(texts):
            yield Message("user", "\n".join(filter(None, texts)))
        texts = []
        call = read_text(block.get("tool_use_id"), f"{where}.tool_use_id")
        yield Message("tool", _texts(block.get("content"), f"{where}.content"), tool_call_id=call)
    if any(texts) or len(texts) == num:  # a message without any text is an empty one, unless it brings results
        yield Message("user", "\n".join(filter(None, texts)))


def _of_assistant(blocks: Iterator[tuple[str, Mapping[str, Any], str]]) -> Message:
    texts: list[str] = []
    calls: list[ToolCall] = []
    for kind, block, where in blocks:
        if kind in THOUGHTS:
            continue
        if kind != "tool_use":
            texts.append(_text(kind, block, where))
            continue
        name = block.get("name")
        if not isinstance(name, str):
            raise CallRefused(400, f"{where}: expected {{type: tool_use, id, name, input}}")
        arguments = msgspec.json.encode(block.get("input") or {}).decode()
        calls.append(ToolCall(read_text(block.get("id"), f"{where}.id"), name, arguments))
    return Message("assistant", "\n".join(filter(None, texts)), tuple(calls))


# ---------------------------------------------------------------- answers


def answer_body(opening: Opening, answer: Answer) -> bytes:
    """The body of an answer that is not streamed."""
    content: list[dict[str, Any]] = [{"type": "text", "text": answer.message.content}] if answer.message.content else []
    content += [{**_tool_use(c), "input": _input(c)} for c in answer.message.tool_calls]
    return msgspec.json.encode({**_head(answer.id, opening.model), "content": content, "stop_sequence": None,
                                "stop_reason": _STOP_REASONS[answer.stop_reason], "usage": _usage(answer.usage)})


class MessageEvents:
    """A streamed answer: a block of text, if there is any, then a block for each call of a tool."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._num_shown = self._num_blocks = 0
        self._has_begun = False

    def text(self, text: str) -> bytes:
        """See `AnswerEvents.text`."""
        begin = self._begin()
        if not self._num_shown:
            begin += _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        self._num_shown += len(text)
        return begin + _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def end(self, answer: Answer) -> bytes:
        """See `AnswerEvents.end`."""
        rest = answer.message.content[self._num_shown:]
        events = [self.text(rest) if rest else self._begin()]
        if self._num_shown:
            events.append(self._stop_block())
        for call in answer.message.tool_calls:
            delta = {"type": "input_json_delta", "partial_json": msgspec.json.encode(_input(call)).decode()}
            events.append(_event("content_block_start", index=self._num_blocks, content_block={**_tool_use(call), "input": {}}))
            events.append(_event("content_block_delta", index=self._num_blocks, delta=delta))
            events.append(self._stop_block())
        delta = {"stop_reason": _STOP_REASONS[answer.stop_reason], "stop_sequence": None}
        events.append(_event("message_delta", delta=delta, usage=_usage(answer.usage)))
        return b"".join((*events, _event("message_stop")))

    def error(self, error: CallRefused) -> bytes:
        """See `AnswerEvents.error`."""
        return b"event: error\ndata: " + error_body(error) + b"\n\n"

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        message = {**_head(self._opening.answer_id, self._opening.model), "content": [], "stop_reason": None,
                   "stop_sequence": None, "usage": _usage(self._opening.usage)}
        return _event("message_start", message=message)

    def _stop_block(self) -> bytes:
        self._num_blocks += 1
        return _event("content_block_stop", index=self._num_blocks - 1)


def error_body(error: CallRefused) -> bytes:
    """An error in Anthropic's form."""
    kind = _KINDS.get(error.status, "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": error.message}})


def count_body(num_tokens: int) -> bytes:
    """The body of an answer to a question for the number of a prompt's tokens."""
    return msgspec.json.encode({"input_tokens": num_tokens})


def _head(answer_id: str, model: str) -> dict[str, Any]:
    return {"id": "msg_" + answer_id, "type": "message", "role": "assistant", "model": model}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _input(call: ToolCall) -> Any:
    """The arguments, which have to be an object on this wire."""
    try:
        value = msgspec.json.decode(call.arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        value = call.arguments
    return value if isinstance(value, dict) else {"arguments": value}


def _usage(usage: Usage) -> dict[str, int]:
    """Here the cached tokens are not among the input's."""
    return {"input_tokens": usage.num_prompt - usage.num_cached, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.num_cached, "output_tokens": usage.num_completion}


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + msgspec.json.encode({"type": kind, **fields}) + b"\n\n"


ANTHROPIC = Dialect(parse, answer_body, MessageEvents, error_body)
