"""The tree of one execution as a file, for people and tools: written at the group's completion, read by `gyre tree`.

It holds the ids once, in depth-first order, and everything else as ranges over them: enough to decode, to see what each
call sampled, and to see what was trained on which path and why the rest was not.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from gyre.contracts.codec import from_plain, pack, to_plain, unpack
from gyre.contracts.errors import BrokenBody
from gyre.contracts.events import GroupDispatched, Outcome, Purpose, RoleClass, VersionSpan
from gyre.trajectory.admission import Admission
from gyre.trajectory.targets import Targets
from gyre.trajectory.tree import Tree

MAX_JSON_TOKENS = 65_536  # longer lists could pass gRPC's 4 MiB; the file in the blob store has everything
_ARRAYS = ("ids", "bounds", "parent", "depth", "owner", "target", "call", "logprob", "version")
_PER_TOKEN = ("ids", "target", "call", "logprob", "version")


@dataclass(frozen=True, slots=True)
class CallNote:
    """One call: it ends in segment `segment` at depth `length`; its output is [prompt_len, length) of that path."""

    call: str
    index: int
    base_call: str | None
    segment: int
    prompt_len: int
    length: int
    role_class: RoleClass
    lineage: str
    model: str
    finish_reason: str
    spans: tuple[VersionSpan, ...]


@dataclass(frozen=True, slots=True)
class PathNote:
    """One admitted path, in the order of its draw."""

    leaf: int
    role_class: RoleClass
    num_owned: int


@dataclass(frozen=True, slots=True, eq=False)
class TreeFile:
    """The tree of `gyre.trajectory.tree.Tree` with its targets and owners.

    ids int32 [U]; bounds int32 [S + 1]; parent, depth int32 [S]; owner int32 [S]: admitted path that owns the segment's
    targets, -1: none; target int32 [Y] token index; call int32 [Y] first call that sampled it; logprob float32 [Y]
    behaviour log-prob; version int32 [Y] weights version
    """

    query: str
    group: str
    purpose: Purpose
    outcome: Outcome
    ids: np.ndarray
    bounds: np.ndarray
    parent: np.ndarray
    depth: np.ndarray
    owner: np.ndarray
    calls: tuple[CallNote, ...]
    paths: tuple[PathNote, ...]
    target: np.ndarray
    call: np.ndarray
    logprob: np.ndarray
    version: np.ndarray

    def to_bytes(self) -> bytes:
        return pack(self)

    def to_json(self) -> bytes:
        """The same as JSON; what there is one of per token is left out (null) in a tree of too many tokens."""
        plain = to_plain(self)
        for name in _ARRAYS:
            plain[name] = getattr(self, name).tolist()
        plain["logprob"] = [round(value, 5) for value in plain["logprob"]]
        if len(self.ids) > MAX_JSON_TOKENS:
            plain |= dict.fromkeys(_PER_TOKEN)
        return json.dumps(plain).encode()


def tree_path(execution: str) -> str:
    """Where the tree of an execution lies in the blob store."""
    return f"trees/{execution}.msgpack"


def tree_from_bytes(data: bytes) -> TreeFile:
    """The inverse of `TreeFile.to_bytes`. Raises BrokenBody."""
    return unpack(data, TreeFile)


def tree_from_json(data: bytes) -> TreeFile:
    """The inverse of `TreeFile.to_json`; what was left out is empty. Raises BrokenBody."""
    try:
        plain = json.loads(data)
        for name in _ARRAYS:
            dtype = np.float32 if name == "logprob" else np.int32
            plain[name] = to_plain(np.array(plain[name] or [], dtype))
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenBody(f"not the JSON of a tree: {error!r}") from error
    return from_plain(plain, TreeFile)


def tree_file(outcome: Outcome, dispatched: GroupDispatched, tree: Tree, targets: Targets, admission: Admission | None,
              roles: Sequence[RoleClass]) -> TreeFile:
    """The file of one execution. `roles`: role class of every call."""
    owner = admission.owner if admission else (-1,) * tree.num_segments
    paths = tuple(PathNote(p.leaf, p.role_class, p.num_owned) for p in admission.paths) if admission else ()
    bounds, parent, depth, owners = (np.array(v, np.int32) for v in (tree.bounds, tree.parent, tree.depth, owner))
    return TreeFile(dispatched.query, dispatched.group, dispatched.purpose, outcome, tree.ids, bounds, parent, depth,
                    owners, _call_notes(tree, roles), paths, targets.index, targets.call, targets.logprob,
                    targets.version)


def _call_notes(tree: Tree, roles: Sequence[RoleClass]) -> tuple[CallNote, ...]:
    return tuple(
        CallNote(c.record.call, c.record.index, c.record.base_call, segment, c.record.prompt_len, c.length, role,
                 c.record.lineage, c.record.model, c.record.finish_reason, c.record.spans)
        for c, segment, role in zip(tree.calls, tree.end, roles, strict=True))


Decode = Callable[[Sequence[int]], str]


def render(file: TreeFile, decode: Decode | None = None, width: int = 60) -> str:
    """The tree as text, one line per segment: where it lies, what is trained on it, which calls end in it.

    `decode` turns ids into text; with it each line shows the beginning of its segment, at most `width` characters.
    """
    lines = [_head(file)]
    children: dict[int, list[int]] = {}
    for segment, parent in enumerate(file.parent.tolist()):
        children.setdefault(parent, []).append(segment)
    stack = [(root, "", root == children[-1][-1]) for root in reversed(children.get(-1, []))]
    while stack:
        segment, indent, is_last = stack.pop()
        lines.append(f"{indent}{'└─' if is_last else '├─'} {_segment_line(file, segment, decode, width)}")
        below = children.get(segment, [])
        deeper = indent + ("   " if is_last else "│  ")
        stack.extend((child, deeper, child == below[-1]) for child in reversed(below))
    return "\n".join(lines)


def _head(file: TreeFile) -> str:
    o = file.outcome
    return (f"{o.execution} · {file.query} · {o.kind} ({o.ending}) · reward {o.reward:g} · advantage {o.advantage:+.4f}"
            f"\n{o.num_calls} calls · {o.num_unique_tokens:,} unique of {o.num_flat_tokens:,} flat tokens · "
            f"{o.num_targets:,} targets, {o.num_trained_targets:,} trained on {len(file.paths)} paths"
            + "".join(f" · {n:,} dropped: {reason}" for reason, n in sorted(o.drops.items()))
            + (f"\n{o.reason}" if o.reason else ""))


def _segment_line(file: TreeFile, segment: int, decode: Decode | None, width: int) -> str:
    low, high = int(file.bounds[segment]), int(file.bounds[segment + 1])
    first, last = np.searchsorted(file.target, (low, high))
    depth = int(file.depth[segment])
    parts = [f"{depth:,}..{depth + high - low:,}"]
    if last > first:
        owner = int(file.owner[segment])
        plural = "s" if last - first > 1 else ""
        parts.append(f"{last - first:,} target{plural} {f'on path {owner}' if owner >= 0 else 'not trained'}")
    ending = [note for note in file.calls if note.segment == segment]
    if ending:
        parts.append(", ".join(f"#{note.index} {note.role_class}" for note in ending))
    if decode is not None:
        text = " ".join(decode(file.ids[low:min(high, low + width)].tolist()).split())
        parts.append(text[:width - 1] + "…" if len(text) > width else text)
    return " · ".join(parts)
