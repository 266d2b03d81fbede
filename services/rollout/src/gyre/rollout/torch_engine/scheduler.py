"""Which tokens are computed next: continuous batching under one rule.

A sequence knows some tokens (its prompt, then what was sampled) and has computed the KV of some of them. Every
iteration spends a token budget on known minus computed tokens, decodes first. That is chunked prefill, decode, the
rebuild after a weights swap and the recompute after a preemption, all at once. A sequence whose known tokens are all
computed yields its next one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from gyre.rollout.engines.base import EngineBusy, EventStream, Finish, GenerateRequest, InvalidRequest, TokenEvent
from gyre.rollout.torch_engine.cache import BlockPool, Tip
from gyre.rollout.torch_engine.sampler import Sampled, SamplingRows


@dataclass(frozen=True)
class SchedulerConfig:
    """Bounds of one engine; all counts are tokens unless they say otherwise.

    `max_batch_tokens` per iteration must leave room for one token of each of `max_running` sequences. `chunk_tokens`
    bounds what one sequence may prefill per iteration, so that it cannot hold up everyone's decode.
    """

    kv_tokens: int
    max_position: int
    block_size: int = 16
    max_running: int = 64
    max_waiting: int = 1024
    max_batch_tokens: int = 2048
    chunk_tokens: int = 512

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.kv_tokens < self.block_size:
            raise ValueError(f"kv_tokens: {self.kv_tokens} must hold at least one block of {self.block_size} tokens")
        if not 1 <= self.max_running <= self.max_batch_tokens:
            raise ValueError(f"max_running: {self.max_running} must be in 1..max_batch_tokens={self.max_batch_tokens}")
        if self.chunk_tokens < 1 or self.max_waiting < 1:
            raise ValueError(f"chunk_tokens: {self.chunk_tokens} and max_waiting: {self.max_waiting} must be positive")


class Sequence:
    """One request while it is in flight. `ids[:num_known]` are known, KV of the first `num_computed` is in `blocks`."""

    __slots__ = (
        "arrival", "blocks", "ids", "num_computed", "num_filed", "num_known", "num_prompt", "request", "slot", "stop",
        "stream", "tip",
    )  # fmt: skip

    def __init__(self, request: GenerateRequest, stream: EventStream, arrival: int) -> None:
        self.request = request
        self.stream = stream
        self.arrival = arrival
        self.num_prompt = self.num_known = len(request.prompt_ids)
        self.ids = np.zeros(self.num_prompt + request.max_tokens, dtype=np.int32)
        self.ids[: self.num_prompt] = request.prompt_ids
        self.stop = frozenset(request.stop_token_ids)
        self.num_computed = 0
        self.num_filed = 0
        self.blocks: list[int] = []
        self.tip: Tip = (-1, "")
        self.slot = -1


@dataclass(frozen=True, slots=True)
class Batch:
    """One iteration's work: row b computes `counts[b]` tokens of `rows[b]` from position `starts[b]` on.

    `yields` are the rows that then sample. Slots and starts are those of the moment of scheduling: a sequence may be
    aborted while the model runs, and must then still write into its own blocks.
    """

    rows: list[Sequence] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    yields: list[int] = field(default_factory=list)


class Slots:
    """Per running sequence, the arrays that the model call indexes: no Python per sequence there."""

    def __init__(self, num_slots: int, num_table_blocks: int) -> None:
        self.free = list(range(num_slots - 1, -1, -1))
        self.table = np.zeros((num_slots, num_table_blocks), dtype=np.int64)
        self.temperatures = np.ones(num_slots)
        self.top_ps = np.ones(num_slots)
        self.top_ks = np.zeros(num_slots, dtype=np.int64)
        self.seeds = np.zeros(num_slots, dtype=np.uint64)

    def take(self, sequence: Sequence) -> None:
        request = sequence.request
        sequence.slot = slot = self.free.pop()
        self.temperatures[slot], self.top_ps[slot] = request.temperature, request.top_p
        self.top_ks[slot], self.seeds[slot] = request.top_k, request.seed
        self.table[slot, : len(sequence.blocks)] = sequence.blocks

    def give_back(self, sequence: Sequence) -> None:
        self.free.append(sequence.slot)
        sequence.slot = -1


class Scheduler:
    """Owns the sequences in flight and the block pool. Pure bookkeeping: no torch, no clock, no I/O."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.version = -1
        self.pool = BlockPool(config.kv_tokens // config.block_size, config.block_size)
        longest = min(config.max_position, self.pool.num_blocks * config.block_size)
        self.slots = Slots(config.max_running, -(-longest // config.block_size))
        self.longest = longest
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.num_sampled = self.num_prefilled = self.num_reused = self.num_preempted = 0
        self._arrivals = 0
        self._by_id: dict[str, Sequence] = {}

    @property
    def has_work(self) -> bool:
        """Whether any request is in flight."""
        return bool(self._by_id)

    @property
    def sequences(self) -> list[Sequence]:
        """Everything in flight."""
        return list(self._by_id.values())

    def add(self, request: GenerateRequest, stream: EventStream) -> None:
        """Queues a request.

        Raises:
            InvalidRequest: it is in flight already, or could never fit.
            EngineBusy: the queue is full.
        """
        if request.request_id in self._by_id:
            raise InvalidRequest(f"request_id: {request.request_id!r} is in flight already")
        total = len(request.prompt_ids) + request.max_tokens
        if total > self.longest:
            raise InvalidRequest(
                f"prompt_ids + max_tokens: {len(request.prompt_ids)} + {request.max_tokens} tokens exceed "
                f"{self.longest}, the longest context of this engine"
            )
        if len(self.waiting) >= self.config.max_waiting:
            raise EngineBusy(f"waiting queue full: {len(self.waiting)} requests; try another cell or later")
        sequence = Sequence(request, stream, self._arrivals)
        self._arrivals += 1
        self._by_id[request.request_id] = sequence
        self.waiting.append(sequence)

    def schedule(self) -> Batch | None:
        """Decides one iteration: 1. running sequences, decodes first; 2. whoever waits and fits. None if idle."""
        batch = Batch()
        budget = self.config.max_batch_tokens
        for sequence in sorted(self.running, key=_num_pending):
            if sequence.slot < 0:  # preempted by an earlier one of this loop
                continue
            budget -= self._place(sequence, budget, batch)
        while budget > 0 and self.waiting and self.slots.free and self._admit():
            budget -= self._place(self.running[-1], budget, batch)
        return batch if batch.rows else None

    def commit(self, batch: Batch, sampled: Sampled) -> None:
        """Enters computed and sampled tokens, pushes events, retires what has finished.

        Rows that were aborted while the model ran are passed over.
        """
        for sequence, count in zip(batch.rows, batch.counts, strict=True):
            if sequence.slot < 0:
                continue
            sequence.num_computed += count
            if count > 1:
                self.num_prefilled += count
                self._file(sequence)
        self.num_sampled += len(batch.yields)
        drawn = zip(batch.yields, sampled.token_ids, sampled.logprobs, sampled.behaviour_logprobs, strict=True)
        for row, token, logprob, behaviour in drawn:
            if batch.rows[row].slot >= 0:
                self._append(batch.rows[row], token, logprob, behaviour)

    def sampling_rows(self, batch: Batch) -> SamplingRows:
        """Sampling parameters of the rows that yield, in order."""
        slots = np.array([batch.slots[row] for row in batch.yields], dtype=np.int64)
        return SamplingRows(
            temperatures_R=self.slots.temperatures[slots],
            top_ps_R=self.slots.top_ps[slots],
            top_ks_R=self.slots.top_ks[slots],
            seeds_R=self.slots.seeds[slots],
            positions_R=np.array([batch.rows[row].num_known for row in batch.yields], dtype=np.int64),
        )

    def finish(self, request_id: str, finish: Finish) -> bool:
        """Ends a request from outside (abort, error). False if it is not in flight."""
        sequence = self._by_id.get(request_id)
        if sequence is None:
            return False
        self._retire(sequence, finish)
        return True

    def swap(self, version: int) -> None:
        """Other weights: everything computed is void, everything known stays."""
        self.version = version
        self.pool.forget()
        for sequence in self.running:
            self.pool.release(sequence.blocks)
            sequence.blocks = []
            sequence.num_computed = sequence.num_filed = 0
            sequence.tip = (version, sequence.request.namespace)

    def _place(self, sequence: Sequence, budget: int, batch: Batch) -> int:
        """Puts a sequence's next tokens into the batch if the budget and the pool allow. Returns how many."""
        count = min(_num_pending(sequence), budget, self.config.chunk_tokens)
        if count <= 0 or not self._reserve(sequence, sequence.num_computed + count, batch):
            return 0
        if sequence.num_computed + count == sequence.num_known:
            batch.yields.append(len(batch.rows))
        batch.rows.append(sequence)
        batch.slots.append(sequence.slot)
        batch.starts.append(sequence.num_computed)
        batch.counts.append(count)
        return count

    def _reserve(self, sequence: Sequence, num_tokens: int, batch: Batch) -> bool:
        """Blocks for `num_tokens`. When the pool is full the youngest that is not in this batch yet is preempted."""
        while len(sequence.blocks) * self.config.block_size < num_tokens:
            block = self.pool.allocate()
            if block is None:
                placed = set(map(id, batch.rows))
                victim = max((s for s in self.running if id(s) not in placed), key=lambda s: s.arrival)
                if victim is sequence and len(placed) == len(self.running) - 1:
                    return False  # nobody else can yield; those in the batch go on and will give blocks back
                self._preempt(victim)
                if victim is sequence:
                    return False
                continue
            self.slots.table[sequence.slot, len(sequence.blocks)] = block
            sequence.blocks.append(block)
        return True

    def _admit(self) -> bool:
        """Moves the first waiting sequence to running if all it knows, and one token more, would fit now."""
        sequence = self.waiting[0]
        root = (self.version, sequence.request.namespace)
        blocks, tip = self.pool.match(root, sequence.ids[: sequence.num_known])
        num_needed = sequence.num_known // self.config.block_size + 1 - len(blocks)
        if num_needed > self.pool.num_available:
            self.pool.release(blocks)
            return False
        self.waiting.popleft()
        sequence.blocks, sequence.tip, sequence.num_filed = blocks, tip, len(blocks)
        sequence.num_computed = len(blocks) * self.config.block_size
        self.num_reused += sequence.num_computed
        self.slots.take(sequence)
        self.running.append(sequence)
        return True

    def _append(self, sequence: Sequence, token: int, logprob: float, behaviour: float) -> None:
        index = sequence.num_known - sequence.num_prompt + sequence.request.num_emitted
        sequence.ids[sequence.num_known] = token
        sequence.num_known += 1
        sequence.stream.push(TokenEvent(index, token, logprob, behaviour, self.version, self.version))
        if token in sequence.stop:
            self._retire(sequence, Finish("stop"))
        elif sequence.num_known == len(sequence.ids):
            self._retire(sequence, Finish("length"))

    def _retire(self, sequence: Sequence, finish: Finish) -> None:
        del self._by_id[sequence.request.request_id]
        if sequence.slot >= 0:
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.stream.push(finish)

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preempted += 1
        self._leave(sequence)
        self.waiting.appendleft(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Out of running; what it computed stays findable until its memory is wanted."""
        self._file(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = sequence.num_filed = 0
        self.running.remove(sequence)
        self.slots.give_back(sequence)

    def _file(self, sequence: Sequence) -> None:
        size = self.config.block_size
        num_full = sequence.num_computed // size
        if num_full > sequence.num_filed:
            blocks = sequence.blocks[sequence.num_filed : num_full]
            ids = sequence.ids[sequence.num_filed * size : num_full * size]
            sequence.tip = self.pool.file(sequence.tip, blocks, ids)
            sequence.num_filed = num_full


def _num_pending(sequence: Sequence) -> int:
    return sequence.num_known - sequence.num_computed
