"""The pieces of `executions` as fixtures."""

from collections.abc import Callable

import executions
import pytest
from gyre.trajectory.config import TrajectoryConfig


@pytest.fixture(scope="session")
def script() -> type[executions.Script]:
    return executions.Script


@pytest.fixture(scope="session")
def story() -> type[executions.Story]:
    return executions.Story


@pytest.fixture(scope="session")
def settings() -> Callable[..., TrajectoryConfig]:
    return executions.settings
