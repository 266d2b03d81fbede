"""`gyre status`: every process, its role and weights version, and the waterlevel, asked over gRPC."""

import asyncio

import grpc
import grpc.aio
from gyre.cli.launcher import ProcessSpec, process_specs
from gyre.cli.run_dir import RunDir, read_pids
from gyre.proto.common.v1 import status_pb2
from gyre.proto.reward.v1 import service_pb2_grpc as reward
from gyre.proto.rollout.v1 import engine_pb2_grpc as engine
from gyre.proto.rollout.v1 import service_pb2_grpc as rollout
from gyre.proto.scheduler.v1 import service_pb2 as scheduler_pb
from gyre.proto.scheduler.v1 import service_pb2_grpc as scheduler
from gyre.proto.trainer.v1 import service_pb2_grpc as trainer
from gyre.proto.trajectory.v1 import service_pb2_grpc as trajectory
from gyre.runtime import rpc
from gyre.runtime.config import load_deployment
from rich.table import Table

STUBS = {"scheduler": scheduler.SchedulerServiceStub, "rollout": rollout.RolloutServiceStub,
         "engine": engine.EngineServiceStub, "trajectory": trajectory.TrajectoryServiceStub,
         "evaluator": reward.RewardServiceStub, "trainer": trainer.TrainerServiceStub}


async def ask(spec: ProcessSpec) -> status_pb2.Status | None:
    """What a process says of itself, None if it does not answer."""
    async with rpc.channel(spec.address, timeout_s=3.0) as channel:
        try:
            return await STUBS[spec.name.partition("-")[0]](channel).GetStatus(status_pb2.StatusRequest())
        except grpc.aio.AioRpcError:
            return None


async def inspect_run(address: str) -> scheduler_pb.InspectRunResponse | None:
    """The scheduler's view of the run, None if it does not answer."""
    async with rpc.channel(address, timeout_s=3.0) as channel:
        try:
            return await scheduler.SchedulerServiceStub(channel).InspectRun(scheduler_pb.InspectRunRequest())
        except grpc.aio.AioRpcError:
            return None


async def status_table(run: RunDir) -> Table:
    """One row per process, the run's figures as caption."""
    deployment = load_deployment(run.deployment)
    specs = process_specs(run, deployment)
    answers = await asyncio.gather(*(ask(spec) for spec in specs))
    view = await inspect_run(deployment.scheduler.address)
    pids = read_pids(run)
    table = Table(title=f"run {run.name}", caption=_caption(view), caption_justify="left")
    for heading in ("process", "pid", "up", "role", "epoch", "weights", "detail"):
        table.add_column(heading)
    table.add_row("nats", str(pids.get("nats", "-")), "", "", "", "", deployment.nats_url)
    cells = view.cells if view else ()
    roles = {c.cell: c.role + ("" if c.stage == "settled" else f" ({c.stage})") for c in cells}
    for spec, answer in zip(specs, answers, strict=True):
        table.add_row(*_row(spec, answer, roles, pids))
    return table


def _row(spec: ProcessSpec, answer: status_pb2.Status | None, roles: dict[int, str], pids: dict[str, int]) -> list[str]:
    if answer is None:
        return [spec.name, str(pids.get(spec.name, "-")), "", "", "", "", "[red]does not answer[/red]"]
    role = answer.role or (roles.get(answer.cell, "") if answer.HasField("cell") else "")
    epoch = str(answer.epoch) if answer.HasField("epoch") else ""
    weights = f"v{answer.weights_version}" if answer.HasField("weights_version") else ""
    gauges = ", ".join(f"{name} {value:g}" for name, value in sorted(answer.gauges.items()))
    detail = "; ".join(part for part in (answer.detail, gauges) if part)
    return [spec.name, str(answer.pid), f"{answer.uptime_s:.0f} s", role, epoch, weights, detail]


def _caption(view: scheduler_pb.InspectRunResponse | None) -> str:
    if view is None:
        return "the scheduler does not answer"
    cells = ", ".join(f"cell {c.cell} {c.role} (epoch {c.epoch}, {c.stage})" for c in view.cells)
    return (f"phase {view.phase}, burst {view.burst}, steps finished {view.steps_finished}, weights version "
            f"v{view.weights_version}, waterlevel {view.waterlevel} = {view.num_dispatched} dispatched - "
            f"{view.num_terminated} terminated; {cells}")
