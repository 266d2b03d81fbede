"""A request while it is in flight, and what one iteration computes of several."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from gyre.rollout.engines.base import EventStream, GenerateRequest
from gyre.rollout.torch_engine.cache import Chain, Key


class Sequence:
    """`ids[:num_known]` are known; what is computed of them is in `chain`. `slot` is -1 while it waits."""

    __slots__ = ("arrival", "chain", "ids", "num_known", "num_prompt", "num_reused", "request", "slot", "stop", "stream")

    def __init__(self, request: GenerateRequest, stream: EventStream, arrival: int, chain: Chain) -> None:
        self.request = request
        self.stream = stream
        self.arrival = arrival
        self.chain = chain
        self.num_prompt = self.num_known = len(request.prompt_ids)
        self.num_reused = -1  # until it is admitted
        self.ids = np.zeros(self.num_prompt + request.max_tokens, dtype=np.int32)
        self.ids[: self.num_prompt] = request.prompt_ids
        self.stop = frozenset(request.stop_token_ids)
        self.slot = -1

    @property
    def num_pending(self) -> int:
        """Known tokens that are not computed."""
        return self.num_known - self.chain.num_computed


@dataclass(frozen=True, slots=True)
class Batch:
    """One iteration's work: row b computes `counts[b]` tokens of `rows[b]` from position `starts[b]` on.

    `yields` are the rows that then sample. `openings` are the keys of the first block that each prefill fills and that is not
    filed yet. Slots and starts are those of the moment of scheduling: a sequence may be aborted while the model runs, and
    must then still write into its own blocks.
    """

    rows: list[Sequence] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    yields: list[int] = field(default_factory=list)
    openings: set[Key] = field(default_factory=set)


class Slots:
    """Per running sequence, the arrays that the model call indexes: no Python per sequence there.

    `last_ids` is the newest known token, `num_known` how many there are.
    """

    def __init__(self, num_slots: int, num_table_blocks: int) -> None:
        self.free = list(range(num_slots - 1, -1, -1))
        self.table = np.zeros((num_slots, num_table_blocks), dtype=np.int64)
        self.last_ids = np.zeros(num_slots, dtype=np.int64)
        self.num_known = np.zeros(num_slots, dtype=np.int64)
        self.temperatures = np.ones(num_slots)
        self.top_ps = np.ones(num_slots)
        self.top_ks = np.zeros(num_slots, dtype=np.int64)
        self.seeds = np.zeros(num_slots, dtype=np.uint64)

    def take(self, sequence: Sequence) -> None:
        request, blocks = sequence.request, sequence.chain.blocks
        sequence.slot = slot = self.free.pop()
        self.temperatures[slot], self.top_ps[slot] = request.temperature, request.top_p
        self.top_ks[slot], self.seeds[slot] = request.top_k, request.seed
        self.num_known[slot], self.last_ids[slot] = sequence.num_known, sequence.ids[sequence.num_known - 1]
        self.table[slot, : len(blocks)] = blocks

    def give_back(self, sequence: Sequence) -> None:
        self.free.append(sequence.slot)
        sequence.slot = -1
