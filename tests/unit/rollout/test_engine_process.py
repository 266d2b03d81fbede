"""The engine process as its peers see it: a real gRPC server in this process, a real device lock, real weights."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from gyre.policy.checkpoint import save_checkpoint, state_digest
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from gyre.proto.common.v1 import status_pb2
from gyre.proto.rollout.v1 import engine_pb2 as pb
from gyre.proto.rollout.v1 import engine_pb2_grpc as pb_grpc
from gyre.rollout.engine_cell import EngineCell
from gyre.rollout.engine_rpc import SERVICE, EngineRpc
from gyre.rollout.engines.torch import TorchEngine, TorchEngineConfig
from gyre.rollout.engines.weights import PulledWeights, WeightsSource
from gyre.rollout.torch_engine.scheduler import SchedulerConfig
from gyre.runtime import rpc
from gyre.runtime.devices import DeviceLock
from gyre.transfer import Transfer, TransferConfig
from gyre.transfer.tensors import arrays_of

torch.set_num_threads(1)
POLICY = PolicyConfig("qwen3", 32, 16, 24, 2, 4, 2, 8, tie_word_embeddings=True, qk_norm=True, max_position=512)


class Harness:
    """One engine process without its process: server, stub, and what its peers would hold."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.core = Transfer(TransferConfig("trainer-0", directory=home / "shm"))
        self.reader = Transfer(TransferConfig("engine-0"))
        self.trainer = DeviceLock(home / "cells", 0, "trainer")
        self.cell = self.new_cell()
        self.server = rpc.Server("127.0.0.1:0", [(SERVICE, self._add)])
        self.channel = rpc.channel(f"127.0.0.1:{self.server.port}")
        self.stub = pb_grpc.EngineServiceStub(self.channel)

    def new_cell(self) -> EngineCell:
        engine = TorchEngine(POLICY, TorchEngineConfig(SchedulerConfig(2048, 512, 8, 8, 4), min_interval_s=0.0))
        lock = DeviceLock(self.home / "cells", 0, "engine")
        return EngineCell(engine, lock, PulledWeights(self.reader, 10.0), self._no_wait)

    def weights(self, version: int, transfer: bool = True, checkpoint: bool = True) -> pb.WeightsRef:
        state = Decoder.create(POLICY, version).state_dict()
        directory, text = self.home / f"v{version}", ""
        if checkpoint:
            save_checkpoint(directory, POLICY, state)
        if transfer:
            self.core.register(f"published-{version}", arrays_of(state))
            text = json.dumps(self.core.describe(f"published-{version}").to_wire())
        where = str(directory) if checkpoint else ""
        return pb.WeightsRef(version=version, checksum=state_digest(state), transfer=text, checkpoint=where)

    async def wake(self, epoch: int, version: int) -> pb.WakeResponse:
        return await self.stub.Wake(pb.WakeRequest(epoch=epoch, weights=self.weights(version)))

    async def generate(self, name: str, max_tokens: int = 10, **fields: object) -> list[pb.TokenChunk]:
        return [chunk async for chunk in self.stub.Generate(request(name, max_tokens, **fields), timeout=20)]

    async def stop(self) -> None:
        await self.cell.close()
        await self.channel.close()
        await self.server.stop(0)
        self.core.close()
        self.reader.close()

    def _add(self, server: grpc.aio.Server) -> None:
        service = EngineRpc(self.cell, 0.02, lambda: status_pb2.Status(process="engine-0", epoch=self.cell.epoch))
        pb_grpc.add_EngineServiceServicer_to_server(service, server)

    async def _no_wait(self, _: float) -> None:
        await asyncio.sleep(0)


def request(name: str, max_tokens: int, **fields: object) -> pb.GenerateRequest:
    prompt = np.arange(9, dtype="<i4").tobytes()
    defaults = {"prompt_ids": prompt, "temperature": 1.0, "top_p": 1.0, "seed": 5}
    return pb.GenerateRequest(request_id=name, max_tokens=max_tokens, **{**defaults, **fields})  # type: ignore[arg-type]


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    harness = Harness(tmp_path)
    await harness.server.start()
    yield harness
    await harness.stop()


def code_of(error: pytest.ExceptionInfo[grpc.aio.AioRpcError]) -> grpc.StatusCode:
    return error.value.code()


async def test_a_woken_engine_streams_coalesced_tokens(harness: Harness) -> None:
    woken = await harness.wake(0, 3)
    assert (woken.version, woken.checksum) == (3, harness.weights(3).checksum)
    chunks = await harness.generate("a")
    assert [c.finish for c in chunks[:-1]] == [""] * (len(chunks) - 1) and chunks[-1].finish == "length"
    assert len(chunks) < 10
    ids = np.concatenate([np.frombuffer(c.token_ids, "<i4") for c in chunks])
    logprobs = np.concatenate([np.frombuffer(c.logprobs, "<f4") for c in chunks])
    assert len(ids) == len(logprobs) == 10 and (logprobs < 0).all()
    assert [v for c in chunks for v in c.versions] == [3] * 10
    assert [c.index for c in chunks if c.token_ids][0] == 0


async def test_a_replay_continues_where_the_first_try_ended(harness: Harness) -> None:
    await harness.wake(0, 3)
    whole = b"".join([c.token_ids for c in await harness.generate("a")])
    prompt = np.arange(9, dtype="<i4").tobytes() + whole[: 4 * 4]
    rest = await harness.generate("a.1", 6, prompt_ids=prompt, num_emitted=4)
    assert rest[0].index == 4
    assert b"".join([c.token_ids for c in rest]) == whole[4 * 4 :]


async def test_an_engine_starts_asleep_and_refuses_requests(harness: Harness) -> None:
    load = await harness.stub.GetLoad(pb.GetLoadRequest())
    assert load.asleep and not load.admitting and load.kv_tokens_free == 0
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await harness.generate("a")
    assert code_of(error) == grpc.StatusCode.UNAVAILABLE


async def test_sleep_hands_the_devices_to_the_trainer_and_wake_takes_them_back(harness: Harness) -> None:
    await harness.wake(0, 3)
    assert not harness.trainer.try_take(1)
    freed = (await harness.stub.Sleep(pb.SleepRequest(epoch=1))).freed_bytes
    assert freed > 0 and (await harness.stub.GetLoad(pb.GetLoadRequest())).asleep
    assert harness.trainer.try_take(1)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await harness.wake(2, 4)
    assert code_of(error) == grpc.StatusCode.UNAVAILABLE
    harness.trainer.give_back()
    assert (await harness.wake(2, 4)).version == 4
    assert not harness.trainer.try_take(1)


async def test_an_epoch_that_is_not_newer_is_refused_and_a_repeat_is_not(harness: Harness) -> None:
    await harness.wake(4, 3)
    for stale in (3, 4):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await harness.stub.Sleep(pb.SleepRequest(epoch=stale))
        assert code_of(error) == grpc.StatusCode.FAILED_PRECONDITION
    assert (await harness.wake(4, 3)).version == 3
    await harness.stub.Sleep(pb.SleepRequest(epoch=5))
    await harness.stub.Sleep(pb.SleepRequest(epoch=5))
    for stale in (4, 5):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await harness.wake(stale, 3)
        assert code_of(error) == grpc.StatusCode.FAILED_PRECONDITION


async def test_a_restarted_engine_wakes_again_in_its_epoch(harness: Harness) -> None:
    await harness.wake(4, 3)
    await harness.cell.close()
    reborn = harness.new_cell()
    weights = harness.weights(3)
    probe = await reborn.wake(4, WeightsSource(3, weights.checksum, weights.transfer, weights.checkpoint))
    assert probe.ok and reborn.awake
    await reborn.close()


async def test_weights_come_from_the_checkpoint_when_the_core_is_gone(harness: Harness) -> None:
    gone = harness.weights(6)
    harness.core.release("published-6")
    woken = await harness.stub.Wake(pb.WakeRequest(epoch=0, weights=gone))
    assert woken.version == 6
    only_core = harness.weights(7, checkpoint=False)
    assert (await harness.stub.LoadWeights(pb.LoadWeightsRequest(weights=only_core))).version == 7


async def test_weights_that_do_not_verify_are_refused_and_the_old_ones_serve_on(harness: Harness) -> None:
    await harness.wake(0, 3)
    wrong = harness.weights(4)
    wrong.checksum = "0" * 64
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await harness.stub.LoadWeights(pb.LoadWeightsRequest(weights=wrong))
    assert code_of(error) == grpc.StatusCode.FAILED_PRECONDITION and "checksum" in error.value.details()
    assert {v for c in await harness.generate("a") for v in c.versions} == {3}


async def test_a_swap_keeps_requests_and_labels_their_tokens(harness: Harness) -> None:
    await harness.wake(0, 3)
    weights = harness.weights(4)
    stream = aiter(harness.stub.Generate(request("a", 400), timeout=20))
    versions = list((await anext(stream)).versions)
    await harness.stub.LoadWeights(pb.LoadWeightsRequest(weights=weights))
    async for chunk in stream:
        versions += chunk.versions
    assert versions == sorted(versions) and set(versions) == {3, 4} and len(versions) == 400


async def test_a_caller_that_goes_away_aborts_its_request(harness: Harness) -> None:
    await harness.wake(0, 3)
    stream = harness.stub.Generate(request("a", 500), timeout=20)
    await stream.read()
    stream.cancel()
    async with asyncio.timeout(10):
        while (await harness.stub.GetLoad(pb.GetLoadRequest())).num_running:
            pass


async def test_abort_ends_a_stream_and_says_whether_it_was_there(harness: Harness) -> None:
    await harness.wake(0, 3)
    stream = aiter(harness.stub.Generate(request("a", 500), timeout=20))
    await anext(stream)
    assert (await harness.stub.Abort(pb.AbortRequest(request_id="a"))).found
    assert not (await harness.stub.Abort(pb.AbortRequest(request_id="a"))).found
    assert [c.finish async for c in stream][-1] == "abort"


async def test_bad_requests_and_a_full_queue_have_their_own_codes(harness: Harness) -> None:
    await harness.wake(0, 3)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await harness.generate("a", prompt_ids=b"abc")
    assert code_of(error) == grpc.StatusCode.INVALID_ARGUMENT and "prompt_ids" in error.value.details()
    # Eight run and four wait; which of forty those are is the network's affair.
    streams = [harness.stub.Generate(request(f"r{i}", 400), timeout=60) for i in range(40)]
    answers = await asyncio.gather(*(stream.read() for stream in streams), return_exceptions=True)
    refused = {a.code() for a in answers if isinstance(a, grpc.aio.AioRpcError)}
    assert refused == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    for stream in streams:
        stream.cancel()


async def test_a_prompt_of_more_than_four_megabytes_is_judged_and_not_cut_off(harness: Harness) -> None:
    await harness.wake(0, 3)
    with pytest.raises(grpc.aio.AioRpcError, match="longest context"):
        await harness.generate("a", prompt_ids=np.zeros(1_500_000, "<i4").tobytes())


async def test_admission_can_be_closed_and_opened(harness: Harness) -> None:
    await harness.wake(0, 3)
    await harness.stub.SetAdmission(pb.SetAdmissionRequest(open=False))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await harness.generate("a")
    assert code_of(error) == grpc.StatusCode.UNAVAILABLE
    await harness.stub.SetAdmission(pb.SetAdmissionRequest(open=True))
    assert (await harness.generate("a"))[-1].finish == "length"


async def test_health_probe_and_status_answer(harness: Harness) -> None:
    await harness.server.set_serving(True)
    health = health_pb2_grpc.HealthStub(harness.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    await harness.wake(2, 3)
    probe = await harness.stub.Probe(pb.ProbeRequest())
    assert probe.ok and probe.version == 3
    assert (await harness.stub.GetStatus(status_pb2.StatusRequest())).epoch == 2


def test_what_serves_without_a_model_imports_no_torch() -> None:
    modules = "gyre.rollout.main, gyre.rollout.engine_process, gyre.rollout.engines.scripted"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_weights_that_fail_the_probe_are_fetched_again(harness: Harness) -> None:
    """Or a cell whose memory was damaged fails every later wake, too."""
    await harness.wake(1, 1)
    await harness.stub.Sleep(pb.SleepRequest(epoch=2))
    engine = harness.cell.engine
    assert isinstance(engine, TorchEngine) and engine._offloaded is not None
    with torch.no_grad():
        next(iter(engine._offloaded.parameters())).mul_(2.0)
    with pytest.raises(grpc.aio.AioRpcError, match="fail the probe"):
        await harness.wake(3, 1)
    reply = await harness.wake(3, 1)
    assert reply.version == 1
    assert (await harness.generate("r"))[-1].finish == "length"
