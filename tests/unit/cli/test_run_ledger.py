"""The ledger is the same whatever the order; a run whose books balance says so, and each way to lose one is found."""

import random
from dataclasses import replace

import pytest
from gyre.cli.facts import FactLog
from gyre.cli.ledger import RunLedger
from gyre.contracts import events as e
from gyre.contracts.codec import body_of, encode
from gyre.contracts.subjects import CALL, EVAL, EXEC, TABLE, row_of
from gyre.runtime.blobs import DirectoryBlobs

Said = list[tuple[e.Fact, float]]


def ledger_of(facts: Said) -> RunLedger:
    ledger = RunLedger("run")
    for fact, time_s in facts:
        ledger.fold(fact, time_s)
    return ledger


def message_of(fact: e.Fact, run: str = "run", **options: object) -> bytes:
    return encode(fact, id="0", run=run, source="test", time_ns=1_700_000_000_000_000_000, **options)


def failed(ledger: FactLog) -> list[str]:
    return [check.name for check in ledger.checks() if not check.ok]


def changed(facts: Said, record: type, number: int, **values: object) -> Said:
    """The facts with the `number`-th of one type changed."""
    places = [i for i, (fact, _) in enumerate(facts) if isinstance(fact, record)]
    place = places[number]
    return [*facts[:place], (replace(facts[place][0], **values), facts[place][1]), *facts[place + 1:]]


def without(facts: Said, record: type, number: int) -> Said:
    places = [i for i, (fact, _) in enumerate(facts) if isinstance(fact, record)]
    return [pair for i, pair in enumerate(facts) if i != places[number]]


def test_a_complete_run_balances(facts):
    ledger = ledger_of(facts)
    assert failed(ledger) == []
    assert ledger.is_complete
    assert (len(ledger.steps), ledger.num_executions, ledger.num_timeouts_scored) == (6, 52, 12)
    targets = ledger.targets()
    assert (targets.num_targets, targets.num_trained, targets.drops) == (36 * 15, 36 * 8, {"max_paths": 36 * 7})


@pytest.mark.parametrize("seed", range(5))
def test_any_order_and_any_repetition_give_the_same_ledger(facts, seed):
    rng = random.Random(seed)
    again = [(fact, time_s + rng.random()) for fact, time_s in rng.sample(facts, len(facts) // 3)]
    shuffled = [*facts, *again]
    rng.shuffle(shuffled)
    one, other = ledger_of(facts), ledger_of(shuffled)
    assert (one.facts, one.calls, one.conflicts) == (other.facts, other.calls, other.conflicts)
    assert one.checks() == other.checks()


def test_a_run_balances_at_every_moment(facts):
    ledger = RunLedger("run")
    for number, (fact, time_s) in enumerate(facts):
        ledger.fold(fact, time_s)
        if number % 7 == 0:
            assert failed(ledger) == [], fact
            assert not ledger.is_complete


def test_a_run_is_not_complete_before_every_stream_has_been_read(facts):
    for record in (e.ExecutionTerminated, e.GroupCompleted, e.StepFinished, e.CallRecorded, e.RunClosed):
        assert not ledger_of(without(facts, record, -1)).is_complete, record


def test_a_lost_execution_stays_live(facts):
    ledger = ledger_of(without(facts, e.ExecutionTerminated, -1))
    check = ledger.checks()[0]
    assert check.parts["live"] == 1
    assert check.text == "52 executions dispatched = 39 finished + 12 timed out + 1 live"


def test_an_execution_that_nobody_dispatched_is_found(facts):
    stray = e.ExecutionStarted("g99999-000-x00", "g99999-000", "train", 0)
    assert failed(ledger_of([*facts, (stray, 1.0)])) == ["executions dispatched"]


def test_a_call_that_was_made_and_not_recorded_is_found(facts):
    ledger = ledger_of(without(facts, e.CallRecorded, 10))
    assert failed(ledger) == ["calls made", "tokens sampled"]
    assert "3 made, 2 recorded" in next(c for c in ledger.checks() if c.name == "calls made").text


def test_sampled_tokens_that_come_back_under_other_ids_are_counted(facts):
    calls = [fact for fact, _ in facts if isinstance(fact, e.CallRecorded)]
    base = calls[0]
    later = next(c for c in calls if c.execution == base.execution and c.index == base.index + 1)

    def read_again(keep_len: int) -> str:
        again = replace(later, base_call=base.call, keep_len=keep_len, prompt_delta=later.prompt_delta[:0], prompt_len=keep_len)
        ledger = ledger_of([(base, 1.0), (again, 2.0)])
        return next(c for c in ledger.checks() if c.name == "sampled tokens read again").sum_text

    num = len(base.output_ids)
    assert read_again(base.prompt_len + num) == f"{num} by their ids + 0 re-tokenised"
    assert read_again(base.prompt_len + 1) == f"1 by their ids + {num - 1} re-tokenised"
    assert read_again(base.prompt_len) == "0 re-tokenised"  # another continuation of the same prompt


def test_two_calls_of_one_index_are_found(facts):
    call = next(fact for fact, _ in facts if isinstance(fact, e.CallRecorded))
    assert "calls made" in failed(ledger_of([*facts, (replace(call, call=f"{call.call}b"), 1.0)]))


def test_a_target_that_is_neither_trained_nor_dropped_is_found(facts):
    group = next(fact for fact, _ in facts if isinstance(fact, e.GroupCompleted) and fact.purpose == "train")
    outcome = replace(group.outcomes[0], drops={})
    place = [fact for fact, _ in facts if isinstance(fact, e.GroupCompleted)].index(group)
    broken = changed(facts, e.GroupCompleted, place, outcomes=(outcome, *group.outcomes[1:]))
    assert failed(ledger_of(broken)) == ["targets sampled for training"]


def test_positions_that_are_no_targets_do_not_count_as_dropped(facts):
    groups = [fact for fact, _ in facts if isinstance(fact, e.GroupCompleted)]
    place = next(i for i, g in enumerate(groups) if g.purpose == "train")
    outcome = replace(groups[place].outcomes[0], drops={"max_paths": 7}, not_targets={"unseen": 3})
    outcomes = (outcome, *groups[place].outcomes[1:])
    assert failed(ledger_of(changed(facts, e.GroupCompleted, place, outcomes=outcomes))) == []


def test_a_dropped_execution_may_be_accounted_for_before_its_records_are_read(facts):
    """Its group does not wait for them: they lie in another stream than its end, and train nothing."""
    found = [(place, group, outcome) for place, group in enumerate(f for f, _ in facts if isinstance(f, e.GroupCompleted))
             for outcome in group.outcomes if group.purpose == "eval"]
    place, group, outcome = found[0]
    num = sum(len(f.output_ids) for f, _ in facts if isinstance(f, e.CallRecorded) and f.execution == outcome.execution)
    early = replace(outcome, kind="dropped", drops={}, num_targets=0, num_sampled_tokens=0)
    outcomes = tuple(early if o is outcome else o for o in group.outcomes)
    ledger = ledger_of(changed(facts, e.GroupCompleted, place, outcomes=outcomes))
    assert failed(ledger) == []
    check = next(c for c in ledger.checks() if c.name == "tokens sampled")
    assert (num > 0, check.parts["of dropped executions"]) == (True, num)


def test_a_micro_step_that_the_trainer_left_out_is_found(facts):
    ledger = ledger_of(changed(facts, e.StepFinished, 2, num_targets=40))
    assert failed(ledger) == ["targets trained, by the trainer"]


def test_an_execution_that_is_trained_twice_is_found(facts):
    first = next(fact for fact, _ in facts if isinstance(fact, e.StepFinished))
    ledger = ledger_of(changed(facts, e.StepFinished, 1, executions=first.executions))
    assert failed(ledger) == ["executions in finished steps"]


def test_a_group_in_two_steps_is_found(facts):
    first = next(fact for fact, _ in facts if isinstance(fact, e.StepSealed))
    ledger = ledger_of(changed(facts, e.StepSealed, 1, groups=first.groups))
    assert "training groups dispatched" in failed(ledger)


def test_a_stale_group_is_dropped_not_trained(facts):
    sealed = [fact for fact, _ in facts if isinstance(fact, e.StepSealed)][3]
    finished = [fact for fact, _ in facts if isinstance(fact, e.StepFinished)][3]
    stale = changed(facts, e.StepSealed, 3, stale_groups=sealed.groups[:1])
    stale = changed(stale, e.StepFinished, 3, num_targets=finished.num_targets // 2)
    ledger = ledger_of(stale)
    assert failed(ledger) == []
    assert ledger.targets().drops["stale"] == 24


def test_a_dead_letter_is_found(facts):
    letter = e.DeadLettered("GYRE_EXEC", "gyre.v1.exec.run.x.y", 7, "scheduler", "not MessagePack", b"?")
    assert failed(ledger_of([*facts, (letter, 1.0)])) == ["facts read"]


def test_a_fact_said_twice_with_different_contents_is_found(facts):
    scored = next(fact for fact, _ in facts if isinstance(fact, e.ExecutionScored))
    ledger = ledger_of([*facts, (replace(scored, evaluator="evaluator-1"), BEYOND)])
    assert ledger.conflicts == {f"execution.scored {scored.execution}"}
    assert ledger.get(e.ExecutionScored, scored.execution).fact == scored


BEYOND = 1_800_000_000.0


def test_of_two_attempts_of_a_step_the_newer_one_counts(facts):
    finished = next(fact for fact, _ in facts if isinstance(fact, e.StepFinished))
    again = replace(finished, attempt=1, loss=9.0)
    for said in ([*facts, (again, BEYOND)], [(again, BEYOND), *facts]):
        ledger = ledger_of(said)
        assert ledger.steps[0].finished.loss == 9.0
        assert not ledger.conflicts


# ---------------------------------------------------------------- messages


def test_messages_give_the_same_ledger_as_facts(facts):
    read = RunLedger("run")
    for fact, _ in facts:
        read.fold_message(message_of(fact))
    plain = ledger_of(facts)
    assert read.calls.keys() == plain.calls.keys()
    assert {r: set(found) for r, found in read.facts.items()} == {r: set(found) for r, found in plain.facts.items()}
    assert [c.num_sampled for c in read.calls.values()] == [c.num_sampled for c in plain.calls.values()]


def test_other_runs_are_passed_over(facts):
    ledger = RunLedger("run")
    ledger.fold_message(message_of(facts[0][0], run="another"))
    assert ledger.facts == {}


def test_what_cannot_be_read_is_noted_and_never_stops_the_reading(facts):
    ledger = ledger_of(facts)
    ledger.fold_message(b"\xc1")
    assert failed(ledger) == ["facts read"]


def test_a_body_that_travelled_by_reference_is_loaded(facts, tmp_path):
    call = next(fact for fact, _ in facts if isinstance(fact, e.CallRecorded))
    blobs = DirectoryBlobs(tmp_path)
    message = message_of(call, ref=blobs.put("bodies/1", body_of(call)))
    with_blobs, without_blobs = RunLedger("run"), RunLedger("run")
    with_blobs.fold_message(message, blobs)
    without_blobs.fold_message(message)
    assert with_blobs.calls[call.call].num_sampled == len(call.output_ids)
    assert list(without_blobs.unreadable) == [f"{row_of(call).type} {call.call}"]


def test_the_work_queue_is_never_read():
    from gyre.cli.facts import filters_of

    assert filters_of(EVAL, "run") == []
    assert filters_of(CALL, "run") == ["gyre.v1.call.run.*.call-recorded"]
    assert filters_of(CALL, "run", with_calls=False) == []
    assert len(filters_of(EXEC, "run")) == sum(row.stream is EXEC for row in TABLE)
