"""Pools of rows: a region each of whose rows is stable by itself while others are written (KV blocks of an engine).

Nothing says when a row is written, so nothing but its checksum says that what arrived is what was meant. Who tells a
reader which rows to read (and keeps them as they are meanwhile) sends their checksums along.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gyre.transfer.describe import RegionDescriptor
from gyre.transfer.errors import ChecksumMismatch, LayoutMismatch
from gyre.transfer.region import HEADER_BYTES
from xxhash import xxh3_128_digest

ROWS = "rows"
ROW_CHECKSUM_BYTES = 16
MAX_ROWS = 1 << 17  # in one read
SMALL_RUN_BYTES = 8 << 10  # below, one call for many runs is worth its second copy

Span = tuple[int, int]  # first and one past the last of the wanted rows


def row_checksum(row: np.ndarray) -> bytes:
    """16 bytes: xxh3_128 over the row's bytes (C order). Finds accidents, not forgeries: it is not cryptographic."""
    return xxh3_128_digest(np.ascontiguousarray(row))


def rows_like(name: str, num_rows: int, row_shape: tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
    """An array [num_rows, *row_shape] without memory of its own; raises `LayoutMismatch` for one without bytes."""
    shape = (num_rows, *row_shape)
    kind = np.dtype(dtype)
    if any(size < 1 for size in shape) or kind.itemsize == 0:
        raise LayoutMismatch(f"pool {name!r} of {num_rows} rows {list(row_shape)} of {kind}: every size must be positive")
    return np.broadcast_to(np.zeros((), kind), shape)


@dataclass(frozen=True, eq=False)
class RowRead:
    """One checked request: row `rows[i]` of the pool goes to row `into_rows[i]` of the destination.

    rows, into_rows: int64 [R]. checksums: R of `row_checksum`. target uint8 [P, row_bytes]: the destination's bytes.
    """

    descriptor: RegionDescriptor
    rows: np.ndarray
    into_rows: np.ndarray
    checksums: tuple[bytes, ...]
    target: np.ndarray

    @classmethod
    def checked(
        cls,
        descriptor: RegionDescriptor,
        rows: np.ndarray,
        checksums: Sequence[bytes],
        into: np.ndarray,
        into_rows: np.ndarray,
    ) -> RowRead:
        """Raise `LayoutMismatch` unless the rows exist on both sides and are alike."""
        info = descriptor.buffer(ROWS)
        if into.dtype.str != info.dtype or into.ndim == 0 or tuple(into.shape[1:]) != info.shape[1:]:
            raise LayoutMismatch(
                f"rows of {descriptor.region!r} are {info.dtype}{list(info.shape[1:])}, "
                f"those of the destination are {into.dtype.str}{list(into.shape[1:])}"
            )
        if not into.flags.c_contiguous or not into.flags.writeable:
            raise LayoutMismatch(f"rows of {descriptor.region!r}: the destination must be C-contiguous and writeable")
        sources = _indices("rows", rows, info.shape[0])
        targets = _indices("into_rows", into_rows, len(into))
        if not len(sources) == len(targets) == len(checksums):
            counts = f"{len(sources)} rows, {len(targets)} into_rows and {len(checksums)} checksums"
            raise LayoutMismatch(f"rows of {descriptor.region!r}: {counts} must be equally many")
        named = np.zeros(len(into), bool)
        named[targets] = True
        if np.count_nonzero(named) != len(targets):
            raise LayoutMismatch(f"rows of {descriptor.region!r}: into_rows names a row more than once")
        row_bytes = info.num_bytes // info.shape[0]
        flat = into.reshape(-1).view(np.uint8).reshape(len(into), row_bytes)
        return cls(descriptor, sources, targets, tuple(checksums), flat)

    @property
    def row_bytes(self) -> int:
        return self.target.shape[1]

    @property
    def num_bytes(self) -> int:
        return len(self.rows) * self.row_bytes

    def rows_over(self, memory: mmap.mmap) -> np.ndarray:
        """uint8 [num_rows, row_bytes] over a mapped region; raises `LayoutMismatch` when it is smaller than described."""
        info = self.descriptor.buffer(ROWS)
        start = HEADER_BYTES + info.offset_bytes
        whole = np.frombuffer(memory, np.uint8)
        if len(whole) < start + info.num_bytes:
            raise LayoutMismatch(f"region {self.descriptor.region!r} is smaller than its descriptor says")
        return whole[start : start + info.num_bytes].reshape(info.shape[0], self.row_bytes)

    def spans(self, chunk_bytes: int) -> Iterator[tuple[Span, np.ndarray]]:
        """The rows in order, at most `chunk_bytes` at a time (one row at least), as runs that are adjacent on both sides.

        Runs are int64 [N, 3]: source row, destination row, how many rows.
        """
        step = max(1, chunk_bytes // self.row_bytes)
        starts = np.ones(len(self.rows), bool)
        starts[1:] = (np.diff(self.rows) != 1) | (np.diff(self.into_rows) != 1)
        starts[::step] = True
        first = np.flatnonzero(starts)
        counts = np.diff(first, append=len(self.rows))
        runs = np.stack([self.rows[first], self.into_rows[first], counts], axis=1)
        borders = np.searchsorted(first, np.arange(0, len(self.rows) + step, step)).tolist()
        for chunk in range(math.ceil(len(self.rows) / step)):
            span = (chunk * step, min((chunk + 1) * step, len(self.rows)))
            yield span, runs[borders[chunk] : borders[chunk + 1]]

    def copy(self, source: np.ndarray, span: Span, runs: np.ndarray) -> None:
        """Put the rows of `span` in their places. source uint8 [num_rows, row_bytes]: the pool."""
        first, stop = span
        if len(runs) * SMALL_RUN_BYTES > (stop - first) * self.row_bytes:
            self.target[self.into_rows[first:stop]] = source[self.rows[first:stop]]
            return
        for row, into_row, count in runs.tolist():
            self.target[into_row : into_row + count] = source[row : row + count]

    def fill(self, arrivals: Iterator[Span]) -> None:
        """Check the rows of each span as it arrives; raises `ChecksumMismatch`, unless `arrivals` knows the cause."""
        wrong: int | None = None
        for span in arrivals:
            wrong = self._first_wrong(span) if wrong is None else wrong
        if wrong is not None:
            actual = xxh3_128_digest(self.target[self.into_rows[wrong]])
            raise ChecksumMismatch(
                f"row {self.rows[wrong]} of region {self.descriptor.region!r} is not as described: "
                f"checksum {actual.hex()}, expected {self.checksums[wrong].hex()}"
            )

    def _first_wrong(self, span: Span) -> int | None:
        first, stop = span
        for at, row in enumerate(self.into_rows[first:stop].tolist(), first):
            if xxh3_128_digest(self.target[row]) != self.checksums[at]:
                return at
        return None


def _indices(what: str, given: np.ndarray, num_rows: int) -> np.ndarray:
    """A copy as int64 [R], so that the caller may go on changing its own."""
    array = np.array(given)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise LayoutMismatch(f"{what} is {array.dtype}{list(array.shape)}: it must be one-dimensional, int64")
    if array.size > MAX_ROWS:
        raise LayoutMismatch(f"{what} has {array.size} rows: read at most {MAX_ROWS} at once")
    if array.size and not (int(array.min()) >= 0 and int(array.max()) < num_rows):
        raise LayoutMismatch(f"{what} goes from {array.min()} to {array.max()}: rows are 0 to {num_rows - 1}")
    return array.astype(np.int64)
