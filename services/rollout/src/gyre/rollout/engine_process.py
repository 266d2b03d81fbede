"""`gyre-rollout engine --cell N`: one engine behind gRPC. Starts asleep; the rollout service wakes it."""

from __future__ import annotations

import asyncio
import json
import os
from functools import partial
from pathlib import Path

from gyre.contracts.errors import ConfigError, EngineError
from gyre.policy.config import PolicyConfig
from gyre.proto.common.v1 import status_pb2
from gyre.proto.rollout.v1 import engine_pb2_grpc as pb_grpc
from gyre.rollout.engine_cell import EngineCell
from gyre.rollout.engine_rpc import SERVICE, EngineRpc
from gyre.rollout.engines.base import Engine
from gyre.rollout.engines.scripted import ScriptedConfig, ScriptedEngine, seeded_script
from gyre.rollout.engines.weights import NoWeights, PulledWeights, WeightsLoader
from gyre.runtime import rpc
from gyre.runtime.config import RunConfig
from gyre.runtime.devices import DeviceLock
from gyre.runtime.process import Process
from gyre.transfer import Address, Transfer, TransferConfig, backends_of

READ_TIMEOUT_S = 300.0  # one-sided read of all weights


async def serve_engine(process: Process) -> None:
    """Runs until the process is asked to stop. Raises ConfigError for a cell the deployment does not have."""
    cell = process.index
    if cell is None or not 0 <= cell < len(process.deployment.engines):
        raise ConfigError(f"cell = {cell}: the deployment has engines 0..{len(process.deployment.engines) - 1}")
    with Transfer(_transfer_config(process, cell)) as transfer:
        engine, loader = build_engine(process.config, process.config_dir, transfer)
        held = EngineCell(engine, DeviceLock(Path(process.deployment.cells_dir), cell, "engine"), loader)
        service = EngineRpc(held, process.config.engine.flush_ms / 1000, lambda: _status(process, held))
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


def build_engine(config: RunConfig, config_dir: Path, transfer: Transfer) -> tuple[Engine, WeightsLoader]:
    """The configured backend and where its weights come from. Only the torch backend imports torch."""
    settings = config.engine
    if settings.backend == "scripted":
        policy = PolicyConfig.from_hf(json.loads((config_dir / config.policy.checkpoint / "config.json").read_text()))
        script = seeded_script(policy.vocab_size, settings.script_token_ms / 1000)
        bounds = ScriptedConfig(settings.kv_tokens, settings.max_running, settings.max_waiting)
        return ScriptedEngine(script, bounds), NoWeights()
    from gyre.rollout.torch_engine.build import torch_engine

    return torch_engine(config, config_dir, transfer), PulledWeights(transfer, READ_TIMEOUT_S)


def _transfer_config(process: Process, cell: int) -> TransferConfig:
    """An engine serves its KV to the others, by files beside the cells' locks or over any port of its host."""
    deployment = process.deployment
    endpoint = deployment.engines[cell]
    listen, advertised = (address.rpartition(":")[0].strip("[]") for address in (endpoint.listen, endpoint.address))
    directory = Path(deployment.cells_dir) / "transfer"
    return TransferConfig(process.name, directory, Address(listen, 0), advertised, backends_of(deployment.transfer))


async def _first_of(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def _status(process: Process, held: EngineCell) -> status_pb2.Status:
    report = held.load_report()
    gauges = {
        "running": report.num_running, "waiting": report.num_waiting, "kv_tokens_free": report.kv_tokens_free,
        "tokens_sampled": report.num_tokens_sampled, "tokens_prefilled": report.num_tokens_prefilled,
        "tokens_reused": report.num_tokens_reused, "preempted": report.num_preempted,
    }  # fmt: skip
    return status_pb2.Status(
        process=process.name, service="rollout", run=process.run, pid=os.getpid(), uptime_s=process.uptime_s,
        cell=process.index, role="rollout" if held.awake else "", epoch=held.epoch, weights_version=report.version,
        gauges=gauges, detail="admitting" if report.admitting else ("asleep" if report.asleep else "not admitting"),
    )  # fmt: skip
