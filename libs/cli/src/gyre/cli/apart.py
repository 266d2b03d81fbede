"""What a run needs when something else than the local launcher starts its processes: `gyre bootstrap`, `gyre start`.

`bootstrap` comes before every process and may be repeated; `start` tells the scheduler to open the run.
"""

import asyncio
from pathlib import Path

import grpc
from gyre.cli.launcher import connect_patiently
from gyre.cli.prepare import Say, prepare
from gyre.cli.run_dir import resolve_paths
from gyre.contracts.errors import ConfigError, GyreError
from gyre.proto.scheduler.v1 import service_pb2, service_pb2_grpc
from gyre.runtime import rpc
from gyre.runtime.config import Deployment, RunConfig, config_digest, load_deployment, load_run
from gyre.runtime.settings import to_toml

START_WITHIN_S = 180
RETRY_S = 1.0
NOT_YET = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def bootstrap(config: Path, deployment: Path, out: Path, say: Say) -> None:
    """Make tasks and first checkpoint, write the resolved configuration to `out`, create the streams.

    What is there already is left alone, so the call may be repeated.

    Raises:
        ConfigError: `out` holds another configuration, or something is missing that no command makes.
        BusError: NATS does not answer.
    """
    where = load_deployment(deployment)
    resolved = resolve_paths(load_run(config), config.parent)
    text = to_toml(resolved)
    if out.exists() and out.read_text() != text:
        raise ConfigError(f"{out} holds another configuration than {config} gives now; name another file for a new run")
    prepare(resolved, say)
    out.write_text(text)
    asyncio.run(_create_streams(where))
    say(f"{out} is ready, the streams of {where.nats_url} exist")


async def _create_streams(deployment: Deployment) -> None:
    bus = await connect_patiently(deployment.nats_url)
    try:
        await bus.bootstrap()
    finally:
        await bus.close()


def start(config: Path, deployment: Path, say: Say) -> None:
    """Open the run, waiting for the scheduler to lead.

    Raises:
        GyreError: the scheduler refused, or did not lead in time.
    """
    already_open = asyncio.run(_start(load_run(config), load_deployment(deployment)))
    say("the run is open already" if already_open else "the run is open")


async def _start(config: RunConfig, deployment: Deployment) -> bool:
    request = service_pb2.StartRunRequest(config_digest=config_digest(config))
    async with rpc.channel(deployment.scheduler.address) as channel:
        stub = service_pb2_grpc.SchedulerServiceStub(channel)
        for attempt in range(START_WITHIN_S):
            try:
                return (await stub.StartRun(request)).already_open
            except grpc.aio.AioRpcError as error:
                if error.code() not in NOT_YET or attempt == START_WITHIN_S - 1:
                    where = deployment.scheduler.address
                    raise GyreError(f"scheduler at {where}: {error.code().name}: {error.details()}") from error
            await asyncio.sleep(RETRY_S)
    raise AssertionError("unreachable")
