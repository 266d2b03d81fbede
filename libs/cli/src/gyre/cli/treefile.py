"""The tree of one execution as trajectory leaves it in the blob store, or answers for it, read for showing.

Only what is shown is read; fields that another release adds are ignored, and those that an older one lacks are empty.
Decoding needs the run's tokenizer and no model.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from gyre.contracts.codec import from_plain, to_plain, unpack
from gyre.contracts.errors import BrokenBody
from gyre.contracts.events import CallEvidence, Outcome, Sampling, VersionSpan
from gyre.runtime.blobs import BlobStore

Decode = Callable[[Sequence[int]], str]
_INTS = ("ids", "bounds", "parent", "depth", "owner", "target", "call", "version")
_FLOATS = ("logprobs", "behaviour_logprobs")


@dataclass(frozen=True, slots=True)
class Call:
    """One call: the first `length` tokens of the path to `segment`, of which `prompt_len` are its prompt.

    `agent` and `role_class` were decided, `known_by` says on what grounds; `excluded` is why its output is no target.
    """

    call: str
    index: int
    base_call: str | None
    segment: int
    prompt_len: int
    length: int
    role_class: str
    lineage: str
    finish_reason: str
    spans: tuple[VersionSpan, ...]
    keep_len: int = 0
    agent: str = ""
    known_by: str = ""
    excluded: str = ""
    model: str = ""
    digest: str = ""
    said_role: str = ""
    cell: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    evidence: CallEvidence = field(default_factory=CallEvidence)


@dataclass(frozen=True, slots=True)
class Path:
    """One admitted path, in the order of its draw."""

    leaf: int
    role_class: str
    num_owned: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a tree belongs to. `policy`: model whose outputs are targets; `source`: where an imported one comes from."""

    query: str
    group: str
    purpose: str
    policy: str
    outcome: Outcome
    source: str = ""


def _no_floats() -> np.ndarray:
    return np.empty(0, np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class TreeView:
    """U tokens in S segments, depth-first.

    ids int32 [U]; bounds int32 [S + 1]; parent, depth, owner int32 [S], owner -1: nothing trained there; target int32
    [Y] token index; call int32 [Y] place of the call that sampled it in `calls`; version int32 [Y]; logprobs,
    behaviour_logprobs float32 [D] of the outputs of all calls, in the order of `calls`. A very long tree that is not in
    the blob store yet comes without what there is one of per token.
    """

    ids: np.ndarray
    bounds: np.ndarray
    parent: np.ndarray
    depth: np.ndarray
    owner: np.ndarray
    calls: tuple[Call, ...]
    paths: tuple[Path, ...]
    target: np.ndarray
    call: np.ndarray
    version: np.ndarray
    header: Header | None = None
    logprobs: np.ndarray = field(default_factory=_no_floats)
    behaviour_logprobs: np.ndarray = field(default_factory=_no_floats)

    @property
    def num_tokens(self) -> int:
        return int(self.bounds[-1]) if len(self.bounds) else 0

    @property
    def has_tokens(self) -> bool:
        """Whether the ids themselves are here."""
        return len(self.ids) == self.num_tokens

    def spans(self, segment: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Where tokens [start, stop) of the path to `segment` lie: (segment, from, to) over `ids`, in path order."""
        found: list[tuple[int, int, int]] = []
        while segment >= 0:
            depth, first = int(self.depth[segment]), int(self.bounds[segment])
            low, high = max(start, depth), min(stop, depth + int(self.bounds[segment + 1]) - first)
            if low < high:
                found.append((segment, first + low - depth, first + high - depth))
            if depth <= start:
                break
            segment = int(self.parent[segment])
        return found[::-1]

    def tokens(self, segment: int, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the path to `segment`: int32; empty if the ids are not here."""
        pieces = [self.ids[low:high] for _, low, high in self.spans(segment, start, stop)] if self.has_tokens else []
        return np.concatenate(pieces) if pieces else np.empty(0, np.int32)

    def sequence(self, call: Call) -> np.ndarray:
        """Prompt plus output of a call: int32 [length]."""
        return self.tokens(call.segment, 0, call.length)


@dataclass(frozen=True, slots=True)
class Turn:
    """One call as it is read: what was new in its prompt, and its output. `is_fresh`: it continues no earlier call."""

    call: Call
    is_fresh: bool
    added: tuple[int, ...]
    output: tuple[int, ...]


def tree_path(execution: str) -> str:
    """Where trajectory keeps the tree of an execution in the blob store."""
    return f"trees/{execution}.msgpack"


def read_tree(blobs: BlobStore, execution: str) -> TreeView:
    """The tree of an execution. Raises FileNotFoundError, or BrokenBody if it is no tree."""
    return tree_from_bytes(blobs.read(tree_path(execution)))


def tree_from_bytes(data: bytes) -> TreeView:
    """A tree from its file. Raises BrokenBody."""
    return _checked(unpack(data, TreeView))


def tree_from_json(data: bytes) -> TreeView:
    """A tree as the trajectory service answers it; what it left out is empty. Raises BrokenBody."""
    try:
        plain = json.loads(data)
        for names, dtype in ((_INTS, np.int32), (_FLOATS, np.float32)):
            plain |= {name: to_plain(np.array(plain.get(name) or [], dtype)) for name in names}
    except (ValueError, TypeError, AttributeError) as error:
        raise BrokenBody(f"not the JSON of a tree: {error!r}") from error
    return _checked(from_plain(plain, TreeView))


def _checked(view: TreeView) -> TreeView:
    """The tree, if its parts fit together. Raises BrokenBody."""
    num = len(view.parent)
    if len(view.bounds) != num + 1 or len(view.depth) != num or len(view.owner) != num:
        raise BrokenBody(f"tree: {len(view.bounds)} bounds, {num} parents, {len(view.depth)} depths and {len(view.owner)} "
                         "owners do not belong together")
    if len(view.ids) not in (0, view.num_tokens):
        raise BrokenBody(f"tree: {len(view.ids)} ids, its segments end at {view.num_tokens}")
    if (view.parent >= np.arange(num)).any() or any(not -1 <= c.segment < num for c in view.calls):
        raise BrokenBody(f"tree: a parent behind its child, or a call that ends outside of {num} segments")
    return view


def turns(tree: TreeView) -> Iterator[Turn]:
    """The calls of an execution in order; each shows the part of its prompt that its base call did not have."""
    by_name = {call.call: call for call in tree.calls}
    for call in sorted(tree.calls, key=lambda c: c.index):
        kept = shared(tree, call, by_name.get(call.base_call or ""))
        added, output = (tree.tokens(call.segment, *edges) for edges in ((kept, call.prompt_len),
                                                                        (call.prompt_len, call.length)))
        yield Turn(call, kept == 0, tuple(added.tolist()), tuple(output.tolist()))


def shared(tree: TreeView, call: Call, base: Call | None) -> int:
    """Tokens at the beginning of a call's prompt that its base call has too; equal ids lie at one place of the tree."""
    if base is None:
        return 0
    ours, theirs = (dict.fromkeys(s for s, _, _ in tree.spans(c.segment, 0, c.length)) for c in (call, base))
    common = [s for s in ours if s in theirs]
    if not common:
        return 0
    last = common[-1]
    return min(int(tree.depth[last] + tree.bounds[last + 1] - tree.bounds[last]), call.prompt_len, base.length)


def spelled(ids: Sequence[int], decode: Decode | None, stop_ids: frozenset[int] = frozenset()) -> str:
    """Ids as text with a line break after every stop token inside; as numbers where there is no tokenizer."""
    if decode is None:
        return " ".join(map(str, ids))
    lines: list[list[int]] = [[]]
    for index in ids:
        lines[-1].append(index)
        if index in stop_ids:
            lines.append([])
    return "\n".join(decode(line) for line in lines if line)
