"""What stands behind a ticket: KV that is offered (the source's half of a move) or that arrives (the destination's).

Both end in a `Holding`: KV that belongs to no request, until one adopts it. Blocks are counted by references alone, so
whatever a ticket holds is neither handed out nor evicted. Bookkeeping only; bytes are `shipping`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from gyre.rollout.engines.base import GenerateRequest
from gyre.rollout.engines.moving import ExportOf, Frozen, MoveRefused, Offer, Reservation, Stage, tokens_digest
from gyre.rollout.torch_engine.cache import Chain
from gyre.rollout.torch_engine.scheduler import Scheduler
from gyre.rollout.torch_engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Holding:
    """KV of the first `chain.num_computed` of `ids` (int32, all known tokens), to be adopted within `namespace`."""

    namespace: str
    ids: np.ndarray
    chain: Chain

    def fits(self, request: GenerateRequest) -> bool:
        """Whether `request` begins with exactly these tokens and has at least one more."""
        num, prompt = self.chain.num_computed, request.prompt_ids
        same = self.namespace == request.namespace and num < len(prompt)
        return same and np.array_equal(prompt[:num], self.ids[:num])


@dataclass(frozen=True, slots=True)
class Published:
    """A block that can be read, and where."""

    block: int
    row: int
    checksum: bytes


class Export:
    """The source's half. Until it is frozen the request goes on and only its full blocks are pinned."""

    def __init__(self, scheduler: Scheduler, what: ExportOf) -> None:
        """Raises MoveRefused if there is nothing of that name."""
        self.what = what
        self.holding: Holding | None = None
        self.published: dict[int, Published] = {}  # by number of the block
        self.one_at_a_time = asyncio.Lock()  # held by whoever publishes
        self._scheduler = scheduler
        self._sequence: Sequence | None = None
        self._pins: list[int] = []
        if what.request_id:
            self._sequence = scheduler.find(what.request_id)
            if self._sequence is None:
                raise MoveRefused(f"request_id: {what.request_id!r} is not in flight")
            self._pin()
        else:
            self.holding = self._cached(what.namespace)

    def offer(self, ticket: str, layout: str, region: str, block_bytes: int) -> Offer:
        """What the destination must know."""
        version = self._scheduler.version
        if self._sequence is not None:
            known, most = self._sequence.num_known, len(self._sequence.ids)
            return Offer(ticket, layout, version, self._sequence.request.namespace, known, most, region, block_bytes)
        assert self.holding is not None
        num = len(self.holding.ids)
        return Offer(ticket, layout, version, self.holding.namespace, num, num, region, block_bytes)

    def full_blocks(self) -> list[int]:
        """The blocks that do not change any more, pinned from now on. Raises MoveRefused if the request has ended."""
        if self.holding is not None:
            chain = self.holding.chain
            return chain.blocks[: chain.num_computed // self._scheduler.config.block_size]
        self._pin()
        return self._pins

    def can_stop(self) -> bool:
        """Whether `freeze` loses no more than one token that is being computed now. Raises MoveRefused if it has ended."""
        if self.holding is not None:
            return True
        num = self._scheduler.num_being_computed(self._in_flight())
        return num == 0 or (num == 1 and self._scheduler.pool.num_available > 0)

    def freeze(self, copy: Callable[[int, int], None]) -> Holding:
        """Stops the request; `can_stop`, or nothing is being computed. Raises MoveRefused if it has ended.

        `copy` (from block, to block): the last block, when the model is writing to it, is left to the model.
        """
        if self.holding is None:
            sequence, pool = self._in_flight(), self._scheduler.pool
            is_partial = sequence.chain.num_computed % self._scheduler.config.block_size > 0
            spare = pool.allocate() if is_partial and self._scheduler.num_being_computed(sequence) else None
            chain = self._scheduler.detach(sequence)
            if spare is not None:
                last = chain.blocks[-1]
                copy(last, spare)
                pool.versions[spare] = pool.versions[last]
                chain.blocks[-1] = spare
                pool.release([last])
            ids = sequence.ids[: sequence.num_known]
            self.holding = Holding(sequence.request.namespace, ids, chain)
        return self.holding

    def stage(self, first: int, blocks: list[int]) -> Stage:
        """The stage of published `blocks`, numbers `first` on."""
        size = self._scheduler.config.block_size
        ids = self.holding.ids if self.holding is not None else self._known()
        end = (first + len(blocks)) * size
        if self.holding is not None:
            end = min(end, self.holding.chain.num_computed)
        rows = [self.published[first + i] for i in range(len(blocks))]
        return Stage(
            first, np.array([r.row for r in rows], dtype=np.int64), tuple(r.checksum for r in rows),
            ids[min(first * size, end) : end].copy(), self._scheduler.pool.versions[blocks].copy(),
        )  # fmt: skip

    def references(self) -> list[int]:
        """Every reference on a block that is held."""
        return self._pins + ([] if self.holding is None else self.holding.chain.blocks)

    def drop(self, keeps_chain: bool = False) -> None:
        """Gives up the pins, and the chain unless a request has adopted it."""
        self._scheduler.pool.release(self._pins)
        self._pins = []
        if self.holding is not None and not keeps_chain:
            self._scheduler.drop(self.holding.chain, self.holding.ids, self.holding.namespace)

    def _cached(self, namespace: str) -> Holding:
        ids = self._scheduler.recent.find(namespace)
        if ids is None:
            raise MoveRefused(f"namespace: nothing is cached for {namespace!r}")
        chain = self._scheduler.match(namespace, np.append(ids, np.int32(0)))
        if not chain.blocks:
            raise MoveRefused(f"namespace: what was cached for {namespace!r} has been evicted")
        return Holding(namespace, ids[: chain.num_computed], chain)

    def _in_flight(self) -> Sequence:
        sequence = self._sequence
        if sequence is None or self._scheduler.find(self.what.request_id) is not sequence:
            raise MoveRefused(f"request_id: {self.what.request_id!r} has ended")
        return sequence

    def _known(self) -> np.ndarray:
        assert self._sequence is not None
        return self._sequence.ids

    def _pin(self) -> None:
        chain = self._in_flight().chain
        num_full = chain.num_computed // self._scheduler.config.block_size
        fresh = chain.blocks[len(self._pins) : num_full]
        self._scheduler.pool.share(fresh)
        self._pins += fresh


class Import:
    """The destination's half: blocks in which KV arrives. `one_at_a_time` is held by whoever fills or commits them."""

    def __init__(self, scheduler: Scheduler, reservation: Reservation) -> None:
        """Takes blocks. Raises MoveRefused if there is no room."""
        self.reservation = reservation
        self.one_at_a_time = asyncio.Lock()
        self.is_reading = self.is_dropped = False
        self.holding: Holding | None = None
        self._scheduler = scheduler
        self._digest = b""
        self._size = scheduler.config.block_size
        if not 1 <= reservation.num_tokens <= scheduler.longest:
            raise MoveRefused(f"num_tokens: {reservation.num_tokens} must be in 1..{scheduler.longest}")
        self.blocks: list[int] = []
        self._ids = np.zeros(scheduler.longest + self._size, dtype=np.int32)
        self._filled: list[int] = []  # tokens that have arrived, by block
        self._checksums: list[bytes] = []
        self.grow(-(-reservation.num_tokens // self._size))

    def grow(self, num_blocks: int) -> None:
        """Takes blocks up to so many: more became known than was expected. Raises MoveRefused."""
        more, pool = num_blocks - len(self.blocks), self._scheduler.pool
        if more <= 0 or self.holding is not None:
            return
        if num_blocks * self._size >= self._scheduler.longest + self._size:
            raise MoveRefused(f"stage: {num_blocks} blocks are more than {self._scheduler.longest} tokens")
        if more > pool.num_available:
            raise MoveRefused(f"no room: {more} blocks are wanted, {pool.num_available} can be had")
        taken = [pool.allocate(self._scheduler.version) for _ in range(more)]
        self.blocks += sorted(block for block in taken if block is not None)  # neighbours are read as one
        self._filled += [0] * more
        self._checksums += [b""] * more

    def missing(self, stage: Stage) -> list[int]:
        """Indexes into the stage of blocks that are not there yet. Raises MoveRefused for a stage that cannot be."""
        num, first = len(stage.rows), stage.first_block
        if self.holding is not None or num == len(stage.token_ids) == 0:
            return []
        if first < 0 or first + num > len(self.blocks):
            raise MoveRefused(f"stage: blocks {first}..{first + num - 1} are outside of the {len(self.blocks)} reserved")
        if not len(stage.checksums) == len(stage.kv_versions) == num:
            raise MoveRefused(f"stage: {len(stage.checksums)} checksums, {len(stage.kv_versions)} versions for {num} rows")
        if not (num - 1) * self._size < len(stage.token_ids) <= num * self._size:
            raise MoveRefused(f"stage: {len(stage.token_ids)} tokens cannot be those of {num} blocks of {self._size}")
        version = self._scheduler.version
        equal = (stage.kv_versions <= version) if self._scheduler.config.keeps else (stage.kv_versions == version)
        if not equal.all():
            raise MoveRefused(f"stage: computed under weights {sorted(set(stage.kv_versions.tolist()))}, here are {version}")
        return [i for i, checksum in enumerate(stage.checksums) if self._checksums[first + i] != checksum]

    def expect(self, stage: Stage, indexes: list[int]) -> list[int]:
        """The blocks for these rows of a stage; they count as empty until `enter`."""
        for index in indexes:
            self._checksums[stage.first_block + index] = b""
            self._filled[stage.first_block + index] = 0
        return [self.blocks[stage.first_block + index] for index in indexes]

    def enter(self, stage: Stage) -> None:
        """All blocks of the stage are there."""
        first, num = stage.first_block, len(stage.rows)
        start = first * self._size
        self._ids[start : start + len(stage.token_ids)] = stage.token_ids
        for index in range(num):
            self._filled[first + index] = min(self._size, len(stage.token_ids) - index * self._size)
            self._checksums[first + index] = stage.checksums[index]
        self._scheduler.pool.versions[self.blocks[first : first + num]] = stage.kv_versions

    def commit(self, frozen: Frozen) -> Holding:
        """Verifies the whole and files it. Raises MoveRefused."""
        if self.holding is not None:
            if frozen.digest != self._digest:
                raise MoveRefused("digest: other tokens were committed under this ticket")
            return self.holding
        num, num_blocks = frozen.num_computed, -(-frozen.num_computed // self._size)
        if num < 0 or num + len(frozen.known_ids) != frozen.num_known:
            raise MoveRefused(f"frozen: {num} computed and {len(frozen.known_ids)} more are not {frozen.num_known}")
        if sum(self._filled[:num_blocks]) != num:
            raise MoveRefused(f"frozen: of {num} computed tokens {sum(self._filled[:num_blocks])} have arrived")
        ids = np.concatenate((self._ids[:num], frozen.known_ids.astype(np.int32)))
        if tokens_digest(ids) != frozen.digest:
            raise MoveRefused("digest: these are not the tokens of the source")
        return self._file(ids, num, frozen.digest)

    def arrived(self) -> tuple[list[int], list[bytes]]:
        """The full blocks of what was pulled, and their checksums, in order."""
        num = next((n for n, filled in enumerate(self._filled) if filled < self._size), len(self._filled))
        return self.blocks[:num], self._checksums[:num]

    def drop(self, keeps_chain: bool = False) -> None:
        """Gives the blocks back, unless a request has adopted them. A read that is going on keeps them to its end."""
        self.is_dropped = True
        if keeps_chain:
            return
        if self.holding is not None:
            self._scheduler.drop(self.holding.chain, self.holding.ids, self.holding.namespace)
        elif not self.is_reading:
            self._scheduler.pool.release(self.blocks)
            self.blocks = []

    def read_ended(self) -> None:
        """A read is over: now blocks that were dropped meanwhile can be used for something else."""
        self.is_reading = False
        if self.is_dropped:
            self.drop()

    def _file(self, ids: np.ndarray, num_computed: int, digest: bytes) -> Holding:
        scheduler, namespace = self._scheduler, self.reservation.namespace
        chain = Chain(scheduler.root(namespace), self.blocks, num_computed)
        scheduler.trim(chain, len(ids) if num_computed else 0)
        if chain.blocks:
            chain.kv_version = int(scheduler.pool.versions[chain.blocks].min())
        scheduler.file(chain, ids)
        scheduler.recent.remember(namespace, ids[: chain.num_filed * self._size])
        self._digest = digest
        self.holding = Holding(namespace, ids, chain)
        return self.holding
