"""`gyre-trainer worker --cell N`: wiring only. Cell 0's worker is the core, every other one a satellite."""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from gyre.proto.trainer.v1 import service_pb2_grpc as pb_grpc
from gyre.runtime import process as runtime
from gyre.runtime.devices import DeviceLock
from gyre.runtime.rpc import Server
from gyre.runtime.service import Service
from gyre.trainer.backends.torch import TorchBackend
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
    config = replace(config, policy=process.config_dir / config.policy)
    reference = process.config_dir / config.loss.kl_reference if config.loss.kl_reference else None
    optimizer = config.optimizer if config.is_core else None
    backend = TorchBackend.load(config.policy, config.dtype, config.loss, optimizer, config.device, reference,
                                config.memory_bytes)
    lock = DeviceLock(config.cells_dir, cell, "trainer")
    with open_transfer(process.name, config.cells_dir, deployment.transfers[cell], deployment.transfer) as transfer:
        service = await open_ledger(process, config, lambda trace: shell.attend(trace))
        parts = (transfer, process.blobs, lock, process.clock)
        coordinator = Coordinator(config, service, backend, backend.policy, *parts) if config.is_core else None
        shell = coordinator or Satellite(config, service, backend, CoreClient(deployment.trainers[0].address), *parts)
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
            lock.give_back()


async def _stop_when_told(process: runtime.Process, service: Service[TrainerState]) -> None:
    await process.stopping.wait()
    service.stop()


def main() -> None:
    """Entry point `gyre-trainer`."""
    parser = argparse.ArgumentParser(prog="gyre-trainer", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    runtime.add_arguments(commands.add_parser("worker", help="one cell's trainer worker"), "cell")
    runtime.run(worker, "trainer", "trainer", parser.parse_args())


if __name__ == "__main__":
    main()
