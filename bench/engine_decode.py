"""Decode throughput of the built-in engine in tokens per CPU-second: `python bench/engine_decode.py [--batch 64]`.

One process, one thread, a randomly initialised policy of about 0.1M parameters; contexts grow from 50 to 70
tokens. The same requests are sent straight to the engine and through gRPC on a loopback port (client and server in one
process, so the client's work is counted too).
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gyre.policy.checkpoint import state_digest
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from gyre.proto.common.v1 import status_pb2
from gyre.proto.rollout.v1 import engine_pb2 as pb
from gyre.proto.rollout.v1 import engine_pb2_grpc as pb_grpc
from gyre.rollout.engine_cell import EngineCell
from gyre.rollout.engine_rpc import SERVICE, EngineRpc
from gyre.rollout.engines.base import EventStream, Finish, GenerateRequest
from gyre.rollout.engines.torch import TorchEngine, TorchEngineConfig
from gyre.rollout.engines.weights import NoWeights
from gyre.rollout.torch_engine.scheduler import SchedulerConfig
from gyre.runtime import rpc
from gyre.runtime.devices import DeviceLock

POLICY = PolicyConfig("qwen3", 64, 64, 192, 2, 4, 4, 16, tie_word_embeddings=True, qk_norm=True, max_position=512)


async def make_engine() -> TorchEngine:
    engine = TorchEngine(POLICY, TorchEngineConfig(SchedulerConfig(32768, 512), min_interval_s=0.0))
    state = Decoder.create(POLICY, 0).state_dict()
    await engine.load_weights(0, state_digest(state), state)
    assert (await engine.probe()).ok
    engine.resume()
    return engine


async def drain(stream: EventStream) -> int:
    num_tokens = 0
    while True:
        events = await stream.take(0.05)
        done = isinstance(events[-1], Finish)
        num_tokens += len(events) - done
        if done:
            return num_tokens


async def one_round(engine: TorchEngine, batch: int, max_tokens: int, number: int) -> int:
    rng = np.random.default_rng(number)
    streams = []
    for row in range(batch):
        prompt = rng.integers(0, 64, 50).astype(np.int32)
        name = f"{number}-{row}"
        streams.append(engine.submit(GenerateRequest(name, prompt, max_tokens, seed=row, namespace=name)))
    return sum(await asyncio.gather(*(drain(s) for s in streams)))


async def call(stub: pb_grpc.EngineServiceStub, request: pb.GenerateRequest) -> int:
    return sum([len(chunk.token_ids) // 4 async for chunk in stub.Generate(request, timeout=60)])


async def one_round_over_grpc(stub: pb_grpc.EngineServiceStub, batch: int, max_tokens: int, number: int) -> int:
    rng = np.random.default_rng(number)
    calls = []
    for row in range(batch):
        prompt = rng.integers(0, 64, 50).astype("<i4").tobytes()
        request = pb.GenerateRequest(
            request_id=f"{number}-{row}", prompt_ids=prompt, max_tokens=max_tokens, temperature=1.0, top_p=1.0,
            seed=row, namespace=f"{number}-{row}",
        )  # fmt: skip
        calls.append(call(stub, request))
    return sum(await asyncio.gather(*calls))


async def measure(batch: int, max_tokens: int, rounds: int) -> None:
    engine = await make_engine()
    await timed(f"engine batch {batch}", partial(one_round, engine, batch, max_tokens), rounds, batch)
    with tempfile.TemporaryDirectory() as cells:
        cell = EngineCell(engine, DeviceLock(Path(cells), 0, "engine"), NoWeights())
        service = EngineRpc(cell, 0.05, status_pb2.Status)
        register = partial(pb_grpc.add_EngineServiceServicer_to_server, service)
        server = rpc.Server("127.0.0.1:0", [(SERVICE, register)])
        await server.start()
        channel = rpc.channel(f"127.0.0.1:{server.port}")
        over = partial(one_round_over_grpc, pb_grpc.EngineServiceStub(channel), batch, max_tokens)
        await timed(f"gRPC   batch {batch}", over, rounds, batch)
        await channel.close()
        await server.stop(0)
    await engine.close()


async def timed(name: str, one: Callable[[int], Awaitable[int]], rounds: int, batch: int) -> None:
    await one(0)
    wall, cpu, num_tokens = time.perf_counter(), time.process_time(), 0
    for number in range(1, rounds + 1):
        num_tokens += await one(number)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{name:16s} {num_tokens / cpu:8.0f} tokens/CPU-s {num_tokens / wall:8.0f} tokens/s "
          f"{cpu / rounds / batch * 1000:7.2f} CPU-ms/call")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--max-tokens", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for batch in arguments.batch:
        asyncio.run(measure(batch, arguments.max_tokens, arguments.rounds))


if __name__ == "__main__":
    main()
