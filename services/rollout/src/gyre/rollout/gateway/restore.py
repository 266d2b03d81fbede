"""Tool calls that a harness wrote anew are put back as they were sampled, so that they do not fork a context."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from gyre.rollout.gateway.messages import Message, ToolCall, canonical_json

_Form = tuple[str, str]  # name and canonical arguments


class SampledToolCalls:
    """The tool calls that one execution sampled, by id and by what they say."""

    __slots__ = ("_by_form", "_by_id", "_spelled")

    def __init__(self) -> None:
        self._by_id: dict[str, ToolCall] = {}
        self._by_form: dict[_Form, ToolCall | None] = {}  # None: said more than once
        self._spelled: dict[str, ToolCall] = {}  # by id, how the harness writes it; read once and not every turn

    def add(self, calls: Iterable[ToolCall]) -> None:
        """Take the tool calls of an answer."""
        for call in calls:
            if call.id not in self._by_id:
                self._by_id[call.id] = call
                form = _form(call)
                self._by_form[form] = None if form in self._by_form else call

    def restored(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """`messages` with every tool call that only was written anew replaced by what was sampled.

        A call is known by its id, or else by name and arguments if exactly one sampled call and exactly one call of the
        request has them. Then the results that name the harness's id name the sampled one, so that the messages are the
        same every turn, whatever ids a harness makes up.
        """
        if not self._by_id or not any(m.tool_calls for m in messages):
            return messages
        renamed = self._renamed(messages)
        return tuple(self._message(m, renamed) if m.tool_calls or m.tool_call_id else m for m in messages)

    def _renamed(self, messages: tuple[Message, ...]) -> dict[str, ToolCall]:
        """Id that we never gave -> the one sampled call that it must stand for."""
        present = [c for m in messages for c in m.tool_calls]
        strangers = [(c.id, _form(c)) for c in present if c.id and c.id not in self._by_id]
        if not strangers:
            return {}
        ids = {c.id for c in present}
        uses = Counter(form for _, form in strangers)
        originals = ((its_id, self._by_form.get(form)) for its_id, form in strangers if uses[form] == 1)
        return {its_id: original for its_id, original in originals if original and original.id not in ids}

    def _message(self, message: Message, renamed: dict[str, ToolCall]) -> Message:
        calls = tuple(self._call(c, renamed) for c in message.tool_calls)
        answered = renamed.get(message.tool_call_id)
        answered_id = answered.id if answered else message.tool_call_id
        if calls == message.tool_calls and answered_id == message.tool_call_id:
            return message
        return replace(message, tool_calls=calls, tool_call_id=answered_id)

    def _call(self, call: ToolCall, renamed: dict[str, ToolCall]) -> ToolCall:
        original = self._by_id.get(call.id)
        if original is None:
            return renamed.get(call.id, call)
        if call != original and call != self._spelled.get(call.id):
            if _form(call) != _form(original):
                return call
            self._spelled[call.id] = call
        return original


def _form(call: ToolCall) -> _Form:
    return call.name, canonical_json(call.arguments)


def string_arguments(call: ToolCall) -> list[str]:
    """The arguments of a tool call that are text, stripped."""
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return []
    values = arguments.values() if isinstance(arguments, dict) else ()
    return [v.strip() for v in values if isinstance(v, str)]
