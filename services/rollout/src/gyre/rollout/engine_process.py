"""`gyre-rollout engine --cell N`: one engine behind gRPC. Starts asleep; the rollout service wakes it."""

from __future__ import annotations

import asyncio
import logging
import os
from functools import partial
from pathlib import Path

from gyre.contracts.errors import ConfigError, EngineError
from gyre.proto.common.v1 import status_pb2
from gyre.proto.rollout.v1 import engine_pb2_grpc as pb_grpc
from gyre.rollout.engine_backends import Site, build
from gyre.rollout.engine_cell import EngineCell
from gyre.rollout.engine_rpc import SERVICE, EngineRpc
from gyre.rollout.engines.choose import Choice
from gyre.rollout.engines.server_process import ServerPlace, reachable_host
from gyre.runtime import rpc
from gyre.runtime.devices import DeviceLock
from gyre.runtime.process import Process
from gyre.transfer import Address, Transfer, TransferConfig, backends_of


async def serve_engine(process: Process) -> None:
    """Runs until the process is asked to stop. Raises ConfigError for a cell the deployment does not have."""
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it says every call to an engine's server
    cell = process.index
    if cell is None or not 0 <= cell < len(process.deployment.engines):
        raise ConfigError(f"cell = {cell}: the deployment has engines 0..{len(process.deployment.engines) - 1}")
    with Transfer(_transfer_config(process, cell)) as transfer:
        built = build(_site(process, transfer, cell))
        engine = built.engine
        held = EngineCell(engine, DeviceLock(Path(process.deployment.cells_dir), cell, "engine"), built.loader)
        service = EngineRpc(held, process.config.engine.flush_ms / 1000, lambda: status_of(process, held, built.choice))
        listen = process.deployment.engines[cell].listen
        server = rpc.Server(listen, [(SERVICE, partial(pb_grpc.add_EngineServiceServicer_to_server, service))])
        await server.start()
        await server.set_serving(True)
        await _first_of(process.stopping, engine.failed)
        await server.set_serving(False)
        await held.close()
        await server.stop()
    if engine.failed.is_set():
        raise EngineError("the engine failed; its log has the reason")


def _site(process: Process, transfer: Transfer, cell: int) -> Site:
    deployment = process.deployment
    host = reachable_host(deployment.engines[cell].listen)
    log = Path(deployment.log_dir) / f"{process.name}.server.log"
    place = ServerPlace(host, log, Path(deployment.cells_dir) / str(cell) / "server")
    return Site(process.config, process.config_dir, transfer, place, Path(deployment.cells_dir))


def _transfer_config(process: Process, cell: int) -> TransferConfig:
    """An engine serves its KV to the others, by files beside the cells' locks or over any port of its host."""
    deployment = process.deployment
    endpoint = deployment.engines[cell]
    listen, advertised = (address.rpartition(":")[0].strip("[]") for address in (endpoint.listen, endpoint.address))
    directory = Path(deployment.regions_dir)
    return TransferConfig(process.name, directory, Address(listen, 0), advertised, backends_of(deployment.transfer))


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def status_of(process: Process, held: EngineCell, choice: Choice) -> status_pb2.Status:
    """What `gyre status` shows of it. The gauge `held` counts tickets whose KV waits for somebody to come for it."""
    report = held.load_report()
    state = "admitting" if report.admitting else ("asleep" if report.asleep else "not admitting")
    gauges = {
        "running": report.num_running, "waiting": report.num_waiting, "kv_tokens_free": report.kv_tokens_free,
        "tokens_sampled": report.num_tokens_sampled, "tokens_prefilled": report.num_tokens_prefilled,
        "tokens_reused": report.num_tokens_reused, "preempted": report.num_preempted,
        "held": report.num_held,
    }  # fmt: skip
    return status_pb2.Status(
        process=process.name, service="rollout", run=process.run, pid=os.getpid(), uptime_s=process.uptime_s,
        cell=process.index, role="rollout" if held.awake else "", epoch=held.epoch, weights_version=report.version,
        gauges=gauges, detail=f"{state}; engine {choice.backend} ({choice.why})",
    )  # fmt: skip
