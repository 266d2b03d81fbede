"""`gyre prepare` and `gyre start`, for processes that something else than the launcher starts."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from gyre.cli.apart import prepare_apart, start_apart
from gyre.cli.main import load
from gyre.contracts.errors import ConfigError, GyreError
from gyre.proto.scheduler.v1 import service_pb2, service_pb2_grpc
from gyre.runtime import rpc
from gyre.runtime.config import Deployment, Endpoint, config_digest, load_run
from gyre.runtime.settings import to_toml

NAME = service_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name
RUN = """
name = "apart"
[policy]
checkpoint = "first"
[tasks]
root = "tasks"
[harness]
command = ["{python}", "{config_dir}/harness.py"]
"""


def write_deployment(directory: Path, scheduler: str) -> Path:
    nowhere = Endpoint("127.0.0.1:1", "127.0.0.1:1")
    at = Endpoint(scheduler, scheduler)
    kept = {name: name for name in ("state_dir", "cells_dir", "blobs", "log_dir", "checkpoint_dir")}
    deployment = Deployment(
        run="apart",
        nats_url="nats://127.0.0.1:1",
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
        self.opening, self.is_open = 0, False

    async def StartRun(
        self, request: service_pb2.StartRunRequest, context: grpc.aio.ServicerContext
    ) -> service_pb2.StartRunResponse:
        self.num_asked += 1
        if self.num_asked == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "does not lead yet")
        if request.config_digest != self._digest:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "runs another configuration")
        return service_pb2.StartRunResponse(already_open=self.is_open, opening=self.opening)


@pytest.fixture
async def scheduler(run: Path) -> AsyncIterator[tuple[FakeScheduler, str]]:
    fake = FakeScheduler(config_digest(load_run(run)))
    server = rpc.Server("127.0.0.1:0", [(NAME, lambda s: service_pb2_grpc.add_SchedulerServiceServicer_to_server(fake, s))])
    await server.start()
    yield fake, f"127.0.0.1:{server.port}"
    await server.stop(0)


def test_prepare_writes_absolute_paths_and_may_be_repeated(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "elsewhere" / "resolved.toml"
    for _ in range(2):
        prepare_apart(load(run, None), out, lambda line: None)
    resolved = load_run(out)
    assert resolved.harness.command == ("{python}", str(tmp_path / "harness.py"))
    assert resolved.tasks.root == str(tmp_path / "tasks")


def test_prepare_does_not_overwrite_another_run(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "resolved.toml"
    prepare_apart(load(run, None), out, lambda line: None)
    with pytest.raises(ConfigError, match="another configuration"):
        prepare_apart(load(run, ["seed=7"]), out, lambda line: None)


async def test_start_waits_for_the_scheduler_to_lead(scheduler: tuple[FakeScheduler, str], run: Path, tmp_path: Path) -> None:
    fake, address = scheduler
    said: list[str] = []
    await start_apart(run, write_deployment(tmp_path, address), said.append)
    assert (fake.num_asked, said) == (2, ["the run is open"])
    fake.opening, fake.is_open = 3, True
    await start_apart(run, write_deployment(tmp_path, address), said.append)
    fake.is_open = False
    await start_apart(run, write_deployment(tmp_path, address), said.append)
    assert said[1:] == ["the run is open already", "the run is open"], "whatever the number of the opening"


async def test_start_reports_a_refusal(scheduler: tuple[FakeScheduler, str], run: Path, tmp_path: Path) -> None:
    run.write_text("seed = 7\n" + RUN)
    with pytest.raises(GyreError, match="runs another configuration"):
        await start_apart(run, write_deployment(tmp_path, scheduler[1]), lambda line: None)
