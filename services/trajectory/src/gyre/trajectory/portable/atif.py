"""Harbor's ATIF (v1.x): steps of one agent, with ids and log-probs, and sub-agents in files of their own.

A step with `metrics.prompt_token_ids`, `completion_token_ids` and `logprobs` is a call. Files that a
`subagent_trajectory_ref` or `continued_trajectory_ref` names are read where they are named. A context summarisation is
of the main agent, as Terminus-2 has it; any other file named so is a sub-agent's.

As bytes, each agent step that is not a copy is a call that was shown all steps before it; after a summarisation, the
first step and those since. What really was shown a text-only file does not say.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from gyre.trajectory.portable.deltas import ForeignCall
from gyre.trajectory.portable.fields import ABSENT, TraceError, decode, dumped, ids, logprobs
from gyre.trajectory.portable.session import Options, Session, Trace, is_inside
from gyre.trajectory.portable.spelling import Message, spell_prompt, text_ids

NAME = "harbor"
_STAGE = re.compile(r"summarization-(?:\d+-)?(\w+)$")
_ROLES = {"system": "system", "user": "user", "agent": "assistant"}


class _Metrics(msgspec.Struct):
    prompt_token_ids: msgspec.Raw = ABSENT
    completion_token_ids: msgspec.Raw = ABSENT
    logprobs: msgspec.Raw = ABSENT


class _Ref(msgspec.Struct):
    session_id: str | None = None
    trajectory_path: str | None = None


class _Result(msgspec.Struct):
    content: Any = None
    subagent_trajectory_ref: list[_Ref] | None = None


class _Observation(msgspec.Struct):
    results: list[_Result] = []


class _Step(msgspec.Struct):
    step_id: int
    source: str
    message: Any = ""
    reasoning_content: str | None = None
    tool_calls: Any = None
    observation: _Observation | None = None
    metrics: _Metrics | None = None
    model_name: str | None = None
    is_copied_context: bool | None = None

    @property
    def refs(self) -> list[_Ref]:
        results = self.observation.results if self.observation else []
        return [ref for result in results for ref in result.subagent_trajectory_ref or []]


class _Agent(msgspec.Struct):
    name: str
    model_name: str | None = None


class _Document(msgspec.Struct):
    schema_version: str
    session_id: str
    agent: _Agent
    steps: list[_Step]
    continued_trajectory_ref: str | None = None


@dataclass(slots=True)
class _File:
    """One file being read: the steps left, the next one last."""

    name: str
    document: _Document
    tags: dict[str, str]
    left: list[_Step] = field(default_factory=list)
    shown: list[Message] = field(default_factory=list)


def sessions(trace: Trace, options: Options) -> Iterator[Session]:
    """The one session of an ATIF file. Raises TraceError."""
    document = _document(trace.data, trace.name)
    session = Session(trace.name, NAME, "byte" if options.as_bytes else "token", iter(()))
    session.calls = _Walk(trace, options, session).calls(document)
    yield session


def _document(data: bytes, name: str) -> _Document:
    document = decode(data, _Document, name)
    if not document.schema_version.startswith("ATIF-v1."):
        raise TraceError(f"{name}: schema_version {document.schema_version!r}; expected ATIF-v1.x")
    return document


@dataclass(slots=True)
class _Walk:
    """Reads a file and those it names, with an explicit stack."""

    trace: Trace
    options: Options
    session: Session
    seen: set[str] = field(default_factory=set)

    def calls(self, document: _Document) -> Iterator[ForeignCall]:
        stack = [self._opened(self.trace.name, document, {"x-gyre-lineage": "main"})]
        while stack:
            file = stack[-1]
            if not file.left:
                stack.pop()
                continuation = self._continuation(file)
                if continuation:
                    stack.append(continuation)
                continue
            step = file.left.pop()
            call = self._call(file, step)
            if call is not None:
                yield call
            if not self.options.main_only:
                stack.extend(reversed([self._named(ref, file, step) for ref in step.refs]))
        self.session.num_files = len(self.seen)

    def _opened(self, name: str, document: _Document, tags: dict[str, str]) -> _File:
        if name in self.seen:
            raise TraceError(f"{name}: named twice; a trajectory is part of one other at most")
        self.seen.add(name)
        return _File(name, document, tags, document.steps[::-1])

    def _call(self, file: _File, step: _Step) -> ForeignCall | None:
        place = f"{file.name}: step {step.step_id}"
        model = step.model_name or file.document.agent.model_name or "unknown"
        is_call = step.source == "agent" and not step.is_copied_context
        if self.options.as_bytes:
            prompt = spell_prompt(file.shown) if is_call else None
            output = self._show(file, step, place)
            return ForeignCall(place, prompt, text_ids(output), None, model, file.tags) if prompt is not None else None
        if not is_call:
            return None
        prompt, output, values = _sampled(step.metrics, place)
        return ForeignCall(place, prompt, output, values, model, file.tags)

    def _show(self, file: _File, step: _Step, place: str) -> str:
        """Add a step to what later ones are shown; returns its text."""
        if step.source not in _ROLES:
            raise TraceError(f"{place}: source {step.source!r}; expected one of {', '.join(_ROLES)}")
        parts = [step.reasoning_content or "", _text(step.message, place)]
        parts += [dumped(step.tool_calls, place)] if step.tool_calls else []
        text = "\n".join(filter(None, parts))
        if step.refs:
            del file.shown[1:]
        file.shown.append((_ROLES[step.source], text))
        results = step.observation.results if step.observation and not step.refs else []
        file.shown += [("tool", _text(result.content, place)) for result in results]
        return text

    def _named(self, ref: _Ref, file: _File, step: _Step) -> _File:
        where = f"{file.name}: step {step.step_id}: subagent_trajectory_ref"
        if not ref.trajectory_path:
            raise TraceError(f"{where}: {ref.session_id!r} has no trajectory_path; --main-only leaves sub-agents out")
        name, data = self._read(ref.trajectory_path, where)
        document = _document(data, name)
        stage = _STAGE.search(document.agent.name)
        tags = {"terminus-2.stage": stage[1]} if stage else {
            "x-gyre-role-class": "sub-agent", "x-gyre-lineage": document.session_id}
        return self._opened(name, document, tags)

    def _continuation(self, file: _File) -> _File | None:
        named = file.document.continued_trajectory_ref
        if named:
            name, data = self._read(named, f"{file.name}: continued_trajectory_ref")
        else:
            name = _next_name(file.name)
            found = self.trace.beside(name)
            if found is None or name in self.seen:
                return None
            data = found
        return self._opened(name, _document(data, name), file.tags)

    def _read(self, path: str, where: str) -> tuple[str, bytes]:
        """A named file: beside the trace under its own name, or under the name with which the trace's begins."""
        if not is_inside(path):
            raise TraceError(f"{where}: {path!r}; expected a path relative to the file, at or below it")
        prefix = self.trace.name.partition("trajectory.")[0] if "trajectory." in self.trace.name else ""
        for name in dict.fromkeys((path, prefix + path)):
            data = self.trace.beside(name)
            if data is not None:
                return name, data
        tried = " or ".join(dict.fromkeys((path, prefix + path)))
        raise TraceError(f"{where}: {tried} is not there; put it beside {self.trace.name}, or leave sub-agents out "
                         "with --main-only")


def _sampled(metrics: _Metrics | None, place: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    for name in ("prompt_token_ids", "completion_token_ids"):
        if metrics is None or bytes(getattr(metrics, name)) == b"null":
            raise TraceError(f"{place}: metrics.{name} is not there. A call needs the ids that were really shown and "
                             "sampled (Terminus-2 writes them with collect_rollout_details=true); a trace of texts alone "
                             "can be looked at with --bytes")
    assert metrics is not None
    prompt = ids(metrics.prompt_token_ids, f"{place}: metrics.prompt_token_ids")
    output = ids(metrics.completion_token_ids, f"{place}: metrics.completion_token_ids")
    return prompt, output, logprobs(metrics.logprobs, len(output), f"{place}: metrics.logprobs")


def _text(value: Any, place: str) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else dumped(value, place)


def _next_name(name: str) -> str:
    """Name under which a file would be continued: `X.json` by `X.cont-1.json`, that by `X.cont-2.json`."""
    stem = name.removesuffix(".json")
    number = re.search(r"\.cont-(\d+)$", stem)
    return f"{stem[:number.start()]}.cont-{int(number[1]) + 1}.json" if number else f"{stem}.cont-1.json"
