"""An unmodified mini-swe-agent, from its own environment, through one execution to a scored workspace."""

import os
from pathlib import Path

import pytest
from harness_stage import check_solved, harness_stage, run_to_its_end

BIN = os.environ.get("GYRE_TEST_HARNESS_BIN", "")
SCRIPT = """
exec mini --yolo --exit-immediately --cost-limit 0 --model openai/policy --output "$HOME/trajectory.json" \
    --task "$(cat "$GYRE_TASK_INSTRUCTION")"
"""
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_SILENT_STARTUP": "1",
         "MSWEA_CONFIGURED": "true"}

pytestmark = [
    pytest.mark.harness,
    pytest.mark.skipif(not (Path(BIN) / "mini").exists() or not BIN, reason="run it by `make test-harness`"),
]


def bash(command: str) -> str:
    return f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{command}"}}}}\n</tool_call>'


TURNS = ("I look first.\n" + bash("ls -a"), bash("printf 'Hello, world!' > hello.txt"), bash("cat hello.txt"),
         bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"))


async def test_mini_swe_agent_solves_a_harbor_task(tmp_path: Path) -> None:
    environment = {**QUIET, "PATH": os.pathsep.join((BIN, os.defpath))}
    async with harness_stage(tmp_path, SCRIPT, TURNS, environment) as stage:
        said = await run_to_its_end(stage)
        await check_solved(stage, said, len(TURNS), tmp_path / "scratch")
