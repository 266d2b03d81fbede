"""A core that loses its SQLite file, at a kill -9 anywhere in a burst, trains the reference all the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from gyre.contracts.events import CellTrainJoined, StepFinished, StepSealed, WeightsPublished  # noqa: E402
from test_mid_step_join import (  # noqa: E402
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
    made.stop()


def lose_and_restart(cluster: Cluster) -> None:
    cluster.kill(0)
    found = list((cluster.home / "state_dir").glob("trainer-0.sqlite*"))
    assert found
    for file in found:
        file.unlink()
    cluster.start(0)


@pytest.mark.parametrize("when", ["joined", "sealed", "finished"])
async def test_every_step_is_trained_once_from_the_same_groups(cluster: Cluster, when: str) -> None:
    cluster.write(40)
    await cluster.connect()
    cluster.start(0)
    await cluster.say(burst(0, 0, STEPS), *to_train(0, 1))
    await cluster.until(CellTrainJoined)
    arrivals = [(step, index) for step in range(STEPS) for index in range(GROUPS_PER_STEP)]
    for num, (step, index) in enumerate(arrivals):
        await cluster.complete_group(step, index)
        if when == "joined" and num == 0:
            await cluster.until_gauge("micro_steps_cell_0", 1)
            lose_and_restart(cluster)
        elif when == "sealed" and num == 1:
            await cluster.until(StepSealed)
            lose_and_restart(cluster)
        elif when == "finished" and num == 2:
            await cluster.until(StepFinished)
            lose_and_restart(cluster)
    assert largest_error(await published(cluster), reference()) < 1e-12
    assert [(f.step, f.groups) for f in await cluster.said(StepSealed)] == [(0, ("s0g0", "s0g1")), (1, ("s1g0", "s1g1"))]


async def test_after_the_burst_nothing_is_trained_or_published_again(cluster: Cluster) -> None:
    cluster.write(40)
    await cluster.connect()
    cluster.start(0)
    await cluster.say(burst(0, 0, STEPS), *to_train(0, 1))
    for step in range(STEPS):
        for index in range(GROUPS_PER_STEP):
            await cluster.complete_group(step, index)
    before = await published(cluster)
    num_finished = len(await cluster.said(StepFinished))
    lose_and_restart(cluster)
    await cluster.say(burst(1, STEPS, 1))
    for index in range(GROUPS_PER_STEP):
        await cluster.complete_group(STEPS, index)
    facts = await cluster.until(WeightsPublished, 3)
    assert [f.version for f in facts] == [0, STEPS, STEPS + 1]
    assert len(await cluster.said(StepFinished)) == num_finished + 1
    assert largest_error(await published_state(facts[1].checkpoint), before) == 0.0


async def published_state(checkpoint: str) -> dict:
    from gyre.policy.checkpoint import load_state

    return load_state(Path(checkpoint))
