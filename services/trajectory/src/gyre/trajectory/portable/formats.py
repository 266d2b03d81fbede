"""Which format a file has, by its content; and from any of them to trees with their counts."""

import gzip
import lzma
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import msgspec
from gyre.contracts.events import Outcome
from gyre.trajectory.inspection import Header, TreeFile, tree_file
from gyre.trajectory.portable import atif, claude_code, document, prefix_hashes, swe_agent
from gyre.trajectory.portable.deltas import execution_name, record_calls
from gyre.trajectory.portable.fields import ABSENT, TraceError, UnknownFormat
from gyre.trajectory.portable.session import Options, Session, Trace
from gyre.trajectory.reading import read_execution
from gyre.trajectory.roles import classifier
from gyre.trajectory.targets import Eligibility

FORMATS = {
    atif.NAME: "ATIF v1.x: a JSON object with schema_version and steps",
    swe_agent.NAME: "SWE-agent .traj: a JSON object with trajectory, of which each step has query or messages",
    claude_code.NAME: "Claude Code: JSON lines with type, uuid and parentUuid",
    prefix_hashes.NAME: "prefix hashes: a JSON object, or one a line, with block_size and requests of hash_ids",
    document.NAME: "our own gyre-tree/1, which `gyre tree export` writes",
}


_PROBED_LINES = 64
_MARKS = {  # what a file that is no JSON, such as a truncated one, still shows of its format
    document.NAME: rb'"format":\s*"gyre-tree/', atif.NAME: rb'"schema_version":\s*"ATIF-',
    prefix_hashes.NAME: rb'"block_size":\s*\d', claude_code.NAME: rb'"parentUuid":\s*', swe_agent.NAME: rb'"trajectory":\s*\[',
}


class _Probe(msgspec.Struct):
    """The fields by which formats are told apart; of no particular type, as the file may be broken."""

    format: msgspec.Raw = ABSENT
    schema_version: msgspec.Raw = ABSENT
    trajectory: msgspec.Raw = ABSENT
    requests: msgspec.Raw = ABSENT
    block_size: msgspec.Raw = ABSENT
    parentUuid: msgspec.Raw = ABSENT
    uuid: msgspec.Raw = ABSENT

    def has(self, *names: str) -> bool:
        return all(getattr(self, name) is not ABSENT for name in names)


@dataclass(frozen=True, slots=True)
class Imported:
    """One execution as a tree. `facts`: further numbers of its session."""

    name: str
    format: str
    unit: str
    file: TreeFile
    num_files: int
    facts: dict[str, int]


@dataclass(frozen=True, slots=True)
class Counts:
    """What there is in a tree; `line` is for people and scripts."""

    calls: int
    flat: int
    unique: int
    drawn: int
    targets: int
    roots: int
    unknown: int

    @classmethod
    def of(cls, file: TreeFile) -> "Counts":
        drawn = sum(note.length - note.prompt_len for note in file.calls if note.excluded != "model")
        return cls(len(file.calls), sum(note.length for note in file.calls), len(file.ids), drawn, len(file.target),
                   int((file.parent < 0).sum()), sum(note.known_by == "unknown" for note in file.calls))

    @property
    def line(self) -> str:
        return (f"tree calls={self.calls} flat={self.flat} unique={self.unique} drawn={self.drawn} "
                f"targets={self.targets} roots={self.roots} unknown={self.unknown}")


def unpacked(trace: Trace) -> Trace:
    """The file without its gzip or xz, if it has one. Raises TraceError."""
    for magic, decompress in ((b"\x1f\x8b", gzip.decompress), (b"\xfd7zXZ\0", lzma.decompress)):
        if trace.data.startswith(magic):
            try:
                return replace(trace, data=decompress(trace.data))
            except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
                raise TraceError(f"{trace.name}: cannot be unpacked: {error}") from error
    return trace


def detect(trace: Trace) -> str:
    """Name of the format. Raises UnknownFormat."""
    lines = (line for line in trace.data.splitlines() if line.strip())
    for text in (trace.data, *islice(lines, _PROBED_LINES)):
        found = _format_of(text)
        if found:
            return found
    for name, mark in _MARKS.items():
        if re.search(mark, trace.data):
            return name
    known = "".join(f"\n  {what}" for what in FORMATS.values())
    raise UnknownFormat(f"{trace.name}: nothing here reads it; what can be imported:{known}")


def _format_of(text: bytes) -> str:
    try:
        probe = msgspec.json.decode(text, type=_Probe)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return ""
    if bytes(probe.format).startswith(b'"gyre-tree/'):
        return document.NAME
    if probe.has("schema_version") and b"ATIF" in bytes(probe.schema_version):
        return atif.NAME
    if probe.has("requests", "block_size"):
        return prefix_hashes.NAME
    if probe.has("uuid", "parentUuid"):
        return claude_code.NAME
    return swe_agent.NAME if probe.has("trajectory") else ""


def imported(traces: Sequence[Trace], options: Options, policy: str = "") -> Iterator[Imported]:
    """The executions in some files; Claude Code files are one execution together.

    policy: model whose outputs are targets; by default the one that made the first call.

    Raises:
        UnknownFormat, TraceError
    """
    read = [unpacked(trace) for trace in traces]
    formats = [detect(trace) for trace in read]
    together = [trace for trace, name in zip(read, formats, strict=True) if name == claude_code.NAME]
    if together:
        yield from (_tree(s, policy) for s in claude_code.sessions(together, options))
    readers = {atif.NAME: atif.sessions, swe_agent.NAME: swe_agent.sessions, prefix_hashes.NAME: prefix_hashes.sessions}
    for trace, name in zip(read, formats, strict=True):
        if name == document.NAME:
            file = document.from_document(trace.data, trace.name)
            yield Imported(file.header.outcome.execution, name, "token", file, 1, {})
        elif name in readers:
            yield from (_tree(session, policy) for session in readers[name](trace, options))


def _tree(session: Session, policy: str) -> Imported:
    execution = execution_name(session.name)
    calls = record_calls(session.calls, execution)
    policy = policy or (calls[0].record.model if calls else "policy")
    reading = read_execution(calls, Eligibility(policy), classifier("any"))
    outcome = Outcome(execution, "unscorable", "finished", 0.0, 0.0, len(calls), 0, 0, reason="imported: nobody scored it")
    header = Header(session.name, "imported", "eval", policy, reading.fill(outcome, None, "unscorable"),
                    f"{session.format} {session.name}")
    file = tree_file(header, reading.tree, reading.targets, None, reading.roles)
    return Imported(session.name, session.format, session.unit, file, session.num_files, session.facts)
