"""`gyre bootstrap` and `gyre start`, for processes that something else than the launcher starts."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from gyre.cli.apart import bootstrap, start
from gyre.contracts.errors import ConfigError, GyreError
from gyre.contracts.subjects import STREAMS
from gyre.proto.scheduler.v1 import service_pb2, service_pb2_grpc
from gyre.runtime import rpc
from gyre.runtime.bus import Bus
from gyre.runtime.config import Deployment, Endpoint, config_digest, load_run
from gyre.runtime.settings import to_toml

RUN = """
name = "apart"
[policy]
checkpoint = "first"
[tasks]
root = "tasks"
[harness]
command = ["{python}", "{config_dir}/harness.py"]
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_deployment(directory: Path, nats_url: str, scheduler: str) -> Path:
    nowhere = Endpoint("127.0.0.1:1", "127.0.0.1:1")
    at = Endpoint(scheduler, scheduler)
    kept = {name: name for name in ("state_dir", "cells_dir", "blobs", "log_dir", "checkpoint_dir")}
    deployment = Deployment(
        run="apart",
        nats_url=nats_url,
        gateway=nowhere,
        gateway_url="http://127.0.0.1:1",
        scheduler=at,
        rollout=nowhere,
        trajectory=nowhere,
        engines=(nowhere,),
        trainers=(nowhere,),
        evaluators=(nowhere,),
        transfers=(nowhere,),
        **kept,
    )
    path = directory / "deployment.toml"
    path.write_text(to_toml(deployment))
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "tasks" / "train").mkdir(parents=True)
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "config.json").write_text("{}")
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


class FakeScheduler(service_pb2_grpc.SchedulerServiceServicer):
    """Leads from the second question on, and runs one configuration."""

    def __init__(self, digest: str) -> None:
        self._digest, self.num_asked = digest, 0

    async def StartRun(
        self, request: service_pb2.StartRunRequest, context: grpc.aio.ServicerContext
    ) -> service_pb2.StartRunResponse:
        self.num_asked += 1
        if self.num_asked == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "does not lead yet")
        if request.config_digest != self._digest:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "runs another configuration")
        return service_pb2.StartRunResponse(already_open=False)


@pytest.fixture
def scheduler(run: Path) -> Iterator[tuple[FakeScheduler, str]]:
    fake, address = FakeScheduler(config_digest(load_run(run))), f"127.0.0.1:{free_port()}"
    up, loop = threading.Event(), asyncio.new_event_loop()

    async def serve() -> rpc.Server:
        server = rpc.Server(address, [("", lambda s: service_pb2_grpc.add_SchedulerServiceServicer_to_server(fake, s))])
        await server.start()
        up.set()
        return server

    def work() -> None:
        server = loop.run_until_complete(serve())
        loop.run_forever()
        loop.run_until_complete(server.stop(0))

    thread = threading.Thread(target=work)
    thread.start()
    assert up.wait(30)
    yield fake, address
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)


def test_bootstrap_resolves_the_run_and_creates_the_streams(nats_server, run: Path, tmp_path: Path) -> None:
    deployment, out = write_deployment(tmp_path, nats_server.url, "127.0.0.1:1"), tmp_path / "resolved.toml"
    for _ in range(2):
        bootstrap(run, deployment, out, lambda line: None)
    resolved = load_run(out)
    assert resolved.harness.command == ("{python}", str(tmp_path / "harness.py"))
    assert resolved.tasks.root == str(tmp_path / "tasks")

    async def names() -> set[str]:
        bus = await Bus.connect(nats_server.url, "test")
        infos = await bus.js.streams_info()
        await bus.close()
        return {info.config.name for info in infos}

    assert asyncio.run(names()) == {stream.name for stream in STREAMS}


def test_bootstrap_does_not_overwrite_another_run(nats_server, run: Path, tmp_path: Path) -> None:
    deployment, out = write_deployment(tmp_path, nats_server.url, "127.0.0.1:1"), tmp_path / "resolved.toml"
    bootstrap(run, deployment, out, lambda line: None)
    run.write_text("seed = 7\n" + RUN)
    with pytest.raises(ConfigError, match="another configuration"):
        bootstrap(run, deployment, out, lambda line: None)


def test_start_waits_for_the_scheduler_to_lead(scheduler: tuple[FakeScheduler, str], run: Path, tmp_path: Path) -> None:
    fake, address = scheduler
    said: list[str] = []
    start(run, write_deployment(tmp_path, "nats://127.0.0.1:1", address), said.append)
    assert (fake.num_asked, said) == (2, ["the run is open"])


def test_start_reports_a_refusal(scheduler: tuple[FakeScheduler, str], run: Path, tmp_path: Path) -> None:
    run.write_text("seed = 7\n" + RUN)
    with pytest.raises(GyreError, match="runs another configuration"):
        start(run, write_deployment(tmp_path, "nats://127.0.0.1:1", scheduler[1]), lambda line: None)
