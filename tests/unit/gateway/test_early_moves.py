"""A call that is moved before its first token has arrived."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
from gyre.rollout.attempt import Attempt, Chunk, Output
from gyre.rollout.engine_client import Observed
from gyre.rollout.engine_wire import opaque_frozen
from gyre.rollout.engines.moving import Frozen
from gyre.rollout.gateway.session import StallMeter
from gyre.rollout.live_call import LiveCall, Route
from gyre.rollout.router import Router, RouterLimits
from gyre.rollout.routes import Engine
from gyre.runtime.clock import ManualClock, SystemClock
from move_stage import QUICK, job_of


def chunk(index: int, num: int, finish: str = "") -> Chunk:
    logprobs = np.full(num, -1.0, np.float32)
    return Chunk(index, np.full(num, 7, np.int32), logprobs, logprobs, (0,) * num, finish)


class Slow:
    """An engine of kind `ticket`: the answer to a freeze overtakes the tokens that were said before it."""

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []
        self.has_begun, self.is_frozen = asyncio.Event(), asyncio.Event()

    async def generate(self, attempt: Attempt) -> AsyncIterator[Chunk]:
        self.attempts.append(attempt)
        self.has_begun.set()
        if attempt.num_emitted == 0:
            await self.is_frozen.wait()
            yield chunk(0, 2, "moved")
            return
        yield chunk(attempt.num_emitted, attempt.max_tokens, "length")

    async def freeze(self, *_: object) -> Frozen:
        self.is_frozen.set()
        return opaque_frozen(b"kv")

    async def release(self, *_: object) -> bool:
        return True


async def test_its_last_words_at_the_source_do_not_send_it_elsewhere() -> None:
    peers = {cell: Slow() for cell in range(2)}
    router = Router(peers, RouterLimits(moves=QUICK), SystemClock())  # type: ignore[arg-type]
    for cell in peers:
        router.observe(cell, Observed(0, False, True, "ticket", "l"))
    router.set_admitting(0, True)
    output = Output()
    call = asyncio.create_task(router.generate(job_of("x", 10), output, StallMeter()))
    await peers[0].has_begun.wait()
    router.set_admitting(1, True)
    assert await router.drain(0, 5.0, 1) == (1, 0)
    await call
    assert [a.ticket for a in peers[1].attempts] == [b"kv"] and len(output.ids) == 10
    assert router.num_replayed == 0


async def until_cancelled() -> str:
    await asyncio.Event().wait()
    return ""


async def test_a_replay_that_waits_for_its_first_token_still_waits_after_a_move_that_was_refused() -> None:
    clock, stall = ManualClock(100.0), StallMeter()
    call = LiveCall(job_of("x"), Output(), stall, clock)
    task = asyncio.create_task(until_cancelled())
    call.number = 1
    call.pause()  # the engine before has died
    call.begin(Route(Engine(0, None)), "x-0.1", task)  # type: ignore[arg-type]
    clock.advance(3.0)
    assert call.stop(1)
    call.carry_on(1)
    clock.advance(4.0)
    assert call.take(1, chunk(0, 1))
    clock.advance(50.0)
    assert stall.untaken_s(clock.now()) == 7.0
    task.cancel()


async def test_what_was_said_before_a_stop_does_not_end_the_pause() -> None:
    clock, stall = ManualClock(100.0), StallMeter()
    call = LiveCall(job_of("x"), Output(), stall, clock)
    task = asyncio.create_task(until_cancelled())
    call.begin(Route(Engine(0, None)), "x-0", task)  # type: ignore[arg-type]
    assert call.stop(0)
    assert call.take(0, chunk(0, 1))
    clock.advance(2.0)
    assert stall.untaken_s(clock.now()) == 2.0
    call.carry_on(0)
    clock.advance(50.0)
    assert stall.untaken_s(clock.now()) == 2.0
    task.cancel()
