"""A server of ours is a child that dies with us, however we die."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from gyre.rollout.engines.server_process import ServerCommand, ServerProcess, reachable_host

# a server with a child of its own, which says who both are
SERVER = "import os, subprocess, sys, time; c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); " \
         "print('pids', os.getpid(), c.pid, flush=True); time.sleep(600)"  # fmt: skip

OWNER = """
import asyncio, sys
from pathlib import Path
from gyre.rollout.engines.server_process import ServerCommand, ServerProcess
async def main():
    await ServerProcess.start(ServerCommand((sys.executable, "-c", sys.argv[1]), log=Path(sys.argv[2])))
    print("started", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def pids_of(log: Path) -> list[int]:
    async with asyncio.timeout(60):
        while not log.exists() or "pids" not in log.read_text():
            await asyncio.sleep(0.05)
    line = next(line for line in log.read_text().splitlines() if line.startswith("pids"))
    return [int(pid) for pid in line.split()[1:]]


async def gone(pids: list[int]) -> None:
    async with asyncio.timeout(60):
        while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            await asyncio.sleep(0.05)


def command(log: Path, code: str = SERVER) -> ServerCommand:
    return ServerCommand((sys.executable, "-c", code), {"OWN": "1"}, log)


async def test_stopping_ends_the_server_and_what_it_started(tmp_path: Path) -> None:
    server = await ServerProcess.start(command(tmp_path / "log"))
    pids = await pids_of(tmp_path / "log")
    await server.stop()
    await gone(pids)
    await server.stop()


async def test_killing_its_owner_ends_the_server_and_what_it_started(tmp_path: Path) -> None:
    log = tmp_path / "log"
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", OWNER, SERVER, str(log), stdout=subprocess.PIPE)
    pids = await pids_of(log)
    owner.kill()
    await owner.wait()
    await gone(pids)


async def test_the_end_of_a_server_is_noticed_with_its_last_words(tmp_path: Path) -> None:
    code = "import os; print('no such model', os.environ['OWN'], os.environ.get('PYTHONPATH')); raise SystemExit(3)"
    server = await ServerProcess.start(command(tmp_path / "log", code))
    async with asyncio.timeout(60):
        await server.ended()
    assert "no such model 1 None" in server.last_words()
    assert "server ended with 3" in server.last_words() and str(tmp_path / "log") in server.last_words()


@pytest.mark.parametrize(("listen", "host"), [("10.1.2.3:4000", "10.1.2.3"), ("node-3:4000", "node-3"), ("[::1]:80", "::1")])
def test_a_server_lives_where_its_cell_listens(listen: str, host: str) -> None:
    assert reachable_host(listen) == host


def test_a_cell_that_listens_everywhere_has_an_address_of_its_own() -> None:
    assert reachable_host(f"{'.'.join('0000')}:80") not in ("", ".".join("0000"))
