"""`gyre-trajectory`: wiring only."""

from gyre.contracts import subjects
from gyre.contracts.events import (
    CallRecorded,
    ExecutionScored,
    ExecutionTerminated,
    ExecutionUnscorable,
    GroupCompleted,
    GroupDispatched,
)
from gyre.proto.trajectory.v1 import service_pb2_grpc
from gyre.runtime import process as runtime
from gyre.runtime.rpc import Server
from gyre.runtime.service import Service, Subscription
from gyre.trajectory.config import trajectory_config
from gyre.trajectory.core import TrajectoryCore
from gyre.trajectory.rpc import SERVICE_NAME, TrajectoryServicer
from gyre.trajectory.state import State

SUBSCRIPTIONS = (
    Subscription(subjects.CTL, (GroupDispatched,)),
    Subscription(subjects.EXEC, (ExecutionTerminated,)),
    Subscription(subjects.CALL, (CallRecorded,)),
    Subscription(subjects.REWARD, (ExecutionScored, ExecutionUnscorable)),
)


async def _perform(effect: object, trace: object) -> None:
    raise NotImplementedError(f"the trajectory core asks for blobs and facts only, not {type(effect).__name__}")


async def serve(process: runtime.Process) -> None:
    """Run until asked to stop."""
    config = trajectory_config(process.run, process.config)
    bus = await process.connect()
    service: Service[State] = Service(
        name="trajectory", run=process.run, core=TrajectoryCore(config), store=process.store(), bus=bus,
        blobs=process.blobs, clock=process.clock, subscriptions=SUBSCRIPTIONS, perform=_perform,
        single_writer_subjects=(GroupCompleted,))
    servicer = TrajectoryServicer(process, config, process.blobs, lambda: service.state, lambda: service.outbox_depth)
    server = Server(process.deployment.trajectory.listen, [
        (SERVICE_NAME, lambda s: service_pb2_grpc.add_TrajectoryServiceServicer_to_server(servicer, s))])
    await server.start()
    await server.set_serving(True)

    async def stop_when_asked() -> None:
        await process.stopping.wait()
        service.stop()

    service.spawn(stop_when_asked())
    try:
        await service.run()
    finally:
        await server.stop()
        await bus.close()


def main() -> None:
    arguments = runtime.parser("gyre-trajectory", "Trajectory trees, group statistics, admission, packing.")
    runtime.run(serve, "trajectory", "trajectory", arguments.parse_args())


if __name__ == "__main__":
    main()
