"""Sampled ids to text while they arrive, never showing half a character."""

from collections.abc import Sequence

from gyre.rollout.gateway.render import Tokenizer

_INCOMPLETE = "\ufffd"
_WINDOW = 8


class Detokenizer:
    """Decodes a growing output. Each piece is decoded with some ids before it, because a tokenizer may join them."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._ids: list[int] = []
        self._context = 0
        self._shown = 0
        self.text = ""

    def push(self, ids: Sequence[int], show: bool) -> None:
        """Take more ids; with `show`, `text` grows by what is complete."""
        self._ids.extend(i for i in ids if i not in self._stop_ids)
        if not show:
            return
        before = self._decode(self._context, self._shown)
        after = self._decode(self._context, len(self._ids))
        if len(after) <= len(before) or after.endswith(_INCOMPLETE):
            return
        self.text += after[len(before):]
        self._shown = len(self._ids)
        self._context = max(0, self._shown - _WINDOW)

    def finish(self) -> str:
        """The whole text, decoded at once."""
        self.text = self._decode(0, len(self._ids))
        return self.text

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=True) if end > start else ""
