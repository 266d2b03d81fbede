"""Rows of several engines in one process, read without a network: what `gyre.transfer.Transfer` does for KV blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from gyre.transfer import BufferInfo, RegionDescriptor, RegionUnknown, TransferError, row_checksum


@dataclass(frozen=True)
class Rows:
    """A registered pool."""

    arrays: dict[str, np.ndarray]

    def populate(self) -> None:
        """It has its pages."""


class Fabric:
    """Every pool that is registered, by owner and name."""

    def __init__(self) -> None:
        self.pools: dict[tuple[str, str], np.ndarray] = {}
        self.generations: dict[tuple[str, str], int] = {}


class FabricRows:
    """`gyre.rollout.torch_engine.kv.RowTransfer` of one owner. `reading` is awaited before rows are copied."""

    def __init__(self, fabric: Fabric, owner: str) -> None:
        self._fabric = fabric
        self._owner = owner
        self.reading: Callable[[], asyncio.Future[None]] | None = None
        self.num_read = 0

    def register_rows(self, name: str, num_rows: int, row_shape: tuple[int, ...], dtype: str) -> Rows:
        key = (self._owner, name)
        self._fabric.pools[key] = np.zeros((num_rows, *row_shape), dtype)
        self._fabric.generations[key] = self._fabric.generations.get(key, 0) + 1
        return Rows({"rows": self._fabric.pools[key]})

    def describe_rows(self, name: str) -> RegionDescriptor:
        key = (self._owner, name)
        pool = self._fabric.pools[key]
        info = BufferInfo("rows", pool.dtype.str, pool.shape, 0)
        return RegionDescriptor(name, self._owner, self._fabric.generations[key], "00", "here", None, None, (info,))

    def release(self, name: str) -> None:
        self._fabric.pools.pop((self._owner, name), None)

    async def read_rows(
        self, descriptor: RegionDescriptor, rows: np.ndarray, checksums: Sequence[bytes], into: np.ndarray,
        into_rows: np.ndarray, *, timeout_s: float,
    ) -> None:  # fmt: skip
        if self.reading is not None:
            await self.reading()
        key = (descriptor.owner, descriptor.region)
        if key not in self._fabric.pools or self._fabric.generations[key] != descriptor.generation:
            raise RegionUnknown(f"no pool {key}")
        source = self._fabric.pools[key]
        into[into_rows] = source[rows]
        self.num_read += len(rows)
        for row, checksum in zip(into_rows, checksums, strict=True):
            if row_checksum(into[row]) != checksum:
                raise TransferError(f"row {row} is not as described")
