"""`gyre-tree/1`: an execution as one JSON document that loses nothing, for other machines and later releases.

    {"format": "gyre-tree/1", "header": {...}, "records": [...], "owner": [...], "paths": [...]}

`records` are the calls in the order of the gateway, as deltas: the prompt is the first `keep_len` tokens of what
`base_call` had (prompt and output), then `prompt_delta`. `digest` covers the ids of the whole sequence, `check` all else
of the record; `role` is what was decided of the call. `owner` and `paths` are the admission. Unknown fields are ignored.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from gyre.contracts.codec import from_plain, to_plain
from gyre.contracts.digest import bytes_digest
from gyre.contracts.errors import BrokenBody
from gyre.contracts.events import CallEvidence, CallRecorded, FinishReason, RoleClass, Sampling, VersionSpan
from gyre.trajectory.admission import Admission, AdmittedPath
from gyre.trajectory.inspection import CallNote, Header, PathNote, TreeFile, tree_file
from gyre.trajectory.portable.fields import TraceError, decode, ids, logprobs
from gyre.trajectory.portable.records import records_of
from gyre.trajectory.record import Call, CallLog
from gyre.trajectory.roles import CallRole, KnownBy
from gyre.trajectory.targets import UNSEEN, Eligibility, Exclusion, Targets, find_targets
from gyre.trajectory.tree import Tree, build_tree

FORMAT = "gyre-tree/1"
NAME = "gyre-tree"


class _Role(msgspec.Struct):
    role_class: RoleClass
    agent: str
    known_by: KnownBy
    excluded: Exclusion


class _Record(msgspec.Struct):
    call: str
    index: int
    base_call: str | None
    keep_len: int
    prompt_len: int
    prompt_delta: msgspec.Raw
    output_ids: msgspec.Raw
    logprobs: msgspec.Raw
    behaviour_logprobs: msgspec.Raw
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    digest: str
    model: str
    role_class: RoleClass
    lineage: str
    sampling: Sampling
    cell: int
    evidence: CallEvidence
    role: _Role
    check: str = ""


class _Document(msgspec.Struct):
    format: str
    header: Any
    records: list[msgspec.Raw]
    owner: list[int]
    paths: list[PathNote]


def to_document(file: TreeFile) -> bytes:
    """The document of a tree, the same bytes for the same tree. Raises TraceError for what JSON has no number for."""
    try:
        head = json.dumps({"format": FORMAT, "header": to_plain(file.header)}, ensure_ascii=False, allow_nan=False, indent=1)
    except ValueError as error:
        raise TraceError(f"header: {error}") from error
    rows = b",\n".join(_row(record, _role(note)) for record, note in zip(records_of(file), file.calls, strict=True))
    tail = msgspec.json.encode({"owner": file.owner.tolist(), "paths": file.paths})
    return head[:-2].encode() + b',\n"records": [\n' + rows + b"\n],\n" + tail[1:] + b"\n"


def from_document(data: bytes, name: str) -> TreeFile:
    """The inverse of `to_document`. Every digest is computed again. Raises TraceError, which names the call."""
    try:
        document = decode(data, _Document, name)
    except TraceError as error:
        raise TraceError(f"{error}{_last_call(data)}") from error
    if document.format != FORMAT:
        raise TraceError(f"{name}: format {document.format!r}; this release reads {FORMAT}")
    try:
        header = from_plain(document.header, Header)
    except BrokenBody as error:
        raise TraceError(f"{name}: header: {error}") from error
    calls, roles = _calls(document, header, name)
    tree = build_tree(calls)
    targets = find_targets(tree, _eligibility(header.policy, calls, roles))
    for call, role, excluded in zip(calls, roles, targets.excluded, strict=True):
        if role.excluded != excluded:
            raise TraceError(f"{name}: call {call.record.call}: excluded: {role.excluded!r}, by its record {excluded!r}")
    _check_counts(document, header, tree, targets, name)
    decided = [CallRole(role.role_class, role.agent, role.known_by) for role in roles]
    return tree_file(header, tree, targets, _admission(document, tree, targets, name), decided)


def _calls(document: _Document, header: Header, name: str) -> tuple[tuple[Call, ...], list[_Role]]:
    """The calls, resolved and with every digest checked, and what was decided of them."""
    log, roles = CallLog(), []
    for number, raw in enumerate(document.records):
        row = decode(bytes(raw), _Record, f"{name}: records[{number}]{_last_call(bytes(raw))}")
        record = _record(row, header, f"{name}: call {row.call}")
        if not log.add(record) and log.refusal is None:
            raise TraceError(f"{name}: call {row.call}: recorded twice")
        if log.refusal is not None:
            raise TraceError(f"{name}: {log.refusal}")
        roles.append(row.role)
    log.close(len(document.records))
    if log.refusal is not None:
        raise TraceError(f"{name}: {log.refusal}")
    calls = log.ordered()
    if [c.record.call for c in calls] != list(log.calls):
        raise TraceError(f"{name}: records: not in the order of index")
    return calls, roles


def _role(note: CallNote) -> _Role:
    return _Role(note.role_class, note.agent, note.known_by, note.excluded)


def _row(record: CallRecorded, role: _Role) -> bytes:
    for field in ("logprobs", "behaviour_logprobs"):
        if not np.isfinite(getattr(record, field)).all():
            raise TraceError(f"call {record.call}: {field}: not finite; JSON has no number for it")
    arrays = [msgspec.Raw(msgspec.json.encode(array.tolist())) for array in (
        record.prompt_delta, record.output_ids, record.logprobs, record.behaviour_logprobs)]
    return msgspec.json.encode(_Record(
        record.call, record.index, record.base_call, record.keep_len, record.prompt_len, *arrays, record.spans,
        record.finish_reason, record.digest, record.model, record.role_class, record.lineage, record.sampling, record.cell,
        record.evidence, role, _check(record, role)))


def _record(row: _Record, header: Header, where: str) -> CallRecorded:
    output = ids(row.output_ids, f"{where}: output_ids")
    record = CallRecorded(
        header.outcome.execution, header.group, row.call, row.index, row.base_call, row.keep_len, row.prompt_len,
        ids(row.prompt_delta, f"{where}: prompt_delta"), output,
        logprobs(row.logprobs, len(output), f"{where}: logprobs"),
        logprobs(row.behaviour_logprobs, len(output), f"{where}: behaviour_logprobs"), row.spans, row.finish_reason,
        row.digest, row.model, row.role_class, row.lineage, row.sampling, row.cell, evidence=row.evidence)
    found = _check(record, row.role)
    if found != row.check:
        raise TraceError(f"{where}: check: its contents give {found}, the file has {row.check!r}; something was changed")
    return record


def _check(record: CallRecorded, role: _Role) -> str:
    """Digest of all that `digest` leaves out. A fixed list, so that a release with more fields agrees on it."""
    sampling, evidence = record.sampling, record.evidence
    listed = [record.call, record.index, record.base_call, record.keep_len, record.prompt_len, len(record.output_ids),
              [[s.start, s.end, s.version] for s in record.spans], record.finish_reason, record.digest, record.model,
              record.role_class, record.lineage, [sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed],
              record.cell, sorted(evidence.tags.items()), evidence.replays, evidence.quotes, evidence.task_of,
              evidence.continues, role.role_class, role.agent, role.known_by, role.excluded]
    arrays = [array.astype("<f4").tobytes() for array in (record.logprobs, record.behaviour_logprobs)]
    return bytes_digest(b"".join((json.dumps(listed).encode(), *arrays)))


def _eligibility(policy: str, calls: Sequence[Call], roles: Sequence[_Role]) -> Eligibility:
    """The rule by which the exclusions were made."""
    pairs = list(zip(calls, roles, strict=True))
    undelivered = frozenset(c.record.call for c, role in pairs
                            if role.excluded == "unseen" and c.record.finish_reason not in UNSEEN)
    trains_unseen = any(not role.excluded and c.record.finish_reason in UNSEEN for c, role in pairs)
    return Eligibility(policy, undelivered, trains_unseen)


def _admission(document: _Document, tree: Tree, targets: Targets, name: str) -> Admission | None:
    owner, paths = document.owner, document.paths
    if len(owner) != tree.num_segments or not all(-1 <= number < len(paths) for number in owner):
        raise TraceError(f"{name}: owner: {len(owner)} numbers of {len(paths)} paths; expected one for each of "
                         f"{tree.num_segments} segments")
    leaves = set(tree.leaves())
    for number, path in enumerate(paths):
        owned = {segment for segment, its_owner in enumerate(owner) if its_owner == number}
        num = sum(targets.count(segment) for segment in owned)
        if path.leaf not in leaves or not owned <= set(tree.path(path.leaf)) or num != path.num_owned:
            raise TraceError(f"{name}: paths[{number}]: leaf {path.leaf} with {path.num_owned} targets does not fit the tree")
    return Admission(tuple(AdmittedPath(p.leaf, p.role_class, p.num_owned, 0) for p in paths), tuple(owner), {})


def _check_counts(document: _Document, header: Header, tree: Tree, targets: Targets, name: str) -> None:
    """The header's counts, if it has any, against the tree: a call that was cut out would change them."""
    outcome = header.outcome
    found = {"num_unique_tokens": tree.num_tokens, "num_flat_tokens": tree.num_flat_tokens, "num_targets": len(targets),
             "num_sampled_tokens": targets.num_drawn, "num_trained_targets": sum(p.num_owned for p in document.paths)}
    if not any(getattr(outcome, field) for field in found):
        return
    for field, num in found.items():
        if getattr(outcome, field) != num:
            raise TraceError(f"{name}: header.outcome.{field}: {getattr(outcome, field)}, the records give {num}")


def _last_call(data: bytes) -> str:
    """Words that name the last call that begins in `data`, or ""."""
    found = re.findall(rb'"call":\s*"([A-Za-z0-9_-]+)"', data)
    return f" (in or after call {found[-1].decode()})" if found else ""
