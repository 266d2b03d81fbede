"""Evaluator processes on a real NATS server: shared work, one counted result per request, kill -9 in the middle."""

import asyncio
import contextlib
import io
import os
import signal
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgpack
import pytest
import pytest_asyncio
from gyre.contracts import codec
from gyre.contracts.events import BlobRef, EvaluationRequested, ExecutionScored, ExecutionUnscorable, Fact
from gyre.contracts.subjects import DLQ, EVAL, PREFIX, REWARD, message_id, subject_of
from gyre.proto.common.v1 import status_pb2
from gyre.proto.reward.v1 import service_pb2, service_pb2_grpc
from gyre.runtime.blobs import DirectoryBlobs
from gyre.runtime.bus import Bus
from gyre.runtime.ports import free_ports
from gyre.runtime.rpc import channel
from gyre.runtime.service import encode_fact
from nats.js.api import AckPolicy, ConsumerConfig

RUN = "r1"
RUN_TOML = """
name = "r1"
[policy]
checkpoint = "none"
[tasks]
root = "tasks"
[harness]
command = ["none"]
sandbox = "none"
shipped_example = true
[reward]
timeout_s = 20.0
"""
TESTS = "from a import f\ndef test_one():\n    assert f() >= 1\ndef test_two():\n    assert f() >= 2\n"


def packed(files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


def deployment(base: Path, nats_url: str, ports: list[int]) -> str:
    def endpoint(port: int) -> str:
        return f'{{listen = "127.0.0.1:{port}", address = "127.0.0.1:{port}"}}'

    single = "".join(f"{name} = {endpoint(1)}\n" for name in ("gateway", "scheduler", "rollout", "trajectory"))
    several = "".join(f"{name} = [{endpoint(1)}]\n" for name in ("engines", "trainers", "transfers"))
    evaluators = ", ".join(endpoint(p) for p in ports)
    return (f'run = "{RUN}"\nnats_url = "{nats_url}"\nstate_dir = "state"\ncells_dir = "cells"\nblobs = "blobs"\n'
            f'log_dir = "log"\ncheckpoint_dir = "checkpoints"\ngateway_url = "none"\n{single}{several}'
            f"evaluators = [{evaluators}]\n")


class Farm:
    """A run's files, its bus, and as many evaluator processes as a test starts."""

    def __init__(self, base: Path, bus: Bus, nats_url: str, ports: list[int]) -> None:
        self.base, self.bus, self.ports = base, bus, ports
        self.blobs = DirectoryBlobs(base / "blobs")
        self.processes: dict[int, asyncio.subprocess.Process] = {}
        (base / "run.toml").write_text(RUN_TOML)
        (base / "deployment.toml").write_text(deployment(base, nats_url, ports))
        (base / "tasks/t/tests").mkdir(parents=True)
        (base / "tasks/t/tests/test_all.py").write_text(TESTS)

    async def start(self, index: int) -> None:
        arguments = [sys.executable, "-m", "gyre.reward.main", "evaluator", "--config", str(self.base / "run.toml"),
                     "--deployment", str(self.base / "deployment.toml"), "--index", str(index)]
        self.processes[index] = await asyncio.create_subprocess_exec(*arguments, env=os.environ | {"PATH": os.defpath})

    async def kill(self, index: int, number: int = signal.SIGKILL) -> int:
        process = self.processes.pop(index)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        return await process.wait()

    async def publish(self, fact: Fact, id_: str = "") -> None:
        body = encode_fact(fact, run=RUN, source="test", blobs=self.blobs)
        await self.bus.publish(subject_of(fact, RUN), body, id_ or message_id(fact, RUN))

    async def ask(self, execution: str, files: dict[str, str], task: str = "t") -> None:
        snapshot = self.blobs.put(f"snapshots/{execution}.tar", packed(files))
        await self.publish(EvaluationRequested(execution, "g", "q", task, "train", "finished", snapshot))

    async def results(self, num: int) -> list[Fact]:
        """The first `num` results, once there are so many and no request is left."""
        async with asyncio.timeout(90):
            while await self.num_requests() or (await self.bus.js.stream_info(REWARD.name)).state.messages < num:
                await asyncio.sleep(0.1)
        stored = await self.bus.read_all(REWARD, [REWARD.subjects])
        return [codec.decode(r.data)[1] for r in stored]

    async def num_requests(self) -> int:
        return (await self.bus.js.stream_info(EVAL.name)).state.messages


@pytest_asyncio.fixture
async def farm(tmp_path: Path, nats_server: "NatsServer") -> AsyncIterator[Farm]:  # noqa: F821
    bus = await Bus.connect(nats_server.url, "test")
    await bus.bootstrap()
    # As the evaluators make it, but for a wait that suits a test.
    config = ConsumerConfig(durable_name=f"{RUN}-reward", ack_policy=AckPolicy.EXPLICIT, ack_wait=1.5, max_deliver=-1,
                            filter_subjects=[f"{PREFIX}.eval.{RUN}.*.evaluation-requested"])
    await bus.js.add_consumer(EVAL.name, config)
    farm = Farm(tmp_path, bus, nats_server.url, free_ports(2, "127.0.0.1"))
    yield farm
    for index in list(farm.processes):
        await farm.kill(index)
    await bus.close()


async def test_two_evaluators_share_the_work_and_one_is_killed_in_the_middle(farm: Farm) -> None:
    """The first request takes its evaluator's full attention; whoever has it is killed -9 while it works on it."""
    await farm.start(0)
    await farm.ask("slow", {"a.py": "import time\ntime.sleep(9)\ndef f(): return 2\n"})
    for number in range(30):
        await farm.ask(f"x{number}", {"a.py": f"def f(): return {number % 3}\n"})
    async with asyncio.timeout(60):
        while (await farm.bus.js.consumer_info(EVAL.name, f"{RUN}-reward")).num_ack_pending == 0:
            await asyncio.sleep(0.05)
    await farm.kill(0)
    await farm.start(1)
    results = await farm.results(31)
    assert len(results) == 31 and all(isinstance(r, ExecutionScored) for r in results)
    rewards = {r.execution: r.reward for r in results}
    assert len(rewards) == 31 and {n: rewards[f"x{n}"] for n in range(3)} == {0: 0.0, 1: 0.5, 2: 1.0}
    assert {r.evaluator for r in results} <= {"reward-0", "reward-1"}


async def test_two_evaluators_at_once_give_every_request_one_result(farm: Farm) -> None:
    await asyncio.gather(farm.start(0), farm.start(1))
    for number in range(40):
        await farm.ask(f"x{number}", {"a.py": "def f(): return 2\n"})
    results = await farm.results(40)
    assert sorted(r.execution for r in results) == sorted(f"x{n}" for n in range(40))


async def test_a_second_result_for_an_execution_is_not_heard_whichever_kind_it_is(farm: Farm) -> None:
    from gyre.reward.evaluator import result_id

    await farm.publish(ExecutionUnscorable("twice", "g", "died", "reward-9"), result_id(RUN, "twice"))
    await farm.start(0)
    await farm.ask("twice", {"a.py": "def f(): return 2\n"})
    await farm.ask("other", {"a.py": "def f(): return 2\n"})
    results = await farm.results(2)
    assert [(r.execution, type(r)) for r in results] == [("twice", ExecutionUnscorable), ("other", ExecutionScored)]


async def test_poison_goes_to_the_dead_letters_and_the_work_goes_on(farm: Farm) -> None:
    subject = f"{PREFIX}.eval.{RUN}.bad.evaluation-requested"
    await farm.bus.publish(subject, b"\xc1 not a message", "poison-1")
    broken = {"v": 1, "type": "evaluation.requested", "id": "i", "run": RUN, "source": "t", "time": 0, "key": "k",
              "data": {"execution": 7}}
    await farm.bus.publish(subject, msgpack.packb(broken), "poison-2")
    await farm.start(0)
    await farm.ask("good", {"a.py": "def f(): return 2\n"})
    assert [r.execution for r in await farm.results(1)] == ["good"]
    dead = [codec.decode(r.data)[1] for r in await farm.bus.read_all(DLQ, [DLQ.subjects])]
    assert len(dead) == 2 and "not MessagePack" in dead[0].reason and "execution" in dead[1].reason


async def test_a_stopped_evaluator_gives_its_work_back_at_once_and_exits_in_peace(farm: Farm) -> None:
    await farm.start(0)
    await farm.ask("first", {"a.py": "def f(): return 2\n"})
    await farm.results(1)
    await farm.ask("slow", {"a.py": "import time\ndef f():\n    time.sleep(0.2)\n    return 2\n"})
    assert await farm.kill(0, signal.SIGTERM) == 0
    await farm.start(1)
    assert {r.execution for r in await farm.results(2)} == {"first", "slow"}


async def test_regrade_scores_again_and_says_nothing(farm: Farm) -> None:
    await farm.start(0)
    await farm.ask("x", {"a.py": "def f(): return 1\n"})
    await farm.results(1)
    ref = farm.blobs.put("again.tar", packed({"a.py": "def f(): return 2\n"}))
    async with channel(f"127.0.0.1:{farm.ports[0]}") as dialled:
        stub = service_pb2_grpc.RewardServiceStub(dialled)
        said = await stub.Regrade(regrade("t", ref))
        assert (said.reward, said.num_passed, said.num_checks) == (1.0, 2, 2)
        with pytest.raises(Exception, match="no directory"):
            await stub.Regrade(regrade("none", ref))
        with pytest.raises(Exception, match="missing"):
            await stub.Regrade(regrade("t", BlobRef("none.tar", ref.digest, ref.size)))
        status = await stub.GetStatus(status_pb2.StatusRequest())
        assert (status.process, status.gauges["scored"]) == ("reward-0", 1.0)
    assert len(await farm.results(1)) == 1


def regrade(task: str, ref: BlobRef) -> service_pb2.RegradeRequest:
    return service_pb2.RegradeRequest(task=task, snapshot_path=ref.path, snapshot_digest=ref.digest,
                                      snapshot_size=ref.size)
