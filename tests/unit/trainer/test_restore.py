"""What a restarted worker may go on from, when checkpoints are damaged or gone."""

from pathlib import Path

import pytest
import torch
from gyre.contracts.errors import CheckpointError
from gyre.policy.checkpoint import save_checkpoint, state_digest
from gyre.runtime.config import CheckpointConfig, OptimizerConfig
from gyre.trainer.backends.torch import TorchBackend
from gyre.trainer.checkpoint import newest_checkpoint, restore_rng, rng_state, write_checkpoint
from gyre.trainer.config import TrainerConfig
from gyre.trainer.core import TrainerState
from gyre.trainer.loss import LossConfig
from gyre.trainer.restore import PublishedVersionLost, restore_weights
from gyre.trainer.step import MembershipRules
from trees import random_micro_step, tiny_decoder


@pytest.fixture
def config(tmp_path: Path) -> TrainerConfig:
    decoder = tiny_decoder()
    save_checkpoint(tmp_path / "policy", decoder.config, decoder.state_dict())
    return TrainerConfig(
        0, 1, "r", "cpu", tmp_path / "policy", tmp_path / "checkpoints", tmp_path / "cells", "", 9, MembershipRules(2, 9),
        LossConfig(), OptimizerConfig(), CheckpointConfig(),
    )  # fmt: skip


def backend() -> TorchBackend:
    return TorchBackend(tiny_decoder(), LossConfig(), OptimizerConfig(learning_rate=0.01))


def write(config: TrainerConfig, trainer: TorchBackend, version: int, run: str = "r") -> Path:
    policy, weights, optimizer = trainer.decoder.config, trainer.weights(), trainer.optimizer_state()
    return write_checkpoint(config.checkpoints, version, policy, weights, optimizer, {"run": run}, config.policy)


def step(trainer: TorchBackend, seed: int = 0) -> None:
    trainer.accumulate(random_micro_step(seed))
    trainer.update(0.25, 0.01, 1.0)


def state(published: int, weights: dict[str, torch.Tensor] | None = None) -> TrainerState:
    return TrainerState(published=published, checksum=state_digest(weights) if weights else "")


def damage(directory: Path) -> None:
    path = directory / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


async def test_an_unpublished_damaged_version_is_trained_again_from_the_one_before(config: TrainerConfig) -> None:
    trainer = backend()
    step(trainer)
    write(config, trainer, 1)
    published = {n: t.clone() for n, t in trainer.weights().items()}
    step(trainer)
    damage(write(config, trainer, 2))
    resumed = backend()
    assert await restore_weights(config, state(1, published), resumed) == 1
    assert all(torch.equal(resumed.weights()[n], t) for n, t in published.items())
    step(resumed, 7)
    directory = write(config, resumed, 2)
    found = newest_checkpoint(config.checkpoints)
    assert found is not None and found.directory == directory, "the damaged one was replaced"
    assert all(torch.equal(found.weights[n], t) for n, t in resumed.weights().items())


async def test_a_published_damaged_version_stops_the_worker(config: TrainerConfig) -> None:
    trainer = backend()
    write(config, trainer, 1)
    step(trainer)
    damage(write(config, trainer, 2))
    untouched = backend()
    before = {n: t.clone() for n, t in untouched.weights().items()}
    with pytest.raises(PublishedVersionLost, match=r"version 2 was published, but the newest whole checkpoint is version 1"):
        await restore_weights(config, state(2), untouched)
    assert all(torch.equal(untouched.weights()[n], t) for n, t in before.items())


async def test_other_weights_under_a_published_version_stop_the_worker(config: TrainerConfig) -> None:
    trainer = backend()
    published = {n: t.clone() for n, t in trainer.weights().items()}
    step(trainer)
    write(config, trainer, 3)
    with pytest.raises(PublishedVersionLost, match="weights of version 3 are not those that were published"):
        await restore_weights(config, state(3, published), backend())


async def test_another_initial_policy_under_published_version_0_stops_the_worker(config: TrainerConfig) -> None:
    other = tiny_decoder(5).state_dict()
    with pytest.raises(PublishedVersionLost, match="version 0"):
        await restore_weights(config, state(0, other), backend())
    assert await restore_weights(config, state(0, backend().weights()), backend()) == 0


async def test_a_version_that_is_durable_and_was_not_published_yet_is_gone_on_from(config: TrainerConfig) -> None:
    trainer = backend()
    step(trainer)
    write(config, trainer, 2)
    assert await restore_weights(config, state(1), backend()) == 2


async def test_another_runs_checkpoint_is_refused(config: TrainerConfig) -> None:
    write(config, backend(), 1, run="other")
    with pytest.raises(CheckpointError, match="belongs to run 'other', this is 'r'"):
        await restore_weights(config, state(-1), backend())


def test_random_numbers_go_on_where_they_were() -> None:
    saved = rng_state()
    first = torch.rand(3)
    restore_rng(saved)
    assert torch.equal(torch.rand(3), first)
