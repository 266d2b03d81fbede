"""Whatever happens, a sequence's blocks hold exactly its own tokens, computed under the current weights.

The model is replaced by memory: computing a token writes (version, id, position) where its key would go, and a row that
yields reads its whole context back through the block table.
"""

from __future__ import annotations

import numpy as np
from gyre.rollout.engines.base import EngineBusy, EventStream, Finish, GenerateRequest
from gyre.rollout.torch_engine.sampler import Sampled
from gyre.rollout.torch_engine.scheduler import Scheduler, SchedulerConfig
from gyre.rollout.torch_engine.sequence import Batch
from hypothesis import given, settings
from hypothesis import strategies as st

BLOCK = 4
CONFIG = SchedulerConfig(
    kv_tokens=48, max_position=40, block_size=BLOCK, max_running=3, max_waiting=5, max_batch_tokens=12, chunk_tokens=7
)


class Memory:
    """Stands in for the model and its cache."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.cells = np.full((scheduler.pool.num_blocks * BLOCK, 3), -1)

    def run(self, batch: Batch) -> Sampled:
        assert sum(batch.counts) <= CONFIG.max_batch_tokens
        for row, sequence in enumerate(batch.rows):
            for position in range(batch.starts[row], batch.starts[row] + batch.counts[row]):
                place = self._place(batch.slots[row], position)
                self.cells[place] = (self.scheduler.version, sequence.ids[position], position)
        for row in batch.yields:
            sequence = batch.rows[row]
            places = [self._place(batch.slots[row], p) for p in range(sequence.num_known)]
            want = [(self.scheduler.version, sequence.ids[p], p) for p in range(sequence.num_known)]
            assert self.cells[places].tolist() == [list(map(int, cell)) for cell in want]
        tokens = [len(batch.rows[row].ids) % 3 for row in batch.yields]
        return Sampled(tokens, [0.0] * len(tokens), [0.0] * len(tokens))

    def _place(self, slot: int, position: int) -> int:
        return int(self.scheduler.slots.table[slot, position // BLOCK]) * BLOCK + position % BLOCK


def step(scheduler: Scheduler, memory: Memory) -> None:
    batch = scheduler.schedule()
    if batch is not None:
        scheduler.commit(batch, memory.run(batch))


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=20)
operations = st.one_of(
    st.tuples(st.just("add"), prompts, st.integers(1, 18), st.sampled_from("xy")),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("swap")),
    st.tuples(st.just("step"), st.integers(1, 6)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(operations, max_size=60))
def test_no_history_mixes_contexts_or_leaks_blocks(history: list[tuple]) -> None:  # type: ignore[type-arg]
    scheduler = Scheduler(CONFIG)
    scheduler.swap(0)
    memory = Memory(scheduler)
    streams: dict[str, tuple[EventStream, int]] = {}
    for operation in history:
        if operation[0] == "add":
            _, prompt, max_tokens, namespace = operation
            name, stream = str(len(streams)), EventStream()
            request = GenerateRequest(name, np.array(prompt, np.int32), max_tokens, namespace=namespace)
            try:
                scheduler.add(request, stream)
                streams[name] = (stream, max_tokens)
            except EngineBusy:
                assert len(scheduler.waiting) == CONFIG.max_waiting
        elif operation[0] == "abort":
            scheduler.finish(str(operation[1]), Finish("abort"))
        elif operation[0] == "swap":
            scheduler.swap(scheduler.version + 1)
        else:
            for _ in range(operation[1]):
                step(scheduler, memory)
    for _ in range(2000):
        if not scheduler.has_work:
            break
        step(scheduler, memory)
    assert not scheduler.has_work, "a request never finished"
    assert scheduler.pool.num_available == scheduler.pool.num_blocks
    assert len(scheduler.slots.free) == CONFIG.max_running
    for stream, max_tokens in streams.values():
        *tokens, finish = stream._events
        assert [t.index for t in tokens] == list(range(len(tokens)))  # type: ignore[union-attr]
        assert finish.reason == "abort" or (finish.reason == "length" and len(tokens) == max_tokens)


def test_decodes_go_first_and_a_long_prefill_comes_in_chunks() -> None:
    config = SchedulerConfig(kv_tokens=128, max_position=100, block_size=4, max_batch_tokens=10, max_running=4, chunk_tokens=8)
    scheduler = Scheduler(config)
    scheduler.swap(0)
    scheduler.add(GenerateRequest("short", np.zeros(2, np.int32), 50), EventStream())
    shapes = []
    for number in range(5):
        if number == 1:
            scheduler.add(GenerateRequest("long", np.ones(20, np.int32), 50), EventStream())
        batch = scheduler.schedule()
        assert batch is not None
        shapes.append([(s.request.request_id, n) for s, n in zip(batch.rows, batch.counts, strict=True)])
        scheduler.commit(batch, Sampled([7] * len(batch.yields), [0.0] * len(batch.yields), [0.0] * len(batch.yields)))
    assert shapes == [
        [("short", 2)],
        [("short", 1), ("long", 8)],
        [("short", 1), ("long", 8)],
        [("short", 1), ("long", 4)],
        [("short", 1), ("long", 1)],
    ]


def test_a_prefix_that_arrives_together_is_computed_once() -> None:
    scheduler = Scheduler(SchedulerConfig(256, 64, block_size=BLOCK, max_running=8, max_batch_tokens=12, chunk_tokens=12))
    scheduler.version = 0
    memory = Memory(scheduler)
    shared = [7] * 18
    for number in range(4):
        ids = np.array([*shared, number, number], dtype=np.int32)
        scheduler.add(GenerateRequest(f"r{number}", ids, 2), EventStream())
    scheduler.add(GenerateRequest("apart", np.array([1, 2, 3], dtype=np.int32), 2), EventStream())
    step(scheduler, memory)
    assert [sequence.request.request_id for sequence in scheduler.running] == ["r0"]
    while scheduler.has_work:
        step(scheduler, memory)
    assert scheduler.num_reused == 3 * 16
    assert scheduler.num_prefilled == 20 + 3 * 4 + 3


def test_whoever_waits_for_a_prefix_goes_on_when_it_is_aborted() -> None:
    scheduler = Scheduler(SchedulerConfig(256, 64, block_size=BLOCK, max_running=8, max_batch_tokens=8, chunk_tokens=8))
    scheduler.version = 0
    memory = Memory(scheduler)
    for name in ("first", "second"):
        scheduler.add(GenerateRequest(name, np.full(30, 7, dtype=np.int32), 1), EventStream())
    step(scheduler, memory)
    scheduler.finish("first", Finish("abort"))
    while scheduler.has_work:
        step(scheduler, memory)
    assert scheduler.num_reused == 8
