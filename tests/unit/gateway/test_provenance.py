"""What the first request of a context shows of earlier calls, and that no other request is looked into."""

import json
from pathlib import Path

import pytest
from gyre.contracts.events import CallEvidence
from gyre.rollout.gateway import provenance
from gyre.rollout.gateway.messages import Answer, Message, ToolCall
from gyre.rollout.gateway.provenance import Provenance
from rollout_fakes import TEMPLATE, Bench, ask, chatml_tokenizer, make_bench, sequences

AGENT = ({"type": "function", "function": {"name": "Agent", "parameters": {"type": "object"}}},)
SYSTEM = Message("system", "You repair programs.")
TASK = Message("user", "Make the tests pass.")
SUMMARY = "The parser drops the last line of a file without a newline at its end; line 40 of parse.py is where to mend it."
NOTHING = CallEvidence()
GOES_ON = CallEvidence(continues=True)


def user(text: str) -> Message:
    return Message("user", text)


def assistant(text: str) -> Message:
    return Message("assistant", text)


def delegating(*tasks: str) -> str:
    blocks = (f'<tool_call>\n{json.dumps({"name": "Agent", "arguments": {"prompt": t, "n": 1}})}\n</tool_call>' for t in tasks)
    return "\n".join(("I delegate.", *blocks))


def evidence(bench: Bench) -> list[CallEvidence]:
    return [c.record.evidence for c in bench.records]


def name(number: int) -> str:
    return f"g00000-000-x00-c{number:04d}"


async def talk(bench: Bench, messages: list[Message], *more: Message, tools: tuple = ()) -> Answer:
    """Ask, and take the answer into `messages`, followed by `more`."""
    answer = await ask(bench, messages, tools)
    messages += [answer.message, *more]
    return answer


async def test_a_harness_that_takes_old_observations_out_stays_in_its_context(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "look here", "look there", SUMMARY, "done")
    history = [SYSTEM, TASK]
    for n in range(3):
        await talk(bench, history, user(f"Observation {n}: a long listing"))
    elided = [m if m.role != "user" or m is TASK or m is history[-1] else user("Old output omitted") for m in history]
    elided[-1] = user(f"Observation: {SUMMARY}")
    await ask(bench, elided)
    sequences(bench)
    last = bench.records[3].record
    assert last.keep_len < bench.records[2].record.prompt_len
    assert evidence(bench) == [NOTHING, GOES_ON, GOES_ON, GOES_ON]


async def test_an_opening_seen_before_is_looked_at_again(tmp_path: Path) -> None:
    """A compaction when nothing has changed: the summary says what the task said, so the next prompt is the first one."""
    words = "a 3 b . c 1 d 2"
    bench = make_bench(tmp_path, "first", words, "second")
    opening = [SYSTEM, user(f"repair\n{words}")]
    history = list(opening)
    await talk(bench, history, user("compact"))
    await talk(bench, history)
    await ask(bench, opening)
    assert evidence(bench) == [NOTHING, GOES_ON, CallEvidence({}, None, (name(1),), None, continues=True)]


async def test_asking_once_more_and_dropping_thoughts_begin_no_context(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, f"<think>hm</think>{SUMMARY}", "other", "done")
    await ask(bench, [SYSTEM, TASK])
    await ask(bench, [SYSTEM, TASK])
    await ask(bench, [SYSTEM, TASK, assistant(SUMMARY), user(f"You said: {SUMMARY}")])
    assert evidence(bench) == [NOTHING, GOES_ON, GOES_ON]


THINKING_TEMPLATE = TEMPLATE.replace('{{ "<|im_start|>assistant\\n" }}', '{{ "<|im_start|>assistant\\n<think>\\n" }}')


async def test_a_template_that_opens_a_thought_leaves_the_context_the_same(tmp_path: Path) -> None:
    # The opened thought is not in the history: the next prompt lacks the last ids of the first one.
    bench = make_bench(tmp_path, f"hm</think>{SUMMARY}", "hm</think>done",
                       tokenizer=chatml_tokenizer(THINKING_TEMPLATE))
    await ask(bench, [SYSTEM, TASK])
    await ask(bench, [SYSTEM, TASK, assistant(SUMMARY), user(f"You said: {SUMMARY}")])
    first, second = (c.record for c in bench.records)
    assert bench.tokenizer.decode(sequences(bench)[first.call][:first.prompt_len].tolist()).endswith("assistant\n<think>\n")
    assert second.keep_len == first.prompt_len - len("<think>\n")
    bench.archive.close()
    again = make_bench(tmp_path, "on", tokenizer=bench.tokenizer)
    await ask(again, [SYSTEM, TASK, assistant("cut"), user(SUMMARY)])
    await ask(again, [SYSTEM, TASK, user(SUMMARY)])
    assert [e.quotes for e in (*evidence(bench), *evidence(again))] == [(), (), (), (name(0),)]


async def test_a_context_that_begins_with_a_summary_quotes_the_call_that_wrote_it(tmp_path: Path) -> None:
    # Claude Code: the summary call continues the history; afterwards the system text changes and one user text is left.
    bench = make_bench(tmp_path, "first step", f"\n{SUMMARY}\n", "going on", "done")
    billing = Message("system", "x-anthropic-billing-header: cc_version=2.1.197.0ab; cc_entrypoint=cli;")
    history = [billing, TASK]
    await talk(bench, history, user("tool output"))
    await talk(bench, history, user("Summarise the conversation so far."))
    await ask(bench, [Message("system", billing.content.replace("0ab", "f31")),
                      user(f"This session is being continued.\n\n{SUMMARY}\n\nPlease go on.")])
    assert evidence(bench)[:2] == [NOTHING, GOES_ON]
    assert evidence(bench)[2] == CallEvidence({}, None, (name(1),), None)


async def test_the_first_user_text_may_stay_before_the_summary(tmp_path: Path) -> None:
    # Codex and OpenHands keep the task and put the summary behind it; the condenser's own call is a context too.
    bench = make_bench(tmp_path, "first step", SUMMARY, "done")
    await ask(bench, [SYSTEM, TASK])
    await ask(bench, [user(f"You are maintaining a context-aware state summary for an interactive agent.\n{TASK.content}")])
    await ask(bench, [SYSTEM, TASK, user(SUMMARY), user("go on")])
    assert evidence(bench) == [NOTHING, NOTHING, CallEvidence({}, None, (name(1),), None)]


HAND_OFF = user("You are about to hand off your work to another AI agent.\nPlease summarise.")
QUESTIONS = "1. Which files have been created so far?\n2. Which of the tests fail, and how do they fail?"
ANSWERS = "1. The file parse.py and nothing else.\n2. test_last_line fails: one line is missing from the result."


async def test_the_three_calls_of_a_terminus_compaction_and_the_context_after_it(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "first step", "second step", SUMMARY, QUESTIONS, ANSWERS, "going on", "done")
    history = [TASK]
    await talk(bench, history, user("terminal output"))
    await talk(bench, history, HAND_OFF)
    await talk(bench, history, user(f"The next agent has a few questions for you, please answer each of them:\n\n{QUESTIONS}"))
    asking = [user(f"You are picking up work from a previous AI agent on this task:\n{SUMMARY}\nPlease begin by asking.")]
    await talk(bench, asking)
    await talk(bench, history)
    history = [TASK, *asking, user(f"Here are the answers the other agent provided.\n\n{ANSWERS}\n\nContinue.")]
    await talk(bench, history, user("terminal output"))
    await talk(bench, history)
    sequences(bench)
    assert evidence(bench) == [NOTHING, GOES_ON, GOES_ON, CallEvidence({}, None, (name(2),), None), GOES_ON,
                               CallEvidence({}, name(3), (name(2), name(4)), None), GOES_ON]


async def test_a_sub_agents_task_is_an_argument_of_a_tool_call_that_waits_for_its_result(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, delegating("Find the bug."), "Found it.", "done", "Found it again.")
    main = [SYSTEM, TASK]
    answer = await talk(bench, main, tools=AGENT)
    await ask(bench, [Message("system", "You look for bugs."), user("Find the bug.\n")])
    main.append(Message("tool", "Found it.", tool_call_id=answer.message.tool_calls[0].id))
    await talk(bench, main, tools=AGENT)
    await ask(bench, [Message("system", "You look."), user("Find the bug.")])
    assert [e.task_of for e in evidence(bench)] == [None, name(0), None, None]
    assert all(e in (NOTHING, GOES_ON) for n, e in enumerate(evidence(bench)) if n != 1)


async def test_sub_agents_that_run_side_by_side_have_one_parent_and_their_own_lines(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, delegating("Find the bug.", "Read the docs."), *(f"step {n}" for n in range(6)), "done")
    main = [SYSTEM, TASK]
    answer = await talk(bench, main, tools=AGENT)
    lines = [[Message("system", "You help."), user("Find the bug.")], [Message("system", "You help."), user("Read the docs.")]]
    for turn in range(3):
        for line in lines:
            await talk(bench, line, user(f"output {turn}"))
    main += [Message("tool", line[-2].content, tool_call_id=c.id) for line, c in zip(lines, answer.message.tool_calls,
                                                                                    strict=True)]
    await ask(bench, main, AGENT)
    assert [e.task_of for e in evidence(bench)] == [None, name(0), name(0), *[None] * 5]
    assert [c.record.base_call for c in bench.records][3:] == [name(1), name(2), name(3), name(4), name(0)]


async def test_of_calls_that_ask_for_the_same_the_latest_is_the_parent(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, delegating("Find the bug."), delegating("Find the bug."), "ok")
    await ask(bench, [SYSTEM, TASK], AGENT)
    await ask(bench, [SYSTEM, TASK], AGENT)
    await ask(bench, [user("Find the bug.")])
    assert evidence(bench)[2].task_of == name(1)


@pytest.mark.parametrize("text", ["Find the bug", "Please: Find the bug.", " ", "1"])
async def test_a_task_that_only_resembles_an_argument_has_no_parent(tmp_path: Path, text: str) -> None:
    bench = make_bench(tmp_path, delegating("Find the bug."), "ok")
    await ask(bench, [SYSTEM, TASK], AGENT)
    await ask(bench, [user(text)])
    assert evidence(bench)[1] == NOTHING


async def test_a_gateway_that_comes_back_still_knows_answers_contexts_and_open_tool_calls(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, delegating("Find the bug.", "Read the docs."), "Read.", SUMMARY)
    main = [SYSTEM, TASK]
    answer = await talk(bench, main, tools=AGENT)
    await ask(bench, [user("Read the docs.")])
    main += [Message("tool", "Read.", tool_call_id=answer.message.tool_calls[1].id)]
    await ask(bench, main, AGENT)
    bench.archive.close()

    again = make_bench(tmp_path, "a", "b", "c", "d")
    again.records.extend(bench.records)
    await ask(again, [user("Find the bug.")])
    await ask(again, [user("Read the docs."), assistant("Read it."), user("once more")])
    await ask(again, [user(f"So far: {SUMMARY}"), assistant("Read."), user("go on")])
    await ask(again, [SYSTEM, TASK, assistant("cut"), user(SUMMARY)], AGENT)
    sequences(again)
    assert evidence(again)[3:] == [CallEvidence({}, None, (), name(0)), GOES_ON,
                                   CallEvidence({}, name(1), (name(2),), None), GOES_ON]


# ---------------------------------------------------------------- the search itself


def heard(*answers: str | Message) -> Provenance:
    memory = Provenance()
    for number, answer in enumerate(answers):
        memory.heard(str(number), assistant(answer) if isinstance(answer, str) else answer)
    return memory


LONG = "x" * 63 + "y"


@pytest.mark.parametrize(("answer", "message", "is_quoted"), [
    (LONG, user(f"It said {LONG}, and so on."), True), (f" {LONG}\n", user(LONG), True), (LONG[1:], user(f"a {LONG}"), False),
    ("12345678", user("before\n12345678\nafter"), True), ("12345678", user("12345678"), True),
    ("12345678", user("before 12345678"), False), ("1234567", user("1234567"), False),
    (f"hm\n</think>\n{LONG}", user(f"So far: {LONG}."), True), ("</think>", user("anything"), False),
    ("two\nlines", user("a\ntwo\nlines\nb"), True), (LONG, Message("system", LONG), True),
    (LONG, assistant(LONG), False), (LONG, Message("tool", LONG, tool_call_id="1"), False), ("", user(""), False)])
def test_a_whole_answer_is_quoted_anywhere_and_a_short_one_on_lines_of_its_own(answer: str, message: Message,
                                                                               is_quoted: bool) -> None:
    assert heard(answer).look([message]).quotes == (("0",) if is_quoted else ())


def test_quotes_come_oldest_first_and_the_newest_sixteen_stay() -> None:
    answers = [f"answer number {n:04d}" for n in range(20)]
    assert heard(*answers).look([user("\n".join(reversed(answers)))]).quotes == tuple(str(n) for n in range(4, 20))


def test_a_replay_is_known_whatever_its_ids_and_however_its_json_is_written() -> None:
    call = ToolCall("call_1", "sh", '{"a": 1,  "b": ""}')
    memory = heard("same", Message("assistant", "Look.", (call,)), "same")
    assert memory.look([assistant(" same ")]).replays == "2"
    assert memory.look([Message("assistant", "Look.", (ToolCall("other", "sh", '{"b":"","a":1}'),))]).replays == "1"
    for message in (user("same"), assistant("Look."), Message("assistant", "Look.", (ToolCall("call_1", "sh", "{}"),)),
                    assistant("")):
        assert memory.look([message]).replays is None
    assert heard("").look([assistant("")]).replays is None
    assert heard("a thought</think>\n\nok").look([assistant("ok")]).replays == "0"
    assert heard("a thought</think>").look([assistant("")]).replays is None


def test_no_more_is_searched_than_the_bounds_say() -> None:
    memory = heard(LONG, *(f"other {n}" for n in range(provenance.MAX_ANSWERS)))
    assert memory.look([user(LONG)]).quotes == ()
    most = "z" * provenance.MAX_SEARCHED
    assert heard(LONG).look([user(most), user(LONG)]).quotes == ()
    assert heard(LONG).look([user(most + "z"), user(LONG)]).quotes == ("0",), "what does not fit is left out"


def test_arguments_that_are_no_object_ask_for_nothing() -> None:
    calls = tuple(ToolCall(str(n), "Agent", text) for n, text in enumerate(
        ("", "{broken", '["Find it."]', '{"a": {"b": "Find it."}}', '"Find it."', "[" * 100_000)))
    assert heard(Message("assistant", "", calls)).look([user("Find it.")]).task_of is None
