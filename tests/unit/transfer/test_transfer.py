"""The same promises for every backend: exact bytes of the asked generation, or an error."""

import contextlib
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gyre.transfer import (
    Address,
    BackendUnavailable,
    BufferInfo,
    ChecksumMismatch,
    DeadlineExceeded,
    LayoutMismatch,
    Region,
    RegionDescriptor,
    RegionUnknown,
    StaleGeneration,
    TornRead,
    Transfer,
    TransferConfig,
    TransferError,
    host_identity,
)
from gyre.transfer.shared_memory import copy_out
from gyre.transfer.tcp import TcpServer
from transfer_pairs import LOOPBACK


def arrays() -> dict[str, np.ndarray]:
    return {
        "w": np.arange(12, dtype=np.float32).reshape(3, 4),
        "ids": np.array([5, -7, 11], dtype=np.int64),
        "scale": np.array(2.5, dtype=np.float64),
        "nothing": np.zeros((0, 8), dtype=np.float32),
    }


async def test_a_read_returns_the_registered_bytes(owner: Transfer, reader: Transfer) -> None:
    owner.register("weights", arrays())
    descriptor = RegionDescriptor.from_wire(owner.describe("weights").to_wire())
    got = await reader.read(descriptor, timeout_s=10)
    for name, array in arrays().items():
        np.testing.assert_array_equal(got[name], array)
        assert got[name].dtype == array.dtype


async def test_a_read_fills_the_callers_arrays_and_only_the_named_ones(owner: Transfer, reader: Transfer) -> None:
    owner.register("weights", arrays())
    into = {"ids": np.zeros(3, np.int64)}
    await reader.read(owner.describe("weights"), into=into, names=["ids"], timeout_s=10)
    assert into["ids"].tolist() == [5, -7, 11]


async def test_a_process_reads_its_own_regions_too(owner: Transfer) -> None:
    owner.register("weights", arrays())
    got = await owner.read(owner.describe("weights"), timeout_s=10)
    np.testing.assert_array_equal(got["w"], arrays()["w"])


async def test_a_destination_of_another_layout_is_refused(owner: Transfer, reader: Transfer) -> None:
    owner.register("weights", arrays())
    with pytest.raises(LayoutMismatch, match="'ids' is <i8"):
        await reader.read(owner.describe("weights"), into={"ids": np.zeros(3, np.int32)}, names=["ids"], timeout_s=10)


async def test_an_older_descriptor_is_stale_after_a_rewrite(owner: Transfer, reader: Transfer) -> None:
    region = owner.register("weights", arrays())
    old = owner.describe("weights")
    with region.rewriting() as views:
        views["w"] += 1
    with pytest.raises(StaleGeneration, match="holds generation 2, asked for 1"):
        await reader.read(old, timeout_s=10)
    new = await reader.read(owner.describe("weights"), timeout_s=10)
    np.testing.assert_array_equal(new["w"], arrays()["w"] + 1)


async def test_a_region_under_rewrite_can_be_neither_described_nor_read(owner: Transfer, reader: Transfer) -> None:
    region = owner.register("weights", arrays())
    descriptor = owner.describe("weights")
    with region.rewriting():
        with pytest.raises(StaleGeneration, match="being rewritten"):
            await reader.read(descriptor, timeout_s=10)
        with pytest.raises(StaleGeneration, match="being rewritten"):
            owner.describe("weights")


async def test_bytes_that_differ_from_their_description_are_refused(owner: Transfer, reader: Transfer) -> None:
    region = owner.register("weights", arrays())
    descriptor = owner.describe("weights")
    region.arrays["w"][0, 0] = 99  # a writer that ignores the protocol
    with pytest.raises(ChecksumMismatch, match="'w'"):
        await reader.read(descriptor, timeout_s=10)


async def test_a_released_region_is_unknown(owner: Transfer, reader: Transfer) -> None:
    owner.register("weights", arrays())
    descriptor = owner.describe("weights")
    owner.release("weights")
    with pytest.raises(RegionUnknown):
        await reader.read(descriptor, timeout_s=10)
    with pytest.raises(RegionUnknown, match="no region 'weights'"):
        owner.describe("weights")


async def test_registering_again_refuses_the_earlier_descriptor(owner: Transfer, reader: Transfer) -> None:
    owner.register("weights", arrays())
    earlier = owner.describe("weights")
    owner.register("weights", arrays())
    with pytest.raises(RegionUnknown):
        await reader.read(earlier, timeout_s=10)


async def test_a_descriptor_without_the_token_is_refused(owner: Transfer, reader: Transfer) -> None:
    owner.register("weights", arrays())
    forged = replace(owner.describe("weights"), token="00" * 16)
    with pytest.raises(RegionUnknown):
        await reader.read(forged, timeout_s=10)


async def test_a_deadline_in_the_past_ends_the_read(owner: Transfer, reader: Transfer) -> None:
    owner.register("weights", arrays())
    with pytest.raises(DeadlineExceeded):
        await reader.read(owner.describe("weights"), timeout_s=-1)


async def test_a_reader_beside_a_writer_gets_one_generation_or_an_error(owner: Transfer, reader: Transfer) -> None:
    """Every generation is a constant array, so a mix of two would show."""
    region = owner.register("grads", {"g": np.zeros(1 << 20, np.float32)})
    descriptors = {1: owner.describe("grads")}
    go_on, stop = threading.Event(), threading.Event()

    def write() -> None:
        while not stop.is_set():
            go_on.wait(5)
            go_on.clear()
            with region.rewriting() as views:
                views["g"] += 1
            descriptors[region.generation] = owner.describe("grads")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(60):
            newest = max(descriptors)
            go_on.set()
            with contextlib.suppress(StaleGeneration, TornRead, ChecksumMismatch):
                got = await reader.read(descriptors[newest], timeout_s=10)
                assert np.all(got["g"] == newest - 1)
    finally:
        stop.set()
        go_on.set()
        writer.join()
    got = await reader.read(owner.describe("grads"), timeout_s=10)
    assert np.all(got["g"] == region.generation - 1)


def test_a_rewrite_in_the_middle_of_a_shared_memory_copy_is_a_torn_read(tmp_path: Path) -> None:
    with Transfer(TransferConfig("owner", directory=tmp_path)) as owner:
        region = owner.register("weights", arrays())
        descriptor = owner.describe("weights")

        def clock_during_which_the_owner_rewrites() -> float:
            with region.rewriting() as views:
                views["w"] += 1
            return 0.0

        into = {"w": np.zeros((3, 4), np.float32)}
        with pytest.raises(TornRead, match="changed while it was read"):
            copy_out(descriptor, into, 1.0, clock_during_which_the_owner_rewrites)


async def test_a_rewrite_in_the_middle_of_a_tcp_copy_is_a_torn_read() -> None:
    class RewrittenWhileSent(Region):
        def payload(self, info: BufferInfo) -> memoryview:
            with self.rewriting() as views:
                views["w"] += 1
            return super().payload(info)

    region = RewrittenWhileSent("weights", arrays(), None)

    class OneRegion:
        def find(self, name: str) -> Region | None:
            return region

    server = TcpServer(LOOPBACK, OneRegion())
    address = Address("127.0.0.1", server.start())
    try:
        with Transfer(TransferConfig("reader")) as reader:
            descriptor = RegionDescriptor(
                "weights", "owner", 1, region.token, "elsewhere", None, address, region.describe_buffers()
            )
            with pytest.raises(TornRead):
                await reader.read(descriptor, names=["w"], timeout_s=10)
    finally:
        server.stop()


def test_a_restart_reclaims_what_a_killed_owner_left(tmp_path: Path) -> None:
    home = tmp_path / "owner"
    home.mkdir()
    (home / "weights.deadbeef.region").write_bytes(b"left by kill -9")
    with Transfer(TransferConfig("owner", directory=tmp_path)):
        assert list(home.glob("*.region")) == []


def test_two_live_owners_of_one_name_are_refused(tmp_path: Path) -> None:
    with Transfer(TransferConfig("owner", directory=tmp_path)), pytest.raises(TransferError, match="unique names"):
        Transfer(TransferConfig("owner", directory=tmp_path))


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(BackendUnavailable, match="'rdma': known are 'nixl', 'shm' and 'tcp'"):
        Transfer(TransferConfig("reader", backends=("rdma",)))


async def test_shared_memory_of_another_host_is_read_over_tcp(tmp_path: Path) -> None:
    both = TransferConfig("owner", directory=tmp_path, listen=LOOPBACK)
    with Transfer(both) as owner, Transfer(TransferConfig("reader")) as reader:
        owner.register("weights", arrays())
        elsewhere = replace(owner.describe("weights"), host="another machine", path="/not/there")
        got = await reader.read(elsewhere, timeout_s=10)
        np.testing.assert_array_equal(got["w"], arrays()["w"])


async def test_memory_that_no_backend_reaches_is_an_error(tmp_path: Path) -> None:
    with Transfer(TransferConfig("owner", directory=tmp_path)) as owner, Transfer(TransferConfig("r")) as reader:
        owner.register("weights", arrays())
        elsewhere = replace(owner.describe("weights"), host="another machine")
        with pytest.raises(BackendUnavailable, match="out of reach"):
            await reader.read(elsewhere, timeout_s=10)


def test_equal_contents_have_equal_digests(tmp_path: Path) -> None:
    with Transfer(TransferConfig("owner", directory=tmp_path)) as owner:
        owner.register("a", arrays())
        owner.register("b", arrays())
        assert owner.describe("a").digest() == owner.describe("b").digest()
        owner.register("c", {**arrays(), "ids": np.array([5, -7, 12])})
        assert owner.describe("c").digest() != owner.describe("a").digest()


def test_a_machine_without_a_boot_id_file_has_a_name_too(tmp_path: Path) -> None:
    missing = tmp_path / "boot_id"
    assert host_identity(missing) == host_identity(missing) != ""
