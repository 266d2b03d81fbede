"""Queries to `gyre-rollout serve`: what runs, and how it is."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc.aio
from gyre.proto.common.v1 import status_pb2
from gyre.proto.rollout.v1 import service_pb2 as pb
from gyre.proto.rollout.v1 import service_pb2_grpc as pb_grpc
from gyre.rollout.core import State
from gyre.rollout.gateway.calls import Calls
from gyre.rollout.keeper import Keeper
from gyre.rollout.router import Router
from gyre.runtime.process import Process

SERVICE = "gyre.proto.rollout.v1.RolloutService"


@dataclass(frozen=True, slots=True)
class View:
    """What the queries may look at."""

    process: Process
    state: Callable[[], State]
    router: Router
    keepers: Mapping[int, Keeper]
    outbox_depth: Callable[[], int]
    calls: Calls


class RolloutRpc(pb_grpc.RolloutServiceServicer):
    """Answers from memory; changes nothing."""

    def __init__(self, view: View) -> None:
        self._view = view

    async def ListExecutions(self, request: pb.ListExecutionsRequest,
                             context: grpc.aio.ServicerContext) -> pb.ListExecutionsResponse:
        """Executions that have not terminated, in order of dispatch."""
        now = self._view.process.clock.now()
        return pb.ListExecutionsResponse(executions=[
            pb.Execution(execution=e.id, group=e.group, state=e.phase, num_calls=e.num_calls,
                         age_s=max(0.0, now - e.starting_at) if e.starting_at else 0.0, pid=e.pid)
            for e in self._view.state().executions.values()])

    async def GetStatus(self, request: status_pb2.StatusRequest,
                        context: grpc.aio.ServicerContext) -> status_pb2.Status:
        """How the process is."""
        process, state, router = self._view.process, self._view.state(), self._view.router
        num_live = {cell: router.num_live(cell) for cell in self._view.keepers}
        admitting = [cell for cell in self._view.keepers if router.is_admitting(cell)]
        counts = router.counts
        gauges = {"waterlevel": float(len(state.executions)), "terminated": float(state.num_terminated),
                  "calls_live": float(sum(num_live.values())), "calls_replayed": float(router.num_replayed),
                  "calls_faulty": float(self._view.calls.num_faulty), "engines_admitting": float(len(admitting)),
                  "outbox": float(self._view.outbox_depth()), "calls_moved": float(counts.num_moved),
                  "prefixes_moved": float(counts.num_prefixes_moved), "tokens_moved": float(counts.num_tokens_moved),
                  "bytes_moved": float(counts.num_bytes_moved),
                  "tokens_recomputed": float(counts.num_tokens_recomputed),
                  **{f"calls_replayed_{reason}": float(num) for reason, num in sorted(counts.replayed.items())}}
        detail = f"{len(state.executions)} executions, cells that admit: {admitting or 'none'}"
        return status_pb2.Status(
            process=process.name, service="rollout", run=process.run, pid=os.getpid(), uptime_s=process.uptime_s,
            weights_version=state.weights.version if state.weights else None, gauges=gauges, detail=detail)
