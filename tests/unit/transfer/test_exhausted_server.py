"""A process that runs out of file descriptors serves its memory again once there are some."""

import asyncio
import os
import resource
import socket

import numpy as np
from gyre.transfer import Address, Transfer, TransferConfig

ROWS = np.arange(4, dtype=np.float32).reshape(2, 2)


async def nothing() -> None:
    await asyncio.sleep(0)


async def test_a_connection_that_cannot_be_accepted_does_not_end_the_server() -> None:
    config = TransferConfig("owner", None, Address("127.0.0.1", 0), backends=("tcp",))
    with Transfer(config) as owner, Transfer(TransferConfig("reader", backends=("tcp",))) as reader:
        owner.register("weights", {"w": ROWS})
        descriptor = owner.describe("weights")
        assert descriptor.address is not None and owner._server is not None
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket() as client:
            lowest = os.dup(0)
            os.close(lowest)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
            try:
                client.connect((descriptor.address.host, descriptor.address.port))
                for _ in range(5):  # turns of the server's loop
                    asyncio.run_coroutine_threadsafe(nothing(), owner._server._loop).result(5)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (await reader.read(descriptor, timeout_s=5.0))["w"].tolist() == ROWS.tolist()
