"""Tool calls out of sampled text.

`hermes` is the form of Qwen and Hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of
them after the text. `plain` knows no tool calls: text is text. What does not parse stays text, so that the harness
sees exactly what the policy said.
"""

import hashlib
import json
from typing import Literal

from gyre.rollout.gateway.messages import ToolCall

ToolFormat = Literal["hermes", "plain"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
_DECODER = json.JSONDecoder()


def parse_tool_calls(text: str, call_key: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Split sampled text into content and tool calls; ids are derived from `call_key`, so they are stable.

    A block that is broken ends the search: it and everything after it stay text.
    """
    calls: list[ToolCall] = []
    start = text.find(OPEN)
    content_end = start if start >= 0 else len(text)
    position = start
    while position >= 0:
        parsed = _parse_block(text, position + len(OPEN))
        if parsed is None:
            break
        name, arguments, position = parsed
        calls.append(ToolCall(_call_id(call_key, len(calls)), name, arguments))
        position = text.find(OPEN, position)
    if not calls:
        return text, ()
    rest = text[position:] if position >= 0 else ""
    content = text[:content_end] + rest if rest.strip() else text[:content_end].rstrip()
    return content, tuple(calls)


def _parse_block(text: str, start: int) -> tuple[str, str, int] | None:
    """(name, arguments as JSON text, end) of the block whose body begins at `start`; None if it is broken."""
    begin = start + len(text[start:]) - len(text[start:].lstrip())
    try:
        body, end = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict) or not isinstance(body.get("name"), str):
        return None
    arguments_text = _arguments_text(body.get("arguments", body.get("parameters", {})))
    if arguments_text is None or not _can_be_sent(body["name"] + arguments_text):
        return None
    close = text.find(CLOSE, end)
    if close >= 0 and not text[end:close].strip():
        return body["name"], arguments_text, close + len(CLOSE)
    return (body["name"], arguments_text, end) if not text[end:].strip() else None


def _arguments_text(arguments: object) -> str | None:
    if isinstance(arguments, str):
        return arguments
    try:
        # No harness could read NaN or infinity.
        return json.dumps(arguments, ensure_ascii=False, allow_nan=False) if isinstance(arguments, dict) else None
    except (ValueError, RecursionError):
        return None


def _can_be_sent(text: str) -> bool:
    """Whether text has no half of a surrogate pair, which JSON can spell but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _call_id(call_key: str, index: int) -> str:
    return "call_" + hashlib.blake2b(f"{call_key}/{index}".encode(), digest_size=12).hexdigest()


def safe_length(text: str) -> int:
    """How much of a growing text may be streamed: nothing that is, or may become, a tool call."""
    start = text.find(OPEN)
    if start >= 0:
        return start
    for width in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if OPEN.startswith(text[-width:]):
            return len(text) - width
    return len(text)
