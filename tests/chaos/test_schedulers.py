"""Two schedulers of an elastic run, the one that leads frozen past its lease or killed while cells change their roles:
what runs goes on, no cell is told two things under one epoch, and who wakes up late can say nothing."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import grpc
import pytest
from gyre.cli.launcher import process_specs
from gyre.cli.trace_view.spans import read_spans
from gyre.cli.trace_view.tree import transitions
from gyre.contracts import events as e
from gyre.proto.common.v1 import status_pb2
from gyre.proto.scheduler.v1 import service_pb2_grpc
from gyre.runtime import rpc
from gyre.runtime.config import Endpoint, load_deployment
from gyre.runtime.ports import free_ports
from gyre.runtime.settings import to_toml
from lap import Lap, clinic_config, left_running

pytestmark = pytest.mark.slow
ELASTIC = ("cells.schedule=elastic", "cells.count=3", "cells.executions_per_cell=6", "burst.phi=1", "steps=6",
           "burst.executions_per_group=8", "evaluation.num_tasks=0", "admission.token_budget=256",
           "loss.entropy_coefficient=0.01")  # an untrained policy earns no advantage


@dataclass
class Schedulers:
    """The scheduler that the launcher keeps alive and one beside it, at an address of its own."""

    lap: Lap
    beside: subprocess.Popen[bytes] | None = None
    led: list[int] = field(default_factory=list)  # who led, one after the other

    def start(self) -> None:
        run = self.lap.run
        deployment = load_deployment(run.deployment)
        [port] = free_ports(1, "127.0.0.1")
        address = f"127.0.0.1:{port}"
        other = run.path / "deployment-beside.toml"
        other.write_text(to_toml(replace(deployment, scheduler=Endpoint(address, address))))
        command = [part if part != str(run.deployment) else str(other) for part in process_specs(run, deployment)[0].command]
        assert command[0] == sys.executable and command != list(process_specs(run, deployment)[0].command)
        environment = os.environ | {"GYRE_LAUNCHER_PID": str(os.getpid())}
        with (run.logs / "scheduler-beside.out").open("ab") as output:
            self.beside = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        self.stubs = [service_pb2_grpc.SchedulerServiceStub(rpc.channel(at)) for at in (deployment.scheduler.address, address)]

    async def leader(self, other_than: int = 0) -> int:
        """The process that leads, once one does."""
        while True:
            for stub in self.stubs:
                try:
                    said = await stub.GetStatus(status_pb2.StatusRequest(), timeout=0.5)
                except grpc.aio.AioRpcError:
                    continue
                if said.detail.startswith("leads") and said.pid != other_than:
                    self.led.append(said.pid)
                    return int(said.pid)
            await asyncio.sleep(0.05)

    async def freeze(self) -> None:
        """Stop who leads until somebody else does, then let it go on: it still believes that it leads."""
        frozen = await self.leader()
        os.kill(frozen, signal.SIGSTOP)
        try:
            await self.leader(other_than=frozen)
        finally:
            os.kill(frozen, signal.SIGCONT)

    async def kill(self) -> None:
        """The launcher starts its own again; the other one is started here."""
        killed = await self.leader()
        if self.beside is not None and killed == self.beside.pid:
            self.end()
            self.start()
        else:
            os.kill(killed, signal.SIGKILL)
        await self.leader(other_than=killed)

    async def kill_both(self) -> None:
        self.lap.kill("scheduler")
        self.end()
        self.start()
        await self.leader()

    def end(self) -> None:
        if self.beside is not None:
            self.beside.kill()
            self.beside.wait()


def changing(lap: Lap, role: str) -> bool:
    """Whether a cell has been told to take this role, and has not yet."""
    ledger = lap.watcher.ledger
    newest = {a.fact.cell: a.fact for a in ledger.all(e.CellRoleAssigned).values()}
    taken = e.CellTrainJoined if role == "train" else e.CellRolloutReady
    confirmed = {(c.fact.cell, c.fact.epoch) for c in ledger.all(taken).values()}
    return any(a.role == role and a.epoch > 0 and (cell, a.epoch) not in confirmed for cell, a in newest.items())


async def test_whoever_leads_changes_nothing_that_runs(tmp_path):
    lap = Lap(tmp_path, clinic_config(tmp_path, *ELASTIC))
    schedulers = Schedulers(lap)
    rounds: list[tuple[str, Callable[[], Awaitable[None]]]] = [
        ("train", schedulers.freeze), ("rollout", schedulers.kill), ("train", schedulers.kill_both),
        ("rollout", schedulers.freeze)]

    unled: list[int] = []  # calls that were answered while nobody led

    async def disturb(_: Lap) -> None:
        schedulers.start()
        for role, disturbance in rounds:
            await lap.until(lambda role=role: changing(lap, role))
            before = len(lap.watcher.ledger.calls)
            await disturbance()
            unled.append(len(lap.watcher.ledger.calls) - before)

    try:
        assert await lap.to_the_end(disturb, timeout_s=400) == "completed"
    finally:
        schedulers.end()
    lap.assert_books_balance()
    ledger = lap.watcher.ledger
    assert len(ledger.steps) == 6 and not ledger.conflicts
    assert len(set(schedulers.led)) >= 4 and sum(unled) > 0, (schedulers.led, unled)
    assert {x.terminated.fact.ending for x in ledger.executions.values()} <= {"finished", "timed_out"}
    assigned = [a.fact for a in ledger.all(e.CellRoleAssigned).values()]
    assert len({(a.cell, a.epoch) for a in assigned}) == len({a.transition for a in assigned}) == len(assigned)
    found = {one.name: one for one in transitions(read_spans(lap.run.logs / "traces"))}
    lost = {(one.fact.cell, one.fact.epoch) for one in ledger.all(e.CellRolloutLost).values()}  # on a busy machine, at the end
    ends = {a.transition: found[a.transition].outcome for a in assigned if (a.cell, a.epoch) not in lost}
    assert set(ends.values()) <= {"completed", "superseded"}, ends
    assert left_running(lap.run) == {}
