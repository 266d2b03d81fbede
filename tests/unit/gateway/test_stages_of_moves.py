"""How a request is copied whose engine gives its blocks away a few at a time."""

import asyncio
from typing import Any

import numpy as np
import pytest
from gyre.rollout.engines.moving import ExportOf, Frozen, MoveRefused, Offer, Stage
from gyre.rollout.migration import Expected, Move, MoveLimits, Progress, migrate

SIZE, NUM_BLOCKS, PER_STAGE = 16, 500, 40


class Source:
    """Has `NUM_BLOCKS` full blocks and a token more."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def open_export(self, ticket: str, *_: Any) -> Offer:
        known = NUM_BLOCKS * SIZE + 1
        return Offer(ticket, "l", 1, "x", known, known + 100, "")

    async def read_stage(self, _: str, first_block: int, __: float) -> Stage:
        self.num_asked += 1
        return self._stage(first_block, min(NUM_BLOCKS, first_block + PER_STAGE))

    async def freeze(self, _: str, first_block: int, *__: Any) -> Frozen:
        return Frozen(self._stage(first_block, NUM_BLOCKS), NUM_BLOCKS * SIZE + 1, NUM_BLOCKS * SIZE,
                      np.zeros(1, np.int32), b"")

    def _stage(self, first: int, end: int) -> Stage:
        rows = np.arange(first, end, dtype=np.int64)
        return Stage(first, rows, (b"",) * len(rows), np.zeros(len(rows) * SIZE, np.int32), rows)


class Destination:
    """Notes what arrives."""

    def __init__(self) -> None:
        self.arrived: list[tuple[int, int]] = []

    async def reserve(self, *_: Any) -> None: ...

    async def pull(self, _: str, __: str, stage: Stage, ___: float) -> None:
        self.arrived.append((stage.first_block, len(stage.rows)))

    async def commit(self, *_: Any) -> None: ...


async def test_what_was_known_at_the_start_is_copied_before_the_request_is_stopped() -> None:
    destination, progress = Destination(), Progress()
    move = Move("t", ExportOf("r"), 1, Source(), destination, Expected("staged", "l", 1))  # type: ignore[arg-type]
    assert await migrate(move, MoveLimits(), lambda: True, progress) == "destination"
    assert progress.num_blocks == NUM_BLOCKS
    assert destination.arrived[-1][1] <= PER_STAGE, "what is left is copied while the stream stands still"
    assert [first for first, _ in destination.arrived[:3]] == [0, 40, 80]


@pytest.mark.parametrize(("num_heard", "num_asked"), [(NUM_BLOCKS * SIZE + 1, 13), (NUM_BLOCKS * SIZE + 1000, 14), (0, 14)])
async def test_who_has_heard_that_little_is_left_need_not_ask(num_heard: int, num_asked: int) -> None:
    source, progress = Source(), Progress()
    move = Move("t", ExportOf("r"), 1, source, Destination(), Expected("staged", "l", 1))  # type: ignore[arg-type]
    limits = MoveLimits(last_blocks=4)
    assert await migrate(move, limits, lambda: True, progress, lambda: num_heard) == "destination"
    assert (source.num_asked, progress.num_blocks) == (num_asked, NUM_BLOCKS)


async def test_what_both_sides_are_asked_for_has_ended_before_either_failure_is_told() -> None:
    ended: list[str] = []

    class Slow(Source):
        async def read_stage(self, *asked: Any) -> Stage:
            await asyncio.sleep(0.05)
            ended.append("read")
            return await super().read_stage(*asked)

    class Full(Destination):
        async def reserve(self, *_: Any) -> None:
            raise MoveRefused("no room")

    move = Move("t", ExportOf("r"), 1, Slow(), Full(), Expected("staged", "l", 1))  # type: ignore[arg-type]
    progress = Progress()
    assert await migrate(move, MoveLimits(), lambda: True, progress) == "stays"
    assert progress.reason == "refused" and ended == ["read"]
