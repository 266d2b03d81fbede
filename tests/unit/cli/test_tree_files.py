"""`gyre tree import` and `gyre tree export`: files to trees and back, through the command line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre.cli.main import app
from gyre.cli.tree_files import ImportOptions, export_tree, import_files, spell_bytes
from gyre.contracts.errors import ConfigError, GyreError
from typer.testing import CliRunner

DATA = Path(__file__).resolve().parents[2] / "data"
ATIF = DATA / "atif_terminus2/hello-world-context-summarization.trajectory.json"
REWIND = DATA / "claude_code/dag_compact_after_rewind_preserved.jsonl"


def gyre(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["tree", *map(str, arguments)])
    return done.exit_code, done.output


def test_an_imported_tree_is_shown_and_counted_in_one_line() -> None:
    code, said = gyre("import", ATIF)
    assert code == 0
    assert said.splitlines()[-1] == "tree calls=10 flat=8832 unique=2660 drawn=1030 targets=960 roots=1 unknown=0"
    assert "main-summary" in said
    code, said = gyre("import", ATIF, "--main-only")
    assert said.splitlines()[-1] == "tree calls=7 flat=7192 unique=2320 drawn=690 targets=620 roots=1 unknown=0"


def test_what_was_spelled_as_bytes_is_shown_as_text(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, said = gyre("import", REWIND, "--html", page)
    assert code == 0
    assert "Second attempt" in page.read_text()
    assert said.splitlines()[-1].startswith("tree calls=5 ")
    assert "Second attempt" in gyre("import", REWIND, "--text")[1]
    assert spell_bytes([257, *"né".encode(), 258, 79]) == "[user] né\n[assistant] O"


def test_what_was_imported_can_be_shown_exported_and_imported_again(tmp_path: Path) -> None:
    tree, packed, again = (tmp_path / name for name in ("t.msgpack", "t.json.gz", "again.msgpack"))
    assert gyre("import", ATIF, "--out", tree)[0] == 0
    assert gyre(tree)[0] == 0
    code, said = gyre("export", tree, packed)
    assert (code, said) == (0, f"{packed}: {packed.stat().st_size:,} bytes\n")
    assert gyre("import", packed, "--out", again)[0] == 0
    assert again.read_bytes() == tree.read_bytes()


def test_an_execution_of_a_run_is_exported(tmp_path: Path, written: Any) -> None:
    run, out, name = written.path, tmp_path / "out.json", "g00000-000-x00"
    (run / "run.toml").write_text("")
    (run / "blobs/trees").mkdir(parents=True, exist_ok=True)
    assert gyre("import", ATIF, "--out", run / f"blobs/trees/{name}.msgpack")[0] == 0
    assert gyre("export", name, out, "--run", run)[0] == 0
    assert json.loads(out.read_text())["format"] == "gyre-tree/1"
    code, said = gyre("export", "g00000-000-x77", out, "--run", run)
    assert (code, "has no tree of 'g00000-000-x77'" in said) == (2, True)


def test_errors_come_with_their_codes(tmp_path: Path) -> None:
    other, bad, broken = (tmp_path / name for name in ("other.json", "bad.json", "broken.msgpack"))
    other.write_text("{}")
    broken.write_text("{}")
    document = json.loads(ATIF.read_text())
    document["steps"][1]["metrics"]["logprobs"].pop()
    bad.write_text(json.dumps(document))
    for code, arguments, expected in (
            (2, ("import", other), "nothing here reads it"),
            (2, ("import", tmp_path / "gone.json"), "gone.json: No such file"),
            (1, ("import", bad, "--main-only"), "bad.json: step 2: metrics.logprobs: 59 log-probs of 60 output tokens"),
            (2, ("import", DATA / "prefix_hashes/subagent_traces_with_hashes.jsonl.xz", "--html", tmp_path / "p.html"),
             "several sessions"),
            (2, ("export", tmp_path / "gone.msgpack", tmp_path / "x.json"), "gone.msgpack: No such file"),
            (1, ("export", broken, tmp_path / "x.json"), "broken.msgpack: not MessagePack")):
        found, said = gyre(*arguments)
        assert (found, expected in said) == (code, True), said
    with pytest.raises(ConfigError):
        import_files([tmp_path / "gone.json"], ImportOptions())
    with pytest.raises(GyreError):
        import_files([bad], ImportOptions(main_only=True))
    with pytest.raises(ConfigError, match="no run under"):
        export_tree("x", tmp_path / "x.json", None, tmp_path)
    assert np.array_equal(import_files([ATIF], ImportOptions(policy="judge")).view.target, [])  # type: ignore[union-attr]
