"""An unmodified Codex, installed apart, through one execution to a scored workspace, over OpenAI Responses."""

import json
import os
from pathlib import Path

import pytest
from harness_stage import check_solved, harness_stage, run_to_its_end

BIN = os.environ.get("GYRE_TEST_HARNESS_BIN", "")
SCRIPT = """
exec codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --model policy \\
    --config model_provider=gyre --config model_providers.gyre.name=gyre \\
    --config "model_providers.gyre.base_url=\\"$OPENAI_BASE_URL\\"" --config model_providers.gyre.env_key=OPENAI_API_KEY \\
    --config model_providers.gyre.wire_api=responses --config model_providers.gyre.supports_websockets=false \\
    "$(cat "$GYRE_TASK_INSTRUCTION")" < /dev/null
"""

pytestmark = [
    pytest.mark.harness,
    pytest.mark.skipif(not (Path(BIN) / "codex").exists() or not BIN, reason="run it by `make test-harness` (needs npm)"),
]


def run(command: str) -> str:
    said = json.dumps({"name": "exec_command", "arguments": {"cmd": command}})
    return f"<tool_call>\n{said}\n</tool_call>"


TURNS = ("I look first.\n" + run("ls -a"), run("printf 'Hello, world!' > hello.txt"), run("cat hello.txt"), "It is done.")


async def test_codex_solves_a_harbor_task(tmp_path: Path) -> None:
    environment = {"PATH": os.pathsep.join((BIN, os.defpath))}
    async with harness_stage(tmp_path, SCRIPT, TURNS, environment) as stage:
        said = await run_to_its_end(stage)
        records = await check_solved(stage, said, len(TURNS), tmp_path / "scratch")
        assert "It is done." in said
        assert all("x-codex-turn-metadata" in r.evidence.tags for r in records)
