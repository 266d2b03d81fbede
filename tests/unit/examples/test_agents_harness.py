"""The harness with sub-agents as a process against a scripted server: the contexts it sends and the files it edits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import agents_harness
import agents_tasks
import pytest
from agents_tasks import DIRECTORIES
from gyre.reward.graders.base import Task
from gyre.reward.graders.functions import FunctionsGrader, TimeLimits
from gyre.reward.sandbox import Limits, Plain
from scripted_endpoint import Answer, Message, Script
from tasks import INSTRUCTION

Start = Callable[[Script], subprocess.CompletedProcess[str]]


def call(number: int, task: object, name: str = "agent") -> Message:
    """A reply that is one tool call."""
    function = {"name": name, "arguments": json.dumps({"task": task})}
    made = {"id": f"call_{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [made]}


@pytest.fixture
def query() -> agents_tasks.Query:
    return agents_tasks.generate(0, "train", 0)


@pytest.fixture
def start(query: agents_tasks.Query, tmp_path: Path) -> Iterator[Start]:
    """Runs the harness against a script in a fresh copy of the workspace."""
    scripts: list[Script] = []
    task = tmp_path / "task"
    agents_tasks.write(query, task)
    shutil.copytree(task / "workspace", tmp_path / "workspace")

    def run(script: Script) -> subprocess.CompletedProcess[str]:
        scripts.append(script)
        environment = {"PATH": os.defpath, "OPENAI_BASE_URL": script.url, "OPENAI_API_KEY": "secret",
                       "GYRE_TASK_INSTRUCTION": str(task / "instruction.md")}
        command = [sys.executable, "-I", "-S", agents_harness.__file__]
        return subprocess.run(
            command, cwd=tmp_path / "workspace", env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    yield run
    for script in scripts:
        script.close()


def report(query: agents_tasks.Query, directory: str) -> str:
    return " ".join(f"{m.name} {m.kind or '.'}" for d, modules in query.directories() if d == directory for m in modules)


def overview(query: agents_tasks.Query) -> str:
    failing = {d: sum(m.kind > 0 for m in modules) for d, modules in query.directories()}
    return " ".join(f"{d} {num}" if num else ". ." for d, num in failing.items())


def contents(request: dict[str, Any]) -> list[tuple[str, str | None]]:
    return [(message["role"], message["content"]) for message in request["messages"]]


def perfect(number: int, messages: list[Message]) -> Answer:
    """Sends an agent wherever something fails; as an agent, repairs what its report says. Summaries are true."""
    words = " ".join(m["content"] for m in messages if m["role"] in ("user", "system", "tool")).split()
    told = {name: state for name, state in zip(words, words[1:], strict=False) if len(name) == 1 and state in ".1234"}
    if messages[0]["role"] == "user":
        if words[-1] == "compact":
            return 200, " ".join(f"{d} {told[d]}" for d in DIRECTORIES if told.get(d, ".") != ".")
        return 200, call(number, f"repair {next((d for d in DIRECTORIES if told.get(d, '.') != '.'), 'x')} now")
    directory = next(d for d in DIRECTORIES if d in words)
    modules = DIRECTORIES[directory]
    if words[-1] == "report":
        return 200, f"{directory} {sum(told[m] != '.' for m in modules) or '.'}"
    if words[-1] == "compact":
        return 200, " ".join(f"{m} {told[m]}" for m in modules)
    name = next((m for m in modules if told[m] != "."), modules[0])
    return 200, f"F {name} {told[name] if told[name] != '.' else 1}"


async def test_agents_edit_real_files_until_the_hidden_tests_pass(start: Start, tmp_path: Path) -> None:
    script = Script(perfect)
    ended = start(script)
    assert (ended.returncode, ended.stderr) == (0, "")
    grader = FunctionsGrader(Plain(), tmp_path / "grading", TimeLimits(), Limits())
    score = await grader.grade(Task(tmp_path / "task"), tmp_path / "workspace")
    await grader.close()
    assert score.reward == 1.0
    delegated = [4, 4, 4, 7, 4, 4, 3]
    assert [r["max_tokens"] for r in script.requests] == [*delegated, *delegated, 7, *delegated, *delegated]
    assert [bool(r.get("tools")) for r in script.requests] == [r["messages"][0]["role"] == "user" for r in script.requests]
    assert (script.connections, script.keys) == (1, {"Bearer secret"})


def test_the_contexts_of_both_kinds_of_agent_are_exactly_these(start: Start, query: agents_tasks.Query) -> None:
    """Nothing but the texts says whose call it is, so the texts are pinned to the letter."""
    right = f"F a {query.modules[0].kind}"
    replies: list[str | Message] = [
        call(1, "repair x now"), right, "nonsense", "the agent's own words", "F b 9", "", "so be it",
        "no command", "x 1 y . z 3", "F zz 1", "F g 9",
    ]
    script = Script(lambda number, messages: (200, replies[number - 1]))
    assert start(script).returncode == 0
    sent = [contents(request) for request in script.requests]
    assert overview(query).split()[2:4] == [".", "."]
    assert query.modules[0].kind
    first = [("user", f"{INSTRUCTION}\n{overview(query)}")]
    sub = [("system", f"modules {report(query, 'x')}"), ("user", "repair x now")]
    told = [("assistant", right), ("user", f"a . {next_failing(query, 'x')}")]
    again = [("system", "modules"), ("user", "repair x now\nthe agent's own words")]
    assert sent[0] == first
    assert sent[1] == sub
    assert sent[2] == [*sub, *told]
    compact = f"? ? {next_failing(query, 'x')}\ncompact"
    assert sent[3] == [*sub, *told, ("assistant", "nonsense"), ("user", compact)]
    malformed = ("user", f"? ? {next_failing(query, 'x')}")
    assert sent[4] == again
    assert sent[5] == [*again, ("assistant", "F b 9"), malformed]
    assert sent[6] == [*sent[5], ("assistant", ""), ("user", f"{malformed[1]}\nreport")]
    assert sent[7] == [*first, ("assistant", None), ("tool", "so be it"), ("user", "z")]
    result = {"role": "tool", "tool_call_id": "call_1", "content": "so be it"}
    assert script.requests[7]["messages"][1:] == [replies[0], result, {"role": "user", "content": "z"}]
    assert sent[8] == [*sent[7], ("assistant", "no command"), ("user", "? ?"), ("user", "x\ncompact")]
    assert sent[9] == [("user", f"{INSTRUCTION}\nx 1 y . z 3")]
    assert sent[10] == [*sent[9], ("assistant", "F zz 1"), ("user", "? ?"), ("user", "x")]
    assert len(sent) == 11


def next_failing(query: agents_tasks.Query, directory: str) -> str:
    """The first module of a directory that fails once its first module is repaired."""
    modules = next(modules for d, modules in query.directories() if d == directory)
    return next((m.name for m in modules[1:] if m.kind), ".")


@pytest.mark.parametrize(
    "reply",
    [
        call(1, "repair w now"), call(1, "repair x soon"), call(1, "mend x now"), call(1, "x"), call(1, 7),
        call(1, "repair x now", "nobody"), {**call(1, ""), "tool_calls": [{"id": "call_1", "type": "function", "function": {
            "name": "agent", "arguments": "repair x now"}}]},
    ],
)
def test_a_call_that_makes_no_sense_is_answered_and_sends_nobody(reply: Message, start: Start) -> None:
    script = Script(lambda number, messages: (200, reply if number == 1 else "nothing"))
    assert start(script).returncode == 0
    assert len(script.requests) == 5
    assert script.requests[1]["messages"][-2] == {"role": "tool", "tool_call_id": "call_1", "content": "? ?"}


def test_the_main_agent_may_repair_itself(start: Start, query: agents_tasks.Query, tmp_path: Path) -> None:
    module = query.modules[4]
    script = Script(lambda number, messages: (200, f"F e {module.kind or 1}"))
    assert start(script).returncode == 0
    assert (tmp_path / "workspace" / "y" / "e.py").read_text() == module.source(kind=0)
    failing = sum(m.kind > 0 for m in query.modules[3:6] if m.name != "e")
    assert script.requests[1]["messages"][-2] == {"role": "user", "content": f"y {failing or '.'}"}
