"""What a request says of itself: headers, metadata and fixed phrases of known harnesses. Read, never acted upon.

Everything here ends in `CallEvidence.tags`, from which the trajectory decides whose call it is. The gateway routes and
renders nothing by it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from gyre.contracts.events import RoleClass
from gyre.contracts.ids import ID_PATTERN
from gyre.rollout.gateway.messages import CallRefused, ChatRequest, Message

MAX_TAG_BYTES = 4096
MAX_TAGS = 16
ROLE_CLASSES = ("main", "main-summary", "sub-agent", "sub-agent-summary")

# Headers that are kept as they are, by who sends them. The first four are ours and are checked.
GYRE_HEADERS = (b"x-gyre-role-class", b"x-gyre-lineage", b"x-gyre-parent", b"x-gyre-trainable")
HARNESS_HEADERS = (
    b"x-claude-code-agent-id", b"x-claude-code-session-id",  # Claude Code: the agent of a sub-agent, the root's session
    b"x-openai-subagent", b"x-codex-parent-thread-id", b"x-codex-turn-metadata", b"thread-id", b"session-id",  # Codex
    b"x-session-id",  # terminus-2
    b"x-litellm-session-id",  # OpenHands
)

# Stage -> how the message that asks for it begins. Such a message ends its request.
STAGES: tuple[tuple[str, str, str], ...] = (
    ("terminus-2.stage", "summary", "You are about to hand off your work to another AI agent."),
    ("terminus-2.stage", "questions", "You are picking up work from a previous AI agent on this task:"),
    ("terminus-2.stage", "answers", "The next agent has a few questions for you, please answer each of them"),
    ("openhands.stage", "summary", "You are maintaining a context-aware state summary for an interactive"),
)
# A line that Claude Code writes into the system text; ours to read, not the model's.
BILLING = "x-anthropic-billing-header"
_SUB_AGENT_LINE = re.compile(rf"^[ \t]*{BILLING}:[^\n]*\bcc_is_subagent=true\b", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a request says of itself. `role_class` and `lineage` are those of X-Gyre-*, or `main`."""

    role_class: RoleClass = "main"
    lineage: str = "main"
    is_retry: bool = False
    tags: Mapping[str, str] = field(default_factory=dict)


def read_evidence(headers: Mapping[bytes, bytes], request: ChatRequest) -> Evidence:
    """What `headers` (lower-case names) and `request` say.

    Raises:
        CallRefused: 400, a header of ours has a value that it cannot have. Nobody else's evidence fails a call.
    """
    tags: dict[str, str] = {}
    for name, value in _found(headers, request):
        if value and len(value.encode()) <= MAX_TAG_BYTES and len(tags) < MAX_TAGS:
            tags.setdefault(name, value)
    role_class, lineage = _ours(headers)
    is_retry = headers.get(b"x-stainless-retry-count", b"0").strip() not in (b"0", b"")
    return Evidence(role_class, lineage, is_retry, tags)


def _found(headers: Mapping[bytes, bytes], request: ChatRequest) -> Iterator[tuple[str, str]]:
    """Every tag there is, the most telling first."""
    yield from _kept(headers, GYRE_HEADERS)
    yield from _phrases(request.messages)
    yield from _kept(headers, HARNESS_HEADERS)
    yield from request.tags.items()


def _kept(headers: Mapping[bytes, bytes], names: tuple[bytes, ...]) -> Iterator[tuple[str, str]]:
    for name in names:
        if name in headers:
            yield name.decode(), _text(headers[name])


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _ours(headers: Mapping[bytes, bytes]) -> tuple[RoleClass, str]:
    role_class = _text(headers.get(b"x-gyre-role-class", b"main"))
    if role_class not in ROLE_CLASSES:
        raise CallRefused(400, f"X-Gyre-Role-Class: {role_class[:80]!r}; use one of {', '.join(ROLE_CLASSES)}")
    lineage = _text(headers.get(b"x-gyre-lineage", b"main"))
    for name, value in (("Lineage", lineage), ("Parent", _text(headers.get(b"x-gyre-parent", b"main")))):
        if not ID_PATTERN.fullmatch(value):
            raise CallRefused(400, f"X-Gyre-{name}: {value[:80]!r}; use 1 to 64 of A-Z a-z 0-9 _ -")
    trainable = _text(headers.get(b"x-gyre-trainable", b"yes"))
    if trainable not in ("yes", "no"):
        raise CallRefused(400, f"X-Gyre-Trainable: {trainable[:80]!r}; use yes or no")
    return role_class, lineage  # type: ignore[return-value]


def _phrases(messages: tuple[Message, ...]) -> Iterator[tuple[str, str]]:
    """What the texts themselves give away: a sub-agent's billing line, a compaction's prompt."""
    opening_texts = (m.content for m in takewhile(lambda m: m.role == "system", messages))
    if any(BILLING in text and _SUB_AGENT_LINE.search(text) for text in opening_texts):
        yield "cc_is_subagent", "true"
    # The request of a compaction is the last message, or the system text under which that is read.
    asking = [m.content[:256].lstrip() for m, role in ((messages[-1], "user"), (messages[0], "system")) if m.role == role]
    for name, stage, opening in STAGES:
        if any(text.startswith(opening) for text in asking):
            yield name, stage
