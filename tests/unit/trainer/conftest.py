"""Helpers beside the tests are importable; torch keeps to one thread; the ranks of one cell."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)

from cell_of_ranks import Ranks  # noqa: E402


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(2, tmp_path_factory.mktemp("ranks"))
    try:
        yield ranks
        ranks.close()
    finally:
        ranks.kill()
