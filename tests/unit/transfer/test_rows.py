"""Rows of a pool that is written all the time: exactly the rows that were described, or an error, over every backend."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gyre.transfer import (
    MAX_ROWS,
    Address,
    BackendUnavailable,
    ChecksumMismatch,
    DeadlineExceeded,
    LayoutMismatch,
    RegionDescriptor,
    RegionUnknown,
    StaleGeneration,
    Transfer,
    TransferConfig,
    TransferError,
    row_checksum,
)
from gyre.transfer.rows import RowRead
from gyre.transfer.shared_memory import ROWS_CHUNK_BYTES, Maps, SharedMemoryReader
from nixl_fakes import FakeFabric
from transfer_pairs import owner_over, reader_over

NUM_ROWS = 40
SHAPE = (2, 3)
UNTOUCHED = -1.0
FITTING = np.zeros((NUM_ROWS, *SHAPE), np.float32)


def pool_of(owner: Transfer, num_rows: int = NUM_ROWS, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    """The owner's pool "kv": every number in it is another one."""
    pool = owner.register_rows("kv", num_rows, shape, np.float32).arrays["rows"]
    pool[...] = np.arange(pool.size, dtype=np.float32).reshape(pool.shape)
    return pool


def described(owner: Transfer) -> RegionDescriptor:
    return RegionDescriptor.from_wire(owner.describe_rows("kv").to_wire())


def sums(pool: np.ndarray, rows: list[int]) -> list[bytes]:
    return [row_checksum(pool[row]) for row in rows]


def destination(pool: np.ndarray, num_rows: int = NUM_ROWS) -> np.ndarray:
    return np.full((num_rows, *pool.shape[1:]), UNTOUCHED, pool.dtype)


async def read(
    reader: Transfer, descriptor: RegionDescriptor, pool: np.ndarray, rows: list[int], into_rows: list[int],
    into: np.ndarray | None = None, timeout_s: float = 10.0,
) -> np.ndarray:  # fmt: skip
    """The destination after a read of `rows`, whose checksums are as they are now."""
    target = destination(pool) if into is None else into
    await reader.read_rows(
        descriptor, np.array(rows), sums(pool, rows), target, np.array(into_rows), timeout_s=timeout_s
    )
    return target


def expected(pool: np.ndarray, rows: list[int], into_rows: list[int]) -> np.ndarray:
    target = destination(pool)
    target[into_rows] = pool[rows]
    return target


@pytest.mark.parametrize(
    ("rows", "into_rows"),
    [
        ([4], [0]),
        ([3, 4, 5, 6], [10, 11, 12, 13]),
        ([3, 4, 5, 20, 21, 0], [7, 8, 9, 10, 11, 39]),
        ([39, 0, 17, 18, 5], [1, 30, 2, 4, 3]),
        ([8, 8, 8], [0, 1, 20]),
        ([], []),
    ],
)
async def test_rows_arrive_in_their_places_and_others_stay(
    owner: Transfer, reader: Transfer, rows: list[int], into_rows: list[int]
) -> None:
    pool = pool_of(owner)
    got = await read(reader, described(owner), pool, rows, into_rows)
    np.testing.assert_array_equal(got, expected(pool, rows, into_rows))


@pytest.mark.parametrize("order", ["as they lie", "mixed"])
async def test_many_small_rows_arrive_in_several_pieces(owner: Transfer, reader: Transfer, order: str) -> None:
    pool = pool_of(owner, num_rows=3000)
    mixed = np.random.default_rng(7)
    rows = np.arange(3000) if order == "as they lie" else mixed.permutation(3000)
    into_rows = np.arange(3000) if order == "as they lie" else mixed.permutation(3000)
    into = destination(pool, 3000)
    checksums = sums(pool, rows.tolist())
    await reader.read_rows(described(owner), rows, checksums, into, into_rows, timeout_s=10)
    np.testing.assert_array_equal(into[into_rows], pool[rows])


async def test_rows_larger_than_a_piece_arrive(owner: Transfer, reader: Transfer) -> None:
    pool = pool_of(owner, num_rows=3, shape=(ROWS_CHUNK_BYTES // 4 + 9,))
    got = await read(reader, described(owner), pool, [2, 0], [0, 1], destination(pool, 2))
    np.testing.assert_array_equal(got, pool[[2, 0]])


async def test_a_process_reads_its_own_pool_into_its_own_pool(owner: Transfer) -> None:
    pool = pool_of(owner)
    await read(owner, described(owner), pool, [1, 2, 3], [20, 21, 22], into=pool)
    np.testing.assert_array_equal(pool[20:23], pool[1:4])


async def test_other_rows_may_be_written_at_any_time(owner: Transfer, reader: Transfer) -> None:
    pool = pool_of(owner)
    descriptor, stop = described(owner), threading.Event()

    def scribble() -> None:
        while not stop.wait(0):
            pool[1::2] += 1

    writer = threading.Thread(target=scribble)
    writer.start()
    try:
        for _ in range(20):
            got = await read(reader, descriptor, pool, [0, 2, 4], [5, 6, 7])
            np.testing.assert_array_equal(got[5:8], pool[:6:2])
    finally:
        stop.set()
        writer.join()


async def test_a_row_that_was_written_meanwhile_is_named(owner: Transfer, reader: Transfer) -> None:
    pool = pool_of(owner)
    rows, into = [3, 9, 4], destination(pool)
    checksums = sums(pool, rows)
    pool[9, 0, 0] = 99
    with pytest.raises(ChecksumMismatch, match="row 9 of region 'kv' is not as described"):
        await reader.read_rows(described(owner), np.array(rows), checksums, into, np.array([0, 1, 2]), timeout_s=10)
    assert np.all(into[3:] == UNTOUCHED)


async def test_a_released_pool_is_unknown_also_to_who_read_it_before(owner: Transfer, reader: Transfer) -> None:
    pool = pool_of(owner)
    descriptor = described(owner)
    await read(reader, descriptor, pool, [1], [1])
    checksums = sums(pool, [1])
    owner.release("kv")
    with pytest.raises(RegionUnknown):
        await reader.read_rows(descriptor, np.array([1]), checksums, destination(pool), np.array([1]), timeout_s=10)
    with pytest.raises(RegionUnknown, match="no region 'kv'"):
        owner.describe_rows("kv")


async def test_a_pool_registered_again_refuses_earlier_descriptors(owner: Transfer, reader: Transfer) -> None:
    earlier = (pool_of(owner), described(owner))[1]
    pool = pool_of(owner)
    with pytest.raises((RegionUnknown, StaleGeneration)):
        await read(reader, earlier, pool, [1], [1])
    assert (earlier.generation, described(owner).generation) == (1, 2)
    got = await read(reader, described(owner), pool, [1], [1])
    np.testing.assert_array_equal(got[1], pool[1])


async def test_an_owner_can_invalidate_all_rows_at_once(owner: Transfer, reader: Transfer) -> None:
    pool = pool_of(owner)
    descriptor = described(owner)
    region = owner.find("kv")
    assert region is not None
    with region.rewriting():
        with pytest.raises(StaleGeneration, match="being rewritten"):
            await read(reader, descriptor, pool, [1], [1])
        with pytest.raises(StaleGeneration, match="being rewritten"):
            owner.describe_rows("kv")
    with pytest.raises(StaleGeneration, match="holds generation 2, asked for 1"):
        await read(reader, descriptor, pool, [1], [1])
    await read(reader, described(owner), pool, [1], [1])


async def test_a_descriptor_without_the_token_is_refused(owner: Transfer, reader: Transfer) -> None:
    pool = pool_of(owner)
    with pytest.raises(RegionUnknown):
        await read(reader, replace(described(owner), token="00" * 16), pool, [1], [1])


async def test_a_deadline_in_the_past_ends_the_read(owner: Transfer, reader: Transfer) -> None:
    pool = pool_of(owner)
    into = destination(pool)
    with pytest.raises(DeadlineExceeded):
        await read(reader, described(owner), pool, [1], [1], into, timeout_s=-1)
    assert np.all(into == UNTOUCHED)


async def test_rows_of_a_larger_pool_than_there_is_are_refused(owner: Transfer, reader: Transfer) -> None:
    pool = pool_of(owner)
    honest = described(owner)
    large = replace(honest, buffers=(replace(honest.buffers[0], shape=(100_000, *SHAPE)),))
    with pytest.raises(TransferError):
        await reader.read_rows(
            large, np.array([99_999]), sums(pool, [0]), destination(pool), np.array([0]), timeout_s=10
        )


@pytest.mark.parametrize(
    ("rows", "into_rows", "num_checksums", "into", "message"),
    [
        ([40], [0], 1, FITTING, "rows goes from 40 to 40: rows are 0 to 39"),
        ([-1], [0], 1, FITTING, "rows goes from -1 to -1"),
        ([0], [40], 1, FITTING, "into_rows goes from 40"),
        ([0, 1], [0], 1, FITTING, "2 rows, 1 into_rows and 1 checksums"),
        ([0, 1], [0, 1], 1, FITTING, "must be equally many"),
        ([0, 1], [5, 5], 2, FITTING, "into_rows names a row more than once"),
        ([0], [0], 1, np.zeros((4, *SHAPE), np.float64), "those of the destination are <f8"),
        ([0], [0], 1, np.zeros((4, 3, 2), np.float32), r"are <f4\[2, 3\], those of the destination are <f4\[3, 2\]"),
        ([0], [0], 1, np.zeros((8, *SHAPE), np.float32)[::2], "C-contiguous"),
        ([0.0], [0], 1, np.zeros((4, *SHAPE), np.float32), "one-dimensional, int64"),
        ([0] * (MAX_ROWS + 1), [0], 1, np.zeros((4, *SHAPE), np.float32), "read at most 131072 at once"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    rows: list[int], into_rows: list[int], num_checksums: int, into: np.ndarray, message: str, tmp_path: Path
) -> None:
    with Transfer(TransferConfig("owner", directory=tmp_path)) as owner:
        pool_of(owner)
        with pytest.raises(LayoutMismatch, match=message):
            RowRead.checked(described(owner), np.array(rows), [b""] * num_checksums, into, np.array(into_rows))


def test_a_pool_and_a_region_of_buffers_are_two_things(tmp_path: Path) -> None:
    with Transfer(TransferConfig("owner", directory=tmp_path)) as owner:
        pool_of(owner)
        owner.register("weights", {"rows": np.zeros(3)})
        with pytest.raises(LayoutMismatch, match="is for register_rows and describe_rows"):
            owner.describe("kv")
        with pytest.raises(LayoutMismatch, match="is for register and describe"):
            owner.describe_rows("weights")


@pytest.mark.parametrize(("num_rows", "shape"), [(0, (3,)), (4, (3, 0)), (-1, ())])
def test_a_pool_without_bytes_is_refused(num_rows: int, shape: tuple[int, ...], tmp_path: Path) -> None:
    owner = Transfer(TransferConfig("owner", directory=tmp_path))
    with owner, pytest.raises(LayoutMismatch, match="every size must be positive"):
        owner.register_rows("kv", num_rows, shape, np.uint16)


def test_who_only_reads_has_no_place_for_a_pool() -> None:
    with Transfer(TransferConfig("reader")) as reader, pytest.raises(BackendUnavailable, match="neither a directory"):
        reader.register_rows("kv", 4, (3,), np.uint16)


def test_a_row_has_one_checksum_however_it_lies_in_memory() -> None:
    row = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert row_checksum(row) == row_checksum(np.asfortranarray(row)) == row_checksum(row.copy().view(np.uint16))
    assert row_checksum(np.frombuffer(b"a", np.uint8)).hex() == "a96faf705af16834e6c632b61e964e1f", "xxh3_128"


def test_what_the_owner_says_at_the_end_matters_more_than_a_checksum(tmp_path: Path) -> None:
    with Transfer(TransferConfig("owner", directory=tmp_path)) as owner:
        pool = pool_of(owner)
        descriptor, into = described(owner), destination(pool)
        wanted = RowRead.checked(descriptor, np.array([1]), [b"wrong"], into, np.array([1]))
        arrivals = SharedMemoryReader(descriptor.host).arrivals(wanted, 1.0, lambda: 0.0)

        def released_before_the_end() -> Iterator[tuple[int, int]]:
            yield next(arrivals)
            owner.release("kv")
            yield from arrivals

        with pytest.raises(RegionUnknown, match="was released"):
            wanted.fill(released_before_the_end())


def test_a_file_is_mapped_once_until_it_is_another(tmp_path: Path) -> None:
    with Transfer(TransferConfig("owner", directory=tmp_path)) as owner:
        pool_of(owner)
        maps, descriptor = Maps(), described(owner)
        first = maps.of(descriptor)
        assert maps.of(descriptor) is first
        path = Path(str(descriptor.path))
        copy = path.with_suffix(".copy")
        copy.write_bytes(path.read_bytes())
        copy.rename(path)
        assert maps.of(descriptor) is not first
        path.unlink()  # as the successor of a killed owner does
        with pytest.raises(RegionUnknown, match="no shared file"):
            maps.of(descriptor)


async def test_a_late_transfer_over_nixl_writes_into_nobodys_rows(fabric: FakeFabric, tmp_path: Path) -> None:
    with owner_over("nixl-fake", fabric, tmp_path) as owner, reader_over("nixl-fake", fabric) as reader:
        pool = pool_of(owner)
        into = destination(pool)
        fabric.behaviour, fabric.skip = "slow", 1  # the header, then the rows
        with pytest.raises(DeadlineExceeded):
            await read(reader, described(owner), pool, [1], [1], into, timeout_s=0.05)
        fabric.finish(fabric.posted[-1])
        assert np.all(into == UNTOUCHED)


async def cancelled(reading: asyncio.Task[np.ndarray]) -> None:
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading
    assert reading.cancelled()


async def test_a_cancelled_read_has_ended_when_it_says_so(fabric: FakeFabric, tmp_path: Path) -> None:
    with owner_over("nixl-fake", fabric, tmp_path) as owner, reader_over("nixl-fake", fabric) as reader:
        pool = pool_of(owner)
        into = destination(pool)
        fabric.behaviour = "slow"
        reading = asyncio.create_task(read(reader, described(owner), pool, [1], [1], into, timeout_s=600))
        while not fabric.posted:
            await asyncio.sleep(0)
        await cancelled(reading)
        fabric.finish(fabric.posted[-1])
        assert np.all(into == UNTOUCHED)


async def test_a_read_from_an_owner_that_says_nothing_over_tcp_can_be_cancelled() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, reader_over("tcp", FakeFabric()) as reader:
        with owner_over("tcp", FakeFabric(), Path()) as owner:
            pool = pool_of(owner)
            descriptor = replace(described(owner), address=Address("127.0.0.1", silent.getsockname()[1]))
        with pytest.raises(DeadlineExceeded):
            await read(reader, descriptor, pool, [1], [1], timeout_s=0.1)
        reading = asyncio.create_task(read(reader, descriptor, pool, [1], [1], timeout_s=600))
        connections = [await asyncio.to_thread(silent.accept) for _ in range(2)]
        await cancelled(reading)
        for connection, _ in connections:
            connection.close()
