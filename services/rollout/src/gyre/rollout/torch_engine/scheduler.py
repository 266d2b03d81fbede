"""Which tokens are computed next: continuous batching under one rule.

A sequence knows some tokens (its prompt, then what was sampled) and has computed the KV of some of them. Every
iteration spends a token budget on known minus computed tokens, decodes first. That is chunked prefill, decode, the
rebuild after a weights swap and the recompute after a preemption, all at once. A sequence whose known tokens are all
computed yields its next one.

A request that arrives with KV of its own (it was moved here) waits with its blocks in hand, before the others. When
nothing else is left, such blocks are given up before a running sequence is preempted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
from gyre.rollout.engines.base import (
    QUEUE_FULL,
    EngineBusy,
    EventStream,
    Finish,
    GenerateRequest,
    InvalidRequest,
    TokenEvent,
)
from gyre.rollout.engines.recent import RecentPrefixes
from gyre.rollout.torch_engine.cache import KEPT, BlockPool, Chain, Root
from gyre.rollout.torch_engine.sampler import Sampled, SamplingRows
from gyre.rollout.torch_engine.sequence import Batch, Sequence, Slots


@dataclass(frozen=True)
class SchedulerConfig:
    """Bounds of one engine; all counts are tokens unless they say otherwise.

    `max_batch_tokens` per iteration must leave room for one token of each of `max_running` sequences. `chunk_tokens`
    bounds what one sequence may prefill per iteration, so that it cannot hold up everyone's decode. `keeps`: blocks of a
    namespace outlive a change of weights, else everything is computed again under the new ones.
    """

    kv_tokens: int
    max_position: int
    block_size: int = 16
    max_running: int = 64
    max_waiting: int = 1024
    max_batch_tokens: int = 2048
    chunk_tokens: int = 512
    keeps: bool = False

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.kv_tokens < self.block_size:
            raise ValueError(f"kv_tokens: {self.kv_tokens} must hold at least one block of {self.block_size} tokens")
        if not 1 <= self.max_running <= self.max_batch_tokens:
            raise ValueError(f"max_running: {self.max_running} must be in 1..max_batch_tokens={self.max_batch_tokens}")
        if self.chunk_tokens < 1 or self.max_waiting < 1:
            raise ValueError(f"chunk_tokens: {self.chunk_tokens} and max_waiting: {self.max_waiting} must be positive")


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
        self.recent = RecentPrefixes(2 * config.kv_tokens)
        self.num_sampled = self.num_prefilled = self.num_reused = self.num_preempted = 0
        self._arrivals = 0
        self._by_id: dict[str, Sequence] = {}
        self._computing: Batch | None = None  # what the model computes now
        self._withheld: list[int] = []  # until it is through

    @property
    def has_work(self) -> bool:
        """Whether any request is in flight."""
        return bool(self._by_id)

    @property
    def sequences(self) -> list[Sequence]:
        """Everything in flight."""
        return list(self._by_id.values())

    @property
    def withheld(self) -> list[int]:
        """References on blocks of sequences that ended while the model still writes to them; for tests and reports."""
        return self._withheld

    def find(self, request_id: str) -> Sequence | None:
        """The request in flight of that name."""
        return self._by_id.get(request_id)

    def root(self, namespace: str) -> Root:
        """What the first block of a sequence is filed under."""
        return (KEPT, namespace) if self.config.keeps and namespace else (self.version, namespace)

    def add(self, request: GenerateRequest, stream: EventStream, chain: Chain | None = None) -> None:
        """Queues a request, with the KV that it brings. Only when this returns the chain is the scheduler's.

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
            raise EngineBusy(f"{QUEUE_FULL}: {len(self.waiting)} requests; try another cell or later")
        brought = chain is not None and bool(chain.blocks)
        sequence = Sequence(request, stream, self._arrivals, chain or Chain(self.root(request.namespace)))
        self._arrivals += 1
        self._by_id[request.request_id] = sequence
        self.waiting.appendleft(sequence) if brought else self.waiting.append(sequence)

    def schedule(self) -> Batch | None:
        """Decides one iteration: 1. running sequences, decodes first; 2. whoever waits and fits. None if idle."""
        batch = Batch()
        budget = self.config.max_batch_tokens
        for sequence in sorted(self.running, key=attrgetter("num_pending")):
            if sequence.slot < 0:  # preempted by an earlier one of this loop
                continue
            budget -= self._place(sequence, budget, batch)
        later: list[Sequence] = []
        while budget > 0 and self.waiting and len(later) < len(self.slots.free):
            if self._is_about_to_be_computed(self.waiting[0], batch):
                later.append(self.waiting.popleft())
                continue
            if not self._admit():
                break
            budget -= self._place(self.running[-1], budget, batch)
        self.waiting.extendleft(reversed(later))
        self._computing = batch if batch.rows else None
        return self._computing

    def commit(self, batch: Batch, sampled: Sampled) -> None:
        """Enters computed and sampled tokens, pushes events, retires what has finished.

        Rows that ended while the model ran (aborted, moved) are passed over.
        """
        self._computing = None
        self.pool.release(self._withheld)
        self._withheld = []
        for sequence, count in zip(batch.rows, batch.counts, strict=True):
            if sequence.slot < 0:
                continue
            sequence.chain.num_computed += count
            if count > 1:
                self.num_prefilled += count
                self.file(sequence.chain, sequence.ids)
        self.num_sampled += len(batch.yields)
        drawn = zip(batch.yields, sampled.token_ids, sampled.logprobs, sampled.behaviour_logprobs, strict=True)
        for row, token, logprob, behaviour in drawn:
            if batch.rows[row].slot >= 0:
                self._append(batch.rows[row], token, logprob, behaviour)

    def sampling_rows(self, batch: Batch) -> SamplingRows:
        """Sampling parameters of the rows that yield, in order."""
        slots_R = np.array(batch.slots, dtype=np.int64)[batch.yields]
        slots = self.slots
        return SamplingRows(slots.temperatures[slots_R], slots.top_ps[slots_R], slots.top_ks[slots_R], slots.seeds[slots_R],
                            slots.num_known[slots_R])  # fmt: skip

    def finish(self, request_id: str, finish: Finish) -> bool:
        """Ends a request from outside (abort, error). False if it is not in flight."""
        sequence = self._by_id.get(request_id)
        if sequence is None:
            return False
        self._retire(sequence, finish)
        return True

    def num_being_computed(self, sequence: Sequence) -> int:
        """Tokens of a sequence that the model computes now."""
        batch = self._computing
        if batch is None or sequence.slot < 0:
            return 0
        return next((n for s, n in zip(batch.rows, batch.counts, strict=True) if s is sequence), 0)

    def detach(self, sequence: Sequence) -> Chain:
        """Ends a request with `moved` and hands over what is computed of it; the references are the caller's now.

        What the model computes of it now is lost, and is still written to its blocks.
        """
        self._withhold(sequence)
        del self._by_id[sequence.request.request_id]
        if sequence.slot >= 0:
            self._stop(sequence)
        else:
            self.waiting.remove(sequence)
            if not sequence.chain.blocks:
                sequence.chain = self.match(sequence.request.namespace, sequence.ids[: sequence.num_known])
        chain = sequence.chain
        self.trim(chain, chain.num_computed)
        sequence.stream.push(_finish_of(sequence, Finish("moved")))
        return chain

    def match(self, namespace: str, ids: np.ndarray) -> Chain:
        """The longest cached prefix of `ids` that leaves at least one token over."""
        blocks, tip = self.pool.match(self.root(namespace), ids)
        oldest = int(self.pool.versions[blocks].min()) if blocks else -1
        return Chain(tip, blocks, len(blocks) * self.config.block_size, len(blocks), oldest)

    def drop(self, chain: Chain, ids: np.ndarray, namespace: str) -> None:
        """Gives up a chain of `ids`; what is filed of it stays findable until its memory is wanted."""
        self.file(chain, ids)
        self.recent.remember(namespace, ids[: chain.num_filed * self.config.block_size])
        self.pool.release(chain.blocks)
        chain.blocks = []

    def trim(self, chain: Chain, num_tokens: int) -> None:
        """Gives back the blocks that `num_tokens` tokens do not need."""
        num_blocks = -(-num_tokens // self.config.block_size)
        self.pool.release(chain.blocks[num_blocks:])
        del chain.blocks[num_blocks:]

    def file(self, chain: Chain, ids: np.ndarray) -> None:
        """Files the full blocks of a chain of `ids` that are not filed yet."""
        size = self.config.block_size
        num_full = chain.num_computed // size
        if num_full > chain.num_filed:
            blocks: Rows[int] = chain.blocks[chain.num_filed : num_full]
            chain.tip = self.pool.file(chain.tip, blocks, ids[chain.num_filed * size : num_full * size])
            chain.num_filed = num_full

    def swap(self, version: int, keeps: bool = False) -> None:
        """Other weights. Everything known stays; what is computed is void, or with `keeps` that of no namespace is."""
        self.version = version
        self.pool.forget(lambda root: not (keeps and root[0] == KEPT))
        if not keeps:
            self.recent.clear()
        for sequence in self._by_id.values():
            if not (keeps and sequence.request.namespace):
                self._void(sequence)
                sequence.num_reused = min(sequence.num_reused, 0)

    def _is_about_to_be_computed(self, sequence: Sequence, batch: Batch) -> bool:
        """Whether a row of this batch computes the first block that the sequence lacks; then it waits for that.

        Executions of one query, and all with one system prompt, arrive together: each prefix is computed once.
        """
        if sequence.chain.blocks or not batch.openings:
            return False
        size, ids = self.config.block_size, sequence.ids[: sequence.num_known]
        blocks, tip = self.pool.match(self.root(sequence.request.namespace), ids)
        self.pool.release(blocks)
        end = (len(blocks) + 1) * size
        return end < len(ids) and (tip, ids[end - size : end].tobytes()) in batch.openings

    def _place(self, sequence: Sequence, budget: int, batch: Batch) -> int:
        """Puts a sequence's next tokens into the batch if the budget and the pool allow. Returns how many."""
        start = sequence.chain.num_computed
        count = min(sequence.num_known - start, budget, self.config.chunk_tokens)
        if count <= 0 or not self._reserve(sequence, start + count, batch):
            return 0
        if start + count == sequence.num_known:
            batch.yields.append(len(batch.rows))
        batch.rows.append(sequence)
        batch.slots.append(sequence.slot)
        batch.starts.append(start)
        batch.counts.append(count)
        first = sequence.chain.num_filed * self.config.block_size
        if count > 1 and start + count >= first + self.config.block_size:
            batch.openings.add((sequence.chain.tip, sequence.ids[first : first + self.config.block_size].tobytes()))
        return count

    def _reserve(self, sequence: Sequence, num_tokens: int, batch: Batch) -> bool:
        """Blocks for `num_tokens`. When the pool is full the youngest that is not in this batch yet is preempted."""
        chain, num_before = sequence.chain, len(sequence.chain.blocks)
        while len(chain.blocks) * self.config.block_size < num_tokens:
            block = self.pool.allocate(self.version)
            if block is None:
                if self._reclaim():
                    continue
                placed = set(map(id, batch.rows))
                victim = max((s for s in self.running if id(s) not in placed), key=lambda s: s.arrival)
                if victim is sequence and len(placed) == len(self.running) - 1:
                    return False  # nobody else can yield; those in the batch go on and will give blocks back
                self._preempt(victim)
                if victim is sequence:
                    return False
                continue
            self.slots.table[sequence.slot, len(chain.blocks)] = block
            chain.blocks.append(block)
            if chain.kv_version < 0:
                chain.kv_version = self.version
        if len(chain.blocks) > num_before + 1:  # neighbours leave this engine as one
            chain.blocks[num_before:] = sorted(chain.blocks[num_before:])
            self.slots.table[sequence.slot, num_before : len(chain.blocks)] = chain.blocks[num_before:]
        return True

    def _admit(self) -> bool:
        """Moves the first waiting sequence to running if all it knows, and one token more, would fit now."""
        sequence = self.waiting[0]
        brought = bool(sequence.chain.blocks)
        if not brought:
            sequence.chain = self.match(sequence.request.namespace, sequence.ids[: sequence.num_known])
        num_needed = sequence.num_known // self.config.block_size + 1 - len(sequence.chain.blocks)
        while num_needed > self.pool.num_available:
            if self.running or not self._reclaim(spared=sequence):
                if not brought:
                    self._void(sequence)
                return False
        self.waiting.popleft()
        self.num_reused += sequence.chain.num_computed
        if sequence.num_reused < 0:
            sequence.num_reused = min(sequence.chain.num_computed, sequence.num_prompt)
        self.slots.take(sequence)
        self.running.append(sequence)
        return True

    def _reclaim(self, spared: Sequence | None = None) -> bool:
        """Takes the blocks of the last one that waits with blocks in hand. False if there is none."""
        for sequence in reversed(self.waiting):
            if sequence.chain.blocks and sequence is not spared:
                self.drop(sequence.chain, sequence.ids, sequence.request.namespace)
                self._void(sequence)
                return True
        return False

    def _append(self, sequence: Sequence, token: int, logprob: float, behaviour: float) -> None:
        index = sequence.num_known - sequence.num_prompt + sequence.request.num_emitted
        sequence.ids[sequence.num_known] = token
        sequence.num_known += 1
        self.slots.last_ids[sequence.slot] = token
        self.slots.num_known[sequence.slot] += 1
        sequence.stream.push(TokenEvent(index, token, logprob, behaviour, self.version, sequence.chain.kv_version))
        if token in sequence.stop:
            self._retire(sequence, Finish("stop"))
        elif sequence.num_known == len(sequence.ids):
            self._retire(sequence, Finish("length"))

    def _withhold(self, sequence: Sequence) -> None:
        """The blocks that the model writes to now are nobody else's until it is through."""
        num = self.num_being_computed(sequence)
        if num:
            chain, size = sequence.chain, self.config.block_size
            written = chain.blocks[chain.num_computed // size : -(-(chain.num_computed + num) // size)]
            self.pool.share(written)
            self._withheld += written

    def _retire(self, sequence: Sequence, finish: Finish) -> None:
        self._withhold(sequence)
        del self._by_id[sequence.request.request_id]
        if sequence.slot >= 0:
            self._stop(sequence)
        else:
            self.waiting.remove(sequence)
        if sequence.chain.blocks:
            self.drop(sequence.chain, sequence.ids, sequence.request.namespace)
        sequence.stream.push(_finish_of(sequence, finish))

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue without its blocks; what it computed stays findable until its memory is wanted."""
        self.num_preempted += 1
        self._stop(sequence)
        self.drop(sequence.chain, sequence.ids, sequence.request.namespace)
        self._void(sequence)
        self.waiting.appendleft(sequence)

    def _stop(self, sequence: Sequence) -> None:
        """Out of running, with its blocks."""
        self.file(sequence.chain, sequence.ids)
        self.running.remove(sequence)
        self.slots.give_back(sequence)

    def _void(self, sequence: Sequence) -> None:
        """Nothing is computed of it any more."""
        self.pool.release(sequence.chain.blocks)
        sequence.chain = Chain(self.root(sequence.request.namespace))


def _finish_of(sequence: Sequence, finish: Finish) -> Finish:
    return replace(finish, num_reused=max(0, sequence.num_reused))
