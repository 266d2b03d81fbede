"""How blocks leave an engine and how they enter one: by one-sided reads of registered rows.

On a CPU the pool itself is registered and a block's row is the block. On a GPU blocks pass through a staging pool in host
memory, on both sides.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from gyre.rollout.engines.moving import MoveRefused
from gyre.rollout.torch_engine.cache import BlockPool
from gyre.rollout.torch_engine.kv import PagedKV, RowTransfer
from gyre.transfer import RegionDescriptor, TransferError, row_checksum

STAGING = "kv-staging"
_INLINE_BYTES = 4 << 20  # checksums of less are made at once; a thread would cost more


class Shipping(Protocol):
    """Blocks to rows and back. `region` is the descriptor of the rows, as JSON."""

    @property
    def region(self) -> str: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def max_stage(self) -> int:
        """Blocks to publish at once at most, so that several moves find room."""
        ...

    def populate(self) -> None:
        """Gives the memory that blocks arrive in its pages, so that a move does not wait for them. Blocking."""
        ...

    def copy(self, block: int, to: int) -> None:
        """What one block holds, into another."""
        ...

    async def publish(self, blocks: Sequence[int]) -> tuple[list[int], list[bytes]]:
        """Makes blocks readable, which must not change meanwhile; their rows and checksums. Raises MoveRefused: no room."""
        ...

    def arrived(self, blocks: Sequence[int], checksums: Sequence[bytes]) -> None:
        """These full blocks were read and verified: their checksums need not be made again when they move on."""
        ...

    def retract(self, rows: Sequence[int]) -> None:
        """These rows are offered no longer."""
        ...

    async def fetch(
        self, region: str, rows: np.ndarray, checksums: tuple[bytes, ...], blocks: Sequence[int], timeout_s: float
    ) -> None:
        """Reads rows of another engine into blocks and verifies them. Raises MoveRefused; then they hold no NaN."""
        ...

    def close(self) -> None:
        """Nothing is readable any more."""
        ...


class InPlace:
    """Rows are the pool's own blocks."""

    def __init__(self, cache: PagedKV, pool: BlockPool, transfer: RowTransfer) -> None:
        assert cache.rows is not None
        self._cache = cache
        self._rows = cache.rows
        self._pool = pool
        self._transfer = transfer
        self._known: dict[int, tuple[int, bytes]] = {}  # full block -> its allocation, checksum

    @property
    def region(self) -> str:
        return self._cache.region

    @property
    def block_bytes(self) -> int:
        return self._rows[0].nbytes

    @property
    def max_stage(self) -> int:
        return len(self._rows)

    def copy(self, block: int, to: int) -> None:
        self._cache.copy(block, to)

    async def publish(self, blocks: Sequence[int]) -> tuple[list[int], list[bytes]]:
        pool = self._pool
        made = {b: known for b in blocks if (known := self._known.get(b)) and known[0] == pool.allocation(b)}
        missing = [(b, pool.allocation(b)) for b in blocks if b not in made]
        checksums = await _checksums(self._rows, [b for b, _ in missing])
        for (block, allocation), checksum in zip(missing, checksums, strict=True):
            made[block] = (allocation, checksum)
            if pool.is_filed(block) and pool.allocation(block) == allocation:  # full, and not given to someone else meanwhile
                self._known[block] = made[block]
        return list(blocks), [made[b][1] for b in blocks]

    def populate(self) -> None:
        if (registered := self._cache.registered) is not None:  # else it was closed meanwhile
            registered.populate()

    def arrived(self, blocks: Sequence[int], checksums: Sequence[bytes]) -> None:
        for block, checksum in zip(blocks, checksums, strict=True):
            self._known[block] = (self._pool.allocation(block), checksum)

    def retract(self, rows: Sequence[int]) -> None:
        """Whoever still reads them finds that their checksums differ once they are used again."""

    async def fetch(
        self, region: str, rows: np.ndarray, checksums: tuple[bytes, ...], blocks: Sequence[int], timeout_s: float
    ) -> None:
        try:
            await _read(self._transfer, region, rows, checksums, self._rows, blocks, timeout_s)
        except BaseException:
            # Whoever gets these blocks next attends to whole blocks: what is masked has weight 0, but 0 * NaN is NaN.
            self._rows[list(blocks)] = 0
            raise

    def close(self) -> None:
        self._cache.close()


class Staged:
    """Blocks of a device, through `num_rows` rows of host memory."""

    def __init__(self, cache: PagedKV, transfer: RowTransfer, num_rows: int) -> None:
        self._cache = cache
        self._transfer = transfer
        self._registered = transfer.register_rows(STAGING, num_rows, cache.row_shape, cache.row_dtype)
        self._rows = self._registered.arrays["rows"]
        self._host = torch.from_numpy(self._rows).view(cache.pool.dtype)
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def region(self) -> str:
        return json.dumps(self._transfer.describe_rows(STAGING).to_wire())

    @property
    def block_bytes(self) -> int:
        return self._rows[0].nbytes

    @property
    def max_stage(self) -> int:
        return max(1, len(self._rows) // 8)

    def copy(self, block: int, to: int) -> None:
        self._cache.copy(block, to)

    async def publish(self, blocks: Sequence[int]) -> tuple[list[int], list[bytes]]:
        rows = self._take(len(blocks))
        picked = self._cache.pool.index_select(0, self._index(blocks))
        self._host.index_copy_(0, torch.tensor(rows, dtype=torch.int64), picked.cpu())
        try:
            return rows, await _checksums(self._rows, rows)
        except asyncio.CancelledError:
            self.retract(rows)
            raise

    def populate(self) -> None:
        self._registered.populate()

    def arrived(self, blocks: Sequence[int], checksums: Sequence[bytes]) -> None:
        """Blocks of a device are looked at in the rows they leave through."""

    def retract(self, rows: Sequence[int]) -> None:
        self._free.extend(rows)

    async def fetch(
        self, region: str, rows: np.ndarray, checksums: tuple[bytes, ...], blocks: Sequence[int], timeout_s: float
    ) -> None:
        landing = self._take(len(rows))
        try:
            await _read(self._transfer, region, rows, checksums, self._rows, landing, timeout_s)
            arrived = self._host.index_select(0, torch.tensor(landing, dtype=torch.int64)).to(self._cache.pool.device)
            self._cache.pool.index_copy_(0, self._index(blocks), arrived)
        finally:
            self.retract(landing)

    def close(self) -> None:
        self._transfer.release(STAGING)

    def _take(self, num_rows: int) -> list[int]:
        if num_rows > len(self._free):
            raise MoveRefused(f"staging: {num_rows} rows are wanted, {len(self._free)} are free")
        return [self._free.pop() for _ in range(num_rows)]

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self._cache.pool.device)


async def _checksums(rows: np.ndarray, wanted: Sequence[int]) -> list[bytes]:
    if not wanted:
        return []
    if len(wanted) * rows[0].nbytes < _INLINE_BYTES:
        return [row_checksum(rows[row]) for row in wanted]
    return await asyncio.to_thread(lambda: [row_checksum(rows[row]) for row in wanted])


async def _read(
    transfer: RowTransfer, region: str, rows: np.ndarray, checksums: tuple[bytes, ...], into: np.ndarray,
    into_rows: Sequence[int], timeout_s: float,
) -> None:  # fmt: skip
    try:
        descriptor = RegionDescriptor.from_wire(json.loads(region))
        places = np.array(into_rows, dtype=np.int64)
        await transfer.read_rows(descriptor, rows, checksums, into, places, timeout_s=timeout_s)
    except (TransferError, ValueError, KeyError, TypeError) as error:
        raise MoveRefused(f"blocks were not read: {error}") from error
