"""The harness as a process against a small scripted server: what it sends, what it edits, what it retries."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grader
import harness
import pytest
import tasks
from scripted_endpoint import Answer, Script


@pytest.fixture
def task(tmp_path: Path) -> Path:
    tasks.write(tasks.generate(0, "train", 0), tmp_path / "task")
    return tmp_path / "task"


@pytest.fixture
def start(task: Path, tmp_path: Path) -> Iterator[Callable[[Script], subprocess.CompletedProcess[str]]]:
    """Runs the harness against a script in a fresh copy of the workspace."""
    scripts: list[Script] = []

    def run(script: Script) -> subprocess.CompletedProcess[str]:
        scripts.append(script)
        shutil.copytree(task / "workspace", tmp_path / "workspace", dirs_exist_ok=True)
        environment = {"PATH": os.defpath, "OPENAI_BASE_URL": script.url, "OPENAI_API_KEY": "secret",
                       "GYRE_TASK_INSTRUCTION": str(task / "instruction.md")}
        command = [sys.executable, "-I", "-S", harness.__file__]
        return subprocess.run(
            command, cwd=tmp_path / "workspace", env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    yield run
    for script in scripts:
        script.close()


def healer() -> Callable[[int, list[dict[str, str]]], Answer]:
    """A perfect policy: repairs what the report in its context says, and summarises what it was told."""
    known: dict[str, str] = {}

    def decide(number: int, messages: list[dict[str, str]]) -> Answer:
        words = messages[-1]["content"].split()
        if len(messages) == 1:
            known.clear()
            known.update(zip(words[-12::2], words[-11::2], strict=True))
        elif words[0] in known:
            known[words[0]] = words[1]
        if words[-1] == "compact":
            return 200, " ".join(f"{name} {state}" for name, state in known.items())
        name = next((name for name, state in known.items() if state != "."), "a")
        return 200, f"F {name} {known[name] if known[name] != '.' else 1}"

    return decide


@pytest.mark.parametrize("chunked", [False, True])
def test_commands_edit_real_files_until_the_hidden_tests_pass(
    chunked: bool, task: Path, tmp_path: Path, start: Callable[[Script], subprocess.CompletedProcess[str]]
) -> None:
    script = Script(healer(), chunked)
    ended = start(script)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert grader.grade(tmp_path / "workspace", task).reward == 1.0
    assert (script.connections, script.keys) == (1, {"Bearer secret"})
    assert {request["path"] for request in script.requests} == {"/e/7/v1/chat/completions"}
    assert [request["max_tokens"] for request in script.requests] == [4, 4, 4, 13, 4, 4, 4, 13, 4, 4, 4]


def test_the_summary_replaces_the_context(start: Callable[[Script], subprocess.CompletedProcess[str]]) -> None:
    texts = iter(["F a 1", "F b 2", "no such command", "the model's own words", *["F c 3"] * 7])
    script = Script(lambda number, messages: (200, next(texts)))
    assert start(script).returncode == 0
    contexts = [[message["content"] for message in request["messages"]] for request in script.requests]
    assert [len(context) for context in contexts] == [1, 3, 5, 7, 1, 3, 5, 7, 1, 3, 5]
    assert contexts[0][0] == f"{tasks.INSTRUCTION}\n{contexts[0][0].splitlines()[1]}"
    assert contexts[3][:-1] == [*contexts[2], "no such command"]
    assert contexts[3][-1].startswith("? ? ")
    assert contexts[3][-1].endswith("\ncompact")
    assert contexts[4] == [f"{tasks.INSTRUCTION}\nthe model's own words"]
    for before, after in zip(contexts, contexts[1:], strict=False):
        assert len(after) == 1 or after[: len(before)] == before


def test_an_absent_and_a_busy_server_get_the_identical_request_again(
    start: Callable[[Script], subprocess.CompletedProcess[str]],
) -> None:
    troubles = {2: 503, 3: 429, 4: 0, 7: 500}
    script = Script(lambda number, messages: (troubles.get(number, 200), "F a 1"))
    assert start(script).returncode == 0
    assert len(script.bodies) == 11 + len(troubles)
    assert script.bodies[1] == script.bodies[2] == script.bodies[3] == script.bodies[4]
    assert script.bodies[6] == script.bodies[7]
    assert script.connections == 2


def test_a_refusal_ends_the_harness_and_says_why(start: Callable[[Script], subprocess.CompletedProcess[str]]) -> None:
    script = Script(lambda number, messages: (401 if number == 3 else 200, "F a 1"))
    ended = start(script)
    assert ended.returncode == 1
    assert "status 401" in ended.stderr
    assert len(script.bodies) == 3


def test_a_base_url_of_another_scheme_is_refused_by_name() -> None:
    with pytest.raises(SystemExit, match="OPENAI_BASE_URL = 'ftp://x'"):
        harness.Endpoint("ftp://x", "key", "policy")
