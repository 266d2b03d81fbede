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
from gyre.rollout.engines.server_process import ServerPlace, reachable_host
from gyre.rollout.engines.weights import NoWeights, PulledWeights, WeightsLoader
from gyre.runtime import rpc
from gyre.runtime.config import RunConfig
from gyre.runtime.devices import DeviceLock
from gyre.runtime.process import Process
from gyre.transfer import Transfer, TransferConfig, backends_of

READ_TIMEOUT_S = 300.0  # one-sided read of all weights


async def serve_engine(process: Process) -> None:
    """Runs until the process is asked to stop. Raises ConfigError for a cell the deployment does not have."""
    cell = process.index
    if cell is None or not 0 <= cell < len(process.deployment.engines):
        raise ConfigError(f"cell = {cell}: the deployment has engines 0..{len(process.deployment.engines) - 1}")
    with Transfer(TransferConfig(process.name, backends=backends_of(process.deployment.transfer))) as transfer:
        engine, loader = build_engine(process.config, process.config_dir, transfer, _place(process, cell))
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


def _place(process: Process, cell: int) -> ServerPlace:
    deployment = process.deployment
    host = reachable_host(deployment.engines[cell].listen)
    log = Path(deployment.log_dir) / f"{process.name}.server.log"
    return ServerPlace(host, log, Path(deployment.cells_dir) / str(cell) / "server")


def build_engine(
    config: RunConfig, config_dir: Path, transfer: Transfer, place: ServerPlace
) -> tuple[Engine, WeightsLoader]:
    """The configured backend and where its weights come from. Only backends that compute import torch."""
    settings = config.engine
    if settings.backend == "scripted":
        policy = PolicyConfig.from_hf(json.loads((config_dir / config.policy.checkpoint / "config.json").read_text()))
        script = seeded_script(policy.vocab_size, settings.script_token_ms / 1000)
        bounds = ScriptedConfig(settings.kv_tokens, settings.max_running, settings.max_waiting)
        return ScriptedEngine(script, bounds), NoWeights()
    loader = PulledWeights(transfer, READ_TIMEOUT_S)
    if settings.backend == "vllm":
        return _vllm_engine(config, config_dir, place), loader
    return _torch_engine(config, config_dir), loader


def _vllm_engine(config: RunConfig, config_dir: Path, place: ServerPlace) -> Engine:
    from gyre.policy.checkpoint import load_config
    from gyre.rollout.engines.vllm_server import vllm_engine

    policy = load_config(config_dir / config.policy.checkpoint)
    longest = min(config.sampling.max_context, policy.max_position)
    return vllm_engine(policy, config.policy.dtype, longest, config.engine, place, config_dir)


def _torch_engine(config: RunConfig, config_dir: Path) -> Engine:
    import torch
    from gyre.policy.checkpoint import load_config
    from gyre.rollout.engines.torch import TorchEngine, TorchEngineConfig
    from gyre.rollout.torch_engine.scheduler import SchedulerConfig

    # two threads beside another busy process of the same cores are many times slower than one (barriers spin)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    policy = load_config(config_dir / config.policy.checkpoint)
    settings, longest = config.engine, min(config.sampling.max_context, policy.max_position)
    budget = max(settings.token_budget, settings.max_running)
    scheduler = SchedulerConfig(
        kv_tokens=settings.kv_tokens,
        max_position=longest,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        max_batch_tokens=budget,
        chunk_tokens=max(1, budget // 4),
    )
    kind = config.cells.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    pace_s = config.engine.min_interval_ms / 1000
    return TorchEngine(policy, TorchEngineConfig(scheduler, getattr(torch, config.policy.dtype), torch.device(kind), pace_s))


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
