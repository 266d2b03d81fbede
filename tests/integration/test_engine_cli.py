"""`gyre-rollout engine` as a process: it starts asleep, serves, dies by kill -9 without keeping the devices, stops."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from gyre.policy.checkpoint import save_checkpoint, state_digest
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from gyre.proto.common.v1 import status_pb2
from gyre.proto.rollout.v1 import engine_pb2 as pb
from gyre.proto.rollout.v1 import engine_pb2_grpc as pb_grpc
from gyre.runtime.devices import DeviceLock
from gyre.runtime.ports import free_ports

POLICY = PolicyConfig("qwen3", 32, 16, 24, 2, 4, 2, 8, tie_word_embeddings=True, qk_norm=True, max_position=512)

RUN = """
name = "test"
[policy]
checkpoint = "policy"
[tasks]
root = "tasks"
[harness]
command = ["true"]
[engine]
backend = "{backend}"
kv_tokens = 8192
"""

DEPLOYMENT = """
run = "test"
nats_url = "nats://unused"
state_dir = "state"
cells_dir = "cells"
blobs = "blobs"
log_dir = "log"
checkpoint_dir = "checkpoints"
gateway_url = "http://unused"
trainers = []
evaluators = []
transfers = []
engines = [{{ listen = "127.0.0.1:{port}", address = "127.0.0.1:{port}" }}]
{endpoints}
"""


class EngineProcess:
    """The process, and a client of it."""

    def __init__(self, home: Path, backend: str) -> None:
        [port] = free_ports(1, "127.0.0.1")
        self.backend = backend
        state = Decoder.create(POLICY, 0).state_dict()
        save_checkpoint(home / "policy", POLICY, state)
        self.weights = pb.WeightsRef(version=0, checksum=state_digest(state), checkpoint=str(home / "policy"))
        unused = "\n".join(
            f'{name} = {{ listen = "x", address = "x" }}' for name in ("gateway", "scheduler", "rollout", "trajectory")
        )
        (home / "run.toml").write_text(RUN.format(backend=backend))
        (home / "deployment.toml").write_text(DEPLOYMENT.format(port=port, endpoints=unused))
        self.home = home
        self.address = f"127.0.0.1:{port}"
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        files = ["--config", str(self.home / "run.toml"), "--deployment", str(self.home / "deployment.toml")]
        self.process = subprocess.Popen([sys.executable, "-m", "gyre.rollout.main", "engine", *files, "--cell", "0"])
        # A channel of its own: an older one may notice only with its next call that the process behind it was killed.
        channel = grpc.insecure_channel(self.address, [("grpc.use_local_subchannel_pool", 1)])
        self.stub = pb_grpc.EngineServiceStub(channel)
        self.stub.GetStatus(status_pb2.StatusRequest(), timeout=120, wait_for_ready=True)
        return self.process

    def wake(self, epoch: int) -> pb.WakeResponse:
        return self.stub.Wake(pb.WakeRequest(epoch=epoch, weights=self.weights), timeout=60)

    def generate(self, name: str) -> bytes:
        request = pb.GenerateRequest(
            request_id=name, prompt_ids=np.arange(9, dtype="<i4").tobytes(), max_tokens=10, temperature=1, top_p=1
        )
        return b"".join(chunk.token_ids for chunk in self.stub.Generate(request, timeout=60))

    def devices_are_free(self, epoch: int) -> bool:
        lock = DeviceLock(self.home / "cells", 0, "trainer")
        taken = lock.try_take(epoch)
        lock.give_back()
        return taken


@pytest.fixture(params=["torch", "scripted"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EngineProcess]:
    engine = EngineProcess(tmp_path, request.param)
    yield engine
    engine.process.kill()
    engine.process.wait()


@pytest.mark.slow
def test_an_engine_survives_kill_9_in_its_epoch_and_stops_when_asked(engine: EngineProcess) -> None:
    assert engine.stub.GetLoad(pb.GetLoadRequest(), timeout=10).asleep
    said = engine.stub.GetStatus(status_pb2.StatusRequest(), timeout=10).detail
    assert said == f"asleep; engine {engine.backend} (named in the configuration)"
    assert engine.wake(3).version == 0
    tokens = engine.generate("a")
    assert len(tokens) == 40 and not engine.devices_are_free(3)

    engine.process.send_signal(signal.SIGKILL)
    engine.process.wait()
    engine.start()
    assert engine.stub.GetLoad(pb.GetLoadRequest(), timeout=10).asleep
    with pytest.raises(grpc.RpcError, match="epoch 2 is over"):
        engine.wake(2)
    engine.wake(3)
    assert engine.generate("a") == tokens

    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(timeout=30) == 0
    assert engine.devices_are_free(4)
