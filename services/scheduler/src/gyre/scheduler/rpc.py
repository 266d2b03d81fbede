"""Commands and queries of the scheduler."""

import os

import grpc
from gyre.proto.common.v1 import status_pb2
from gyre.proto.scheduler.v1 import service_pb2 as pb
from gyre.proto.scheduler.v1 import service_pb2_grpc
from gyre.runtime.process import Process
from gyre.scheduler.loop import Scheduler

NAME = pb.DESCRIPTOR.services_by_name["SchedulerService"].full_name


class SchedulerRpc(service_pb2_grpc.SchedulerServiceServicer):
    """Answers from the folded state; commands take effect through facts, and are answered once these have been read back."""

    def __init__(self, process: Process, scheduler: Scheduler, config_digest: str) -> None:
        self._process, self._scheduler, self._digest = process, scheduler, config_digest

    async def StartRun(self, request: pb.StartRunRequest, context: grpc.aio.ServicerContext) -> pb.StartRunResponse:
        if not self._scheduler.leading:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this scheduler does not lead yet")
        if request.config_digest and request.config_digest != self._digest:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION,
                                f"this scheduler runs configuration {self._digest}, not {request.config_digest}")
        already_open, opening = self._scheduler.start()
        await self._scheduler.read_back(lambda state: state.opening >= opening)
        return pb.StartRunResponse(already_open=already_open, opening=opening)

    async def StopRun(self, request: pb.StopRunRequest, context: grpc.aio.ServicerContext) -> pb.StopRunResponse:
        if not self._scheduler.leading:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this scheduler does not lead yet")
        opening = self._scheduler.stop(request.reason)
        await self._scheduler.read_back(lambda state: state.stopping[0] >= opening)
        return pb.StopRunResponse()

    async def InspectRun(self, request: pb.InspectRunRequest,
                         context: grpc.aio.ServicerContext) -> pb.InspectRunResponse:
        state = self._scheduler.state
        cells = [pb.CellRole(cell=c.cell, role=c.role, epoch=c.epoch, stage=c.stage) for c in state.cells]
        return pb.InspectRunResponse(
            phase=state.phase(), burst=state.burst, steps_finished=state.steps_finished,
            weights_version=state.published_version, waterlevel=state.water.level,
            num_dispatched=len(state.water.dispatched), num_terminated=len(state.water.terminated),
            cells=cells, close_reason=state.closed)

    async def GetStatus(self, request: status_pb2.StatusRequest,
                        context: grpc.aio.ServicerContext) -> status_pb2.Status:
        state = self._scheduler.state
        gauges = {"waterlevel": state.water.level, "waterlevel_kv_tokens": state.water.kv_tokens(),
                  "steps": state.steps_finished, "burst": state.burst, "join_s": state.join_s}
        gauges |= {f"held_back_by_{gate}": num for gate, num in self._scheduler.gates.total.items()}
        return status_pb2.Status(
            process=self._process.name, service="scheduler", run=self._process.run, pid=os.getpid(),
            uptime_s=self._process.uptime_s, weights_version=state.published_version, gauges=gauges,
            detail=("leads, " if self._scheduler.leading else "stands by, ") + state.phase())
