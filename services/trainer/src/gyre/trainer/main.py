"""`gyre-trainer worker --cell N`: wiring only. Cell 0's worker is the core, every other one a satellite.

`gyre-trainer rank --cell N` is one more rank of a worker; a worker that is alone on its machine starts them itself.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from dataclasses import replace

import torch
from gyre.proto.trainer.v1 import service_pb2_grpc as pb_grpc
from gyre.runtime import process as runtime
from gyre.runtime.devices import DeviceLock
from gyre.runtime.rpc import Server
from gyre.runtime.service import Service
from gyre.trainer.backends.launch import Place, follow_leader, open_backend
from gyre.trainer.config import trainer_config
from gyre.trainer.coordinator import Coordinator
from gyre.trainer.core import TrainerState
from gyre.trainer.ledger import open_ledger
from gyre.trainer.rpc import SERVICE, CoreClient, TrainerService
from gyre.trainer.satellite import Satellite
from gyre.trainer.status import StatusSource
from gyre.trainer.weights import open_transfer


async def worker(process: runtime.Process) -> None:
    """One cell's trainer until it is told to stop."""
    assert process.index is not None
    torch.set_num_threads(1)  # a second thread beside the cell's engine costs more than it brings
    cell, deployment = process.index, process.deployment
    config = trainer_config(process.config, deployment, cell)
    reference = process.config_dir / config.loss.kl_reference if config.loss.kl_reference else None
    config = replace(config, policy=process.config_dir / config.policy, reference=reference)
    place = Place.of(os.environ, config.training.ranks)
    if place is not None and place.rank > 0:
        await follow_leader(config, place, process.stopping)
        return
    opened = await asyncio.to_thread(open_backend, config, place)
    lock = DeviceLock(config.cells_dir, cell, "trainer")
    with open_transfer(process.name, deployment.regions_dir, deployment.transfers[cell], deployment.transfer) as transfer:
        service = await open_ledger(process, config, lambda trace: shell.attend(trace))
        parts = (transfer, process.blobs, lock, process.clock)
        coordinator = Coordinator(config, service, opened.backend, opened.policy, *parts) if config.is_core else None
        shell = coordinator or Satellite(config, service, opened.backend, CoreClient(deployment.trainers[0].address), *parts)
        endpoint = TrainerService(StatusSource(process, service, lock, shell), coordinator)
        listen = deployment.trainers[cell].listen
        server = Server(listen, [(SERVICE, lambda s: pb_grpc.add_TrainerServiceServicer_to_server(endpoint, s))])
        await server.start()
        await server.set_serving(True)
        service.spawn(shell.run())
        service.spawn(_stop_when_told(process, service))
        try:
            await service.run()
        finally:
            await server.stop()
            opened.close()
            lock.give_back()


async def _stop_when_told(process: runtime.Process, service: Service[TrainerState]) -> None:
    await process.stopping.wait()
    service.stop()


def main() -> None:
    """Entry point `gyre-trainer`."""
    parser = argparse.ArgumentParser(prog="gyre-trainer", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    runtime.add_arguments(commands.add_parser("worker", help="one cell's trainer worker"), "cell")
    runtime.add_arguments(commands.add_parser("rank", help="one more rank of a cell's worker"), "cell")
    rank = os.environ.get("RANK", "0")
    runtime.run(worker, "trainer", "trainer" if rank == "0" else f"trainer-rank-{rank}", parser.parse_args())


if __name__ == "__main__":
    main()
