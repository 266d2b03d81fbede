"""Claude Code's JSONL: lines that know their parent. Texts alone, so byte ids; system prompt and tools are not in it.

Every assistant message is a call that was shown its ancestors. One message may take several lines, and the results of
its tools hang on any of them. A rewind gives a message two children. After a `compact_boundary` the context is the
summary and the messages preserved with it; a preserved line may have been given a new parent, and was sampled before
that. Lines with `isSidechain` are a sub-agent's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from gyre.trajectory.portable.deltas import ForeignCall
from gyre.trajectory.portable.fields import TraceError, decode, dumped
from gyre.trajectory.portable.session import Options, Session, Trace
from gyre.trajectory.portable.spelling import Message, spell_prompt, text_ids

NAME = "claude-code"


class _Preserved(msgspec.Struct):
    anchorUuid: str
    uuids: list[str]


class _Compact(msgspec.Struct):
    preservedMessages: _Preserved | None = None


class _Body(msgspec.Struct):
    content: Any
    id: str | None = None
    model: str | None = None


class _Kind(msgspec.Struct):
    type: str


class _Line(msgspec.Struct):
    type: str
    uuid: str | None = None
    parentUuid: str | None = None
    isSidechain: bool = False
    agentId: str | None = None
    sessionId: str | None = None
    message: _Body | None = None
    isCompactSummary: bool = False
    isVisibleInTranscriptOnly: bool = False
    compactMetadata: _Compact | None = None
    place: str = ""


@dataclass(slots=True)
class _Answer:
    """One assistant message: its lines in the order of the file."""

    number: int
    lines: list[_Line]
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


def sessions(traces: Sequence[Trace], options: Options) -> Iterator[Session]:
    """The one session of all files: a main agent's, and those of its sub-agents. Raises TraceError."""
    dag = _Dag()
    for trace in traces:
        for number, text in enumerate(trace.data.splitlines(), 1):
            if text.strip():
                dag.take(text, f"{trace.name}: line {number}")
    dag.finish(options.main_only)
    name = next((line.sessionId for line in dag.lines.values() if line.sessionId), traces[0].name)
    yield Session(name, NAME, "byte", dag.calls(), len(traces))


@dataclass(slots=True)
class _Dag:
    """All lines by uuid, and what joins them."""

    lines: dict[str, _Line] = field(default_factory=dict)
    preserved: dict[str, list[str]] = field(default_factory=dict)  # anchor -> uuids that stand behind it
    parent: dict[str, str | None] = field(default_factory=dict)
    sampled_after: dict[str, str] = field(default_factory=dict)  # preserved line -> the line it had as a parent before
    answers: list[_Answer] = field(default_factory=list)
    answer_of: dict[str, _Answer] = field(default_factory=dict)  # uuid of a line -> its message
    results: dict[str, list[_Line]] = field(default_factory=dict)  # uuid -> tool results that hang on it

    def take(self, text: bytes, place: str) -> None:
        kind = decode(text, _Kind, place).type
        line = decode(text, _Line if kind in ("user", "assistant") else _Plain, place)
        if line.uuid is None or line.uuid in self.lines:  # no message, or a copy that a resumed session begins with
            return
        if kind in ("user", "assistant") and line.message is None:
            raise TraceError(f"{place}: message is not there")
        line.place = place
        self.lines[line.uuid] = line
        self.parent[line.uuid] = line.parentUuid
        kept = line.compactMetadata.preservedMessages if line.compactMetadata else None
        if kept is not None:
            self.preserved[kept.anchorUuid] = kept.uuids

    def finish(self, main_only: bool) -> None:
        """Once all lines are here: the old parents of preserved lines, messages, tool results."""
        for anchor, uuids in self.preserved.items():
            for before, uuid in zip(uuids, uuids[1:], strict=False):
                if self.parent.get(uuid) == anchor:
                    self.sampled_after[uuid] = before
                    if before not in self.lines:
                        raise TraceError(f"{self.lines[uuid].place}: preservedMessages: {before!r} is not in the file")
        for uuid, line in self.lines.items():
            parent = self.parent[uuid]
            if parent is not None and parent not in self.lines:
                raise TraceError(f"{line.place}: parentUuid: {parent!r} is not in the file; what the call was shown is not "
                                 "known")
            if line.type == "assistant" and not (main_only and line.isSidechain):
                self._join(line)
            elif parent is not None and line.type == "user" and _result_ids(line):
                self.results.setdefault(parent, []).append(line)

    def calls(self) -> Iterator[ForeignCall]:
        for answer in self.answers:
            first = answer.lines[0]
            shown, seen = self._shown(first)
            prompt = spell_prompt(shown)
            replays = max((a.number for a in seen if a.number < answer.number), default=None)
            is_compacted = any(role == "summary" for role, _ in shown)
            model = (first.message.model if first.message else None) or "unknown"
            yield ForeignCall(first.place, prompt, text_ids(answer.text), None, model, _tags(first),
                              replays if is_compacted else None, self._spawner(answer, shown) if first.isSidechain else None)

    def _join(self, line: _Line) -> None:
        """Put an assistant line to the message it is part of."""
        above = self.answer_of.get(self.parent[line.uuid or ""] or "")
        identity = line.message.id if line.message else None
        same = above is not None and identity is not None and above.lines[0].message.id == identity  # type: ignore[union-attr]
        answer = above if above is not None and same else _Answer(len(self.answers), [])
        if not answer.lines:
            self.answers.append(answer)
        answer.lines.append(line)
        answer.texts.append(_text(line))
        self.answer_of[line.uuid or ""] = answer

    def _chain(self, line: _Line) -> list[_Line]:
        """The lines above, the oldest first; of a message its first line alone."""
        chain: list[_Line] = []
        seen = {line.uuid}
        at = self.sampled_after.get(line.uuid or "", self.parent[line.uuid or ""])
        while at is not None:
            answer = self.answer_of.get(at)
            above = answer.lines[0] if answer else self.lines[at]
            if above.uuid in seen:
                raise TraceError(f"{line.place}: parentUuid: its ancestors go round in a circle at {above.uuid!r}")
            seen.add(above.uuid)
            chain.append(above)
            at = self.parent[above.uuid or ""]
        return chain[::-1]

    def _shown(self, line: _Line) -> tuple[list[Message], list[_Answer]]:
        """What the call that answers with `line` was shown, and the answers that stand in it."""
        chain = self._chain(line)
        for number in range(len(chain) - 1, -1, -1):
            uuids = self.preserved.get(chain[number].uuid or "")
            if uuids is not None:
                kept = [self._first(uuid, chain[number]) for uuid in uuids]
                names = {one.uuid for one in kept}
                behind = [one for one in chain[number + 1:] if one.uuid not in names]
                chain = [*chain[:number + 1], *_distinct(kept), *behind]
                break
        shown: list[Message] = []
        answers: list[_Answer] = []
        on_chain = {one.uuid for one in chain}
        for above in chain:
            answer = self.answer_of.get(above.uuid or "")
            if answer is not None:
                answers.append(answer)
                shown.append(("assistant", answer.text))
            elif above.type == "user" and not above.isVisibleInTranscriptOnly:
                shown += self._user(above, answers[-1] if answers else None, on_chain)
        return shown, answers

    def _first(self, uuid: str, anchor: _Line) -> _Line:
        if uuid not in self.lines:
            raise TraceError(f"{anchor.place}: preservedMessages: {uuid!r} is not in the file")
        answer = self.answer_of.get(uuid)
        return answer.lines[0] if answer else self.lines[uuid]

    def _user(self, line: _Line, above: _Answer | None, on_chain: set[str | None]) -> list[Message]:
        """A user line; before the result of a tool those of the same message's tools that hang beside the chain."""
        found = _result_ids(line)
        if not found:
            return [("summary" if line.isCompactSummary else "user", _text(line))]
        beside = [r for one in (above.lines if above else ()) for r in self.results.get(one.uuid or "", ())
                  if r.uuid not in on_chain and not _result_ids(r) & found]
        return [("tool", _text(one)) for one in (*beside, line)]

    def _spawner(self, answer: _Answer, shown: list[Message]) -> int | None:
        """The latest earlier call one of whose tool calls has the sub-agent's first text as an argument."""
        task = next((text for role, text in shown if role == "user"), None)
        for earlier in reversed(self.answers[:answer.number]):
            for block in (b for line in earlier.lines for b in _blocks(line)):
                given = block.get("input")
                if block.get("type") == "tool_use" and isinstance(given, dict) and task in given.values():
                    return earlier.number
        return None


class _Plain(_Line):
    """A line that is no message; whatever its `message` is."""

    message: Any = None


def _distinct(lines: list[_Line]) -> list[_Line]:
    return list({line.uuid: line for line in lines}.values())


def _tags(line: _Line) -> dict[str, str]:
    """What the file says of whose line it is, as the requests say it."""
    if not line.isSidechain:
        return {"x-claude-code-session-id": line.sessionId or ""}
    return {"x-claude-code-agent-id": line.agentId} if line.agentId else {"cc_is_subagent": "true"}


def _blocks(line: _Line) -> list[dict[str, Any]]:
    content = line.message.content if line.message else None
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


def _result_ids(line: _Line) -> set[str]:
    return {str(b.get("tool_use_id")) for b in _blocks(line) if b.get("type") == "tool_result"}


def _text(line: _Line) -> str:
    """The text of a message: text blocks as they are, any other block as JSON."""
    content = line.message.content if line.message else None
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise TraceError(f"{line.place}: message.content: {type(content).__name__}; expected a text or a list of blocks")
    parts = []
    for block in content:
        is_text = isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str)
        parts.append(block["text"] if is_text else dumped(block, f"{line.place}: message.content"))
    return "\n".join(parts)
