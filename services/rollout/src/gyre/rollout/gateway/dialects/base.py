"""What every dialect is, and how all of them read a body."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from gyre.rollout.gateway.messages import Answer, CallRefused, ChatRequest, Usage


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one request body."""

    max_body_bytes: int = 64 * 1024 * 1024  # a million tokens of code as JSON take some 6 MB
    max_messages: int = 65_536  # items, where a turn is several
    max_tools: int = 1024


class AnswerEvents(Protocol):
    """One streamed answer as server-sent events, in order: `text` any number of times, then `end` or `error`."""

    def text(self, text: str) -> bytes:
        """More of the answer's text; never empty."""
        ...

    def end(self, answer: Answer) -> bytes:
        """What of the answer was not sent yet, and the end."""
        ...

    def error(self, error: CallRefused) -> bytes:
        """An error after the stream has begun, and its end."""
        ...


@dataclass(frozen=True, slots=True)
class Opening:
    """What is known of an answer before its first text. `created`: seconds of the epoch."""

    answer_id: str
    created: int
    model: str
    request: ChatRequest
    usage: Usage


@dataclass(frozen=True, slots=True)
class Dialect:
    """A wire format. All four are pure.

    parse: a body -> the request in it. Raises CallRefused: 400, names the field that is wrong.
    answer: the body of an answer that is not streamed.
    events: what writes a streamed one. error: the body of an error.
    """

    parse: Callable[[bytes, Limits], ChatRequest]
    answer: Callable[[Opening, Answer], bytes]
    events: Callable[[Opening], AnswerEvents]
    error: Callable[[CallRefused], bytes]


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises CallRefused."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CallRefused(400, f"body: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise CallRefused(400, f"body: a JSON object was expected, not {type(data).__name__}")
    return data


def read_list(data: Mapping[str, Any], field: str, limit: int) -> list[Any]:
    """The list in a field; nothing there is an empty one. Raises CallRefused."""
    value = data.get(field)
    if value is None:
        return []
    if not isinstance(value, list):
        raise CallRefused(400, f"{field}: a list was expected, not {type(value).__name__}")
    if len(value) > limit:
        raise CallRefused(400, f"{field}: {len(value)} entries, at most {limit}")
    return value


def read_text(value: object, where: str) -> str:
    """A text; nothing is the empty one. Raises CallRefused."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise CallRefused(400, f"{where}: text was expected, not {type(value).__name__}")
    return value


def read_positive(data: Mapping[str, Any], field: str) -> int | None:
    """The positive whole number in a field, None if there is none. Raises CallRefused."""
    value = data.get(field)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise CallRefused(400, f"{field}: {value!r}; a positive integer was expected")
    return value


def read_tags(data: Mapping[str, Any], *fields: str) -> dict[str, str]:
    """What harnesses say in these fields of whose request it is; `a.b` is field b of the object a. No text says nothing."""
    found: dict[str, str] = {}
    for name in fields:
        value: object = data
        for step in name.split("."):
            value = value.get(step) if isinstance(value, dict) else None
        if isinstance(value, str):
            found[name] = value
    return found


def refuse_fields(data: Mapping[str, Any], *fields: str) -> None:
    """Raises CallRefused for the first of `fields` that says anything."""
    for field in fields:
        if data.get(field):
            raise CallRefused(400, f"{field}: is not served; leave it out")
