"""A checkpoint is there whole or not at all, and a damaged one is never resumed from."""

from pathlib import Path

import pytest
import torch
from gyre.contracts.errors import CheckpointError
from gyre.policy.checkpoint import save_checkpoint
from gyre.runtime.config import OptimizerConfig
from gyre.trainer.backends.torch import TorchBackend
from gyre.trainer.checkpoint import list_checkpoints, newest_checkpoint, prune, read_checkpoint, write_checkpoint
from gyre.trainer.loss import LossConfig
from trees import random_micro_step, tiny_decoder


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """The initial policy's directory, with a tokenizer beside the weights."""
    decoder = tiny_decoder()
    save_checkpoint(tmp_path / "policy", decoder.config, decoder.state_dict())
    (tmp_path / "policy" / "tokenizer.json").write_text("{}", encoding="utf-8")
    return tmp_path / "policy"


def backend() -> TorchBackend:
    return TorchBackend(tiny_decoder(), LossConfig(), OptimizerConfig(learning_rate=0.01))


def train(trainer: TorchBackend, *steps: int) -> None:
    for step in steps:
        trainer.accumulate(random_micro_step(step))
        trainer.update(0.25, 0.01, 1.0)


def write(root: Path, policy: Path, version: int, trainer: TorchBackend) -> Path:
    return write_checkpoint(
        root, version, trainer.decoder.config, trainer.weights(), trainer.optimizer_state(), {"burst": 1}, policy
    )


def test_training_resumed_from_a_checkpoint_is_bit_identical(tmp_path: Path, policy: Path) -> None:
    straight, first = backend(), backend()
    train(straight, 0, 1, 2, 3)
    train(first, 0, 1)
    write(tmp_path / "c", policy, 2, first)
    found = newest_checkpoint(tmp_path / "c")
    assert found is not None and found.version == 2 and found.position["burst"] == 1
    resumed = backend()
    resumed.load_weights(found.weights)
    resumed.load_optimizer_state(found.optimizer)
    train(resumed, 2, 3)
    for name, want in straight.weights().items():
        assert torch.equal(resumed.weights()[name], want)


def test_it_is_a_policy_directory_with_the_tokenizer(tmp_path: Path, policy: Path) -> None:
    directory = write(tmp_path / "c", policy, 2, backend())
    names = {p.name for p in directory.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "optimizer.safetensors"} <= names


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "trainer.json", "config.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_file_is_named_and_the_older_checkpoint_is_taken(
    tmp_path: Path, policy: Path, name: str, damage: str
) -> None:
    trainer = backend()
    write(tmp_path / "c", policy, 1, trainer)
    newest = write(tmp_path / "c", policy, 2, trainer)
    data = bytearray((newest / name).read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        (newest / name).write_bytes(data)
    elif damage == "cut":
        (newest / name).write_bytes(data[: len(data) // 2])
    else:
        (newest / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        read_checkpoint(newest)
    found = newest_checkpoint(tmp_path / "c")
    assert found is not None and found.version == 1


def test_what_a_killed_writer_left_is_not_a_checkpoint_and_goes_with_the_next_prune(
    tmp_path: Path, policy: Path
) -> None:
    root = tmp_path / "c"
    write(root, policy, 1, backend())
    half = root / ".staged-000002-123"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    found = newest_checkpoint(root)
    assert found is not None and found.version == 1
    prune(root, 2, 0)
    assert not half.exists()


def test_writing_a_version_that_is_durable_already_keeps_it(tmp_path: Path, policy: Path) -> None:
    trainer = backend()
    first = write(tmp_path / "c", policy, 1, trainer)
    before = (first / "model.safetensors").read_bytes()
    train(trainer, 0)
    assert write(tmp_path / "c", policy, 1, trainer) == first
    assert (first / "model.safetensors").read_bytes() == before


def test_the_last_ones_and_every_nth_are_kept(tmp_path: Path, policy: Path) -> None:
    root, trainer = tmp_path / "c", backend()
    for version in range(1, 8):
        write(root, policy, version, trainer)
    assert prune(root, keep_last=2, keep_every=3) == 6
    assert [p.name[-1] for p in list_checkpoints(root)] == ["3", "6", "7"]
    assert prune(root, keep_last=1, keep_every=0) == 7
    assert [p.name[-1] for p in list_checkpoints(root)] == ["7"]


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "nothing") is None
    assert prune(tmp_path / "nothing", 1, 0) == 0
