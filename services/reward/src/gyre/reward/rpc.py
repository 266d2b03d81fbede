"""RewardService: score a preserved workspace again without saying anything, and say how this evaluator is doing."""

import os

import grpc
import grpc.aio
from gyre.contracts.events import BlobRef
from gyre.proto.common.v1 import status_pb2
from gyre.proto.reward.v1 import service_pb2, service_pb2_grpc
from gyre.reward.core import Failed, Graded
from gyre.reward.evaluation import Evaluation
from gyre.reward.evaluator import Evaluator
from gyre.runtime.process import Process

SERVICE = service_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name


class RewardRpc(service_pb2_grpc.RewardServiceServicer):
    """Answers for one evaluator process."""

    def __init__(self, process: Process, evaluation: Evaluation, evaluator: Evaluator) -> None:
        self._process = process
        self._evaluation = evaluation
        self._evaluator = evaluator

    def register(self, server: grpc.aio.Server) -> None:
        service_pb2_grpc.add_RewardServiceServicer_to_server(self, server)

    async def Regrade(self, request: service_pb2.RegradeRequest,
                      context: grpc.aio.ServicerContext) -> service_pb2.RegradeResponse:
        """One attempt. FAILED_PRECONDITION when no attempt could succeed, UNAVAILABLE when another one might."""
        snapshot = BlobRef(request.snapshot_path, request.snapshot_digest, request.snapshot_size)
        attempt = await self._evaluation.attempt(request.task, snapshot)
        if isinstance(attempt, Failed):
            code = grpc.StatusCode.FAILED_PRECONDITION if attempt.final else grpc.StatusCode.UNAVAILABLE
            await context.abort(code, attempt.reason)
        if not isinstance(attempt, Graded):
            return service_pb2.RegradeResponse(placeholder=True)
        score = attempt.score
        return service_pb2.RegradeResponse(reward=score.reward, num_passed=score.num_passed,
                                           num_checks=score.num_checks, metrics=score.metrics)

    async def GetStatus(self, request: status_pb2.StatusRequest,
                        context: grpc.aio.ServicerContext) -> status_pb2.Status:
        process, evaluator = self._process, self._evaluator
        gauges = {"scored": evaluator.num_scored, "unscorable": evaluator.num_unscorable, "busy_s": evaluator.busy_s}
        return status_pb2.Status(process=process.name, service="reward", run=process.run, pid=os.getpid(),
                                 uptime_s=process.uptime_s, gauges=gauges,
                                 detail=f"{evaluator.num_scored} scored, {evaluator.num_unscorable} unscorable")
