"""The texts of a tree's calls for a page of bounded size: long ones lose their middle, and say how much that was."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gyre.cli.tree_view.anatomy import Anatomy
from gyre.cli.treefile import Call, Decode, shared, spelled

MAX_BYTES = 5_000_000  # of all texts together, as they stand in the page
FIRST_LIMIT = 6_000  # tokens of one piece that are shown, if the page has room for it
LEAST_LIMIT = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a call: `fate` says what it is; of `num` tokens, `left_out` in its middle are not in `parts`."""

    fate: str
    num: int
    parts: tuple[str, ...]
    left_out: int = 0


def texts(tree: Anatomy, decode: Decode | None, max_bytes: int = MAX_BYTES) -> str:
    """JSON that may stand inside a script element: for every call its new context and its output, piece by piece.

    Pieces are cut ever shorter until all fit into `max_bytes`.
    """
    limit, calls = FIRST_LIMIT, tree.view.calls
    bases = {call.call: call for call in calls}
    while True:
        told = [[[p.fate, p.num, p.left_out, *p.parts] for p in pieces(tree, c, bases.get(c.base_call or ""), decode, limit)]
                for c in calls]
        written = json.dumps(told, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
        size = len(written.encode())
        if size <= max_bytes or limit <= LEAST_LIMIT:
            return written
        limit = max(LEAST_LIMIT, min(limit // 2, int(limit * 1.2 * max_bytes / size)))


def pieces(tree: Anatomy, call: Call, base: Call | None, decode: Decode | None, limit: int) -> Iterator[Piece]:
    """What the call's prompt has beyond what `base` has, then its output, each piece at most `limit` tokens."""
    view = tree.view
    if not view.has_tokens:
        return
    kept = shared(view, call, base)
    for start, stop, is_output in ((kept, call.prompt_len, False), (call.prompt_len, call.length, True)):
        for fate, low, high in _stretches(tree, call, start, stop, is_output):
            yield _piece(view.tokens(call.segment, low, high).tolist(), fate, decode, limit)


def _stretches(tree: Anatomy, call: Call, start: int, stop: int, is_output: bool) -> list[tuple[str, int, int]]:
    """(fate, from, to) in depth of the call's own tokens; neighbours of one fate are one stretch."""
    found: list[tuple[str, int, int]] = []
    for segment, low, high in tree.view.spans(call.segment, start, stop):
        shift = int(tree.view.depth[segment]) - int(tree.view.bounds[segment])
        for run in tree.runs_of(segment):
            first, last = max(low, run.start) + shift, min(high, run.stop) + shift
            fate = run.fate if is_output else "context"
            if first < last and found and found[-1][0] == fate:
                found[-1] = (fate, found[-1][1], last)
            elif first < last:
                found.append((fate, first, last))
    return found


def _piece(ids: Sequence[int], fate: str, decode: Decode | None, limit: int) -> Piece:
    if len(ids) <= limit:
        return Piece(fate, len(ids), (spelled(ids, decode),))
    head = max(limit * 2 // 3, 1)
    tail = max(limit - head, 1)
    return Piece(fate, len(ids), (spelled(ids[:head], decode), spelled(ids[-tail:], decode)), len(ids) - head - tail)
