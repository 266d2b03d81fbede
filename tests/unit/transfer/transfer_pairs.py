"""An owner and a reader over every backend, for tests whose promises are the same over all of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gyre.transfer import Address, Transfer, TransferConfig
from gyre.transfer.nixl_agent import installed
from nixl_fakes import FakeFabric

LOOPBACK = Address("127.0.0.1", 0)
REAL_NIXL = pytest.param("nixl", marks=pytest.mark.skipif(not installed(), reason="nixl-cu12 is not installed here"))
BACKENDS = ["shm", "tcp", "nixl-fake", REAL_NIXL]


@contextmanager
def owner_over(backend: str, fabric: FakeFabric, directory: Path) -> Iterator[Transfer]:
    ways = {
        "shm": TransferConfig("owner", directory=directory),
        "tcp": TransferConfig("owner", listen=LOOPBACK),
    }
    config = ways.get(backend, TransferConfig("owner", backends=("nixl",)))
    with Transfer(config, fabric.backend("owner") if backend == "nixl-fake" else None) as transfer:
        yield transfer


@contextmanager
def reader_over(backend: str, fabric: FakeFabric) -> Iterator[Transfer]:
    config = TransferConfig("reader", backends=(backend.removesuffix("-fake"),))
    with Transfer(config, fabric.backend("reader") if backend == "nixl-fake" else None) as transfer:
        yield transfer
