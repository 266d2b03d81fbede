"""OpenAI Chat Completions on the wire <-> our messages. Pure: bytes and records in, bytes and records out.

What a harness may not decide (temperature, seed, penalties) is ignored, because the run's sampling distribution
decides; what would change the answer's form and cannot be honoured is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
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
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one request body."""

    max_body_bytes: int = 8 * 1024 * 1024
    max_messages: int = 4096
    max_tools: int = 128


def parse(body: bytes, limits: Limits) -> ChatRequest:
    """The request in a body.

    Raises:
        CallRefused: 400, names the field that is wrong.
    """
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CallRefused(400, f"body: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise CallRefused(400, f"body: a JSON object was expected, not {type(data).__name__}")
    _refuse_unsupported(data)
    messages = _list(data, "messages", limits.max_messages)
    if not messages:
        raise CallRefused(400, "messages: at least one is needed")
    tools = _list(data, "tools", limits.max_tools)
    options = data.get("stream_options")
    return ChatRequest(
        messages=tuple(_message(m, i) for i, m in enumerate(messages)),
        tools=() if data.get("tool_choice") == "none" else tuple(_tool(t, i) for i, t in enumerate(tools)),
        max_tokens=_max_tokens(data),
        stream=data.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        model=str(data.get("model", "")),
        tags=_tags(data),
    )


def _tags(data: Mapping[str, Any]) -> dict[str, str]:
    """Fields by which harnesses say whose request it is; what is no text says nothing."""
    metadata = data.get("metadata")
    fields = {"metadata.user_id": metadata.get("user_id") if isinstance(metadata, dict) else None,
              "session_id": data.get("session_id"), "prompt_cache_key": data.get("prompt_cache_key")}
    return {name: value for name, value in fields.items() if isinstance(value, str)}


def _refuse_unsupported(data: Mapping[str, Any]) -> None:
    number = data.get("n")
    if number is not None and number != 1:
        raise CallRefused(400, f"n: {number!r}; one answer a call is served, use 1")
    if data.get("tool_choice") not in (None, "auto", "none"):
        raise CallRefused(400, f"tool_choice: {data['tool_choice']!r}; constrained decoding is not served, use auto")
    form = data.get("response_format")
    if isinstance(form, dict) and form.get("type") != "text":
        raise CallRefused(400, f"response_format: {form.get('type')!r}; constrained decoding is not served, use text")
    for field in ("stop", "logit_bias", "functions", "prompt_embeds", "guided_json", "guided_regex", "guided_grammar"):
        if data.get(field):
            raise CallRefused(400, f"{field}: is not served; leave it out")


def _list(data: Mapping[str, Any], field: str, limit: int) -> list[Any]:
    value = data.get(field)
    if value is None:
        return []
    if not isinstance(value, list):
        raise CallRefused(400, f"{field}: a list was expected, not {type(value).__name__}")
    if len(value) > limit:
        raise CallRefused(400, f"{field}: {len(value)} entries, at most {limit}")
    return value


def _max_tokens(data: Mapping[str, Any]) -> int | None:
    field = "max_completion_tokens" if data.get("max_completion_tokens") is not None else "max_tokens"
    value = data.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CallRefused(400, f"{field}: {value!r}; a positive integer was expected")
    return value


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
    calls = _list(value, "tool_calls", MAX_TOOL_CALLS)
    return Message(
        role=role,
        content=_text(value.get("content"), f"{where}.content"),
        tool_calls=tuple(_tool_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)),
        tool_call_id=_string(value.get("tool_call_id"), f"{where}.tool_call_id"),
        name=_string(value.get("name"), f"{where}.name"),
    )


def _string(value: object, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise CallRefused(400, f"{where}: text was expected, not {type(value).__name__}")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, list):
        return _string(value, where)
    parts: list[str] = []
    for i, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") not in ("text", "refusal"):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise CallRefused(400, f"{where}[{i}]: {kind!r}; only text parts are served")
        parts.append(_string(part.get(part["type"]), f"{where}[{i}]"))
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
    return ToolCall(_string(value.get("id"), f"{where}.id"), function["name"], arguments)  # type: ignore[union-attr]


# ---------------------------------------------------------------- answers


def completion(answer: Answer, model: str) -> bytes:
    """The body of an answer that is not streamed."""
    choice = {"index": 0, "message": _wire_message(answer.message), "logprobs": None,
              "finish_reason": answer.stop_reason}
    return msgspec.json.encode({"id": answer.id, "object": "chat.completion", "created": answer.created,
                                "model": model, "choices": [choice], "usage": _wire_usage(answer.usage)})


def text_event(answer_id: str, created: int, model: str, text: str, first: bool) -> bytes:
    """One SSE event with more text; the first one also names the role."""
    delta = {"role": "assistant", "content": text} if first else {"content": text}
    return _chunk(answer_id, created, model, [_choice(delta, None)])


def final_events(answer: Answer, model: str, num_shown: int, include_usage: bool) -> bytes:
    """The events that end a stream of which `num_shown` characters were already sent."""
    events: list[bytes] = []
    rest = answer.message.content[num_shown:]
    if rest or num_shown == 0:
        events.append(text_event(answer.id, answer.created, model, rest, num_shown == 0))
    for index, call in enumerate(answer.message.tool_calls):
        delta = {"tool_calls": [{"index": index, **_wire_tool_call(call)}]}
        events.append(_chunk(answer.id, answer.created, model, [_choice(delta, None)]))
    events.append(_chunk(answer.id, answer.created, model, [_choice({}, answer.stop_reason)]))
    if include_usage:
        events.append(_chunk(answer.id, answer.created, model, [], _wire_usage(answer.usage)))
    return b"".join((*events, DONE))


def error_body(error: CallRefused) -> bytes:
    """An error in OpenAI's form."""
    return msgspec.json.encode({"error": {"message": error.message, "type": error.kind, "param": None,
                                          "code": error.code or None}})


def error_events(error: CallRefused) -> bytes:
    """An error after a stream has started, and the end of that stream."""
    return b"data: " + error_body(error) + b"\n\n" + DONE


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


def _chunk(answer_id: str, created: int, model: str, choices: list[dict[str, Any]],
           usage: Mapping[str, Any] | None = None) -> bytes:
    body: dict[str, Any] = {"id": answer_id, "object": "chat.completion.chunk", "created": created,
                            "model": model, "choices": choices}
    if usage is not None:
        body["usage"] = usage
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
