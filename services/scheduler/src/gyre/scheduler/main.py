"""`gyre-scheduler`: wiring only."""

from pathlib import Path

from gyre.proto.scheduler.v1 import service_pb2_grpc
from gyre.runtime import rpc
from gyre.runtime.config import config_digest
from gyre.runtime.process import Process, parser, run
from gyre.scheduler.config import LEASE_TTL_S, plan_of
from gyre.scheduler.lease import Lease
from gyre.scheduler.loop import Scheduler
from gyre.scheduler.rpc import NAME, SchedulerRpc
from gyre.scheduler.schedules import schedule_of


async def serve(process: Process) -> None:
    """Stand by, lead, and stop when asked to."""
    config, deployment = process.config, process.deployment
    digest = config_digest(config)
    plan = plan_of(config, digest, process.config_dir / Path(config.tasks.root))
    bus = await process.connect()
    lease = Lease(bus, process.blobs, process.clock, process.run, LEASE_TTL_S)
    schedule = schedule_of(config.cells.schedule, config.cells.num_training)
    scheduler = Scheduler(process.run, plan, schedule, bus, process.blobs, lease, process.clock)
    servicer = SchedulerRpc(process, scheduler, digest)
    server = rpc.Server(deployment.scheduler.listen, [
        (NAME, lambda s: service_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, s))])
    await server.start()
    await server.set_serving(True)
    try:
        await scheduler.run(process.stopping)
    finally:
        await server.stop()
        await bus.close()


def main() -> None:
    """The console script."""
    about = "Owns the run: bursts, dispatch, waterlevel, the role of every cell."
    run(serve, "scheduler", "scheduler", parser("gyre-scheduler", about).parse_args())


if __name__ == "__main__":
    main()
