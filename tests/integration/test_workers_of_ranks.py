"""Workers of two ranks as real processes: they train the reference, and end together."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from gyre.runtime.ports import free_ports

sys.path.insert(0, str(Path(__file__).parent))
from gyre.contracts.events import CellTrainJoined, StepFinished  # noqa: E402
from gyre.runtime.clock import SystemClock  # noqa: E402
from test_mid_step_join import (  # noqa: E402
    DEADLINE_S,
    GROUPS_PER_STEP,
    STEPS,
    Cluster,
    burst,
    largest_error,
    new_cluster,
    published,
    reference,
    to_train,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(tmp_path: Path, nats_server: object) -> Iterator[Cluster]:
    made = new_cluster(tmp_path / "run", nats_server)
    yield made
    followers = [f for cell in made.processes for f in followers_of(made, cell)]
    made.stop()
    _, alive = psutil.wait_procs(followers, timeout=30)
    assert not alive, "followers outlived their leader"


def followers_of(cluster: Cluster, cell: int) -> list[psutil.Process]:
    return psutil.Process(cluster.processes[cell].pid).children()


def write(cluster: Cluster, training: str) -> None:
    cluster.write(40)
    with (cluster.home / "run.toml").open("a", encoding="utf-8") as file:
        file.write(f"[training]\n{training}\n")


async def complete(cluster: Cluster, *steps: int) -> None:
    for step in steps:
        for index in range(GROUPS_PER_STEP):
            await cluster.complete_group(step, index)


async def test_a_core_and_a_satellite_of_two_ranks_each_train_the_reference(cluster: Cluster) -> None:
    write(cluster, 'backend = "fsdp"\nranks = 2')
    await cluster.connect()
    cluster.start(0)
    cluster.start(1)
    await cluster.say(burst(0, 0, STEPS), *to_train(0, 1), *to_train(1, 2))
    await cluster.until(CellTrainJoined, 2)
    await complete(cluster, 0, 1)
    assert largest_error(await published(cluster), reference()) < 1e-12
    assert any("1" in f.micro_steps_by_cell for f in await cluster.said(StepFinished))


async def test_a_worker_ends_with_any_of_its_ranks_and_trains_the_reference_when_it_is_started_again(cluster: Cluster) -> None:
    write(cluster, "ranks = 2")
    await cluster.connect()
    cluster.start(0)
    await cluster.say(burst(0, 0, STEPS), *to_train(0, 1))
    await cluster.until(CellTrainJoined)
    await cluster.complete_group(0, 0)
    await cluster.until_gauge("micro_steps_cell_0", 1)
    (follower,) = followers_of(cluster, 0)
    follower.kill()
    await cluster.complete_group(0, 1)
    process = cluster.processes.pop(0)
    async with asyncio.timeout(DEADLINE_S):
        while process.poll() is None:
            await SystemClock().sleep(0.05)
    assert process.returncode == 1
    cluster.start(0)
    await complete(cluster, 1)
    assert largest_error(await published(cluster), reference()) < 1e-12


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="make test-deepspeed")
@pytest.mark.parametrize("stage", [1, 3])
async def test_a_core_and_a_satellite_on_deepspeed_train_the_reference(cluster: Cluster, stage: int) -> None:
    write(cluster, f'backend = "deepspeed"\nranks = 2\nzero_stage = {stage}')
    text = (cluster.home / "run.toml").read_text(encoding="utf-8").replace('"float64"', '"float32"')
    (cluster.home / "run.toml").write_text(text, encoding="utf-8")
    await cluster.connect()
    cluster.start(0)
    cluster.start(1)
    await cluster.say(burst(0, 0, STEPS), *to_train(0, 1), *to_train(1, 2))
    await cluster.until(CellTrainJoined, 2)
    await complete(cluster, 0, 1)
    assert largest_error(await published(cluster), reference()) < 1e-4
    assert any("1" in f.micro_steps_by_cell for f in await cluster.said(StepFinished))


def worker(cluster: Cluster) -> list[str]:
    files = ["--config", str(cluster.home / "run.toml"), "--deployment", str(cluster.home / "deployment.toml")]
    return [sys.executable, "-m", "gyre.trainer.main", "worker", "--cell", "0", *files]


def placed(cluster: Cluster, rank: int, port: int) -> subprocess.Popen[bytes]:
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    return subprocess.Popen(worker(cluster), env=os.environ | place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})


async def test_ranks_that_a_launcher_has_placed_find_their_leader_and_end_with_it(cluster: Cluster) -> None:
    """As torchrun does it: the same command for every rank, places in the environment."""
    write(cluster, 'backend = "fsdp"\nranks = 2')
    [port] = free_ports(1, "127.0.0.1")
    leader, follower = (placed(cluster, rank, port) for rank in (0, 1))
    try:
        await cluster.connect()
        await cluster.say(burst(0, 0, STEPS), *to_train(0, 1))
        await complete(cluster, 0, 1)
        assert largest_error(await published(cluster), reference()) < 1e-12
        leader.terminate()
        assert (await asyncio.to_thread(leader.wait, DEADLINE_S), await asyncio.to_thread(follower.wait, DEADLINE_S)) == (0, 0)
    finally:
        leader.kill()
        follower.kill()


async def test_a_worker_with_another_number_of_ranks_than_configured_is_refused(cluster: Cluster) -> None:
    write(cluster, "ranks = 3")
    command = worker(cluster)
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "2"}
    done = await asyncio.to_thread(subprocess.run, command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2
    assert "training.ranks = 3: this worker was started with WORLD_SIZE=2" in done.stderr
