"""Who may call, what a repeated request is owed, and what happens when an execution ends."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gyre.rollout.attempt import Attempt, Chunk, Job, Output
from gyre.rollout.gateway.archive import ArchivedCall
from gyre.rollout.gateway.calls import Calls, CallSettings
from gyre.rollout.gateway.evidence import Evidence
from gyre.rollout.gateway.messages import CallRefused, ChatRequest, Message
from gyre.rollout.gateway.render import Renderer
from gyre.rollout.gateway.session import StallMeter
from gyre.rollout.live_call import Stall
from gyre.rollout.router import Router, RouterLimits
from gyre.runtime.clock import SystemClock
from rollout_fakes import FakeEngine, make_bench

HELLO = ChatRequest((Message("user", "hello"),))
ONCE = Evidence()
RETRY = Evidence(is_retry=True)


async def test_a_retry_of_a_call_in_flight_joins_it(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "one", "two")
    session = bench.open()
    bench.engine.gate.clear()
    _, first = bench.calls.start(session, HELLO, ONCE)
    _, second = bench.calls.start(session, replace(HELLO, stream=True), ONCE)
    assert second is first
    bench.engine.gate.set()
    assert (await first.result).message.content == "one"
    assert len(bench.records) == len(bench.engine.attempts) == 1


async def test_a_request_whose_answer_was_not_delivered_gets_the_recorded_answer(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "one", "two")
    session = bench.open()
    key, call = bench.calls.start(session, HELLO, ONCE)
    answer = await call.result
    assert await bench.calls.start(session, HELLO, ONCE)[1].result == answer
    session.delivered(key)
    assert await bench.calls.start(session, HELLO, RETRY)[1].result == answer
    assert len(bench.records) == 1


async def test_a_request_repeated_after_its_answer_arrived_is_another_sample(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "one", "two")
    session = bench.open()
    key, call = bench.calls.start(session, HELLO, ONCE)
    await call.result
    session.delivered(key)
    assert (await bench.calls.start(session, HELLO, ONCE)[1].result).message.content == "two"
    first, second = (c.record for c in bench.records)
    assert (second.base_call, second.keep_len) == (first.call, first.prompt_len)
    assert first.sampling.seed != second.sampling.seed


async def test_a_gateway_that_died_after_recording_answers_the_retry_from_its_archive(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "one")
    answer = await bench.calls.start(bench.open(), HELLO, ONCE)[1].result
    bench.archive.close()
    again = make_bench(tmp_path, "another")
    assert await again.calls.start(again.open(), HELLO, ONCE)[1].result == answer
    assert not again.engine.attempts


async def test_indices_have_no_gaps_when_calls_overtake_one_another(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "x")
    session = bench.open()
    bench.engine.gate.clear()
    calls = [bench.calls.start(session, ChatRequest((Message("user", str(i)),)), ONCE)[1] for i in range(5)]
    bench.engine.gate.set()
    await asyncio.gather(*(c.result for c in calls))
    assert [c.record.index for c in bench.records] == list(range(5))
    assert len({c.record.sampling.seed for c in bench.records}) == 5


async def test_too_many_calls_in_flight_are_refused(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "x")
    session = bench.open()
    bench.engine.gate.clear()
    for i in range(session.limits.max_in_flight):
        bench.calls.start(session, ChatRequest((Message("user", str(i)),)), ONCE)
    with pytest.raises(CallRefused, match="429"):
        bench.calls.start(session, HELLO, ONCE)
    session.close()


async def test_an_ended_execution_is_answered_nothing(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "x")
    session = bench.open()
    bench.engine.gate.clear()
    _, call = bench.calls.start(session, HELLO, ONCE)
    bench.sessions.close(session.spec.execution)
    with pytest.raises(CallRefused, match="has ended"):
        await call.result
    with pytest.raises(CallRefused, match="has ended"):
        bench.calls.start(session, HELLO, ONCE)
    with pytest.raises(CallRefused, match="409"):
        bench.sessions.authenticate(f"Bearer {bench.sessions.secret(session.spec.execution)}")
    assert not bench.records


async def test_a_record_that_the_core_refuses_is_not_answered(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "x")
    bench.refuse_commits = True
    session = bench.open()
    _, call = bench.calls.start(session, HELLO, ONCE)
    with pytest.raises(CallRefused, match="has ended"):
        await call.result
    assert session.num_recorded == 0


class OneLogprobShort(FakeEngine):
    """An engine that forgets a logprob."""

    async def generate(self, attempt: Attempt) -> AsyncIterator[Chunk]:
        async for chunk in super().generate(attempt):
            yield replace(chunk, logprobs=chunk.logprobs[1:])


async def keep_open(router: Router) -> None:
    """Watch an engine and take it for healthy, whatever it says."""
    while True:
        router.set_admitting(0, True)
        await asyncio.sleep(0)


async def test_an_engine_that_says_too_few_logprobs_is_tried_again_and_given_up_by_name(tmp_path: Path) -> None:
    engine = OneLogprobShort(lambda attempt: [70, 71, 72])
    bench = make_bench(tmp_path, engine=engine)
    session = bench.open()
    watch = asyncio.create_task(keep_open(bench.router))
    with pytest.raises(CallRefused, match="503.*3 ids has 3 versions and 2/3 logprobs"):
        await bench.calls.start(session, HELLO, ONCE)[1].result
    watch.cancel()
    assert len(engine.attempts) > 1
    assert not bench.records and not list(bench.archive.load(session.spec.execution))


class UncheckedRouter(Router):
    """Gives an output through as an engine said it: with `num_logprobs` logprobs."""

    num_logprobs = 0

    async def generate(self, job: Job, output: Output, stall: Stall) -> None:
        await super().generate(job, output, stall)
        output._logprobs = [np.zeros(self.num_logprobs, np.float32)]


@pytest.mark.parametrize("num_logprobs", [2, 4])
async def test_a_record_that_does_not_fit_together_is_never_made(tmp_path: Path, num_logprobs: int) -> None:
    # 3 ids and 2 or 4 logprobs: refused and counted, never padded or cut.
    bench = make_bench(tmp_path, "x")
    router = UncheckedRouter({0: FakeEngine(lambda attempt: [70, 71, 72])}, RouterLimits(), SystemClock())
    router.num_logprobs = num_logprobs
    router.set_admitting(0, True)
    calls = Calls(CallSettings(max_tokens=3), Renderer(bench.tokenizer), router, bench.archive, commit_nothing, fire_nothing,
                  SystemClock())
    session = bench.open()
    with pytest.raises(CallRefused, match=f"503.*3 output ids but {num_logprobs} logprobs"):
        await calls.start(session, HELLO, ONCE)[1].result
    assert (calls.num_faulty, session.num_recorded, session.deliveries.undelivered) == (1, 0, ())
    assert not list(bench.archive.load(session.spec.execution))


async def commit_nothing(call: ArchivedCall) -> bool:
    raise AssertionError(f"{call.record.call} was to be published")


async def fire_nothing(execution: str) -> None:
    raise AssertionError(f"{execution} reached no limit")


async def test_the_nth_call_of_a_call_limit_waits_for_the_end(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "x")
    session = bench.open(timeout_calls=2)
    key, call = bench.calls.start(session, HELLO, ONCE)
    await call.result
    session.delivered(key)
    _, second = bench.calls.start(session, HELLO, ONCE)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert bench.limits_fired == [session.spec.execution]
    assert not second.result.done()
    bench.sessions.close(session.spec.execution)
    with pytest.raises(CallRefused, match="has ended"):
        await second.result
    assert len(bench.records) == 1


async def test_a_prompt_that_does_not_fit_is_refused_in_words_harnesses_know(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "x", settings=CallSettings(max_context=40))
    _, call = bench.calls.start(bench.open(), ChatRequest((Message("user", "y" * 50),)), ONCE)
    with pytest.raises(CallRefused, match="maximum context length is 40 tokens"):
        await call.result
    _, call = bench.calls.start(bench.open(), HELLO, ONCE)
    answer = await call.result
    assert answer.usage.num_prompt + answer.usage.num_completion <= 40
    assert bench.open().num_errors == 1


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer x", "Basic abc", "Bearer gyre.g00000-000-x00.",
                                    "Bearer gyre.g00000-000-x01.00", "Bearer gyre.é.00"])
async def test_other_keys_open_nothing(tmp_path: Path, header: str) -> None:
    bench = make_bench(tmp_path, "x")
    bench.open()
    with pytest.raises(CallRefused, match="401"):
        bench.sessions.authenticate(header)


async def test_a_key_opens_its_own_execution_and_outlives_the_gateway(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, "x")
    bench.open("g00000-000-x00")
    bench.open("g00000-000-x01")
    secret = bench.sessions.secret("g00000-000-x01")
    assert bench.sessions.authenticate(f"Bearer {secret}").spec.execution == "g00000-000-x01"
    bench.archive.close()
    assert make_bench(tmp_path).sessions.secret("g00000-000-x01") == secret


def test_overlapping_stalls_count_once() -> None:
    meter = StallMeter()
    meter.begin(10.0)
    meter.begin(12.0)
    meter.end(13.0)
    assert meter.untaken_s(14.0) == 4.0
    assert meter.take(14.0) == 4.0
    meter.end(15.0)
    assert meter.untaken_s(99.0) == meter.take(99.0) == 1.0
    assert meter.untaken_s(99.0) == 0.0
