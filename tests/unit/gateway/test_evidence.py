"""What a request says of itself is kept word for word, and nothing but our own headers can fail a call."""

import json

import pytest
from gyre.rollout.gateway.dialects import chat
from gyre.rollout.gateway.evidence import Evidence, read_evidence
from gyre.rollout.gateway.messages import CallRefused, ChatRequest, Message

HELLO = (Message("user", "hello"),)


def read(headers: dict[str, bytes] | None = None, messages: tuple[Message, ...] = HELLO,
         tags: dict[str, str] | None = None) -> Evidence:
    named = {name.lower().encode(): value for name, value in (headers or {}).items()}
    return read_evidence(named, ChatRequest(messages, tags=tags or {}))


def test_a_request_that_says_nothing_is_the_main_agents() -> None:
    assert read() == Evidence("main", "main", False, {})


def test_known_headers_are_kept_word_for_word_and_others_are_not() -> None:
    turn = json.dumps({"thread_source": "subagent", "request_kind": "compaction", "window_number": 2}).encode()
    said = {"X-Claude-Code-Session-Id": b"s1", "x-claude-code-agent-id": b"a 1", "session-id": b"root", "thread-id": b"t",
            "x-codex-turn-metadata": turn, "x-openai-subagent": b"review", "x-codex-parent-thread-id": b"p",
            "X-Session-ID": b"x", "x-litellm-session-id": "ü".encode(), "authorization": b"Bearer secret", "cookie": b"c"}
    kept = {name.lower(): value.decode() for name, value in said.items() if name not in ("authorization", "cookie")}
    assert dict(read(said).tags) == kept


def test_our_own_headers_decide_role_and_lineage_and_are_tags_too() -> None:
    said = read({"X-Gyre-Role-Class": b"sub-agent", "X-Gyre-Lineage": b"sub-1", "X-Gyre-Parent": b"main",
                 "X-Gyre-Trainable": b"no"})
    assert (said.role_class, said.lineage) == ("sub-agent", "sub-1")
    assert dict(said.tags) == {"x-gyre-role-class": "sub-agent", "x-gyre-lineage": "sub-1", "x-gyre-parent": "main",
                               "x-gyre-trainable": "no"}


@pytest.mark.parametrize(("name", "value"), [
    ("X-Gyre-Role-Class", b"boss"), ("X-Gyre-Lineage", b"a b"), ("X-Gyre-Parent", b""), ("X-Gyre-Trainable", b"maybe"),
    ("X-Gyre-Trainable", b"\xff"), ("X-Gyre-Lineage", b"x" * 65)])
def test_our_own_headers_are_refused_by_name_when_they_are_wrong(name: str, value: bytes) -> None:
    with pytest.raises(CallRefused, match=f"400.*{name}"):
        read({name: value})


def test_bytes_that_are_no_text_and_values_that_are_too_long_fail_nothing() -> None:
    said = read({"thread-id": b"\xff", "session-id": b"x" * 4096, "x-session-id": b"x" * 4097,
                 "x-codex-turn-metadata": b"{broken", "x-openai-subagent": b""}, tags={"session_id": "ü" * 2049})
    assert dict(said.tags) == {"thread-id": "\xff", "session-id": "x" * 4096, "x-codex-turn-metadata": "{broken"}


def test_of_too_many_tags_the_most_telling_stay() -> None:
    headers = {"x-gyre-role-class": b"main", "x-gyre-lineage": b"main", "x-gyre-parent": b"main",
               "x-gyre-trainable": b"yes", **dict.fromkeys((
                   "x-claude-code-session-id", "x-claude-code-agent-id", "session-id", "thread-id", "x-codex-turn-metadata",
                   "x-openai-subagent", "x-codex-parent-thread-id", "x-session-id", "x-litellm-session-id"), b"v")}
    messages = (Message("system", "x-anthropic-billing-header: cc_is_subagent=true;"), *HELLO)
    tags = read(headers, messages, {"metadata.user_id": "u", "session_id": "s", "prompt_cache_key": "k"}).tags
    assert len(tags) == 16
    assert "cc_is_subagent" in tags and "metadata.user_id" in tags and "prompt_cache_key" not in tags


def body(**fields: object) -> ChatRequest:
    return chat.parse(json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode(), chat.Limits())


def test_fields_of_the_body_are_tags_if_they_are_text() -> None:
    request = body(metadata={"user_id": '{"session_id": "s"}', "other": "x"}, session_id="t2", prompt_cache_key="conv")
    assert request.tags == {"metadata.user_id": '{"session_id": "s"}', "session_id": "t2", "prompt_cache_key": "conv"}
    for metadata in ("u", ["u"], {"user_id": 7}, None):
        assert body(metadata=metadata, session_id=3, prompt_cache_key=["k"]).tags == {}


@pytest.mark.parametrize(("role", "text", "is_sub_agent"), [
    ("system", "x-anthropic-billing-header: cc_version=2.1.197.0ab; cc_entrypoint=cli; cc_is_subagent=true;", True),
    ("system", "You are an agent.\n x-anthropic-billing-header: cc_entrypoint=cli; cc_is_subagent=true", True),
    ("system", "x-anthropic-billing-header: cc_version=2.1.197.0ab; cc_entrypoint=cli;", False),
    ("system", "x-anthropic-billing-header: cc_entrypoint=cli;\ncc_is_subagent=true", False),
    ("system", "In the x-anthropic-billing-header: cc_is_subagent=true is meant.", False),
    ("user", "x-anthropic-billing-header: cc_is_subagent=true;", False)])
def test_claude_codes_billing_line_tells_a_sub_agent(role: str, text: str, is_sub_agent: bool) -> None:
    tags = read(messages=(Message("system", "You are a tool."), Message(role, text), *HELLO)).tags
    assert tags == ({"cc_is_subagent": "true"} if is_sub_agent else {})


TASK = Message("user", "Create a file called hello.txt")
STAGES = [
    ("terminus-2.stage", "summary", "You are about to hand off your work to another AI agent.\n            Please"),
    ("terminus-2.stage", "questions", "You are picking up work from a previous AI agent on this task:\n\n**Original"),
    ("terminus-2.stage", "answers", "The next agent has a few questions for you, please answer each of them one by one"),
    ("openhands.stage", "summary", "You are maintaining a context-aware state summary for an interactive agent.\nYou"),
]


@pytest.mark.parametrize(("name", "stage", "text"), STAGES)
def test_the_request_of_a_compaction_is_known_by_how_it_begins(name: str, stage: str, text: str) -> None:
    asking = Message("user", text)
    assert read(messages=(TASK, Message("assistant", "ok"), asking)).tags == {name: stage}
    assert read(messages=(asking,)).tags == {name: stage}
    assert read(messages=(TASK, asking, Message("assistant", "ok"), Message("user", "Here are the answers"))).tags == {}
    assert read(messages=(TASK, Message("user", f"It said: {text}"))).tags == {}
    assert read(messages=(asking, Message("assistant", "ok"), Message("tool", "out", tool_call_id="1"))).tags == {}


def test_a_condenser_may_ask_in_the_system_text() -> None:
    rules = Message("system", STAGES[3][2])
    assert read(messages=(rules, Message("user", "<EVENT>\n</EVENT>"))).tags == {"openhands.stage": "summary"}


def test_a_retry_count_says_that_a_request_is_a_retry() -> None:
    assert [read({"x-stainless-retry-count": n}).is_retry for n in (b"0", b"1", b"")] == [False, True, False]
