"""Helpers beside the tests are importable; an owner and a reader over every backend."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gyre.transfer import Transfer

sys.path.insert(0, str(Path(__file__).parent))

from nixl_fakes import FakeFabric  # noqa: E402
from transfer_pairs import BACKENDS, owner_over, reader_over  # noqa: E402


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def fabric() -> FakeFabric:
    return FakeFabric()


@pytest.fixture
def owner(backend: str, fabric: FakeFabric, tmp_path: Path) -> Iterator[Transfer]:
    with owner_over(backend, fabric, tmp_path) as transfer:
        yield transfer


@pytest.fixture
def reader(backend: str, fabric: FakeFabric) -> Iterator[Transfer]:
    with reader_over(backend, fabric) as transfer:
        yield transfer
