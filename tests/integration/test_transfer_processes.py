"""Reads between two processes over every backend that is installed here; NIXL's runs on host memory, over UCX."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gyre.transfer import (
    ChecksumMismatch,
    DeadlineExceeded,
    RegionDescriptor,
    RegionUnknown,
    StaleGeneration,
    Transfer,
    TransferConfig,
    TransferError,
)
from gyre.transfer.nixl import NixlBackend
from gyre.transfer.nixl_agent import installed

OWNER = Path(__file__).parents[1] / "support" / "transfer_owner.py"
MEGABYTES = 64
REAL_NIXL = pytest.param("nixl", marks=pytest.mark.skipif(not installed(), reason="nixl-cu12 is not installed here"))


class Owner:
    """The other process, and the newest descriptor it said."""

    def __init__(self, backend: str, directory: Path) -> None:
        command = [sys.executable, str(OWNER), backend, str(directory), str(MEGABYTES)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def descriptor(self) -> RegionDescriptor:
        assert self.process.stdout is not None
        for line in self.process.stdout:  # NIXL writes log lines to stdout
            if line.startswith("{"):
                return RegionDescriptor.from_wire(json.loads(line))
        raise AssertionError("the owner ended")

    def rewrite(self) -> RegionDescriptor:
        assert self.process.stdin is not None
        print("again", file=self.process.stdin, flush=True)
        return self.descriptor()

    def rows(self) -> tuple[RegionDescriptor, list[bytes]]:
        """A new pool of the owner's, odd rows of which are being written, and the checksums of all rows before that."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print("rows", file=self.process.stdin, flush=True)
        said = next(json.loads(line) for line in self.process.stdout if line.startswith('{"pool"'))
        return RegionDescriptor.from_wire(said["pool"]), [bytes.fromhex(one) for one in said["checksums"]]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(params=["shm", "tcp", REAL_NIXL])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def owner(backend: str, tmp_path: Path) -> Iterator[Owner]:
    made = Owner(backend, tmp_path / "one")
    yield made
    made.kill()


@pytest.fixture
def reader(backend: str) -> Iterator[Transfer]:
    with Transfer(TransferConfig("reader", backends=(backend,))) as transfer:
        yield transfer


async def test_every_generation_of_another_process_is_read_as_described(
    backend: str, owner: Owner, reader: Transfer
) -> None:
    descriptor = owner.descriptor()
    into = {"w": np.ones(MEGABYTES << 18, np.float32)}
    for generation in range(3):
        started = time.perf_counter()
        await reader.read(descriptor, names=["w"], into=into, timeout_s=60)
        seconds = time.perf_counter() - started
        print(f"{backend}: {MEGABYTES} MiB with checksums in {seconds:.3f} s, {MEGABYTES / 1024 / seconds:.2f} GiB/s")
        assert np.all(into["w"] == generation)
        earlier, descriptor = descriptor, owner.rewrite()
        with pytest.raises(StaleGeneration, match=f"holds generation {generation + 2}"):
            await reader.read(earlier, timeout_s=60)


async def test_an_owner_killed_between_or_in_reads_is_an_error_and_others_go_on(
    backend: str, owner: Owner, reader: Transfer, tmp_path: Path
) -> None:
    if backend == "shm":
        pytest.skip("the file outlives its owner: what it holds stays readable until the owner is started again")
    other = Owner(backend, tmp_path / "two")
    try:
        descriptor, second = owner.descriptor(), other.descriptor()
        await reader.read(descriptor, names=["v"], timeout_s=60)
        owner.kill()
        for _ in range(3):
            with pytest.raises(TransferError):
                await reader.read(descriptor, timeout_s=20)
        assert np.all((await reader.read(second, timeout_s=60))["w"] == 0)
    finally:
        other.kill()


async def test_an_owner_killed_while_it_is_being_read_ends_the_read(backend: str, owner: Owner, reader: Transfer) -> None:
    if backend == "shm":
        pytest.skip("the file outlives its owner")
    descriptor = owner.descriptor()
    reads = 0

    async def read_on() -> None:
        nonlocal reads
        while True:
            await reader.read(descriptor, names=["w"], timeout_s=20)
            reads += 1

    reading = asyncio.create_task(read_on())
    async with asyncio.timeout(60):
        while reads == 0:
            await asyncio.sleep(0.001)
    owner.kill()
    with pytest.raises(TransferError):
        await reading


async def test_rows_of_another_process_are_read_while_it_writes_others(
    backend: str, owner: Owner, reader: Transfer
) -> None:
    owner.descriptor()
    descriptor, checksums = owner.rows()
    num_rows, num_floats = descriptor.buffer("rows").shape
    into = np.full((num_rows, num_floats), -1, np.float32)
    even = np.random.default_rng(5).permutation(np.arange(0, num_rows, 2))
    for _ in range(10):
        await reader.read_rows(descriptor, even, [checksums[row] for row in even], into, even + 1, timeout_s=60)
    assert np.array_equal(into[1::2], np.broadcast_to(np.arange(0, num_rows, 2)[:, None], (num_rows // 2, num_floats)))
    assert np.all(into[::2] == -1)
    with pytest.raises(ChecksumMismatch, match="row 1 "):
        async with asyncio.timeout(60):  # the first write may be yet to come
            while True:
                await reader.read_rows(descriptor, np.array([1]), checksums[1:2], into, np.array([0]), timeout_s=60)
    again, _ = owner.rows()
    with pytest.raises(RegionUnknown):
        await reader.read_rows(descriptor, even, [checksums[row] for row in even], into, even, timeout_s=60)
    await reader.read_rows(again, even, [checksums[row] for row in even], into, even, timeout_s=60)
    if backend != "shm":  # a file outlives its owner
        owner.kill()
        with pytest.raises(TransferError):
            await reader.read_rows(again, even, [checksums[row] for row in even], into, even, timeout_s=20)


@pytest.mark.skipif(not installed(), reason="nixl-cu12 is not installed here")
async def test_a_stopped_owner_makes_nixl_miss_the_deadline_and_the_late_bytes_reach_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over UCX's TCP the owner's process has to take part, so stopping it leaves a real transfer in flight."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    owner, agent = Owner("nixl", tmp_path), NixlBackend("reader")
    into = {"w": np.ones(MEGABYTES << 18, np.float32)}
    loop = asyncio.get_running_loop()
    try:
        descriptor = owner.descriptor()
        await agent.read(descriptor, into, loop.time() + 60)
        assert np.all(into["w"] == 0)
        owner.process.send_signal(signal.SIGSTOP)
        into["w"][:] = 5
        with pytest.raises(DeadlineExceeded):
            await agent.read(descriptor, into, loop.time() + 0.5)
        assert agent.num_quarantined == 1
        owner.process.send_signal(signal.SIGCONT)
        await agent.read(descriptor, {"w": np.zeros(MEGABYTES << 18, np.float32)}, loop.time() + 60)
        assert np.all(into["w"] == 5)
        async with asyncio.timeout(60):
            while agent.num_quarantined:
                await agent.read(descriptor, {"v": np.zeros(5, np.int64)}, loop.time() + 60)
    finally:
        owner.process.send_signal(signal.SIGCONT)
        owner.kill()
        agent.close()
