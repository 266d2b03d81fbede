"""`gyre tree` as it is typed: which run, which execution, what is said when there is none, and a run that is up."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest
from gyre.cli.main import app
from gyre.cli.run_dir import RunDir, write_pids
from gyre.cli.terminal import harmless
from gyre.cli.tree_view.source import Place, ask, decoder, find_place, open_tree
from gyre.contracts.errors import ConfigError
from gyre.proto.trajectory.v1 import service_pb2, service_pb2_grpc
from gyre.runtime.blobs import DirectoryBlobs
from gyre.runtime.config import load_deployment
from gyre.runtime.settings import to_toml
from long_execution import file_of, long_tree, small_records
from typer.testing import CliRunner

KNOWN = "g00000-000-x00"


@pytest.fixture
def run(written):
    """The synthetic run with its configuration, so that it can be opened."""
    (written.path / "run.toml").write_text(to_toml(written.config))
    return written.path


def gyre(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["tree", *map(str, words)])
    return result.exit_code, " ".join(result.output.split("\n"))


def test_an_execution_of_the_newest_run_is_printed(run):
    code, text = gyre(KNOWN, "--runs", run.parent, "--calls")
    assert code == 0, text
    assert "the newest under" in text
    assert f"execution    {KNOWN}" in text
    assert "main + summary" in text or "main-summary" in text


def test_the_explicit_form_is_the_same(run):
    assert gyre("show", KNOWN, "--run", run) == gyre(KNOWN, "--run", run)


def test_texts_are_spelled_by_the_policys_tokenizer(run):
    code, text = gyre(KNOWN, "--run", run, "--text")
    assert code == 0
    assert "F a 3 <|end|>" in text
    assert "repair the modules" in gyre(KNOWN, "--run", run, "--path", "0")[1]


def test_what_others_wrote_cannot_steer_the_terminal(tmp_path):
    """A title, a colour, a deletion of the screen, a line that is turned around."""
    said, file = "\x1b]0;title\x07\x1b[31mred\x9b2J\x7f\u202eback", tmp_path / "one.msgpack"
    tree = file_of(small_records())
    file.write_bytes(replace(tree, calls=tuple(replace(call, agent=said) for call in tree.calls)).to_bytes())
    for words in (("--calls", "--width", 300), ("--path", "call:0")):
        code, text = gyre("show", file, *words)
        assert code == 0, text
        assert "red\ufffd2J␡\ufffdback" in text
        assert not [c for c in text if ord(c) < 32 or 127 <= ord(c) < 160 or c == "\u202e"]
    assert harmless(said) == "␛]0;title␇␛[31mred\ufffd2J␡\ufffdback"
    assert harmless("a\ttab, é, 漢\n") == "a\ttab, é, 漢\n"


def test_without_a_tokenizer_ids_are_shown(run):
    for path in (run / "start").iterdir():
        path.unlink()
    assert decoder(find_place(run, run.parent)) is None
    assert "F a 3" not in gyre(KNOWN, "--run", run, "--text")[1]


def test_a_page_is_written(run, tmp_path):
    code, text = gyre(KNOWN, "--run", run, "--html", tmp_path / "x.html")
    assert code == 0, text
    assert "F a 3 <|end|>".replace("<", "\\u003c") in (tmp_path / "x.html").read_text()


def test_a_file_of_its_own_is_shown(tmp_path):
    path = tmp_path / "one.msgpack"
    path.write_bytes(file_of(small_records()).to_bytes())
    assert "g00007-003-x02" in gyre(path)[1]
    path.write_bytes(b"no tree")
    code, text = gyre(path)
    assert code == 2
    assert "no tree can be read" in text
    assert gyre(tmp_path / "missing.msgpack")[0] == 2


def test_the_list_names_every_tree(run):
    code, text = gyre("--list", "--run", run)
    assert code == 0
    assert text.count("train-0") == 2 * 8 + 6 * 2 * 3
    assert "main 2, summary 1" in text
    _, one = gyre("--list", "g00003-001", "--run", run)
    assert one.count("train-0") == 3


@pytest.mark.parametrize("words", [("g00000-000-x0",), ("g00000-000-x09",)])
def test_an_unknown_execution_is_answered_with_those_like_it(run, words):
    code, text = gyre(*words, "--run", run)
    assert code == 2
    assert f"like it: {KNOWN}" in text
    assert "gyre tree --list" in text


@pytest.mark.parametrize("words", [(), ("nothing-like-it",)])
def test_without_a_like_execution_those_of_the_last_burst_are_named(run, words):
    code, text = gyre(*words, "--run", run)
    assert code == 2
    assert "of the last burst: g00005-000-x00" in text


def test_no_run_and_no_id_are_refused(run, tmp_path):
    code, text = gyre(KNOWN, "--runs", tmp_path / "none")
    assert code == 2
    assert "no run under" in text
    assert "is not an id" in gyre("a/b", "--run", run)[1]


def test_a_word_that_is_no_command_goes_to_show():
    result = CliRunner().invoke(app, ["tree", "--help"])
    assert result.exit_code == 0
    assert "show" in result.output


# ---------------------------------------------------------------- a run that is up


class Service(service_pb2_grpc.TrajectoryServiceServicer):
    """Answers with one tree."""

    def __init__(self, execution: str, answer: bytes) -> None:
        self.execution, self.answer = execution, answer

    async def InspectTree(self, request, context):
        if request.execution != self.execution:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no tree is known")
        return service_pb2.InspectTreeResponse(json=self.answer)


@pytest.fixture
async def address():
    """A trajectory service that has the open execution `open-x00`."""
    server = grpc.aio.server()
    service_pb2_grpc.add_TrajectoryServiceServicer_to_server(Service("open-x00", long_tree().to_json()), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.fixture
def launcher(run):
    """A process that counts as the run's."""
    process = subprocess.Popen([sys.executable, "-c", "input()", "gyre"], stdin=subprocess.PIPE)
    write_pids(RunDir(run), {})
    (run / "pids.json").write_text(json.dumps({"launcher": process.pid}))
    yield process
    process.communicate(b"\n")


def place(run: Path, address: str) -> Place:
    text = (run / "deployment.toml").read_text()
    (run / "deployment.toml").write_text(text.replace("unused:1", address))
    return Place(RunDir(run), "named", load_deployment(run / "deployment.toml"), DirectoryBlobs(run / "blobs"))


async def test_an_open_execution_is_asked_of_the_service(run, launcher, address):
    view = await open_tree(place(run, address), "open-x00")
    assert len(view.calls) == 312
    assert not view.has_tokens
    assert json.loads(await ask(address, "open-x00"))["header"]["query"] == "train-0042"


async def test_an_execution_that_the_service_does_not_know_either(run, launcher, address):
    with pytest.raises(ConfigError, match=r"trajectory service says: no tree is known; of \d+ trees"):
        await open_tree(place(run, address), "open-x01")


async def test_a_run_that_is_not_up_is_not_asked(run, address):
    with pytest.raises(ConfigError, match="has no tree of 'open-x00'; of"):
        await open_tree(place(run, address), "open-x00")
