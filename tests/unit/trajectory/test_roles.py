"""Roles of the calls of an execution: request logs of known harnesses, as the gateway writes their evidence down."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from executions import Script
from gyre.contracts.events import CallEvidence
from gyre.trajectory.roles import CallRole, classifier


def evidence(tags: Mapping[str, str] | None = None, quotes: Sequence[str] = (), **fields: Any) -> CallEvidence:
    return CallEvidence(tags=dict(tags or {}), quotes=tuple(quotes), **fields)


def codex(thread: str, **turn: Any) -> dict[str, str]:
    return {"thread-id": thread, "x-codex-turn-metadata": json.dumps(turn)}


def roles_of(calls: Script, harness: str = "any") -> tuple[CallRole, ...]:
    return classifier(harness).classify(calls.calls())


def told(calls: Script, harness: str = "any") -> list[tuple[str, str]]:
    return [(role.role_class, role.agent) for role in roles_of(calls, harness)]


def name(index: int) -> str:
    return f"g00000-000-x00-c{index:04d}"


# ---------------------------------------------------------------- the stream alone


def test_a_context_that_quotes_an_answer_goes_on_with_its_agent_and_makes_it_a_summary(script: Any) -> None:
    calls = (script().call([1, 2], [3]).call([1, 2, 3, 4], [50, 51])
             .call([9, 50, 51], [7], evidence=evidence(quotes=[name(1)])).call([9, 50, 51, 7, 8], [6]))
    assert roles_of(calls) == (CallRole("main", "main", "stream"), CallRole("main-summary", "main", "stream"),
                               CallRole("main", "main", "stream"), CallRole("main", "main", "stream"))


def test_a_sub_agent_is_known_by_the_open_tool_call_it_was_asked_with(script: Any) -> None:
    """Its compaction makes a summary of its own; its report inside the parent's context is no new root."""
    calls = (script().call([1, 2], [3]).call([20, 21], [22], evidence=evidence(task_of=name(0)))
             .call([20, 21, 22, 23], [24, 25]).call([30, 24, 25], [26], evidence=evidence(quotes=[name(2)]))
             .call([1, 2, 3, 26], [4]))
    assert told(calls) == [("main", "main"), ("sub-agent", "sub-1"), ("sub-agent-summary", "sub-1"), ("sub-agent", "sub-1"),
                           ("main", "main")]


def test_sub_agents_beside_one_another_are_told_apart_whatever_the_order_of_arrival(script: Any) -> None:
    calls = (script().call([1, 2], [3]).call([20, 21], [22], evidence=evidence(task_of=name(0)))
             .call([40, 41], [42], evidence=evidence(task_of=name(0))).call([20, 21, 22, 23], [24])
             .call([40, 41, 42, 43], [44]))
    assert [agent for _, agent in told(calls)] == ["main", "sub-1", "sub-2", "sub-1", "sub-2"]


def test_a_sub_agent_of_a_sub_agent_is_one_of_its_own(script: Any) -> None:
    calls = (script().call([1, 2], [3]).call([20, 21], [22], evidence=evidence(task_of=name(0)))
             .call([30, 31], [32], evidence=evidence(task_of=name(1))))
    assert told(calls) == [("main", "main"), ("sub-agent", "sub-1"), ("sub-agent", "sub-2")]


@pytest.mark.parametrize("prompt, why", [
    ([1, 2, 77, 5, 6], "old observations elided: the trunk forks behind the opening prompt"),
    ([1, 2, 10, 5], "thinking stripped from an earlier answer"),
    ([1, 2], "the same prompt sampled again"),
    ([1, 2, 90], "rolled back to the beginning"),
])
def test_whoever_keeps_the_opening_prompt_is_still_in_that_context(script: Any, prompt: list[int], why: str) -> None:
    calls = script().call([1, 2], [90, 10]).call([1, 2, 90, 10, 5], [6]).call(prompt, [8])
    assert roles_of(calls)[2] == CallRole("main", "main", "stream"), why


def test_two_contexts_may_begin_with_the_same_prompt(script: Any) -> None:
    """A summary that says what the task said before, and two sub-agents sent with the same words."""
    calls = (script().call([1, 50, 51], [3]).call([1, 50, 51, 3, 4], [50, 51])
             .call([1, 50, 51], [7], evidence=evidence(quotes=[name(1)], continues=True))
             .call([20, 21], [22], evidence=evidence(task_of=name(0))).call([20, 21, 22, 23], [24])
             .call([20, 21], [25], evidence=evidence(task_of=name(2), continues=True)))
    assert told(calls) == [("main", "main"), ("main-summary", "main"), ("main", "main"), ("sub-agent", "sub-3"),
                           ("sub-agent", "sub-3"), ("sub-agent", "sub-5")]


def test_what_the_template_itself_takes_back_ends_no_context(script: Any) -> None:
    """The opening prompt ended with an opened thought, [1, 2, 88]; the next one leaves the thought out, opening too."""
    calls = script().call([1, 2, 88], [90, 10]).call([1, 2, 10, 5, 88], [6], evidence=evidence(continues=True))
    assert roles_of(calls)[1] == CallRole("main", "main", "stream")


def test_a_shared_system_prompt_is_no_continuation(script: Any) -> None:
    """[1, 2] is a system prompt that all agents of the harness have."""
    calls = (script().call([1, 2, 3, 4], [5]).call([1, 2, 30, 31], [32])
             .call([1, 2, 40, 41], [42], evidence=evidence(task_of=name(0))))
    assert roles_of(calls) == (CallRole("main", "main", "stream"), CallRole("main", "main", "unknown"),
                               CallRole("sub-agent", "sub-2", "stream"))


def test_a_rewritten_system_prompt_goes_on_by_what_it_replays(script: Any) -> None:
    """Harnesses change their system prompt in the middle of a run; the assistant's messages stay."""
    calls = script().call([1, 2], [3]).call([9, 2, 3, 4], [5], evidence=evidence(replays=name(0)))
    assert roles_of(calls)[1] == CallRole("main", "main", "stream")


def test_what_nothing_is_known_of_is_main_and_counted(script: Any) -> None:
    calls = script().call([1, 2], [3]).call([7, 8], [9]).call([7, 8, 9, 1], [2])
    assert [role.known_by for role in roles_of(calls)] == ["stream", "unknown", "stream"]
    assert told(calls)[1:] == [("main", "main")] * 2


def test_evidence_of_calls_that_were_not_recorded_is_no_evidence(script: Any) -> None:
    calls = script().call([1, 2], [3]).call([7, 8], [9], evidence=evidence(quotes=["gone"], replays="gone", task_of="gone"))
    assert roles_of(calls)[1].known_by == "unknown"


# ---------------------------------------------------------------- what harnesses say


def test_our_own_headers_come_first(script: Any) -> None:
    said = {"x-gyre-role-class": "sub-agent-summary", "x-gyre-lineage": "reviewer"}
    calls = script().call([1, 2], [3]).call([1, 2, 3, 4], [5], evidence=evidence(said | codex("t9", thread_source="user")))
    assert roles_of(calls)[1] == CallRole("sub-agent-summary", "reviewer", "harness")


def test_a_lineage_alone_tells_agents_apart_and_the_first_is_main(script: Any) -> None:
    lineage = ["planner", "coder", "planner", "coder"]
    calls = script()
    for index, who in enumerate(lineage):
        calls.call([10 * (index + 1)], [3], evidence=evidence({"x-gyre-lineage": who}))
    assert told(calls) == [("main", "planner"), ("sub-agent", "coder"), ("main", "planner"), ("sub-agent", "coder")]


def test_claude_code(script: Any) -> None:
    """The agent id is on sub-agents only. Compaction: the request itself extends the context; the new one quotes."""
    session = {"x-claude-code-session-id": "s"}
    calls = (script().call([1, 2], [3], evidence=evidence(session))
             .call([20, 21], [22], evidence=evidence(session | {"x-claude-code-agent-id": "a7"}))
             .call([20, 21, 22, 23], [24], evidence=evidence(session | {"x-claude-code-agent-id": "a7"}))
             .call([1, 2, 3, 24], [50, 51], evidence=evidence(session))
             .call([8, 50, 51], [4], evidence=evidence(session, quotes=[name(3)])))
    assert told(calls) == [("main", "main"), ("sub-agent", "a7"), ("sub-agent", "a7"), ("main-summary", "main"),
                           ("main", "main")]
    assert {role.known_by for role in roles_of(calls)} == {"harness"}
    billed = script().call([1], [2]).call([5], [6], evidence=evidence({"cc_is_subagent": "true"}))
    assert told(billed)[1] == ("sub-agent", "sub-1")


def test_codex(script: Any) -> None:
    """A thread per agent; compaction has no tools, so that not even the prefix of its context is shared."""
    main, sub = codex("t1", thread_source="user", request_kind="turn"), codex("t2", thread_source="subagent")
    compact = codex("t1", thread_source="user", request_kind="compaction", window_number=1)
    calls = (script().call([1, 2], [3], evidence=evidence(main))
             .call([20, 21], [22], evidence=evidence(sub | {"x-openai-subagent": "collab_spawn",
                                                            "x-codex-parent-thread-id": "t1"}))
             .call([5, 2, 3, 4], [50, 51], evidence=evidence(compact, replays=name(0)))
             .call([1, 50, 51], [7], evidence=evidence(main, quotes=[name(2)])))
    assert told(calls) == [("main", "main"), ("sub-agent", "t2"), ("main-summary", "main"), ("main", "main")]
    assert told(script().call([1], [2], evidence=evidence({"x-openai-subagent": "compact"}))) == [("main-summary", "main")]


def test_broken_metadata_is_no_word(script: Any) -> None:
    for text in ("{", "[]", "null", '"x"', "[" * 100_000):
        calls = script().call([1], [2], evidence=evidence({"x-codex-turn-metadata": text}))
        assert roles_of(calls) == (CallRole("main", "main", "stream"),)


def test_terminus_2(script: Any) -> None:
    """Three calls per compaction; the next context holds the questions as the assistant's and quotes the answers."""
    def stage(value: str) -> dict[str, str]:
        return {"terminus-2.stage": value}

    calls = (script().call([1, 2], [3]).call([1, 2, 3, 60], [50], evidence=evidence(stage("summary")))
             .call([70, 50], [51], evidence=evidence(stage("questions"), quotes=[name(1)]))
             .call([1, 2, 3, 60, 50, 51], [52], evidence=evidence(stage("answers")))
             .call([1, 70, 51, 52], [4], evidence=evidence(quotes=[name(3)], replays=name(2))))
    assert [role for role, _ in told(calls)] == ["main", "main-summary", "main-summary", "main-summary", "main"]
    # Without its word, the questions are the main agent's: they become part of its next context.
    silent = (script().call([1, 2], [3]).call([1, 2, 3, 60], [50]).call([70, 50], [51], evidence=evidence(quotes=[name(1)]))
              .call([1, 2, 3, 60, 50, 51], [52])
              .call([1, 70, 51, 52], [4], evidence=evidence(quotes=[name(3)], replays=name(2))))
    assert [role for role, _ in told(silent)] == ["main", "main-summary", "main", "main-summary", "main"]


def test_openhands(script: Any) -> None:
    """Each conversation has an id; the first is the main agent's. The condenser is known by its prompt."""
    def conversation(value: str) -> CallEvidence:
        return evidence({"x-litellm-session-id": value})

    calls = (script().call([1, 2], [3], evidence=conversation("a")).call([20, 21], [22], evidence=conversation("b"))
             .call([1, 2, 3, 4], [5], evidence=conversation("a"))
             .call([90], [50, 51], evidence=evidence({"openhands.stage": "summary"})))
    assert told(calls) == [("main", "a"), ("sub-agent", "b"), ("main", "a"), ("main-summary", "main")]


def test_only_the_named_harness_is_believed(script: Any) -> None:
    calls = script().call([1], [2]).call([5], [6], evidence=evidence({"x-claude-code-agent-id": "a7"}))
    assert told(calls, "codex")[1] == ("main", "main")
    assert told(calls, "claude-code")[1] == ("sub-agent", "a7")
