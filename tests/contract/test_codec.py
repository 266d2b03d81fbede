"""Envelope and bodies: golden bytes, tolerance for newer releases, refusal of what is broken."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest
from gyre.contracts import codec
from gyre.contracts import events as e
from gyre.contracts.errors import BrokenBody, ContractError, InvalidId, MessageTooLarge, UnknownType
from gyre.contracts.ids import check_id
from gyre.contracts.subjects import STREAMS, TABLE, filter_of, message_id, row_of, subject_of
from hypothesis import example, given
from hypothesis import strategies as st

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("samples", HERE / "samples.py")
samples = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(samples)
GOLDEN = json.loads((HERE / "golden" / "v1.json").read_text())
BY_TYPE = {row_of(f).type: f for f in samples.SAMPLES}
COMMON = {"id": "0" * 32, "run": "golden", "source": "test", "time_ns": 1}


def same(a: object, b: object) -> bool:
    return codec.pack(a) == codec.pack(b)


def test_every_type_of_the_table_has_a_sample_and_golden_bytes():
    assert {row.type for row in TABLE} == set(BY_TYPE) == set(GOLDEN)


@pytest.mark.parametrize("type_", sorted(GOLDEN))
def test_bytes_are_those_of_this_version_for_ever(type_):
    trace = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}
    assert codec.encode(BY_TYPE[type_], **COMMON, epoch=2, trace=trace).hex() == GOLDEN[type_]


@pytest.mark.parametrize("type_", sorted(GOLDEN))
def test_golden_bytes_decode_to_the_record(type_):
    envelope, fact = codec.decode(bytes.fromhex(GOLDEN[type_]))
    assert (envelope.type, envelope.run, envelope.epoch, envelope.time) == (type_, "golden", 2, 1)
    assert type(fact) is type(BY_TYPE[type_])
    assert same(fact, BY_TYPE[type_])


@pytest.mark.parametrize("type_", sorted(GOLDEN))
def test_fields_of_a_newer_release_are_ignored(type_):
    message = msgpack.unpackb(bytes.fromhex(GOLDEN[type_]))
    message["colour"] = "blue"
    message["data"]["a_field_of_the_next_release"] = [1, {"x": 2}]
    assert same(codec.decode(msgpack.packb(message))[1], BY_TYPE[type_])


@pytest.mark.parametrize("type_", sorted(GOLDEN))
def test_a_body_that_lost_a_required_field_is_refused_by_name(type_):
    message = msgpack.unpackb(bytes.fromhex(GOLDEN[type_]))
    first = next(iter(message["data"]))
    del message["data"][first]
    with pytest.raises(BrokenBody, match=first):
        codec.decode(msgpack.packb(message))


@given(st.binary(max_size=200))
@example(b"\x81\x80\x00")  # a map as the key of a map
def test_arbitrary_bytes_are_refused_never_crash(data):
    with pytest.raises(ContractError):
        codec.decode(data)


@pytest.mark.parametrize("message", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x81" * 3000, b"\xdd\xff\xff\xff\xff"])
def test_known_poison_is_refused(message):
    with pytest.raises(ContractError):
        codec.decode(message)


def test_an_unknown_type_and_an_unknown_version_are_told_apart_from_a_broken_body():
    message = msgpack.unpackb(bytes.fromhex(GOLDEN["run.closed"]))
    with pytest.raises(UnknownType, match="run.vanished"):
        codec.decode(msgpack.packb(message | {"type": "run.vanished"}))
    with pytest.raises(UnknownType, match="version 9"):
        codec.decode(msgpack.packb(message | {"v": 9}))


@pytest.mark.parametrize("change, says", [
    ({"output_ids": np.array([4, 2], np.int64)}, "expected a vector of int32, got int64"),
    ({"logprobs": np.zeros((1, 2), np.float32)}, "expected a vector of float32, got float32 of shape"),
])
def test_a_call_record_of_other_arrays_cannot_be_made(change, says):
    fields = {name: getattr(samples.CALL, name) for name in samples.CALL.__dataclass_fields__} | change
    with pytest.raises(BrokenBody, match=says):
        e.CallRecorded(**fields)


@pytest.mark.parametrize("change, says", [
    ({"logprobs": np.zeros(3, np.float32)}, "2 output ids but 3 logprobs"),
    ({"behaviour_logprobs": np.zeros(1, np.float32)}, "and 1 behaviour logprobs"),
    ({"keep_len": 4}, "is not prompt_len"),
    ({"spans": (e.VersionSpan(0, 1, 3),)}, "do not cover 2 output tokens"),
    ({"spans": (e.VersionSpan(0, 2, 3), e.VersionSpan(1, 2, 3))}, "do not cover"),
    ({"spans": ()}, "do not cover"),
    ({"spans": (e.VersionSpan(0, 2, 3), e.VersionSpan(2, 1, 3), e.VersionSpan(1, 2, 3))}, "ends before it begins"),
    ({"spans": (e.VersionSpan(0, -5, 3), e.VersionSpan(-5, 2, 3))}, "ends before it begins"),
    ({"spans": (e.VersionSpan(0, 2, 2**31),)}, r"version is not in [0, 2^31)"),
    ({"spans": (e.VersionSpan(0, 2, -1),)}, "version is not in"),
    ({"output_ids": np.array([4, -2], np.int32)}, "token id -2 is negative"),
    ({"prompt_delta": -samples.CALL.prompt_delta - 1}, "is negative"),
])
def test_the_fault_of_a_call_record_that_contradicts_itself_is_named(change, says):
    """It can still be read: whoever refuses it has to know whose execution it spoils."""
    record = codec.decode(codec.encode(replace(samples.CALL, **change), **COMMON))[1]
    assert record.execution == samples.CALL.execution
    assert says in e.call_fault(record)
    assert e.call_fault(samples.CALL) == ""


@pytest.mark.parametrize("fact, says", [
    (replace(samples.CALL, group="g/1"), "CallRecorded.group: 'g/1' is not an id"),
    (replace(samples.CALL, execution="../x"), "CallRecorded.execution: '../x' is not an id"),
    (e.GroupDispatched("g1", 0, "q", "t", "train", 0, (e.ExecutionSpec("x/1", 0, 1.0, 1.0),)),
     "GroupDispatched.executions: 'x/1' is not an id"),
])
def test_a_fact_of_a_group_or_execution_that_is_no_name_is_not_read(fact, says):
    """It would become a path outside its folder, or a subject of another shape."""
    envelope = {"v": 1, "type": row_of(fact).type, "id": "i", "run": "r", "source": "s", "time": 1, "key": "k",
                "data": codec.to_plain(fact)}
    with pytest.raises(BrokenBody, match=says):
        codec.decode(msgpack.packb(envelope))


def test_an_empty_output_needs_no_spans():
    fields = {name: getattr(samples.CALL, name) for name in samples.CALL.__dataclass_fields__}
    empty = {"output_ids": np.zeros(0, np.int32), "logprobs": np.zeros(0, np.float32),
             "behaviour_logprobs": np.zeros(0, np.float32), "spans": ()}
    assert e.call_fault(e.CallRecorded(**fields | empty)) == ""


def test_a_message_stays_under_512_kib_with_its_headers():
    fact = e.RunClosed("x" * 600_000, 1)
    with pytest.raises(MessageTooLarge):
        codec.encode(fact, **COMMON)
    by_reference = codec.encode(fact, **COMMON, ref=samples.BLOB)
    envelope = codec.decode_envelope(by_reference)
    assert envelope.ref == samples.BLOB
    assert codec.fact_of(envelope, codec.body_of(fact)) == fact


@given(st.lists(st.integers(-2**31, 2**31 - 1), max_size=50))
def test_arrays_travel_bit_for_bit(values):
    array = np.array(values, np.int32)
    plain = codec.to_plain({"x": array})["x"]
    assert plain["b"] == array.tobytes()
    assert np.array_equal(codec.from_plain(plain, np.ndarray), array)


@pytest.mark.parametrize("plain", [{"d": "<i4", "s": [3], "b": b"1234"}, {"d": "O", "s": [1], "b": b"12345678"}, [1, 2], 5])
def test_an_array_that_lies_about_its_size_or_type_is_refused(plain):
    with pytest.raises(BrokenBody):
        codec.from_plain(plain, np.ndarray)


def test_subjects_carry_the_run_and_belong_to_their_stream():
    for fact in samples.SAMPLES:
        row, subject = row_of(fact), subject_of(fact, "my-run")
        assert subject.split(".")[:4] == ["gyre", "v1", row.stream.domain, "my-run"]
        assert subject.startswith(row.stream.subjects[:-1])
        pattern = filter_of("my-run", type(fact)).split(".")
        assert all(p in ("*", s) for p, s in zip(pattern, subject.split("."), strict=True))


def test_message_ids_are_the_same_for_the_same_fact_and_differ_between_facts_and_runs():
    ids = [message_id(f, "r") for f in samples.SAMPLES]
    assert len(set(ids)) == len(ids)
    assert ids == [message_id(f, "r") for f in samples.SAMPLES]
    assert message_id(samples.CALL, "r") != message_id(samples.CALL, "s")


def test_streams_have_one_owner_and_do_not_overlap():
    assert len({s.name for s in STREAMS}) == len({s.domain for s in STREAMS}) == len(STREAMS)


def test_the_error_of_a_wrong_name_is_short():
    with pytest.raises(InvalidId) as raised:
        check_id("g" * 600_000, "group")
    assert str(raised.value) == f"group: {'g' * 80!r} is not an id; use 1 to 64 of A-Z a-z 0-9 _ -"


@pytest.mark.parametrize("bad", ["", "a.b", "a b", "x" * 65, "a*", "a>", "ä", None])
def test_ids_that_would_break_a_subject_are_refused(bad):
    with pytest.raises(InvalidId, match="run"):
        check_id(bad, "run")
