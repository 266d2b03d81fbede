"""Checkpoint directories: shards, digests and wrong tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gyre.policy.checkpoint import load_checkpoint, load_state, save_checkpoint, state_digest
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from safetensors.torch import save_file

CONFIG = PolicyConfig("llama", 32, 16, 24, 2, 2, 1, 8)


def test_creation_is_deterministic_and_seeds_differ() -> None:
    digests = [state_digest(Decoder.create(CONFIG, seed).state_dict()) for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


def test_a_sharded_checkpoint_is_read_through_its_index(tmp_path: Path) -> None:
    state = Decoder.create(CONFIG, 0).state_dict()
    names = sorted(state)
    weight_map = {}
    for number, part in enumerate((names[:5], names[5:])):
        save_file({name: state[name] for name in part}, tmp_path / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{number}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert state_digest(load_state(tmp_path)) == state_digest(state)


def test_an_index_cannot_point_outside_its_directory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(ValueError, match="weight_map"):
        load_state(tmp_path)


def test_a_missing_and_a_misshapen_parameter_are_named(tmp_path: Path) -> None:
    state = Decoder.create(CONFIG, 0).state_dict()
    with pytest.raises(ValueError, match="model.norm.weight"):
        save_checkpoint(tmp_path, CONFIG, {k: v for k, v in state.items() if k != "model.norm.weight"})
    with pytest.raises(ValueError, match="lm_head.weight"):
        save_checkpoint(tmp_path, CONFIG, {**state, "lm_head.weight": torch.zeros(3, 16)})


def test_the_digest_sees_names_dtypes_shapes_and_bytes() -> None:
    base = {"a": torch.zeros(4), "b": torch.ones(2)}
    variants = [
        base,
        {"c": torch.zeros(4), "b": torch.ones(2)},
        {"a": torch.zeros(2, 2), "b": torch.ones(2)},
        {"a": torch.zeros(4, dtype=torch.int32), "b": torch.ones(2)},
        {"a": torch.zeros(4), "b": torch.full((2,), 2.0)},
    ]
    assert len({state_digest(v) for v in variants}) == len(variants)
    assert state_digest(base) == state_digest(dict(reversed(base.items())))


def test_bfloat16_survives_the_round_trip(tmp_path: Path) -> None:
    state = Decoder.create(CONFIG, 0).to(torch.bfloat16).state_dict()
    save_checkpoint(tmp_path, CONFIG, state)
    assert state_digest(load_checkpoint(tmp_path)[1]) == state_digest(state)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
