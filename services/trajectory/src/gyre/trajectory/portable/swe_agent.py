"""SWE-agent's `.traj`: texts alone, so byte ids; the whole list of messages is written down with every step.

`query` is what the step's call was shown. Older files have `messages`: the list after the step, as the next call is
shown it (a history processor may have elided old observations). So the first call was shown the beginning of the first
list, every other call the list of the step before, and the last list was never shown to anybody.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from gyre.trajectory.portable.deltas import ForeignCall
from gyre.trajectory.portable.fields import TraceError, decode, dumped
from gyre.trajectory.portable.session import Options, Session, Trace
from gyre.trajectory.portable.spelling import ROLE_IDS, Message, spell_prompt, text_ids

NAME = "swe-agent"


class _Message(msgspec.Struct):
    role: str
    content: Any = None
    tool_calls: Any = None


class _Step(msgspec.Struct):
    response: str = ""
    query: list[_Message] | None = None
    messages: list[_Message] | None = None
    tool_calls: Any = None


class _Document(msgspec.Struct):
    trajectory: list[_Step]


def sessions(trace: Trace, options: Options) -> Iterator[Session]:
    """The one session of a file. Raises TraceError."""
    steps = decode(trace.data, _Document, trace.name).trajectory
    yield Session(trace.name, NAME, "byte", _calls(steps, trace.name))


def message_lists(trace: Trace) -> list[list[Message]]:
    """The list of messages that stands with each step, as it is spelled."""
    steps = decode(trace.data, _Document, trace.name).trajectory
    return [_spelled(_list(steps, number, trace.name), f"{trace.name}: trajectory[{number}]") for number in range(len(steps))]


def shared_messages(lists: Sequence[Sequence[Message]]) -> list[int]:
    """How many messages each list begins with as the list before it does."""
    shared = []
    for before, now in zip([(), *lists], lists, strict=False):
        pairs = zip(before, now, strict=False)
        shared.append(next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(before), len(now))))
    return shared


def _calls(steps: list[_Step], name: str) -> Iterator[ForeignCall]:
    shown = _opening(steps, name)
    for number, step in enumerate(steps):
        place = f"{name}: trajectory[{number}]"
        if step.query is not None:
            shown = step.query
        after = _list(steps, number, name)
        answer = _answer(step, after[len(shown)] if len(after) > len(shown) else None)
        yield ForeignCall(place, _prompt(shown, place), text_ids(_body(answer, place)))
        shown = after


def _opening(steps: list[_Step], name: str) -> list[_Message]:
    """What the first call was shown: the first list up to that call's own answer."""
    if not steps or steps[0].query is not None:
        return []
    first = _list(steps, 0, name)
    for number, message in enumerate(first):
        if message.role == "assistant" and _is_text(message, steps[0].response):
            return first[:number]
    raise TraceError(f"{name}: trajectory[0].messages: the answer of the step is not among them")


def _list(steps: list[_Step], number: int, name: str) -> list[_Message]:
    found = steps[number].messages if steps[number].query is None else steps[number].query
    if found is None:
        raise TraceError(f"{name}: trajectory[{number}]: neither query nor messages; what its call was shown is not known")
    return found


def _answer(step: _Step, recorded: _Message | None) -> _Message:
    """The answer as a later call is shown it, if it is."""
    if recorded is not None and recorded.role == "assistant" and _is_text(recorded, step.response):
        return recorded
    return _Message("assistant", step.response, step.tool_calls)


def _is_text(message: _Message, text: str) -> bool:
    if isinstance(message.content, list) and len(message.content) == 1 and isinstance(message.content[0], dict):
        return message.content[0].get("text") == text
    return message.content == text


def _prompt(messages: list[_Message], place: str) -> np.ndarray:
    return spell_prompt(_spelled(messages, place))


def _spelled(messages: list[_Message], place: str) -> list[Message]:
    for number, message in enumerate(messages):
        if message.role not in ROLE_IDS:
            raise TraceError(f"{place}: message {number}: role {message.role!r}; expected one of {', '.join(ROLE_IDS)}")
    return [(message.role, _body(message, place)) for message in messages]


def _body(message: _Message, place: str) -> str:
    """What a model is shown of a message, as JSON."""
    return dumped({"role": message.role, "content": message.content, "tool_calls": message.tool_calls}, place)
