"""Our own words for a model request and its answer; every dialect translates to and from these."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from gyre.contracts.errors import GyreError

MessageRole = Literal["system", "developer", "user", "assistant", "tool"]
StopReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool; `arguments` is JSON text, exactly as it was sampled or sent."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; `content` is plain text."""

    role: MessageRole
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One model request. `tools` are the function declarations as they were sent; `max_tokens` None: no wish.

    `tags`: what the body says of whose request it is, by the name of its field. `free_tools`: those whose one argument the
    harness wants as plain text.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    model: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    free_tools: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Real token counts of one call; `num_cached` of the prompt's tokens continue an earlier call."""

    num_prompt: int
    num_completion: int
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What the harness is told under `id`. `call` is empty if it is not a sample (a budget stop)."""

    id: str
    call: str
    message: Message
    stop_reason: StopReason
    usage: Usage
    created: int = 0


class CallRefused(GyreError):
    """A request that gets an error answer. `status` is the HTTP status, `code` OpenAI's error code."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", code: str = "") -> None:
        super().__init__(f"{status} {code or kind}: {message}")
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code


def message_key(message: Message) -> bytes:
    """Canonical bytes of a message. Whitespace around an assistant's text does not count: harnesses strip it."""
    content = message.content.strip() if message.role == "assistant" else message.content
    calls = [[c.id, c.name, c.arguments] for c in message.tool_calls]
    return msgspec.json.encode([message.role, content, calls, message.tool_call_id, message.name])


def chain_start(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """The chain of no messages under `tools`: other tools render another prompt."""
    return hashlib.blake2b(msgspec.json.encode(list(tools)), digest_size=16).digest()


def chain_next(state: bytes, message: Message) -> bytes:
    """The chain after one more message: 16 bytes that name exactly this list of messages."""
    return hashlib.blake2b(state + message_key(message), digest_size=16).digest()


def chains(request: ChatRequest) -> list[bytes]:
    """`chains[i]` names the first i messages of the request."""
    result = [chain_start(request.tools)]
    for message in request.messages:
        result.append(chain_next(result[-1], message))
    return result


def canonical_json(text: str) -> str:
    """One spelling for all JSON texts that say the same; no text at all says `{}`. What is no JSON stays as it is."""
    if not text.strip():
        return "{}"
    try:
        return json.dumps(json.loads(text, parse_float=_number), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return text


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value  # some languages write 1.0 as 1


def said_key(message: Message) -> bytes:
    """Names what an assistant said: its text and tool calls, whatever their ids and however their JSON is written."""
    calls = [[c.name, canonical_json(c.arguments)] for c in message.tool_calls]
    return hashlib.blake2b(msgspec.json.encode([message.content.strip(), calls]), digest_size=16).digest()
