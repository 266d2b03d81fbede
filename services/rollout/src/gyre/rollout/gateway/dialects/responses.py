"""OpenAI Responses on the wire <-> our messages. Pure: bytes and records in, bytes and records out.

Nothing is stored here, so every request has to bring its whole input. Items that one answer was made of, a text and calls
of tools, are one message again. A tool of a namespace is called `namespace.name`; a tool that takes free text has one
argument, `input`; tools that the provider would run itself are not offered to the policy.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
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
from gyre.rollout.gateway.dialects.chat import error_body
from gyre.rollout.gateway.messages import Answer, CallRefused, ChatRequest, Message, MessageRole, ToolCall, Usage

MAX_PARTS = 4096  # of one message
HOSTED = ("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search")
TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text")
_ROLES: dict[str, MessageRole] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
FREE = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def parse(body: bytes, limits: Limits) -> ChatRequest:
    """The request in a body.

    Raises:
        CallRefused: 400, names the field that is wrong.
    """
    data = read_object(body)
    _refuse_unsupported(data)
    instructions = read_text(data.get("instructions"), "instructions")
    messages = [Message("system", instructions)] if instructions else []
    given = data.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else read_list(data, "input", limits.max_messages)
    if not items:
        raise CallRefused(400, "input: at least one item is needed")
    for index, item in enumerate(items):
        _take(messages, item, f"input[{index}]")
    tools = read_list(data, "tools", limits.max_tools)
    offered = [t for index, tool in enumerate(tools) for t in _tools(tool, f"tools[{index}]")]
    return ChatRequest(
        messages=tuple(messages),
        tools=() if data.get("tool_choice") == "none" else tuple(offered),
        max_tokens=read_positive(data, "max_output_tokens"),
        stream=data.get("stream") is True,
        model=str(data.get("model", "")),
        tags=read_tags(data, "metadata.user_id", "prompt_cache_key"),
        free_tools=tuple(str(t["name"]) for t in tools if isinstance(t, dict) and t.get("type") == "custom"),
    )


def _refuse_unsupported(data: Mapping[str, Any]) -> None:
    if data.get("tool_choice") not in (None, "auto", "none"):
        raise CallRefused(400, f"tool_choice: {data['tool_choice']!r}; constrained decoding is not served, use auto")
    form = data["text"].get("format") if isinstance(data.get("text"), dict) else None
    if isinstance(form, dict) and form.get("type") != "text":
        raise CallRefused(400, f"text.format: {form.get('type')!r}; constrained decoding is not served, use text")
    for field in ("previous_response_id", "conversation", "prompt"):
        if data.get(field):
            raise CallRefused(400, f"{field}: nothing is stored here; send the whole input")
    refuse_fields(data, "background")


def _tools(value: object, where: str) -> Iterator[Mapping[str, Any]]:
    """The tools in one declaration, in the form in which chat templates are given them."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(kind, str):
        raise CallRefused(400, f"{where}: a tool with a type was expected")
    if kind in HOSTED:
        return
    if kind not in ("function", "custom", "namespace"):
        raise CallRefused(400, f"{where}.type: {kind!r}; use function, custom or namespace")
    if not isinstance(value.get("name"), str):
        raise CallRefused(400, f"{where}.name: {value.get('name')!r}; text was expected")
    if kind == "namespace":
        for index, inner in enumerate(read_list(value, "tools", MAX_PARTS)):
            for tool in _tools(inner, f"{where}.tools[{index}]"):
                yield _function(f"{value['name']}.{tool['function']['name']}", tool["function"], "parameters")
    else:
        yield _function(value["name"], {**value, "parameters": FREE} if kind == "custom" else value, "parameters")


def _function(name: str, of: Mapping[str, Any], parameters: str) -> Mapping[str, Any]:
    return {"type": "function", "function": {"name": name, "description": of.get("description") or "",
                                             "parameters": of.get(parameters) or {"type": "object"}}}


# ---------------------------------------------------------------- items


def _take(messages: list[Message], item: object, where: str) -> None:
    """Puts one item of the input behind `messages`."""
    if not isinstance(item, dict):
        raise CallRefused(400, f"{where}: an object was expected, not {type(item).__name__}")
    kind = item.get("type", "message")
    if kind == "reasoning":
        return
    if kind == "message":
        role = _ROLES.get(str(item.get("role")))
        if role is None:
            raise CallRefused(400, f"{where}.role: {item.get('role')!r}; use one of {', '.join(_ROLES)}")
        text = _text(item.get("content"), f"{where}.content")
        if role == "system" and len(messages) == 1 and messages[0].role == "system":
            messages[0] = Message("system", f"{messages[0].content}\n\n{text}")  # many templates take one, at the beginning
        else:
            messages.append(Message(role, text))
    elif kind in ("function_call", "custom_tool_call"):
        call = _call(item, where)
        if not messages or messages[-1].role != "assistant":
            messages.append(Message("assistant"))
        messages[-1] = replace(messages[-1], tool_calls=(*messages[-1].tool_calls, call))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        answered = read_text(item.get("call_id"), f"{where}.call_id")
        messages.append(Message("tool", _text(item.get("output"), f"{where}.output"), tool_call_id=answered))
    else:
        raise CallRefused(400, f"{where}.type: {kind!r}; use message, function_call, function_call_output, custom_tool_call, "
                               "custom_tool_call_output or reasoning")


def _call(item: Mapping[str, Any], where: str) -> ToolCall:
    name, space = item.get("name"), item.get("namespace")
    if not isinstance(name, str):
        raise CallRefused(400, f"{where}.name: {name!r}; text was expected")
    if item["type"] == "custom_tool_call":
        arguments = msgspec.json.encode({"input": read_text(item.get("input"), f"{where}.input")}).decode()
    else:
        arguments = read_text(item.get("arguments"), f"{where}.arguments")
    return ToolCall(read_text(item.get("call_id"), f"{where}.call_id"), f"{space}.{name}" if space else name, arguments)


def _text(content: object, where: str) -> str:
    if not isinstance(content, list):
        return read_text(content, where)
    if len(content) > MAX_PARTS:
        raise CallRefused(400, f"{where}: {len(content)} parts, at most {MAX_PARTS}")
    parts: list[str] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in TEXTS:
            raise CallRefused(400, f"{where}[{index}]: {kind!r}; only text is served")
        parts.append(read_text(part.get("refusal" if kind == "refusal" else "text"), f"{where}[{index}]"))
    return "\n".join(parts)


# ---------------------------------------------------------------- answers


def answer_body(opening: Opening, answer: Answer) -> bytes:
    """The body of an answer that is not streamed."""
    return msgspec.json.encode(_response(opening, answer))


class ResponseEvents:
    """A streamed answer: an item of text, if there is any, then an item for each call of a tool."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._shown = ""
        self._num_events = 0

    def text(self, text: str) -> bytes:
        """See `AnswerEvents.text`."""
        begin = b"" if self._num_events else self._begin()
        if not self._shown:
            part = {"type": "output_text", "text": "", "annotations": []}
            begin += self._event("response.output_item.added", output_index=0, item=_text_item(self._opening, None))
            begin += self._event("response.content_part.added", **self._place(), part=part)
        self._shown += text
        return begin + self._event("response.output_text.delta", **self._place(), delta=text)

    def end(self, answer: Answer) -> bytes:
        """See `AnswerEvents.end`.

        It ends with `response.completed` also if the answer was cut off, which its status says: what reads
        `response.incomplete` as a failure would ask again, and be given another sample.
        """
        rest = answer.message.content[len(self._shown):]
        events = [self.text(rest)] if rest else [] if self._num_events else [self._begin()]
        if self._shown:
            events += self._end_text(answer.message.content)
        first = int(bool(self._shown))
        for index, call in enumerate(answer.message.tool_calls, first):
            item = _call_item(self._opening, call)
            events.append(self._event("response.output_item.added", output_index=index, item={**item, "status": "in_progress"}))
            events.append(self._event("response.output_item.done", output_index=index, item=item))
        events.append(self._event("response.completed", response=_response(self._opening, answer)))
        return b"".join(events)

    def error(self, error: CallRefused) -> bytes:
        """See `AnswerEvents.error`."""
        failed = {**_response(self._opening, None), "status": "failed",
                  "error": {"code": error.code or error.kind, "message": error.message}}
        return self._event("response.failed", response=failed)

    def _begin(self) -> bytes:
        return self._event("response.created", response=_response(self._opening, None))

    def _end_text(self, text: str) -> list[bytes]:
        part = {"type": "output_text", "text": text, "annotations": []}
        return [self._event("response.output_text.done", **self._place(), text=text),
                self._event("response.content_part.done", **self._place(), part=part),
                self._event("response.output_item.done", output_index=0, item=_text_item(self._opening, text))]

    def _place(self) -> dict[str, Any]:
        return {"item_id": _text_id(self._opening), "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._num_events += 1
        data = {"type": kind, "sequence_number": self._num_events - 1, **fields}
        return f"event: {kind}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"


def _response(opening: Opening, answer: Answer | None) -> dict[str, Any]:
    """The object that stands for the whole answer; None: it has only begun."""
    body: dict[str, Any] = {"id": "resp_" + opening.answer_id, "object": "response", "created_at": opening.created,
                            "model": opening.model, "status": "in_progress", "output": [], "error": None,
                            "incomplete_details": None, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    if answer is not None:
        is_cut = answer.stop_reason == "length"
        text = [_text_item(opening, answer.message.content)] if answer.message.content else []
        body |= {"status": "incomplete" if is_cut else "completed", "usage": _usage(answer.usage),
                 "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
                 "output": [*text, *(_call_item(opening, call) for call in answer.message.tool_calls)]}
    return body


def _text_item(opening: Opening, text: str | None) -> dict[str, Any]:
    content = [] if text is None else [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": _text_id(opening), "role": "assistant", "content": content,
            "status": "in_progress" if text is None else "completed"}


def _call_item(opening: Opening, call: ToolCall) -> dict[str, Any]:
    item: dict[str, Any] = {"id": "fc_" + call.id.removeprefix("call_"), "call_id": call.id, "status": "completed"}
    if call.name in opening.request.free_tools:
        return {**item, "type": "custom_tool_call", "name": call.name, "input": _free_text(call.arguments)}
    space, _, name = call.name.rpartition(".")
    inside = {"namespace": space} if space else {}
    return {**item, "type": "function_call", "name": name, "arguments": call.arguments, **inside}


def _free_text(arguments: str) -> str:
    """What a policy gave to a tool that takes free text, also if it gave something else than it was asked for."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _usage(usage: Usage) -> dict[str, Any]:
    return {"input_tokens": usage.num_prompt, "input_tokens_details": {"cached_tokens": usage.num_cached},
            "output_tokens": usage.num_completion, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.num_prompt + usage.num_completion}


def _text_id(opening: Opening) -> str:
    return "msg_" + opening.answer_id


RESPONSES = Dialect(parse, answer_body, ResponseEvents, error_body)
