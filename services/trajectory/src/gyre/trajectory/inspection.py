"""The tree of one execution as a file: written at the group's completion, shown by `gyre tree`, exported and imported.

It holds the ids once, in depth-first order, and everything else as ranges over them. Nothing that was recorded is
left out, so that the records can be made again from it (`portable.py`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from gyre.contracts.codec import from_plain, pack, to_plain, unpack
from gyre.contracts.errors import BrokenBody
from gyre.contracts.events import CallEvidence, FinishReason, Outcome, Purpose, RoleClass, Sampling, VersionSpan
from gyre.trajectory.admission import Admission
from gyre.trajectory.roles import CallRole, KnownBy
from gyre.trajectory.targets import Exclusion, Targets
from gyre.trajectory.tree import Tree

MAX_JSON_TOKENS = 65_536  # longer lists could pass gRPC's 4 MiB; the file in the blob store has everything
_ARRAYS = ("ids", "bounds", "parent", "depth", "owner", "target", "call", "version", "logprobs", "behaviour_logprobs")
_PER_TOKEN = ("ids", "target", "call", "version", "logprobs", "behaviour_logprobs")
_FLOATS = ("logprobs", "behaviour_logprobs")


@dataclass(frozen=True, slots=True)
class CallNote:
    """One call: it ends in segment `segment` at depth `length`; its output is [prompt_len, length) of that path.

    `agent` and `role_class` are what was decided, `said_role` and `lineage` what the record has; `excluded` says why its
    output is no target.
    """

    call: str
    index: int
    base_call: str | None
    keep_len: int
    segment: int
    prompt_len: int
    length: int
    role_class: RoleClass
    agent: str
    known_by: KnownBy
    excluded: Exclusion
    model: str
    finish_reason: FinishReason
    spans: tuple[VersionSpan, ...]
    digest: str
    said_role: RoleClass
    lineage: str
    sampling: Sampling
    cell: int
    evidence: CallEvidence


@dataclass(frozen=True, slots=True)
class PathNote:
    """One admitted path, in the order of its draw."""

    leaf: int
    role_class: RoleClass
    num_owned: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a tree belongs to. `policy`: model whose outputs are targets; `source`: where an imported one comes from."""

    query: str
    group: str
    purpose: Purpose
    policy: str
    outcome: Outcome
    source: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class TreeFile:
    """The tree of `gyre.trajectory.tree.Tree` with its targets and owners.

    ids int32 [U]; bounds int32 [S + 1]; parent, depth int32 [S]; owner int32 [S]: admitted path that owns the segment's
    targets, -1: none; target int32 [Y] token index; call int32 [Y] place in `calls` of the first call that sampled it;
    version int32 [Y] weights version; logprobs, behaviour_logprobs float32 [D]: of the outputs of all calls, one after
    another in the order of `calls`
    """

    header: Header
    ids: np.ndarray
    bounds: np.ndarray
    parent: np.ndarray
    depth: np.ndarray
    owner: np.ndarray
    calls: tuple[CallNote, ...]
    paths: tuple[PathNote, ...]
    target: np.ndarray
    call: np.ndarray
    version: np.ndarray
    logprobs: np.ndarray
    behaviour_logprobs: np.ndarray

    def to_bytes(self) -> bytes:
        return pack(self)

    def to_json(self) -> bytes:
        """The same as JSON; what there is one of per token is left out (null) in a tree of too many tokens."""
        plain = to_plain(self)
        for name in _ARRAYS:
            plain[name] = getattr(self, name).tolist()
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
            plain[name] = to_plain(np.array(plain[name] or [], np.float32 if name in _FLOATS else np.int32))
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenBody(f"not the JSON of a tree: {error!r}") from error
    return from_plain(plain, TreeFile)


def tree_file(header: Header, tree: Tree, targets: Targets, admission: Admission | None,
              roles: Sequence[CallRole]) -> TreeFile:
    """The file of one execution. `roles`: role of every call."""
    owner = admission.owner if admission else (-1,) * tree.num_segments
    paths = tuple(PathNote(p.leaf, p.role_class, p.num_owned) for p in admission.paths) if admission else ()
    bounds, parent, depth, owners = (np.array(v, np.int32) for v in (tree.bounds, tree.parent, tree.depth, owner))
    records = [c.record for c in tree.calls]
    logprobs, behaviour = (np.concatenate(values) if values else np.empty(0, np.float32) for values in (
        [r.logprobs for r in records], [r.behaviour_logprobs for r in records]))
    return TreeFile(header, tree.ids, bounds, parent, depth, owners, _call_notes(tree, targets, roles), paths,
                    targets.index, targets.call, targets.version, logprobs, behaviour)


def _call_notes(tree: Tree, targets: Targets, roles: Sequence[CallRole]) -> tuple[CallNote, ...]:
    return tuple(
        CallNote(r.call, r.index, r.base_call, r.keep_len, segment, r.prompt_len, call.length, role.role_class, role.agent,
                 role.known_by, excluded, r.model, r.finish_reason, r.spans, r.digest, r.role_class, r.lineage, r.sampling,
                 r.cell, r.evidence)
        for call, segment, role, excluded in zip(tree.calls, tree.end, roles, targets.excluded, strict=True)
        for r in (call.record,))
