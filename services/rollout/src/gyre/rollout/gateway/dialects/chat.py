"""OpenAI Chat Completions on the wire <-> our messages. Pure: bytes and records in, bytes and records out.

What a harness may not decide (temperature, seed, penalties) is ignored, because the run's sampling distribution
decides; what would change the answer's form and cannot be honoured is refused by name.
"""

from collections.abc import Mapping
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
from gyre.rollout.gateway.messages import (
    Answer,
    CallRefused,
    ChatRequest,
    Message,
    MessageRole,
    ToolCall,
    Usage,
)

_ROLES: dict[str, MessageRole] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant",
                                  "tool": "tool", "function": "tool"}
MAX_TOOL_CALLS = 256
ID_PREFIX = "chatcmpl-"
DONE = b"data: [DONE]\n\n"


def parse(body: bytes, limits: Limits) -> ChatRequest:
    """The request in a body.

    Raises:
        CallRefused: 400, names the field that is wrong.
    """
    data = read_object(body)
    _refuse_unsupported(data)
    messages = read_list(data, "messages", limits.max_messages)
    if not messages:
        raise CallRefused(400, "messages: at least one is needed")
    tools = read_list(data, "tools", limits.max_tools)
    options = data.get("stream_options")
    return ChatRequest(
        messages=tuple(_message(m, i) for i, m in enumerate(messages)),
        tools=() if data.get("tool_choice") == "none" else tuple(_tool(t, i) for i, t in enumerate(tools)),
        max_tokens=_max_tokens(data),
        stream=data.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        model=str(data.get("model", "")),
        tags=read_tags(data, "metadata.user_id", "session_id", "prompt_cache_key"),
    )


def _refuse_unsupported(data: Mapping[str, Any]) -> None:
    number = data.get("n")
    if number is not None and number != 1:
        raise CallRefused(400, f"n: {number!r}; one answer a call is served, use 1")
    if data.get("tool_choice") not in (None, "auto", "none"):
        raise CallRefused(400, f"tool_choice: {data['tool_choice']!r}; constrained decoding is not served, use auto")
    form = data.get("response_format")
    if isinstance(form, dict) and form.get("type") != "text":
        raise CallRefused(400, f"response_format: {form.get('type')!r}; constrained decoding is not served, use text")
    refuse_fields(data, "stop", "logit_bias", "functions", "prompt_embeds", "guided_json", "guided_regex", "guided_grammar")


def _max_tokens(data: Mapping[str, Any]) -> int | None:
    return read_positive(data, "max_completion_tokens" if data.get("max_completion_tokens") is not None else "max_tokens")


def _tool(value: object, index: int) -> Mapping[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise CallRefused(400, f"tools[{index}]: expected {{type: function, function: {{name, ...}}}}")
    return value


def _message(value: object, index: int) -> Message:
    if type(value) is dict and len(value) == 2 and type(value.get("content")) is str and value.get("role") in _ROLES:
        return Message(_ROLES[value["role"]], value["content"])
    where = f"messages[{index}]"
    if not isinstance(value, dict):
        raise CallRefused(400, f"{where}: an object was expected, not {type(value).__name__}")
    role = _ROLES.get(str(value.get("role")))
    if role is None:
        raise CallRefused(400, f"{where}.role: {value.get('role')!r}; use one of {', '.join(_ROLES)}")
    calls = read_list(value, "tool_calls", MAX_TOOL_CALLS)
    return Message(
        role=role,
        content=_text(value.get("content"), f"{where}.content"),
        tool_calls=tuple(_tool_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)),
        tool_call_id=read_text(value.get("tool_call_id"), f"{where}.tool_call_id"),
        name=read_text(value.get("name"), f"{where}.name"),
    )


def _text(value: object, where: str) -> str:
    if not isinstance(value, list):
        return read_text(value, where)
    parts: list[str] = []
    for i, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") not in ("text", "refusal"):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise CallRefused(400, f"{where}[{i}]: {kind!r}; only text parts are served")
        parts.append(read_text(part.get(part["type"]), f"{where}[{i}]"))
    return "\n".join(parts)


def _tool_call(value: object, where: str) -> ToolCall:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise CallRefused(400, f"{where}: expected {{id, type: function, function: {{name, arguments}}}}")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = ""
    elif not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return ToolCall(read_text(value.get("id"), f"{where}.id"), function["name"], arguments)  # type: ignore[union-attr]


# ---------------------------------------------------------------- answers


def completion(opening: Opening, answer: Answer) -> bytes:
    """The body of an answer that is not streamed."""
    choice = {"index": 0, "message": _wire_message(answer.message), "logprobs": None,
              "finish_reason": answer.stop_reason}
    return msgspec.json.encode({"id": ID_PREFIX + answer.id, "object": "chat.completion", "created": answer.created,
                                "model": opening.model, "choices": [choice], "usage": _wire_usage(answer.usage)})


class ChatEvents:
    """A streamed answer as chunks; the first one also names the role."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._num_shown = 0

    def text(self, text: str) -> bytes:
        """See `AnswerEvents.text`."""
        delta = {"content": text} if self._num_shown else {"role": "assistant", "content": text}
        self._num_shown += len(text)
        return self._chunk([_choice(delta, None)])

    def end(self, answer: Answer) -> bytes:
        """See `AnswerEvents.end`."""
        rest = answer.message.content[self._num_shown:]
        events = [self.text(rest)] if rest or self._num_shown == 0 else []
        for index, call in enumerate(answer.message.tool_calls):
            delta = {"tool_calls": [{"index": index, **_wire_tool_call(call)}]}
            events.append(self._chunk([_choice(delta, None)]))
        events.append(self._chunk([_choice({}, answer.stop_reason)]))
        if self._opening.request.include_usage:
            events.append(self._chunk([], _wire_usage(answer.usage)))
        return b"".join((*events, DONE))

    def error(self, error: CallRefused) -> bytes:
        """See `AnswerEvents.error`."""
        return b"data: " + error_body(error) + b"\n\n" + DONE

    def _chunk(self, choices: list[dict[str, Any]], usage: Mapping[str, Any] | None = None) -> bytes:
        opening = self._opening
        body: dict[str, Any] = {"id": ID_PREFIX + opening.answer_id, "object": "chat.completion.chunk",
                                "created": opening.created, "model": opening.model, "choices": choices}
        if usage is not None:
            body["usage"] = usage
        return b"data: " + msgspec.json.encode(body) + b"\n\n"


def error_body(error: CallRefused) -> bytes:
    """An error in OpenAI's form."""
    return msgspec.json.encode({"error": {"message": error.message, "type": error.kind, "param": None,
                                          "code": error.code or None}})


def models_body(model: str, max_context: int) -> bytes:
    """The body of `GET /v1/models`."""
    return msgspec.json.encode({"object": "list", "data": [
        {"id": model, "object": "model", "created": 0, "owned_by": "opengyre", "max_model_len": max_context}]})


def _wire_message(message: Message) -> dict[str, Any]:
    wire: dict[str, Any] = {"role": "assistant", "content": message.content or (None if message.tool_calls else "")}
    if message.tool_calls:
        wire["tool_calls"] = [_wire_tool_call(c) for c in message.tool_calls]
    return wire


def _wire_tool_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _wire_usage(usage: Usage) -> dict[str, Any]:
    return {"prompt_tokens": usage.num_prompt, "completion_tokens": usage.num_completion,
            "total_tokens": usage.num_prompt + usage.num_completion,
            "prompt_tokens_details": {"cached_tokens": usage.num_cached}}


def _choice(delta: Mapping[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}


CHAT = Dialect(parse, completion, ChatEvents, error_body)
