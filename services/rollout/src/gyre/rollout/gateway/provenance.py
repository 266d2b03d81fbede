"""What the first request of a context shows of the calls before it, found in its text.

Looked for only where a prompt continues no earlier context token by token; an ordinary call costs nothing here.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from gyre.contracts.events import CallEvidence
from gyre.rollout.gateway.messages import Message, ToolCall, said_key
from gyre.rollout.gateway.restore import string_arguments

MIN_QUOTE_ANYWHERE = 64  # characters; a shorter answer must stand on lines of its own
MIN_QUOTE = 8
MAX_QUOTES = 16
END_OF_THOUGHT = "</think>"
MAX_ANSWERS = 512  # the newest answers, and tool calls, that are looked for
MAX_SEARCHED = 4 * 1024 * 1024  # characters of messages that are looked into


class Provenance:
    """The answers of one execution and its tool calls that nobody has answered."""

    __slots__ = ("_answered", "_answers", "_open")

    def __init__(self) -> None:
        self._answers: deque[tuple[str, Message]] = deque(maxlen=MAX_ANSWERS)
        self._open: dict[str, tuple[str, ToolCall]] = {}
        self._answered: list[str] = []

    def heard(self, call: str, answer: Message) -> None:
        """Take the answer that the harness was given for `call`."""
        self._answers.append((call, answer))
        for tool_call in answer.tool_calls:
            self._open[tool_call.id] = (call, tool_call)
        while len(self._open) > MAX_ANSWERS:
            del self._open[next(iter(self._open))]

    def close_answered(self, messages: Sequence[Message]) -> None:
        """Tool calls whose result is among `messages` wait for none any more."""
        if self._open:
            self.close_tool_calls([m.tool_call_id for m in messages if m.role == "tool"])

    def close_tool_calls(self, ids: Sequence[str]) -> None:
        """Tool calls `ids` have their results."""
        self._answered += [i for i in ids if self._open.pop(i, None) is not None]

    @property
    def answered(self) -> tuple[str, ...]:
        """Tool calls that got their results since `saved`, for the archive."""
        return tuple(self._answered)

    def saved(self, num: int | None = None) -> None:
        """The first `num` of `answered`, or all of them, are in the archive."""
        del self._answered[:num]

    def look(self, messages: Sequence[Message]) -> CallEvidence:
        """What a context that begins with `messages` shows of earlier calls; without tags."""
        searched = list(_searched(messages))
        return CallEvidence({}, self._replayed(searched), self._quoted(searched), self._asked(messages))

    def _replayed(self, messages: Sequence[Message]) -> str | None:
        said = {said_key(m) for m in messages if m.role == "assistant" and (m.content.strip() or m.tool_calls)}
        if not said:
            return None
        return next((call for call, answer in reversed(self._answers)
                     if any(said_key(replace(answer, content=text)) in said for text in _texts(answer))), None)

    def _quoted(self, messages: Sequence[Message]) -> tuple[str, ...]:
        texts = [m.content for m in messages if m.role in ("user", "system")]
        lines = [f"\n{text}\n" for text in texts]
        newest_first = (call for call, answer in reversed(self._answers)
                        if any(_stands(text, texts, lines) for text in _texts(answer)))
        return tuple(reversed(list(islice(newest_first, MAX_QUOTES))))

    def _asked(self, messages: Sequence[Message]) -> str | None:
        """The latest call with an open tool call that says exactly the first user text."""
        task = next((m.content for m in messages if m.role == "user"), "").strip()
        if not task:
            return None
        return next((call for call, tool_call in reversed(self._open.values()) if task in string_arguments(tool_call)), None)


def _searched(messages: Sequence[Message]) -> Iterator[Message]:
    """The messages whose text may show something, as far as the bound reaches."""
    left = MAX_SEARCHED
    for message in messages:
        if message.role != "tool" and len(message.content) <= left:
            left -= len(message.content)
            yield message


def _texts(answer: Message) -> tuple[str, ...]:
    """A whole answer as harnesses keep it: as it is, or without the thoughts before it."""
    whole = answer.content.strip()
    _, found, rest = whole.rpartition(END_OF_THOUGHT)
    return (whole, rest.strip()) if found else (whole,)


def _stands(answer: str, texts: Sequence[str], lines: Sequence[str]) -> bool:
    """Whether a whole answer stands in a text; a short one only on lines of its own."""
    if len(answer) >= MIN_QUOTE_ANYWHERE:
        return any(answer in text for text in texts)
    return len(answer) >= MIN_QUOTE and any(f"\n{answer}\n" in text for text in lines)
