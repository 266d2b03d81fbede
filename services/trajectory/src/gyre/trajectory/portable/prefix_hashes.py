"""Sessions of coding agents as hashes of 64-token prefix blocks (`hash_ids`), sub-agents nested in them.

One id stands for one block of the prompt. Of outputs only their number of tokens is known: every call has an empty
output here, and the tokens are counted beside the tree (`output_tokens`).
"""

from collections.abc import Iterator

import msgspec
import numpy as np
from gyre.trajectory.portable.deltas import ForeignCall
from gyre.trajectory.portable.fields import ABSENT, TraceError, decode, ids
from gyre.trajectory.portable.session import Options, Session, Trace

NAME = "prefix-hashes"


class _Request(msgspec.Struct):
    type: str
    model: str = "unknown"
    input: int = msgspec.field(name="in", default=0)
    output: int = msgspec.field(name="out", default=0)
    hash_ids: msgspec.Raw = ABSENT
    agent_id: str | None = None
    requests: list["_Request"] | None = None


class _Document(msgspec.Struct):
    id: str
    block_size: int
    requests: list[_Request]


def sessions(trace: Trace, options: Options) -> Iterator[Session]:
    """One session per document; a file has one, or one a line. Raises TraceError."""
    lines = trace.data.splitlines()
    documents = [(trace.name, trace.data)] if _is_one(trace.data) else [
        (f"{trace.name}: line {n}", line) for n, line in enumerate(lines, 1) if line.strip()]
    for where, data in documents:
        document = decode(data, _Document, where)
        session = Session(document.id, NAME, f"block of {document.block_size} tokens", iter(()))
        session.calls = _calls(document, f"{trace.name}: {document.id}", options, session)
        yield session


def _is_one(data: bytes) -> bool:
    """Whether the file is one document, however many lines it has."""
    try:
        decode(data, msgspec.Raw, "")
    except TraceError:
        return False
    return True


def _calls(document: _Document, name: str, options: Options, session: Session) -> Iterator[ForeignCall]:
    session.facts = {"block_size": document.block_size, "sub_agents": 0, "input_tokens": 0, "output_tokens": 0}
    main = {"x-gyre-lineage": "main"}
    stack = [(f"request {n}", main, request) for n, request in reversed(list(enumerate(document.requests)))]
    while stack:
        at, tags, request = stack.pop()
        if request.requests is not None:
            if options.main_only:
                continue
            if not request.agent_id:
                raise TraceError(f"{name}: {at}: agent_id is not there; a sub-agent needs one")
            session.facts["sub_agents"] += 1
            inner = {"x-gyre-role-class": "sub-agent", "x-gyre-lineage": request.agent_id}
            stack += [(f"{at}.{n}", inner, r) for n, r in reversed(list(enumerate(request.requests)))]
            continue
        session.facts["input_tokens"] += request.input
        session.facts["output_tokens"] += request.output
        prompt = ids(request.hash_ids, f"{name}: {at}: hash_ids")
        yield ForeignCall(f"{name}: {at}", prompt, np.empty(0, np.int32), None, request.model, tags)
