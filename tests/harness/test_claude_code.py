"""An unmodified Claude Code, installed apart, through one execution to a scored workspace, over Anthropic Messages."""

import json
import os
from pathlib import Path

import pytest
from gyre.trajectory.record import CallLog
from gyre.trajectory.roles import classifier
from harness_stage import check_solved, harness_stage, records_of, run_to_its_end

BIN = os.environ.get("GYRE_TEST_HARNESS_BIN", "")
SCRIPT = """
exec claude --print --dangerously-skip-permissions --model policy "$(cat "$GYRE_TASK_INSTRUCTION")"
"""
QUIET = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1", "IS_SANDBOX": "1",
         "ANTHROPIC_SMALL_FAST_MODEL": "policy", "ANTHROPIC_DEFAULT_HAIKU_MODEL": "policy"}

pytestmark = [
    pytest.mark.harness,
    pytest.mark.skipif(not (Path(BIN) / "claude").exists() or not BIN, reason="run it by `make test-harness` (needs npm)"),
]


def use(tool: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def bash(command: str) -> str:
    return use("Bash", command=command, description="does it")


TURNS = ("I look first.\n" + bash("ls -a"), bash("printf 'Hello, world!' > hello.txt"), bash("cat hello.txt"), "It is done.")


async def test_claude_code_solves_a_harbor_task(tmp_path: Path) -> None:
    environment = {**QUIET, "PATH": os.pathsep.join((BIN, os.defpath))}
    async with harness_stage(tmp_path, SCRIPT, TURNS, environment) as stage:
        said = await run_to_its_end(stage)
        records = await check_solved(stage, said, len(TURNS), tmp_path / "scratch")
        assert "It is done." in said
        assert all("x-claude-code-session-id" in r.evidence.tags for r in records)


async def test_a_sub_agent_of_claude_code_is_one(tmp_path: Path) -> None:
    """Its calls make a context of their own, and the main agent goes on where it was."""
    turns = (use("Agent", description="write it", prompt="Write the file.", subagent_type="general-purpose"),
             bash("printf 'Hello, world!' > hello.txt"), "I wrote it.", "It is done.")
    async with harness_stage(tmp_path, SCRIPT, turns, {**QUIET, "PATH": os.pathsep.join((BIN, os.defpath))}) as stage:
        said = await run_to_its_end(stage)
        [end] = stage.ends()
        assert (end.ending, end.exit_code, end.num_calls, end.num_harness_errors) == ("finished", 0, 4, 0), said[-3000:]
        assert stage.preserved()["hello.txt"] == b"Hello, world!"
        records = records_of(stage)
        log = CallLog()
        assert all(log.add(r) for r in records) and log.refusal is None
        roles = classifier("any").classify(log.ordered())
        assert [r.role_class for r in roles] == ["main", "sub-agent", "sub-agent", "main"]
        assert {r.known_by for r in roles[1:3]} == {"harness"}
        main, _, _, last = records
        assert last.base_call == main.call and last.keep_len == main.prompt_len + len(main.output_ids)
