"""Files that are not what they say: the message names the file, the step and the field."""

import contextlib
import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from gyre.contracts.errors import GyreError
from gyre.trajectory.portable.fields import TraceError, UnknownFormat
from gyre.trajectory.portable.formats import Imported, imported, unpacked
from gyre.trajectory.portable.main import main
from gyre.trajectory.portable.session import Options, Trace, is_inside

PAIR = {"prompt_token_ids": [1, 2], "completion_token_ids": [3, 4], "logprobs": [-0.1, -0.2]}


def read(data: bytes, name: str = "f.json", options: Options | None = None, **files: bytes) -> list[Imported]:
    return list(imported([Trace(name, data, {f"{k}.json": v for k, v in files.items()}.get)], options or Options()))


def atif(metrics: object = None, **fields: Any) -> bytes:
    steps = [{"step_id": 1, "source": "user", "message": "u"}, {"step_id": 2, "source": "agent", "message": "m",
                                                               "metrics": PAIR if metrics is None else metrics}]
    document = {"schema_version": "ATIF-v1.5", "session_id": "s", "agent": {"name": "a"}, "steps": steps}
    return json.dumps(document | fields).encode()


def ref(path: object) -> list[dict]:
    results = [{"subagent_trajectory_ref": [{"session_id": "sub", "trajectory_path": path}]}]
    return [{"step_id": 7, "source": "system", "message": "", "observation": {"results": results}}]


@pytest.mark.parametrize(("data", "said"), [
    (atif({}), r"f.json: step 2: metrics.prompt_token_ids is not there. .*--bytes"),
    (atif(PAIR | {"completion_token_ids": None}), r"f.json: step 2: metrics.completion_token_ids is not there"),
    (atif(PAIR | {"logprobs": None}), r"f.json: step 2: metrics.logprobs: it is not there; expected a list of 2 numbers"),
    (atif(PAIR | {"logprobs": [-0.1]}), r"f.json: step 2: metrics.logprobs: 1 log-probs of 2 output tokens"),
    (atif(PAIR | {"logprobs": [-0.1, 0.5]}), r"f.json: step 2: metrics.logprobs\[1\]: 0.5; a log-prob is finite and at most 0"),
    (atif(PAIR | {"logprobs": [-0.1, float("nan")]}), r"f.json: steps\[1\].metrics.logprobs\[1\] is nan"),
    (atif(PAIR | {"logprobs": [float("-inf"), 0]}), r"f.json: steps\[1\].metrics.logprobs\[0\] is -inf"),
    (atif(PAIR | {"logprobs": [-0.1, "x"]}), r"step 2: metrics.logprobs: \[-0.1, \"x\"\]; expected a list of 2 numbers"),
    (atif(PAIR | {"prompt_token_ids": [1, 2.5]}), r"f.json: step 2: metrics.prompt_token_ids: \[1, 2.5\]; expected a list"),
    (atif(PAIR | {"prompt_token_ids": [[1], 2]}), r"f.json: step 2: metrics.prompt_token_ids: "),
    (atif(PAIR | {"prompt_token_ids": {"a": 1}}), r"f.json: step 2: metrics.prompt_token_ids: "),
    (atif(PAIR | {"prompt_token_ids": [-1]}), r"f.json: step 2: metrics.prompt_token_ids: \[-1\]"),
    (atif(PAIR | {"prompt_token_ids": [2**31]}), r"metrics.prompt_token_ids: id 2147483648; at most 2147483647"),
    (atif(PAIR | {"prompt_token_ids": [10**40]}), r"metrics.prompt_token_ids: id \d+; at most 2147483647"),
    (atif([]), r"f.json: Expected `object \| null`, got `array` - at `steps\[1\].metrics`"),
    (atif(steps=[{"step_id": 1}]), r"f.json: Object missing required field `source` - at `steps\[0\]`"),
    (atif(steps=[{"step_id": "1", "source": "agent"}]), r"Expected `int`, got `str` - at `steps\[0\].step_id`"),
    (atif(agent="a"), r"Expected `object`, got `str` - at `agent`"),
    (atif(schema_version="ATIF-v2.0"), r"schema_version 'ATIF-v2.0'; expected ATIF-v1.x"),
    (atif(steps=ref("gone.json")), r"f.json: step 7: subagent_trajectory_ref: gone.json is not there; put it beside f.json"),
    (atif(steps=ref("../x.json")), r"f.json: step 7: subagent_trajectory_ref: '../x.json'; expected a path relative"),
    (atif(steps=ref(None)), r"f.json: step 7: subagent_trajectory_ref: 'sub' has no trajectory_path; --main-only"),
    (atif(continued_trajectory_ref="gone.json"), r"f.json: continued_trajectory_ref: gone.json is not there"),
    (atif()[:-20], r"f.json: .*truncated"),
])
def test_atif(data: bytes, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        read(data)


def test_atif_beside() -> None:
    with pytest.raises(TraceError, match=r"sub.json: step 2: metrics.logprobs: 1 log-probs"):
        read(atif(steps=ref("sub.json")), sub=atif(PAIR | {"logprobs": [-1]}))
    with pytest.raises(TraceError, match=r"sub.json: named twice"):
        read(atif(steps=ref("sub.json")), sub=atif(steps=ref("sub.json")))
    with pytest.raises(TraceError, match=r"sub.json: Object missing required field"):
        read(atif(steps=ref("sub.json")), sub=b"{}")
    with pytest.raises(TraceError, match=r"f.json: step 1: source 'alien'"):
        read(atif(steps=[{"step_id": 1, "source": "alien"}]), options=Options(as_bytes=True))


def swe(*steps: Any) -> bytes:
    return json.dumps({"trajectory": steps}).encode()


USER = {"role": "user", "content": "u"}


@pytest.mark.parametrize(("data", "said"), [
    (swe({"response": "a"}), r"f.json: trajectory\[0\]: neither query nor messages; what its call was shown is not known"),
    (swe({"response": "a", "messages": [USER]}), r"f.json: trajectory\[0\].messages: the answer of the step is not among them"),
    (swe({"response": "a", "query": [{"role": "alien"}]}), r"trajectory\[0\]: message 0: role 'alien'; expected one of system"),
    (swe({"response": "a", "query": [{"content": "u"}]}), r"missing required field `role` - at `trajectory\[0\].query\[0\]`"),
    (swe({"response": 7, "query": [USER]}), r"Expected `str`, got `int` - at `trajectory\[0\].response`"),
    (swe({"response": "a", "query": [USER]}, 3), r"Expected `object`, got `int` - at `trajectory\[1\]`"),
    (b'{"trajectory": {}}', r"Expected `array`, got `object` - at `trajectory`"),
])
def test_swe_agent(data: bytes, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        read(data)


def lines(*rows: dict[str, Any]) -> bytes:
    return b"\n".join(json.dumps({"parentUuid": None, "sessionId": "s"} | row).encode() for row in rows)


def said_by(kind: str, uuid: str, parent: str | None = None, content: object = "x", **fields: Any) -> dict[str, Any]:
    return {"type": kind, "uuid": uuid, "parentUuid": parent, "message": {"content": content}} | fields


COMPACT = {"type": "system", "uuid": "c", "compactMetadata": {"preservedMessages": {"anchorUuid": "u", "uuids": ["gone"]}}}


@pytest.mark.parametrize(("data", "said"), [
    (lines(said_by("user", "u"), said_by("assistant", "a", "gone")),
     r"f.json: line 2: parentUuid: 'gone' is not in the file; what the call was shown is not known"),
    (lines(said_by("assistant", "a", "b"), said_by("user", "b", "c"), said_by("user", "c", "b")),
     r"f.json: line 1: parentUuid: its ancestors go round in a circle at 'b'"),
    (lines(said_by("assistant", "a", "a")), r"f.json: line 1: parentUuid: its ancestors go round in a circle"),
    (lines({"type": "user", "uuid": "u"}), r"f.json: line 1: message is not there"),
    (lines(said_by("user", "u"), {"type": "assistant", "uuid": "a", "message": {}}),
     r"f.json: line 2: Object missing required field `content` - at `message`"),
    (lines({"uuid": "u"}), r"f.json: line 1: Object missing required field `type`"),
    (lines(said_by("user", "u") | {"uuid": 7}), r"f.json: line 1: Expected `str \| null`, got `int` - at `uuid`"),
    (lines(said_by("user", "u"), said_by("assistant", "a", "u", content=7)), r"f.json: line 2: message.content: int; expected"),
    (lines(COMPACT, said_by("user", "u", "c"), said_by("assistant", "a", "u")),
     r"f.json: line 2: preservedMessages: 'gone' is not in the file"),
    (lines(said_by("user", "u")) + b"\n{\"type\": ", r"f.json: line 2: .*truncated"),
])
def test_claude_code(data: bytes, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        read(data)


def hashed(*requests: Any, **fields: Any) -> bytes:
    return json.dumps({"id": "t", "block_size": 64, "requests": requests} | fields).encode()


@pytest.mark.parametrize(("data", "said"), [
    (hashed({"type": "n", "in": 1}), r"f.json: t: request 0: hash_ids: it is not there; expected a list of integers"),
    (hashed({"type": "n", "hash_ids": [1, "2"]}), r"f.json: t: request 0: hash_ids: "),
    (hashed({"type": "n", "in": "x", "hash_ids": []}), r"Expected `int`, got `str` - at `requests\[0\].in`"),
    (hashed({"type": "subagent", "requests": []}), r"f.json: t: request 0: agent_id is not there"),
    (hashed({"type": "subagent", "agent_id": "a", "requests": [{"type": "n"}]}), r"f.json: t: request 0.0: hash_ids"),
    (hashed(block_size="64"), r"Expected `int`, got `str` - at `block_size`"),
    (hashed() + b"\n" + hashed(id=7), r"f.json: line 2: Expected `str`, got `int` - at `id`"),
])
def test_prefix_hashes(data: bytes, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        read(data)


@pytest.mark.parametrize("data", [
    b"", b"\x00\xff", b"[]", b"{}", b"text", b'{"messages": []}', b'{"timestamp": 0, "hash_ids": [1]}', b"[" * 100_000,
    b'{"a":' * 100_000])
def test_what_nothing_reads_lists_what_is_read(data: bytes) -> None:
    with pytest.raises(UnknownFormat, match=r"f.json: nothing here reads it(.|\n)*ATIF(.|\n)*Claude Code(.|\n)*gyre-tree/1"):
        read(data)


@pytest.mark.parametrize("data", [
    b'{"schema_version": "ATIF-v1.5", "steps": ' + b"[" * 100_000,
    atif()[:-1] + b', "extra": ' + b'{"a":' * 100_000,
    hashed({"type": "n", "hash_ids": [1]})[:-3],
    b'{"format": "gyre-tree/1", "records": ' + b"[" * 100_000,
])
def test_deep_nests_and_stumps_are_refused(data: bytes) -> None:
    with pytest.raises(TraceError, match=r"f.json: "):
        read(data)


def test_deep_sub_agents_need_no_recursion() -> None:
    """Nested as deep as the JSON reader goes; walking them is a loop."""
    request: dict[str, Any] = {"type": "n", "hash_ids": [1]}
    for _ in range(150):
        request = {"type": "subagent", "agent_id": "a", "requests": [request]}
    (one,) = read(hashed(request))
    assert one.facts["sub_agents"] == 150


def test_packed_files_that_break_off() -> None:
    for data in (gzip.compress(atif())[:-10], b"\x1f\x8b", b"\xfd7zXZ\0broken"):
        with pytest.raises(TraceError, match="f.json: cannot be unpacked"):
            unpacked(Trace("f.json", data))


def test_paths_that_lead_out_are_none() -> None:
    assert [is_inside(p) for p in ("a.json", "a/b.json", "", "/a", "../a", "a/../../b", "\\\\host\\a", "c:/a")] == [
        True, True, *[False] * 6]


def test_the_tool_ends_with_2_for_what_was_asked_and_1_for_what_was_found(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, many, other = (tmp_path / name for name in ("good.json", "bad.json", "many.json", "other.json"))
    good.write_bytes(atif())
    bad.write_bytes(atif(PAIR | {"logprobs": [1]}))
    many.write_bytes(hashed(id="one") + b"\n" + hashed({"type": "n", "hash_ids": [5, 6]}, id="two"))
    other.write_bytes(b"{}")
    out = tmp_path / "out.msgpack"
    for code, arguments, said in (
            (0, ["import", str(good)], r"^tree calls=1 flat=4 unique=4 drawn=2 targets=2 roots=1 unknown=0$"),
            (0, ["import", str(good), "--policy", "m9"], r"^tree calls=1 flat=4 unique=4 drawn=0 targets=0 roots=1 unknown=0$"),
            (1, ["import", str(bad)], r"bad.json: step 2: metrics.logprobs"),
            (2, ["import", str(other)], r"nothing here reads it"),
            (2, ["import", str(tmp_path / "gone.json")], r"gone.json: No such file"),
            (2, ["import", str(many), "--out", str(out)], r"2 sessions in the files; choose one with --session: one, two"),
            (2, ["import", str(many), "--session", "three"], r"--session three: no such session"),
            (0, ["import", str(many), "--session", "two", "--out", str(out)], r"^tree calls=1 flat=2"),
            (2, ["export", str(tmp_path / "gone.msgpack"), "--out", str(out)], r"gone.msgpack: No such file"),
            (1, ["export", str(good), "--out", str(out)], r"not MessagePack|TreeFile")):
        assert main(arguments) == code, arguments
        heard = capsys.readouterr()
        assert re.search(said, heard.out + heard.err, re.MULTILINE), (arguments, heard)


GONE = (said_by("user", "u", "c"), said_by("user", "gone"), said_by("assistant", "a", "u"))
SAMPLES = (atif(), swe({"response": "a", "query": [USER]}), lines(COMPACT, *GONE),
           hashed({"type": "n", "in": 9, "hash_ids": [1, 2]}))
JUNK = (b"null", b"-1", b"1e999", b"NaN", b'"x"', b"[]", b"{}", b"99999999999999999999", b"\xff", b'"\\ud800"', b"0.5")


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_file_is_read_or_refused_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    for data in SAMPLES:
        values = [match.span() for match in re.finditer(rb'"[^"]*"|-?\d[\d.]*|null', data)]
        for _ in range(25):
            start, stop = rng.choice(values) if rng.random() < 0.8 else (at := rng.randrange(len(data)), at + rng.randint(0, 9))
            with contextlib.suppress(GyreError):
                read(data[:start] + rng.choice(JUNK) + data[stop:], options=Options(as_bytes=rng.random() < 0.5))
