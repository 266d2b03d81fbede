"""What agents read: the gateway renders tool calls and results to exactly the tokens that the warm start reads."""

from __future__ import annotations

import agents_sessions
import agents_warmstart
import numpy as np
import pytest
from agents_harness import TOOLS
from agents_policy import CALL, CALL_END, POLICY, VOCABULARY, build
from agents_tasks import DIRECTORIES
from gyre.policy.tokenizer import ChatTokenizer
from gyre.rollout.gateway.context import TokenTree
from gyre.rollout.gateway.messages import ChatRequest, Message, MessageRole
from gyre.rollout.gateway.render import Renderer, plain
from gyre.rollout.gateway.tools import parse_tool_calls
from policy import END
from tasks import INSTRUCTION


def messages_of(tokenizer: ChatTokenizer, row: list[int]) -> list[Message]:
    """The messages that a row of tokens renders, with tool calls as the gateway parses them out of sampled text."""
    messages: list[Message] = []
    for turn in tokenizer.decode(row).split(END)[:-1]:
        role, _, content = turn.strip().partition("|> ")
        name: MessageRole = role.removeprefix("<|")  # type: ignore[assignment]
        text, calls = parse_tool_calls(content, str(len(messages))) if name == "assistant" else (content, ())
        answered = messages[-1].tool_calls[0].id if name == "tool" else ""
        messages.append(Message(name, text, calls, answered))
    return messages


def test_random_sessions_are_in_the_tokens_of_the_rendered_chat() -> None:
    tokenizer = build()
    blocks = agents_sessions.draw(np.random.default_rng(0), agents_sessions.training_patterns(), 20)
    num_calls = 0
    for row in [row for block in blocks for row in block.ids_SW.tolist()]:
        messages = messages_of(tokenizer, row)
        text = tokenizer.render([plain(m) for m in messages], tools=TOOLS, add_generation_prompt=False)
        assert tokenizer.encode(text) == row
        num_calls += sum(len(m.tool_calls) for m in messages)
    assert num_calls > 10


def test_sessions_are_the_contexts_that_the_harness_opens_and_closes() -> None:
    tokenizer = build()
    blocks = agents_sessions.draw(np.random.default_rng(1), agents_sessions.training_patterns(), 3)
    first, again, main = ([messages_of(tokenizer, row) for row in block.ids_SW.tolist()] for block in blocks)
    for messages in first:
        assert messages[0].content.startswith("modules ")
        assert messages[1].content in {f"repair {d} now" for d in DIRECTORIES}
        assert messages[-2].content.endswith(" compact")
    for messages in again:
        assert messages[0].content == "modules"
        assert messages[1].content.startswith("repair ")
        assert messages[-2].content.endswith(" report")
        assert len(messages[-1].content.split()) == 2
    for messages in main:
        assert messages[0].content.startswith(INSTRUCTION)
        assert messages[-2].content.endswith(" compact")


def test_a_tool_call_costs_as_many_tokens_as_a_command() -> None:
    tokenizer = build()
    output = [*tokenizer.encode(f"{CALL} x {CALL_END}"), tokenizer.id_of(END)]
    assert len(output) == 4
    content, calls = parse_tool_calls(tokenizer.decode(output, skip_special_tokens=True), "call")
    assert (content, calls[0].name, calls[0].arguments) == ("", "agent", '{"task": "repair x now"}')
    assert tokenizer.vocab_size == len(VOCABULARY) == POLICY.vocab_size


def test_a_tool_result_extends_the_sampled_tokens_and_renders_the_same_from_scratch() -> None:
    tokenizer = build()
    renderer, tree = Renderer(tokenizer), TokenTree()
    asked = (Message("user", f"{INSTRUCTION}\nx 2 y 3 . ."),)
    tools = tuple(TOOLS)
    prompt = renderer.prompt(ChatRequest(asked, tools), tree, None, 0)
    output = np.array([*tokenizer.encode(f"{CALL} x {CALL_END}"), tokenizer.id_of(END)], np.int32)
    node = tree.add("c0", prompt.place, prompt.ids, output, tree.extended(prompt.place, prompt.ids, output))
    _, calls = parse_tool_calls(f"{CALL} x {CALL_END}", "c0")
    result = Message("tool", "x .", tool_call_id=calls[0].id)
    messages = (*asked, Message("assistant", "", calls), result, Message("user", "y"))
    after = renderer.prompt(ChatRequest(messages, tools), tree, node, 2)
    assert not after.rerooted
    assert after.ids[: node.length].tolist() == node.ids().tolist()
    assert after.ids.tolist() == renderer.prompt(ChatRequest(messages, tools), TokenTree(), None, 0).ids.tolist()
    assert tokenizer.decode(after.ids[node.length :].tolist()) == f"<|tool|> x . {END} <|user|> y {END} <|assistant|>"


@pytest.mark.parametrize("block", [0, 1])
def test_random_commands_do_not_depend_on_what_the_context_says(block: int) -> None:
    drawn = agents_sessions.draw(np.random.default_rng(0), agents_sessions.training_patterns(), 4000)[block]
    places_W = drawn.places_W
    kinds_S = drawn.ids_SW[:, np.flatnonzero(places_W == agents_sessions.KIND)[0]]
    modules_S = drawn.ids_SW[:, np.flatnonzero(places_W == agents_sessions.MODULE)[0]]
    states_S = np.full(len(kinds_S), -1)
    for column in range(len(places_W) - 1):
        if places_W[column + 1] == agents_sessions.REPORT and (places_W[: column + 1] != agents_sessions.MODULE).all():
            states_S = np.where(drawn.ids_SW[:, column] == modules_S, drawn.ids_SW[:, column + 1], states_S)
    failing_S = np.isin(states_S, agents_sessions.STATE_IDS[1:]) & np.isin(kinds_S, agents_sessions.STATE_IDS[1:])
    assert failing_S.sum() > 1000
    assert (kinds_S == states_S)[failing_S].mean() == pytest.approx(0.25, abs=0.04)


def test_the_main_agent_of_a_session_turns_to_any_directory_whatever_fails_there() -> None:
    drawn = agents_sessions.main_agents(np.random.default_rng(0), 6000)
    opening = np.flatnonzero(drawn.places_W == agents_sessions.OPENING)[0]
    counts = np.flatnonzero(drawn.places_W == agents_sessions.REPORT)[1 : 2 * len(DIRECTORIES) : 2]
    for number, directory_id in enumerate(agents_sessions.DIRECTORY_IDS):
        healthy_S = drawn.ids_SW[:, counts[number]] == agents_sessions.STATE_IDS[0]
        chosen_S = drawn.ids_SW[:, opening + 1] == directory_id
        assert chosen_S[healthy_S].mean() == pytest.approx(chosen_S[~healthy_S].mean(), abs=0.04)


def test_the_checkpoint_is_made_from_every_file_that_shapes_it() -> None:
    names = {source.name for source in agents_warmstart.course().sources}
    assert {"sessions.py", "warmstart.py", "policy.py", "agents_sessions.py", "agents_policy.py"} <= names
