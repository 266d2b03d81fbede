"""A call outlives its engine: nothing is lost, nothing is said twice, and waiting is counted."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest
from gyre.contracts.errors import EngineError
from gyre.contracts.events import Sampling, VersionSpan
from gyre.rollout.attempt import Attempt, Chunk, EngineFull, EngineRefused, Job, Output
from gyre.rollout.gateway.session import StallMeter
from gyre.rollout.router import Router, RouterLimits
from gyre.runtime.clock import ManualClock, SystemClock
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_fakes import FakeEngine

STOP = 99


def counting(length: int) -> object:
    def script(attempt: Attempt) -> Sequence[int]:
        return [*range(length), STOP]
    return script


def job(execution: str = "x", max_tokens: int = 100) -> Job:
    return Job(f"{execution}-0", execution, np.asarray([7, 8], np.int32), max_tokens, Sampling(seed=5), (STOP,))


def router_of(*engines: FakeEngine, limits: RouterLimits | None = None) -> Router:
    router = Router(dict(enumerate(engines)), limits or RouterLimits(), SystemClock())
    for cell in range(len(engines)):
        router.set_admitting(cell, True)
    return router


async def test_an_execution_stays_with_its_engine_and_new_ones_go_where_least_is_live() -> None:
    engines = [FakeEngine(counting(3)) for _ in range(2)]
    router = router_of(*engines)
    engines[0].gate.clear()
    waiting = asyncio.create_task(router.generate(job("a"), Output(), StallMeter()))
    while not engines[0].attempts:
        await asyncio.sleep(0)
    for _ in range(2):
        await router.generate(job("b"), Output(), StallMeter())
    assert [len(e.attempts) for e in engines] == [1, 2]
    engines[0].gate.set()
    await waiting


@settings(deadline=None)
@given(length=st.integers(1, 20), die_after=st.integers(0, 20), chunk=st.integers(1, 7), budget=st.integers(1, 25))
def test_death_at_any_token_neither_repeats_nor_loses_one(length: int, die_after: int, chunk: int, budget: int) -> None:
    async def run() -> None:
        engines = [FakeEngine(counting(length), version=3, chunk=chunk, die_after=die_after),
                   FakeEngine(counting(length), version=4, chunk=chunk)]
        seen: list[int] = []
        output = Output(seen.extend)
        await router_of(*engines).generate(job(max_tokens=budget), output, StallMeter())
        expected = [*range(length), STOP][:budget]
        assert output.ids == seen == expected
        assert output.finish == ("stop" if budget > length else "length")
        assert [s.version for s in output.spans()] in ([3], [4], [3, 4])
        assert output.spans()[-1].end == len(expected)
        for attempt in engines[1].attempts:
            assert attempt.prompt.tolist() == [7, 8, *expected[:attempt.num_emitted]]
            assert attempt.max_tokens == budget - attempt.num_emitted
            assert attempt.sampling.seed == 5

    asyncio.run(run())


def said(index: int, versions: tuple[int, ...], kv_versions: tuple[int, ...] = ()) -> Chunk:
    logprobs = np.full(len(versions), -0.5, np.float32)
    return Chunk(index, np.arange(len(versions), dtype=np.int32), logprobs, logprobs, versions, kv_versions=kv_versions)


async def test_spans_are_runs_of_one_version_of_weights_and_of_kv() -> None:
    output = Output()
    output.take(said(0, (1, 1, 2)))
    output.take(said(3, (2, 2, 1)))
    assert output.spans() == (VersionSpan(0, 2, 1), VersionSpan(2, 5, 2), VersionSpan(5, 6, 1))
    output.take(said(6, (2, 2, 2), (1, 1, 2)))
    assert output.spans()[3:] == (VersionSpan(6, 8, 2, 1), VersionSpan(8, 9, 2))


async def test_a_call_waits_while_nobody_admits_and_the_wait_is_counted() -> None:
    clock = ManualClock(100.0)
    engine = FakeEngine(counting(2))
    router = Router({0: engine}, RouterLimits(), clock)
    stall = StallMeter()
    task = asyncio.create_task(router.generate(job(), output := Output(), stall))
    await asyncio.sleep(0)
    clock.advance(30.0)
    assert stall.untaken_s(clock.now()) == 30.0
    router.set_admitting(0, True)
    await task
    assert stall.take(clock.now()) == 30.0
    assert output.finish == "stop"


async def test_waiting_is_bounded() -> None:
    router = Router({0: FakeEngine(counting(2))}, RouterLimits(stall_timeout_s=0.01), SystemClock())
    with pytest.raises(EngineError, match="no engine admitted"):
        await router.generate(job(), Output(), StallMeter())


async def test_a_drained_engine_gives_its_calls_to_another_one() -> None:
    engines = [FakeEngine(counting(9), version=1, chunk=3), FakeEngine(counting(9), version=1)]
    router = router_of(*engines)
    output = Output()
    task = asyncio.create_task(router.generate(job(), output, StallMeter()))
    await engines[0].said.wait()
    engines[0].gate.clear()
    assert await router.drain(0, 5.0) == (0, 1)
    assert router.num_live(0) == 0
    await task
    assert output.ids == [*range(9), STOP]
    assert output.cell == 1


async def test_the_last_engine_is_drained_by_letting_its_calls_end() -> None:
    engine = FakeEngine(counting(9), chunk=3)
    router = router_of(engine)
    output = Output()
    task = asyncio.create_task(router.generate(job(), output, StallMeter()))
    await engine.said.wait()
    assert await router.drain(0, 5.0) == (0, 0)
    await task
    assert len(engine.attempts) == 1


async def test_an_engine_that_repeats_tokens_is_not_believed() -> None:
    class Repeating(FakeEngine):
        async def generate(self, attempt: Attempt):  # noqa: ANN202
            async for chunk in super().generate(attempt):
                yield chunk
                yield chunk

    router = router_of(Repeating(counting(9), chunk=3), FakeEngine(counting(9)))
    output = Output()
    await router.generate(job(), output, StallMeter())
    assert output.ids == [*range(9), STOP]


async def test_a_request_that_no_engine_will_serve_is_not_tried_elsewhere() -> None:
    class Refusing(FakeEngine):
        async def generate(self, attempt: Attempt):  # noqa: ANN202
            self.attempts.append(attempt)
            raise EngineRefused("prompt too long")
            yield

    engines = [Refusing(counting(1)), Refusing(counting(1))]
    with pytest.raises(EngineRefused):
        await router_of(*engines).generate(job(), Output(), StallMeter())
    assert sum(len(e.attempts) for e in engines) == 1


async def test_engines_that_fail_again_and_again_fail_the_call() -> None:
    engine = FakeEngine(counting(9), die_after=0)
    router = router_of(engine, limits=RouterLimits(max_replays=3))
    task = asyncio.create_task(router.generate(job(), Output(), StallMeter()))
    while not task.done():
        router.set_admitting(0, True)
        await asyncio.sleep(0)
    with pytest.raises(EngineError, match="too often"):
        await task
    assert len(engine.attempts) == 3


async def test_a_call_outlives_any_number_of_drains() -> None:
    """A drain is the service's doing: it is none of the engines that may fail under a call."""
    engines = [FakeEngine(counting(9), chunk=1), FakeEngine(counting(9), chunk=1)]
    router = router_of(*engines, limits=RouterLimits(max_replays=3))
    for engine in engines:
        engine.gate.clear()
    output = Output()
    task = asyncio.create_task(router.generate(job(), output, StallMeter()))
    for number in range(6):
        cell = number % 2
        while not router.num_live(cell):
            assert not task.done(), task.exception()
            await asyncio.sleep(0)
        router.set_admitting(1 - cell, True)
        assert await router.drain(cell, 5.0) == (0, 1)
    for engine in engines:
        engine.gate.set()
    await task
    assert output.ids == [*range(9), STOP]


async def test_a_full_engine_is_no_failure_and_is_asked_again() -> None:
    """Its queue empties; until then it goes on admitting others, and the call comes back without being counted."""
    engine = FullEngine(counting(3), num_full=5)
    router = router_of(engine, limits=RouterLimits(max_replays=2, full_s=0.0))
    output, stall = Output(), StallMeter()
    await router.generate(job(), output, stall)
    assert output.ids == [*range(3), STOP]
    assert len(engine.attempts) == 6 and router.is_admitting(0)


class FullEngine(FakeEngine):
    """Refuses the first `num_full` tries."""

    def __init__(self, script: object, num_full: int) -> None:
        super().__init__(script)
        self.num_full = num_full

    async def generate(self, attempt: Attempt) -> AsyncIterator[Chunk]:
        if len(self.attempts) < self.num_full:
            self.attempts.append(attempt)
            raise EngineFull("waiting queue full: 7 requests")
        async for chunk in super().generate(attempt):
            yield chunk
