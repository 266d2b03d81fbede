"""Texts as ids where a trace has no ids: one id per UTF-8 byte, and before each message one id for its role.

Deterministic, and no two dialogues are spelled alike. Trees of such ids have the shape of the session; no model was
ever asked in them, so they are for looking at, not for training.
"""

from collections.abc import Iterable

import numpy as np

ROLE_IDS = {"system": 256, "user": 257, "assistant": 258, "tool": 259, "summary": 260}
Message = tuple[str, str]  # role, text


def text_ids(text: str) -> np.ndarray:
    """int32 [bytes of the text]."""
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int32)


def spell(messages: Iterable[Message]) -> np.ndarray:
    """A dialogue: int32 [one per message and byte]. Raises KeyError for a role without an id."""
    pieces = [np.empty(0, np.int32)]
    for role, text in messages:
        pieces += [np.array([ROLE_IDS[role]], np.int32), text_ids(text)]
    return np.concatenate(pieces)


def spell_prompt(messages: Iterable[Message]) -> np.ndarray:
    """What a call that answers `messages` was shown: the dialogue, then the assistant's id."""
    return np.concatenate((spell(messages), np.array([ROLE_IDS["assistant"]], np.int32)))
