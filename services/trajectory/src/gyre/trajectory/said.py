"""What harnesses say of their own calls: one reader per harness over the tags of a record.

A reader returns None where the harness says nothing. A harness adapter of one's own needs none: it sends
`X-Gyre-Role-Class` and `X-Gyre-Lineage`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gyre.contracts.events import CallRecorded


@dataclass(frozen=True, slots=True)
class Said:
    """The harness' word on one call; None: it does not say. `agent` is its own name for who asks."""

    is_sub: bool | None = None
    is_summary: bool = False
    agent: str | None = None


Reader = Callable[[CallRecorded], Said | None]


def gyre(record: CallRecorded) -> Said | None:
    """`X-Gyre-Role-Class` and `X-Gyre-Lineage`."""
    tags = record.evidence.tags
    role = tags.get("x-gyre-role-class") or (record.role_class if record.role_class != "main" else "")
    lineage = tags.get("x-gyre-lineage") or (record.lineage if record.lineage != "main" else "")
    if not role and not lineage:
        return None
    is_sub = role.startswith("sub-agent") if role else False if lineage == "main" else None
    return Said(is_sub, role.endswith("-summary"), lineage or None)


def claude_code(record: CallRecorded) -> Said | None:
    """Sub-agents carry `x-claude-code-agent-id`; the billing block of their system prompt says so too."""
    tags = record.evidence.tags
    agent = tags.get("x-claude-code-agent-id")
    if agent or tags.get("cc_is_subagent") == "true":
        return Said(True, agent=agent)
    return Said(False) if "x-claude-code-session-id" in tags else None


def codex(record: CallRecorded) -> Said | None:
    """A thread of its own for each sub-agent; compaction is a kind of request, or a sub-agent named `compact`."""
    tags = record.evidence.tags
    turn = _object(tags.get("x-codex-turn-metadata", ""))
    kind = tags.get("x-openai-subagent", "")
    if not turn and not kind and "x-codex-parent-thread-id" not in tags:
        return None
    is_summary = turn.get("request_kind") == "compaction" or kind == "compact"
    is_sub = (turn.get("thread_source") == "subagent" or "x-codex-parent-thread-id" in tags
              or kind not in ("", "compact"))
    return Said(is_sub, is_summary, tags.get("thread-id") if is_sub else None)


def terminus_2(record: CallRecorded) -> Said | None:
    """Its three compaction calls (summary, questions, answers) are recognised by their prompts."""
    return Said(False, is_summary=True) if "terminus-2.stage" in record.evidence.tags else None


def openhands(record: CallRecorded) -> Said | None:
    """The condenser is recognised by its prompt; each conversation, the first of which is the main agent's, has an id."""
    tags = record.evidence.tags
    if "openhands.stage" in tags:
        return Said(is_summary=True)
    conversation = tags.get("x-litellm-session-id")
    return Said(agent=conversation) if conversation else None


READERS: dict[str, Reader] = {
    "gyre": gyre, "claude-code": claude_code, "codex": codex, "terminus-2": terminus_2, "openhands": openhands,
}


def _object(text: str) -> Mapping[str, object]:
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
