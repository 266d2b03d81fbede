"""Messages -> prompt ids. What was sampled is never tokenised again.

If the request's messages begin with those of an earlier call plus its answer, the prompt is that call's exact prompt
and output ids, followed by the rendered increment of the new messages alone. Otherwise it is a new root: everything is
rendered. The increment is what the chat template writes after an assistant's text, so it also closes the turn.
"""

import json
import os.path
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from gyre.rollout.gateway.context import Node, Place, TokenTree
from gyre.rollout.gateway.messages import CallRefused, ChatRequest, Message

# Stands for the earlier answer while the template writes what follows it; no template changes it, no harness sends it.
_ANSWER = "gyre-0f4c1d7e-answer"


class Tokenizer(Protocol):
    """The part of `gyre.policy.tokenizer.ChatTokenizer` that rendering needs."""

    stop_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None,
               add_generation_prompt: bool = True, variables: Mapping[str, Any] | None = None) -> str: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """Exact prompt ids (int32 [T]) and where they hang. `rerooted`: an earlier call fitted but the template did not."""

    ids: np.ndarray
    place: Place
    rerooted: bool = False


class Renderer:
    """Turns requests into prompts for one tokenizer and chat template.

    `num_opening`: ids at the end of every prompt that the template does not write before an answer of the past, such as
    the opening of a thought. A template that refuses a system message anywhere but at the beginning is given those as the
    user's: harnesses put reminders there.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._stop_ids = frozenset(tokenizer.stop_ids)
        self.num_opening = self._count_opening()
        self._takes_late_system = self._renders(({"role": "user", "content": "."}, {"role": "system", "content": "."}))

    def _count_opening(self) -> int:
        question = {"role": "user", "content": "."}
        try:
            asked = self._render([question], ())
            answered = self._render([question, {"role": "assistant", "content": _ANSWER}, question], ())
        except CallRefused:
            return 0
        opening = asked[len(os.path.commonprefix([asked, answered])):]
        return len(self.tokenizer.encode(opening)) if opening else 0

    def _renders(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        try:
            self._render(messages, ())
        except CallRefused:
            return False
        return True

    def _plain(self, messages: Sequence[Message], num_before: int = 0) -> list[dict[str, Any]]:
        """Messages as the template takes them; `num_before` others stand before them."""
        given = [plain(m) for m in messages]
        if not self._takes_late_system:
            for message in given[0 if num_before else 1:]:
                if message["role"] == "system":
                    message["role"] = "user"
        return given

    def prompt(self, request: ChatRequest, tree: TokenTree, earlier: Node | None, num_shared: int) -> Prompt:
        """The prompt of `request`, of which the first `num_shared` messages are those of `earlier` and its answer.

        Raises:
            CallRefused: 400, the chat template refuses the messages.
        """
        if earlier is not None:
            increment = self._increment(request.messages[num_shared:], earlier)
            if increment is not None:
                ids = np.concatenate((earlier.ids(), np.asarray(increment, dtype=np.int32)))
                return Prompt(ids, tree.locate(ids, earlier))
        text = self._render(self._plain(request.messages), request.tools)
        ids = np.asarray(self.tokenizer.encode(text), dtype=np.int32)
        return Prompt(ids, tree.locate(ids), rerooted=earlier is not None)

    def _increment(self, messages: Sequence[Message], earlier: Node) -> list[int] | None:
        """Ids that follow the sequence of `earlier`; None if the template refuses to write an increment."""
        stand_in = [{"role": "user", "content": "."}, {"role": "assistant", "content": _ANSWER}]
        try:
            text = self._render([*stand_in, *self._plain(messages, len(stand_in))], ())
        except CallRefused:
            return None
        _, found, rest = text.partition(_ANSWER)
        if not found or _ANSWER in rest:
            return None
        ids = self.tokenizer.encode(rest)
        last = int(earlier.ids(earlier.length - 1)[0])
        closed = bool(ids) and last in self._stop_ids and ids[0] == last
        return ids[1:] if closed else ids

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
        try:
            return self.tokenizer.render(messages, tools=tools or None)
        except ValueError as error:
            raise CallRefused(400, f"messages: {error}", code="invalid_messages") from error


def plain(message: Message) -> dict[str, Any]:
    """A message as chat templates expect it: tool arguments as objects where they are JSON objects."""
    result: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        result["tool_calls"] = [{"id": c.id, "type": "function", "function": {"name": c.name,
                                 "arguments": _arguments(c.arguments)}} for c in message.tool_calls]
    if message.tool_call_id:
        result["tool_call_id"] = message.tool_call_id
    if message.name:
        result["name"] = message.name
    return result


def _arguments(text: str) -> dict[str, Any] | str:
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
