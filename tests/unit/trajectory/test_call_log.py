"""Records are resolved, verified, refused; each refusal quarantines the execution with its reason."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gyre.contracts.digest import TokenChain, token_digest
from gyre.contracts.events import CallEvidence, CallRecorded, VersionSpan
from gyre.trajectory.record import MARK, CallLog


def two_turns(script: Any) -> list[CallRecorded]:
    return script().call([1, 2], [3, 4]).call([1, 2, 3, 4, 5], [6]).records


def refusal_of(records: list[CallRecorded]) -> str:
    log = CallLog()
    for record in records:
        log.add(record)
    return log.refusal.reason if log.refusal else ""


def test_a_delta_spells_prompt_and_output(script: Any) -> None:
    records = two_turns(script)
    assert records[1].prompt_delta.tolist() == [5]
    calls = script().call([1, 2], [3, 4]).call([1, 2, 3, 4, 5], [6]).calls()
    assert calls[1].read(0, 6).tolist() == [1, 2, 3, 4, 5, 6]
    assert calls[1].read(1, 5).tolist() == [2, 3, 4, 5]
    assert calls[1].read(3, 3).tolist() == []


def test_a_record_waits_for_its_base(script: Any) -> None:
    first, second = two_turns(script)
    log = CallLog()
    assert log.add(second)
    assert (len(log), list(log.calls), list(log.waiting)) == (1, [], [second.call])
    assert log.add(first)
    assert [c.record.call for c in log.ordered()] == [first.call, second.call]


def test_a_duplicate_changes_nothing_whether_it_waits_or_not(script: Any) -> None:
    first, second = two_turns(script)
    log = CallLog()
    assert [log.add(r) for r in (second, second, first, first, second)] == [True, False, True, False, False]
    assert (len(log), log.refusal) == (2, None)


@pytest.mark.parametrize(("changed", "reason"), [
    (lambda r: replace(r, digest="0" * 32), "digest"),
    (lambda r: replace(r, output_ids=np.array([7], np.int32)), "digest"),
    (lambda r: replace(r, keep_len=5, prompt_len=6), "keep-beyond-base"),
    (lambda r: replace(r, keep_len=-1, prompt_len=0), "keep-beyond-base"),
    (lambda r: replace(r, base_call=None), "keep-without-base"),
    (lambda r: replace(r, index=0), "base-not-earlier"),
    (lambda r: replace(r, behaviour_logprobs=np.array([np.nan], np.float32)), "logprob"),
    (lambda r: replace(r, behaviour_logprobs=np.array([0.5], np.float32)), "logprob"),
])
def test_what_does_not_fit_is_refused_with_its_reason(script: Any, changed: Any, reason: str) -> None:
    first, second = two_turns(script)
    assert refusal_of([first, changed(second)]) == reason
    assert refusal_of([changed(second), first]) == reason


def test_one_call_told_in_two_ways_is_a_conflict(script: Any) -> None:
    first, second = two_turns(script)
    other = script().call([1, 2], [3, 9]).records[0]
    assert refusal_of([first, other]) == "conflict"
    versions = replace(first, spans=(VersionSpan(0, 2, 9),))
    assert refusal_of([first, second, versions]) == "conflict"


@pytest.mark.parametrize("changed", [
    {"finish_reason": "abort"}, {"lineage": "helper"}, {"role_class": "sub-agent"},
    {"evidence": CallEvidence({"x-gyre-trainable": "no"})}, {"logprobs": np.array([-1.0, -2.0], np.float32)},
    {"prompt_delta": np.array([1, 7], np.int32)},
])
def test_a_call_told_twice_with_another_role_or_end_is_a_conflict_in_either_order(script: Any, changed: Any) -> None:
    first, second = two_turns(script)
    other = replace(first, **changed)
    log = CallLog()
    for record in (other, second, first):
        log.add(record)
    assert log.refusal is not None
    assert refusal_of([first, second, other]) == "conflict"


def test_lengths_that_disagree_are_refused_and_never_padded(script: Any) -> None:
    """C14: three ids with two or four log-probs."""
    first, second = two_turns(script)
    for num in (1, 3):
        broken = replace(first, behaviour_logprobs=np.zeros(num, np.float32))
        assert refusal_of([broken, second]) == "contradiction"
        assert refusal_of([second, broken]) == "contradiction"


def test_a_refused_record_is_known_and_counts_as_arrived(script: Any) -> None:
    """Otherwise its execution would wait for it, and every redelivery would be another refusal."""
    first, second = two_turns(script)
    broken = replace(first, spans=())
    log = CallLog()
    assert log.add(broken)
    assert not log.add(broken)
    log.add(second)
    assert len(log) == 2
    again = CallLog()
    for record in log.records():
        again.add(record)
    assert (str(again.refusal), len(again)) == (str(log.refusal), 2)


def test_closing_names_what_is_missing(script: Any) -> None:
    first, second = two_turns(script)
    log = CallLog()
    log.add(second)
    log.close(num_calls=1)
    assert str(log.refusal).startswith("unknown-base: call g00000-000-x00-c0001: continues")
    log = CallLog()
    log.add(first)
    log.close(num_calls=1)
    assert log.refusal is None
    log.close(num_calls=3)
    assert str(log.refusal) == "missing-calls: call -: 1 of 3 records arrived"


def test_records_of_a_log_rebuild_it(script: Any) -> None:
    calls = script().call([1], [2]).call([1, 2, 3], [4]).call([1, 9], [5])
    log = CallLog()
    for record in (calls.records[1], calls.records[0]):
        log.add(record)
    again = CallLog()
    for record in log.records():
        again.add(record)
    assert list(again.calls) == list(log.calls)


def test_digest_state_at_any_length_is_that_of_the_tokens(script: Any) -> None:
    """Long contexts are hashed from the nearest kept state; a fork gives the digest of its own tokens."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 1000, 3 * MARK + 77).tolist()
    calls = script().call(ids[:5000], ids[5000:5100]).call(ids[:9000], ids[9000:9001])
    for keep in (0, 1, MARK - 1, MARK, MARK + 1, 2 * MARK, 8999):
        calls.call([*ids[:keep], 5555, 6], [7, 8])
    calls.call(ids, [1])
    log = calls.log()
    assert log.refusal is None
    for number, call in enumerate(log.ordered()):
        assert call.chain.hexdigest() == token_digest(np.array(calls.sequences[number], np.int32))
    last = log.ordered()[-1]
    for length in (0, 1, 255, 256, MARK, MARK + 1, 5050, 9000, 3 * MARK, 3 * MARK + 77):
        assert last.chain_at(length) == TokenChain().extend(np.array(ids[:length], np.int32))



def test_extending_a_context_reads_none_of_it(script: Any) -> None:
    calls = script().call(list(range(5000)), [1]).call([*range(5000), 1, 2], [3])
    first, second = calls.calls()
    assert second.record.prompt_delta.tolist() == [2]
    assert first.chain_at(first.length) is first.chain
