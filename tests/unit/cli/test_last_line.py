"""What the launcher says of a process that ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from gyre.cli.launcher import last_line


@pytest.mark.parametrize("said, last", [
    ("starting\nvllm is not installed; make test-engines\n\n", "vllm is not installed; make test-engines"),
    ("x" * 10_000 + "\nthe reason", "the reason"),
    ("\n \n", "it said nothing"),
    ("", "it said nothing"),
])  # fmt: skip
def test_the_last_line_that_says_something(tmp_path: Path, said: str, last: str) -> None:
    output = tmp_path / "engine-0.out"
    output.write_text(said)
    assert last_line(output) == last
