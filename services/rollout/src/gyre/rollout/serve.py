"""`gyre-rollout serve`: the gateway, the router and the executor around one core.

    harness --HTTP--> gateway -> calls -> router --gRPC--> engines
                                  |  record                   ^
                                  v                           | keeper: asleep, or serving the weights
    facts --NATS--> core --effects--> executor: workspaces and harness processes
"""

import asyncio
import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import uvicorn
from gyre.contracts.events import CellRoleAssigned, CellTrainReleased, GroupDispatched, WeightsPublished
from gyre.contracts.subjects import CTL, TRAIN
from gyre.policy.tokenizer import ChatTokenizer
from gyre.proto.rollout.v1 import service_pb2_grpc as pb_grpc
from gyre.rollout.config import call_settings, executor_settings, router_limits, sandbox_settings, split_listen
from gyre.rollout.core import RolloutCore, State
from gyre.rollout.engine_client import GrpcEngine
from gyre.rollout.executor import Executor
from gyre.rollout.gateway.archive import ArchivedCall, CallArchive
from gyre.rollout.gateway.calls import Calls
from gyre.rollout.gateway.dialects.base import Limits
from gyre.rollout.gateway.render import Renderer
from gyre.rollout.gateway.server import GatewayApp
from gyre.rollout.gateway.session import Sessions
from gyre.rollout.harness.process import ProcessHarness
from gyre.rollout.keeper import Keeper
from gyre.rollout.local import CallFinished, ContextsDue, LimitFired, OpenGateway, ServiceWasAway, SettleCell
from gyre.rollout.router import Router
from gyre.rollout.rpc import SERVICE, RolloutRpc, View
from gyre.runtime import rpc, telemetry
from gyre.runtime.process import Process
from gyre.runtime.service import Service, Subscription

SUBSCRIPTIONS = (Subscription(CTL, (GroupDispatched, CellRoleAssigned)),
                 Subscription(TRAIN, (WeightsPublished, CellTrainReleased)))
STOP_TIMEOUT_S = 2
CONTEXTS_EVERY_S = 2.0


class Rollout:
    """Everything of one `serve` process, connected."""

    def __init__(self, process: Process, tokenizer: ChatTokenizer) -> None:
        config, deployment = process.config, process.deployment
        state_dir = Path(deployment.state_dir)
        state_dir.mkdir(parents=True, exist_ok=True)
        self.process = process
        self.service: Service[State] | None = None
        self.resumed = asyncio.Event()
        engines = {cell: GrpcEngine(rpc.channel(endpoint.address)) for cell, endpoint in enumerate(deployment.engines)}
        # Tickets of an earlier life may still be held somewhere: this life's are named otherwise.
        self.router = Router(engines, router_limits(config), process.clock, prefix=f"{os.urandom(4).hex()}/")
        self.archive = CallArchive(state_dir / "rollout-calls.sqlite", deployment.durability)
        self.sessions = Sessions(_gateway_key(state_dir / "gateway.key"), self.archive, ended=self.router.forget)
        self.calls = Calls(call_settings(config), Renderer(tokenizer), self.router, self.archive, self._commit,
                           self._fire_call_limit, process.clock)
        self.keepers = {cell: Keeper(cell, engine, self.router, self._post, process.clock)
                        for cell, engine in engines.items()}
        harness = ProcessHarness(sandbox_settings(config, deployment, process.config_dir))
        self.executor = Executor(executor_settings(config, deployment, process.config_dir), harness, self.sessions,
                                 process.blobs, lambda: self._service.state.executions, self._post,
                                 lambda work: self._service.spawn(work), process.clock)

    @property
    def _service(self) -> Service[State]:
        assert self.service is not None, "the service is set before anything runs"
        return self.service

    async def _post(self, event: Any) -> None:
        await self._service.post(event, telemetry.inject())

    async def _commit(self, call: ArchivedCall) -> bool:
        """Make a record durable; whether it counts is the core's word."""
        record = call.record
        await self._service.submit(CallFinished(record, call.stall_s))
        execution = self._service.state.executions.get(record.execution)
        return execution is not None and execution.num_calls > record.index

    async def _fire_call_limit(self, execution: str) -> None:
        await self._post(LimitFired(execution, "calls"))

    async def report_contexts(self) -> None:
        """Have the contexts' lengths said from time to time; the scheduler forecasts memory from them."""
        while True:
            await self.process.clock.sleep(CONTEXTS_EVERY_S)
            await self._post(ContextsDue())

    async def _open_gateway(self, effect: OpenGateway) -> None:
        if effect.away_s:
            await self._post(ServiceWasAway(effect.away_s))
        if effect.may_sweep:
            await self.executor.sweep(effect.live)
        self.resumed.set()

    async def perform(self, effect: Any, trace: Mapping[str, str]) -> None:
        """Carry out one effect of the core; long work goes on beside the loop."""
        if isinstance(effect, SettleCell):
            self.keepers[effect.cell].settle(effect, trace)
        elif isinstance(effect, OpenGateway):
            await self._open_gateway(effect)
        else:
            await self.executor.perform(effect, trace)


async def serve(process: Process) -> None:
    """Run until the process is asked to stop. Raises ConfigError, SandboxError, BusError."""
    tokenizer = ChatTokenizer.load((process.config_dir / process.config.policy.checkpoint).resolve())
    rollout = Rollout(process, tokenizer)
    core = RolloutCore(process.config.harness.max_concurrent, len(rollout.keepers))
    service = Service(name=process.name, run=process.run, core=core,
                      store=process.store(), bus=await process.connect(), blobs=process.blobs, clock=process.clock,
                      subscriptions=SUBSCRIPTIONS, perform=rollout.perform)
    rollout.service = service
    view = View(process, lambda: service.state, rollout.router, rollout.keepers, lambda: service.outbox_depth,
                rollout.calls)
    server = rpc.Server(process.deployment.rollout.listen,
                        [(SERVICE, lambda s: pb_grpc.add_RolloutServiceServicer_to_server(RolloutRpc(view), s))])
    web = _web_server(GatewayApp(rollout.sessions, rollout.calls, Limits()), process.deployment.gateway.listen)
    await server.start()
    for keeper in rollout.keepers.values():
        service.spawn(keeper.run())
    service.spawn(rollout.executor.watch())
    service.spawn(rollout.report_contexts())
    service.spawn(_serve_gateway(rollout, web, server))
    service.spawn(_stop_when_asked(process, service, web))
    try:
        await service.run()
    finally:
        await server.stop()
        rollout.archive.close()


async def _serve_gateway(rollout: Rollout, web: uvicorn.Server, server: rpc.Server) -> None:
    await rollout.resumed.wait()
    await server.set_serving(True)
    await web.serve()


async def _stop_when_asked(process: Process, service: Service[State], web: uvicorn.Server) -> None:
    await process.stopping.wait()
    web.should_exit = True
    service.stop()


class _QuietServer(uvicorn.Server):
    """Leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _web_server(app: GatewayApp, listen: str) -> uvicorn.Server:
    host, port = split_listen(listen)
    return _QuietServer(uvicorn.Config(app, host=host, port=port, lifespan="off", loop="none", access_log=False,
                                       log_config=None, ws="none", server_header=False, date_header=False,
                                       timeout_keep_alive=300, timeout_graceful_shutdown=STOP_TIMEOUT_S))


def _gateway_key(path: Path) -> bytes:
    """The key that execution secrets are derived from; made once, so that secrets outlive the process."""
    with contextlib.suppress(FileNotFoundError):
        key = path.read_bytes()
        if len(key) == 32:
            return key
    aside = path.with_suffix(".aside")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(os.urandom(32))
        file.flush()
        os.fsync(descriptor)
    aside.replace(path)
    return path.read_bytes()
