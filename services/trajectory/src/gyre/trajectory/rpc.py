"""gRPC surface: look at a tree, a group, the process. Nothing here changes anything."""

import os
from collections.abc import Callable

import grpc
import grpc.aio
from gyre.contracts.errors import ContractError, InvalidId
from gyre.contracts.events import Outcome
from gyre.contracts.ids import check_id
from gyre.proto.common.v1 import status_pb2
from gyre.proto.trajectory.v1 import service_pb2, service_pb2_grpc
from gyre.runtime.blobs import BlobStore
from gyre.runtime.process import Process
from gyre.trajectory.completion import eligibility
from gyre.trajectory.config import TrajectoryConfig
from gyre.trajectory.inspection import Header, TreeFile, tree_file, tree_from_bytes, tree_path
from gyre.trajectory.reading import read_execution
from gyre.trajectory.roles import classifier
from gyre.trajectory.state import ExecutionState, GroupState, State

SERVICE_NAME = service_pb2.DESCRIPTOR.services_by_name["TrajectoryService"].full_name


class TrajectoryServicer(service_pb2_grpc.TrajectoryServiceServicer):
    """Answers from the core's state and, for completed groups, from the blob store."""

    def __init__(self, process: Process, config: TrajectoryConfig, blobs: BlobStore, state: Callable[[], State],
                 outbox_depth: Callable[[], int]) -> None:
        self._process, self._config, self._blobs = process, config, blobs
        self._state, self._outbox_depth = state, outbox_depth

    async def InspectTree(self, request: service_pb2.InspectTreeRequest,
                          context: grpc.aio.ServicerContext) -> service_pb2.InspectTreeResponse:
        try:
            file = self._tree(check_id(request.execution, "execution"))
        except InvalidId as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except ContractError as error:
            await context.abort(grpc.StatusCode.DATA_LOSS, str(error))
        except FileNotFoundError:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"execution {request.execution!r}: no tree is known")
        return service_pb2.InspectTreeResponse(json=file.to_json())

    async def InspectGroup(self, request: service_pb2.InspectGroupRequest,
                           context: grpc.aio.ServicerContext) -> service_pb2.InspectGroupResponse:
        state = self._state()
        finished = state.completed.get(request.group)
        if finished is not None:
            return service_pb2.InspectGroupResponse(group=request.group, completed=True, detail=finished.detail,
                                                    num_executions=finished.num_executions,
                                                    num_settled=finished.num_executions)
        group = state.groups.get(request.group)
        if group is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"group {request.group!r}: not known here")
        return service_pb2.InspectGroupResponse(group=request.group, num_executions=len(list(group.members())),
                                                num_settled=group.num_settled, detail=describe(group))

    async def GetStatus(self, request: status_pb2.StatusRequest,
                        context: grpc.aio.ServicerContext) -> status_pb2.Status:
        state, process = self._state(), self._process
        executions = [e for group in state.groups.values() for e in group.executions.values()]
        gauges = {"open_groups": len(state.groups), "completed_groups": len(state.completed),
                  "open_executions": len(executions), "records_held": sum(len(e.log) for e in executions),
                  "outbox_depth": self._outbox_depth(), **state.counts}
        return status_pb2.Status(process=process.name, service=process.service, run=process.run, pid=os.getpid(),
                                 uptime_s=process.uptime_s, gauges={k: float(v) for k, v in gauges.items()},
                                 detail=f"{len(state.groups)} groups open, {len(state.completed)} completed")

    def _tree(self, execution: str) -> TreeFile:
        """Raises FileNotFoundError, BrokenBody."""
        for group in self._state().groups.values():
            if group.dispatched is not None and execution in group.executions:
                return live_tree(execution, group, self._config)
        return tree_from_bytes(self._blobs.read(tree_path(execution)))


def live_tree(execution: str, group: GroupState, config: TrajectoryConfig) -> TreeFile:
    """The tree of an execution whose group is still open: nothing is admitted yet."""
    if group.dispatched is None:
        raise FileNotFoundError(execution)
    state = group.executions[execution]
    reading = read_execution(state.log.ordered(), eligibility(state, config), classifier(config.harness))
    bare = Outcome(execution, "unscorable", state.terminated.ending if state.terminated else "finished", 0.0, 0.0,
                   len(state.log), 0, 0, reason=f"open: {_waits_for(state) or 'settled'}")
    dispatched = group.dispatched
    header = Header(dispatched.query, dispatched.group, dispatched.purpose, config.policy, reading.fill(bare, None, "open"))
    return tree_file(header, reading.tree, reading.targets, None, reading.roles)


def describe(group: GroupState) -> str:
    """What an open group waits for, one clause per execution that is not settled."""
    if group.dispatched is None:
        return "its dispatch has not been seen"
    return "; ".join(f"{name} waits for {_waits_for(e)}" for name, e in group.members() if not e.settle())


def _waits_for(execution: ExecutionState) -> str:
    if execution.terminated is None:
        return "its end"
    if execution.awaits_records:
        return f"{execution.terminated.num_calls - len(execution.log)} call records"
    return "its score" if not execution.settle() else ""
