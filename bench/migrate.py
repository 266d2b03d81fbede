"""What does it cost to move a live call between two engines, beside computing its context again? `make bench NAME=migrate`.

Two real engine processes with a small model, 32 KiB of keys and values per token (Qwen3-0.6B in bfloat16 has 112), and one
call whose stream is read here through the router. For each length of context the call's first token says what computing the
context takes; then its engine is drained and drained again, back and forth, while it goes on decoding. A move is timed from
its first question to the commit (move_ms) and on to the first token at the destination (landed_ms), which is what computing
again is compared with. Just before each move the same blocks are read raw: one one-sided read by this process over the same
backend, each row verified, into memory of the same kind as an engine's pool, while the call goes on decoding as it does
during the move; nothing of the protocol is around it. Neither is charged for the source's checksums (the raw read asks for
the blocks first, and a block that moves on is not summed again), nor for mapping a pool, which costs the first read of each
page once per pair of engines: the first move of all is shown apart (first_ms).

A pause (stall) is from the freeze to the first token of the other engine: the first step there and what the move adds to
it; step_ms is the median time between two tokens of the call. Recomputed are tokens whose keys and values were there and are
computed again; the one token that the source is at when it is frozen is drawn by the destination instead, which is part of
the pause.

    python bench/migrate.py [--sizes 1024,4096,16384,65536] [--rounds 8] [--backends shared_memory,nixl]

Most of the time goes into computing contexts: that of 64k takes a quarter of an hour, with each backend.
NIXL is measured where it is installed, or where `make test-nixl` has made .venv-nixl. The last line is for scripts: how
many times faster than computing again and how many times slower than the raw read (the worst backend, the median; over_raw
from 16k on), the longest pauses a harness saw (all rounds), and the tokens that were computed twice; nan without a context
of 16k.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

import numpy as np
from gyre.policy.config import PolicyConfig
from gyre.proto.rollout.v1 import engine_pb2 as pb
from gyre.proto.rollout.v1 import engine_pb2_grpc as pb_grpc
from gyre.rollout.engines.moving import ExportOf
from gyre.rollout.migration import MoveLimits
from gyre.rollout.router import Router
from gyre.runtime import rpc
from gyre.runtime.clock import SystemClock
from gyre.transfer import RegionDescriptor, Transfer, TransferConfig, backends_of
from gyre.transfer.nixl_agent import installed as nixl_installed

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support")]
from torch_cells import Listener, TorchCells, job  # noqa: E402

MAX_TOKENS = 3000  # of the answer: more than the rounds take
LIMITS = replace(MoveLimits(), min_tokens=1, total_s=120.0, pull_s=60.0, stop_s=60.0, land_s=60.0, stream_s=60.0)
LONG = 16_384  # from here on a move should cost little more than the read
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # pools are files: on a disk a move waits for its write-back
NUM_WARM = 4  # moves before the first that counts, two each way: channels open, pools are mapped


def policy(longest: int) -> PolicyConfig:
    """Runs in a thread of its own, as every model does whose context is worth moving; 32 KiB of KV per token in float32."""
    return PolicyConfig("qwen3", 32_768, 128, 256, 8, 8, 8, 64, tie_word_embeddings=True, qk_norm=True,
                        max_position=longest + MAX_TOKENS + 16)


@dataclass
class Measured:
    """One length of context over one backend; seconds."""

    backend: str
    size: int
    prefill_s: float = 0.0
    num_bytes: int = 0
    num_recomputed: int = 0
    first_s: float = 0.0
    moves_s: list[float] = field(default_factory=list)
    landed_s: list[float] = field(default_factory=list)
    raws_s: list[float] = field(default_factory=list)
    stalls_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)  # between two tokens, moves included

    @property
    def speedup(self) -> float:
        return self.prefill_s / statistics.median(self.landed_s)

    @property
    def over_raw(self) -> float:
        return statistics.median(self.moves_s) / statistics.median(self.raws_s)

    def row(self) -> str:
        medians = map(statistics.median, (self.landed_s, self.moves_s, self.raws_s))
        times_ms = [1e3 * s for s in (self.prefill_s, self.first_s, *medians)]
        stalls_ms = np.percentile(self.stalls_s, [50, 99]) * 1e3
        cells = [f"{self.backend:14} {self.size:6d} {self.num_bytes / 2**20:8.1f} {times_ms[0]:11.1f}",
                 *(f"{time:9.1f}" for time in times_ms[1:]), f"{self.over_raw:8.2f} {self.speedup:8.1f}",
                 *(f"{stall:9.1f}" for stall in stalls_ms), f"{1e3 * statistics.median(self.steps_s):7.1f}",
                 f"{self.num_recomputed:10d}"]
        return " ".join(cells)


HEAD = ("backend          size      MiB  prefill_ms  first_ms landed_ms   move_ms    raw_ms over_raw  speedup stall_p50 "
        "stall_p99 step_ms recomputed")


class Scene:
    """Two engines, a router over them and one call. `at` is the engine it is on."""

    def __init__(self, cells: TorchCells, reader: Transfer) -> None:
        self.cells, self.reader, self.at = cells, reader, 0
        self.into: np.ndarray | None = None  # as large as a pool
        self.stubs = [pb_grpc.EngineServiceStub(rpc.channel(f"127.0.0.1:{port}")) for port in cells.ports]

    async def num_prefilled(self) -> int:
        """Tokens that both engines computed without sampling them."""
        return sum([(await stub.GetLoad(pb.GetLoadRequest())).num_tokens_prefilled for stub in self.stubs])

    async def measure(self, backend: str, size: int, rounds: int) -> Measured:
        measured = Measured(backend, size)
        router = await self.cells.router(LIMITS)
        router.set_admitting(1, False)
        self.at = 0
        listener = Listener(job(f"c{size}", size, MAX_TOKENS))
        began = perf_counter()
        listener.start(router)
        await listener.until(1, 3600.0)
        measured.prefill_s = perf_counter() - began
        before = await self.num_prefilled()
        for number in range(rounds + NUM_WARM):
            raw_s = await self.raw(listener, number)
            move_s, landed_s, stall_s = await self.move(router, listener)
            if number == 0:
                measured.first_s = move_s
            if number >= NUM_WARM:
                measured.moves_s.append(move_s)
                measured.landed_s.append(landed_s)
                measured.raws_s.append(raw_s)
                measured.stalls_s.append(stall_s)
        measured.steps_s = np.diff(listener.times).tolist()
        measured.num_recomputed = await self.num_prefilled() - before
        measured.num_bytes = router.counts.num_bytes_moved // (rounds + NUM_WARM)
        assert router.counts.num_moved == rounds + NUM_WARM and listener.task and not listener.task.done()
        listener.task.cancel()
        await asyncio.wait({listener.task})
        return measured

    async def move(self, router: Router, listener: Listener) -> tuple[float, float, float]:
        """Drain the engine the call is on, as its keeper does. Returns the time until it was committed, until its first token
        came from the other engine, and the pause of the stream."""
        other = 1 - self.at
        await self.cells.clients[other].set_admission(True)
        router.observe(other, await self.cells.clients[other].observe())
        router.set_admitting(other, True)
        await self.cells.clients[self.at].set_admission(False)
        committed: list[float] = []

        async def note() -> None:
            committed.append(perf_counter())

        for client in self.cells.clients.values():
            client.forget()
        self.cells.clients[other].after("commit", note)
        began = perf_counter()
        assert await router.drain(self.at, 300.0, epoch=1) == (1, 0)
        landed = perf_counter()
        self.at = other
        return committed[0] - began, landed - began, listener.stall.take(SystemClock().now())

    async def raw(self, listener: Listener, number: int) -> float:
        """Read the blocks that the call has now with one read and nothing else."""
        client, ticket = self.cells.clients[self.at], f"raw-{number}-{listener.job.request_id}"
        attempt = client.attempts[-1].request_id
        offer = await client.open_export(ticket, ExportOf(attempt), 0, 60.0, 60.0)
        stage = await client.read_stage(ticket, 0, 60.0)
        descriptor = RegionDescriptor.from_wire(json.loads(offer.region))
        info = descriptor.buffer("rows")
        if self.into is None:
            pool = self.reader.register_rows("bench", info.shape[0], tuple(info.shape[1:]), info.dtype)
            pool.populate()
            self.into = pool.arrays["rows"]
        began = perf_counter()
        await self.reader.read_rows(descriptor, stage.rows, stage.checksums, self.into, np.arange(len(stage.rows)),
                                    timeout_s=60.0)
        took = perf_counter() - began
        await client.release(ticket.encode(), 60.0)
        return took


async def measure_backend(backend: str, sizes: Sequence[int], rounds: int) -> list[Measured]:
    longest = max(sizes)
    with (tempfile.TemporaryDirectory(dir=MEMORY) as home,
          Transfer(TransferConfig("bench", Path(home) / "bench", backends=backends_of(backend))) as reader):
        cells = TorchCells(Path(home), 2, policy(longest), "min_interval_ms = 0.0\ntoken_budget = 8192",
                           longest + 2 * MAX_TOKENS, backend)
        cells.prepare()
        cells.launch()
        try:
            await cells.connect()
            scene = Scene(cells, reader)
            found = []
            for size in sizes:
                found.append(await scene.measure(backend, size, rounds))
                print(found[-1].row(), flush=True)
            return found
        finally:
            cells.stop()


async def measure_all(backends: Sequence[str], sizes: Sequence[int], rounds: int) -> list[Measured]:
    print(HEAD)
    return [measured for backend in backends for measured in await measure_backend(backend, sizes, rounds)]


def with_nixl() -> None:
    """Go on in .venv-nixl, which is .venv with NIXL, if it is there and this is not it."""
    other = ROOT / ".venv-nixl" / "bin" / "python"
    if not nixl_installed() and other.exists():
        os.execv(other, [str(other), *sys.argv])


def main() -> None:
    """Entry point."""
    with_nixl()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1024,4096,16384,65536", help="tokens of context")
    parser.add_argument("--rounds", type=int, default=8, help="moves for each size")
    parser.add_argument("--backends", default="shared_memory,nixl" if nixl_installed() else "shared_memory")
    arguments = parser.parse_args()
    if "nixl" not in arguments.backends:
        print("without NIXL: `make test-nixl` makes .venv-nixl, in which this runs then")
    sizes = [int(size) for size in arguments.sizes.split(",")]
    found = asyncio.run(measure_all(arguments.backends.split(","), sizes, arguments.rounds))
    long = [m for m in found if m.size >= LONG]
    speedup = min((m.speedup for m in long if m.size == LONG), default=float("nan"))
    over_raw = max((m.over_raw for m in long), default=float("nan"))
    stalls = [stall for m in found for stall in m.stalls_s]
    print(f"migrate speedup_16k={speedup:.1f} over_raw={over_raw:.2f} "
          f"stall_p99_ms={np.percentile(stalls, 99) * 1e3:.1f} recomputed={sum(m.num_recomputed for m in found)}")


if __name__ == "__main__":
    main()
