"""`gyre-tree/1`: nothing is lost, and nothing that was changed gets in."""

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executions import random_calls, settings
from gyre.contracts.codec import pack
from gyre.contracts.events import CallEvidence, Outcome, Sampling, VersionSpan
from gyre.trajectory.admission import admit
from gyre.trajectory.inspection import Header, TreeFile, tree_file, tree_from_bytes
from gyre.trajectory.portable.document import from_document, to_document
from gyre.trajectory.portable.fields import TraceError
from gyre.trajectory.portable.main import main
from gyre.trajectory.portable.records import records_of
from gyre.trajectory.reading import read_execution
from gyre.trajectory.record import CallLog
from gyre.trajectory.roles import ROLE_ORDERS, classifier
from gyre.trajectory.targets import Eligibility
from gyre.trajectory.workload import Workload, make


def file_of(log: CallLog, execution: str, eligibility: Eligibility, max_paths: int = 3) -> TreeFile:
    reading = read_execution(log.ordered(), eligibility, classifier("any"))
    admission = admit(reading.tree, reading.targets, reading.leaf_roles(), ROLE_ORDERS["paper"], max_paths, ("run", execution))
    outcome = Outcome(execution, "scored", "finished", 0.1, -1 / 3, len(log), 0, 0, reason='"quoted" and ünïcode')
    header = Header("q", "g00000-000", "train", "policy", reading.fill(outcome, admission, "zero_advantage"))
    return tree_file(header, reading.tree, reading.targets, admission, reading.roles)


def random_file(seed: int) -> tuple[TreeFile, list[Any]]:
    """A random execution with everything a record may say, under a random rule of what is a target."""
    script, rng = random_calls(seed), np.random.default_rng(seed)
    script.records = [replace(
        r, logprobs=-rng.random(len(r.output_ids), dtype=np.float32) * np.float32(10.0 ** rng.integers(-6, 6)),
        sampling=Sampling(0.7, 0.95, 20, seed), cell=int(rng.integers(3)), lineage=str(rng.choice(["main", "a", "b"])),
        evidence=CallEvidence({"x-session": "é\n"}, None, (script.records[0].call,) * (n % 2), None, n % 3 == 0))
        for n, r in enumerate(script.records)]
    lost = frozenset(r.call for r in script.records if rng.random() < 0.2)
    log = script.log()
    return file_of(log, f"x{seed}", Eligibility("policy", lost, bool(seed % 5 == 0))), script.records


@pytest.mark.parametrize("seed", range(200))
def test_export_and_import_give_the_same_bytes(seed: int) -> None:
    file, records = random_file(seed)
    document = to_document(file)
    again = from_document(document, "f")
    assert again.to_bytes() == file.to_bytes()
    assert to_document(again) == document
    assert [pack(r) for r in records_of(file)] == [pack(r) for r in records]


def test_a_long_execution_and_an_empty_one_survive() -> None:
    log = CallLog()
    for record in make(Workload(turns=300, strip_thinking=20, compactions=2, sub_agents=4, sub_agent_turns=5)).records:
        log.add(record)
    for one in (log, CallLog()):
        file = file_of(one, "g00000-000-x00", Eligibility("policy"))
        assert from_document(to_document(file), "f").to_bytes() == file.to_bytes()


@pytest.fixture
def document(script: Any) -> dict[str, Any]:
    calls = (script("x").call([1, 2], [10, 11]).call([1, 2, 10, 11, 3], [12, 13], finish_reason="length")
             .call([1, 2, 10], [14], model="judge").call([7], [8]))
    return json.loads(to_document(file_of(calls.log(), "x", Eligibility("policy"), max_paths=1)))


def refusal(document: dict[str, Any]) -> str:
    with pytest.raises(TraceError) as caught:
        from_document(json.dumps(document).encode(), "f.json")
    return str(caught.value)


def changed(number: int, field: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        document["records"][number][field] = value
    return change


@pytest.mark.parametrize(("change", "call", "reason"), [
    (changed(1, "prompt_delta", [4]), "x-c0001", "digest"),
    (changed(1, "output_ids", [12, 99]), "x-c0001", "digest"),
    (changed(1, "digest", "0" * 32), "x-c0001", "check"),
    (changed(1, "logprobs", [-0.01, -0.03]), "x-c0001", "check"),
    (changed(1, "behaviour_logprobs", [-0.01, -0.03]), "x-c0001", "check"),
    (changed(1, "logprobs", [-0.01]), "x-c0001", "logprobs: 1 log-probs of 2"),
    (changed(1, "logprobs", [-0.01, 5.0]), "x-c0001", r"logprobs\[1\]: 5.0"),
    (changed(1, "output_ids", "12"), "x-c0001", "output_ids: \"12\"; expected a list of integers"),
    (changed(1, "output_ids", [12, -1]), "x-c0001", "output_ids"),
    (changed(1, "output_ids", [12, 2 ** 31]), "x-c0001", "output_ids: id 2147483648; at most 2147483647"),
    (changed(1, "keep_len", 3), "x-c0001", "check"),
    (changed(1, "finish_reason", "stop"), "x-c0001", "check"),
    (changed(1, "finish_reason", "bored"), "x-c0001", "finish_reason"),
    (changed(1, "spans", []), "x-c0001", "check"),
    (changed(1, "model", "judge"), "x-c0001", "check"),
    (changed(1, "check", ""), "x-c0001", "check"),
    (changed(0, "call", "x-c0001"), "x-c0001", "check"),
    (lambda d: d["records"][2]["role"].update(role_class="sub-agent"), "x-c0002", "check"),
    (lambda d: d["records"][2]["evidence"].update(continues=True), "x-c0002", "check"),
    (lambda d: d["records"][2].pop("digest"), "x-c0002", "digest"),
    (lambda d: d["records"].pop(0), "x-c0002", "unknown-base: call x-c0001: continues 'x-c0000'"),
    (lambda d: d["records"].append(d["records"][2]), "x-c0002", "recorded twice"),
])
def test_what_was_changed_is_refused_by_the_call_and_the_reason(document: dict[str, Any], change: Any, call: str,
                                                                reason: str) -> None:
    change(document)
    said = refusal(document)
    assert said.startswith("f.json: ")
    assert call in said or "unknown-base" in said
    assert re.search(reason, said), said


@pytest.mark.parametrize(("change", "reason"), [
    (lambda d: d["records"].pop(3), "header.outcome.num_unique_tokens: 10, the records give 8"),
    (lambda d: d["records"].reverse(), "not in the order of index"),
    (lambda d: d["owner"].pop(), "owner: 3 numbers of 1 paths; expected one for each of 4 segments"),
    (lambda d: d["owner"].__setitem__(0, 9), "owner"),
    (lambda d: d["paths"][0].update(num_owned=9), "header.outcome.num_trained_targets: 4, the records give 9"),
    (lambda d: d["paths"][0].update(leaf=0), "paths[0]: leaf 0 with 4 targets does not fit the tree"),
    (lambda d: d["owner"].__setitem__(3, 0), "paths[0]: leaf 1 with 4 targets does not fit the tree"),
    (lambda d: d["header"]["outcome"].update(num_targets=1), "header.outcome.num_targets"),
    (lambda d: d["header"].update(policy="other"), "excluded: '', by its record 'model'"),
    (lambda d: d["header"].pop("outcome"), "header: Header: Object missing required field `outcome`"),
    (lambda d: d.update(format="gyre-tree/2"), "format 'gyre-tree/2'; this release reads gyre-tree/1"),
    (lambda d: d.update(records={}), "Expected `array`, got `object` - at `records`"),
])
def test_what_does_not_fit_together_is_refused(document: dict[str, Any], change: Any, reason: str) -> None:
    change(document)
    assert reason in refusal(document)


def test_a_file_that_breaks_off_names_the_call(document: dict[str, Any]) -> None:
    text = json.dumps(document).encode()
    at = text.index(b'"x-c0002"') + 200
    with pytest.raises(TraceError, match=r"f.json: .*\(in or after call x-c0002\)"):
        from_document(text[:at], "f.json")


def test_unknown_fields_are_ignored(document: dict[str, Any]) -> None:
    before = from_document(json.dumps(document).encode(), "f").to_bytes()
    document["later"] = {"a": [1]}
    document["header"]["later"] = document["header"]["outcome"]["later"] = 1
    for record in document["records"]:
        record["later"] = record["sampling"]["later"] = record["evidence"]["later"] = record["role"]["later"] = "x"
    assert from_document(json.dumps(document).encode(), "f").to_bytes() == before


def test_what_json_has_no_number_for_is_refused_at_the_call(script: Any) -> None:
    bad = script("x").call([1], [2], logprobs=[-0.5])
    bad.records[0] = replace(bad.records[0], logprobs=np.array([-np.inf], np.float32))
    with pytest.raises(TraceError, match="call x-c0000: logprobs: not finite"):
        to_document(file_of(bad.log(), "x", Eligibility("policy")))


def test_the_trees_that_a_group_leaves_survive(script: Any, story: Any) -> None:
    """Admitted, lost and quarantined executions, as they lie in the blob store."""
    from gyre.runtime.effects import WriteBlob
    from gyre.trajectory.core import TrajectoryCore

    winner = script("g00000-000-x00").call([1, 2], [10, 11], spans=(VersionSpan(0, 1, 3), VersionSpan(1, 2, 4))).call(
        [1, 2, 10, 11, 3], [12]).call([5], [6], finish_reason="abort")
    broken = script("g00000-000-x01").call([1, 2], [30]).call([1, 2], [31], digest="0" * 32)
    told, core = story([winner, broken], [1.0, 0.0]), TrajectoryCore(settings())
    state, blobs = core.initial(), []
    for fact in told.facts():
        state, effects = core.step(state, fact, 0.0)
        blobs += [e.data for e in effects if isinstance(e, WriteBlob) and e.path.startswith("trees/")]
    assert len(blobs) == 2
    for data in blobs:
        assert from_document(to_document(tree_from_bytes(data)), "f").to_bytes() == data


def test_the_tool_writes_and_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, _ = random_file(3)
    tree, packed, plain, back = (tmp_path / name for name in ("t.msgpack", "t.json.gz", "t.json", "back.msgpack"))
    tree.write_bytes(file.to_bytes())
    for out in (packed, plain):
        assert main(["export", str(tree), "--out", str(out)]) == 0
        assert main(["import", str(out), "--out", str(back)]) == 0
        assert back.read_bytes() == tree.read_bytes()
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "from gyre-tree session=x3 files=1 unit=token"
    assert said[1].startswith(f"tree calls={len(file.calls)} flat=")
    tree.write_bytes(b"no tree")
    assert main(["export", str(tree), "--out", str(plain)]) == 1
