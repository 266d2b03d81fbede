"""The calls of one execution as token contexts: which earlier call does a prompt continue, on exact ids?

Calls that continue one another share one buffer, so a context of 700K tokens is held once and not once per turn.
"""

from dataclasses import dataclass, field

import numpy as np
from gyre.contracts.digest import TokenChain

_PROBE = 64


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """Length of the longest common prefix of two id vectors (int32, [T])."""
    length = min(len(left), len(right))
    for start, end in ((0, min(_PROBE, length)), (min(_PROBE, length), length)):
        different = left[start:end] != right[start:end]
        if different.any():
            return start + int(different.argmax())
    return length


class _Line:
    """A buffer of ids that grows at its end; what was written never changes."""

    __slots__ = ("_buffer", "length")

    def __init__(self, ids: np.ndarray) -> None:
        self._buffer = np.array(ids, dtype=np.int32)
        self.length = len(ids)

    def append(self, ids: np.ndarray) -> None:
        needed = self.length + len(ids)
        if needed > len(self._buffer):
            grown = np.empty(max(needed, 2 * len(self._buffer)), np.int32)
            grown[:self.length] = self._buffer[:self.length]
            self._buffer = grown
        self._buffer[self.length:needed] = ids
        self.length = needed

    def view(self, start: int, end: int) -> np.ndarray:
        return self._buffer[start:end]


@dataclass(slots=True, eq=False)
class Node:
    """One recorded call; its sequence is prompt + output, `length` ids. `children` continue all of it.

    `context`: length of the prompt that opened the context to which the call belongs, up to where its answer begins.
    """

    call: str
    length: int
    context: int
    chain: TokenChain
    line: _Line
    children: list["Node"] = field(default_factory=list)

    def ids(self, start: int = 0) -> np.ndarray:
        """The sequence from `start` on (int32); a view, not to be written."""
        return self.line.view(start, self.length)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a prompt hangs: `base` shares its first `keep_len` ids; `inside` is the deepest call it holds whole."""

    base: Node | None
    keep_len: int
    inside: Node | None

    @property
    def continues(self) -> bool:
        """Whether the prompt goes on with an earlier context: it holds all of the prompt that opened that one.

        So it does where a harness took old observations or thoughts out, or asks once more.
        """
        return self.base is not None and self.keep_len >= self.base.context


class TokenTree:
    """All recorded calls of one execution."""

    def __init__(self) -> None:
        self._roots: list[Node] = []

    def locate(self, prompt: np.ndarray, hint: Node | None = None) -> Place:
        """The call with the longest common prefix with `prompt`. `hint` is a call known to lie whole inside it."""
        inside = hint
        length = hint.length if hint else 0
        while True:
            children = inside.children if inside else self._roots
            best, shared = self._longest(children, prompt, length)
            if best is None or shared == 0:
                return Place(inside, length, inside)
            if length + shared < best.length:
                return Place(best, length + shared, inside)
            inside, length = best, best.length

    @staticmethod
    def _longest(nodes: list[Node], prompt: np.ndarray, start: int) -> tuple[Node | None, int]:
        best, most = None, 0
        for node in nodes:
            shared = common_prefix(node.ids(start), prompt[start:])
            if shared > most or (best is not None and shared == most and node.length < best.length):
                best, most = node, shared
        return best, most

    @staticmethod
    def extended(place: Place, prompt: np.ndarray, output: np.ndarray) -> TokenChain:
        """The digest chain over the whole sequence of a call whose prompt was located at `place`."""
        inside = place.inside
        chain, start = (inside.chain, inside.length) if inside else (TokenChain(), 0)
        return chain.extend(prompt[start:]).extend(output)

    def add(self, call: str, place: Place, prompt: np.ndarray, output: np.ndarray, chain: TokenChain,
            num_opening: int = 0) -> Node:
        """Hang a call whose prompt was located at `place`; `chain` = `extended(place, prompt, output)`.

        `num_opening`: ids at the end of the prompt that are gone from the history once the answer is in it.
        """
        inside = place.inside
        start = inside.length if inside else 0
        delta = np.concatenate((prompt[start:], output)).astype(np.int32, copy=False)
        if inside is not None and inside.line.length == inside.length:
            line = inside.line
            line.append(delta)
        else:
            line = _Line(np.concatenate((prompt, output)))
        context = place.base.context if place.base and place.continues else len(prompt) - num_opening
        node = Node(call, len(prompt) + len(output), context, chain, line)
        (inside.children if inside else self._roots).append(node)
        return node
