"""What runs inside TensorRT-LLM's workers, without TensorRT-LLM: reading checkpoints, and telling weights apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine_steps import POLICY
from gyre.policy.checkpoint import load_state, save_checkpoint
from gyre.policy.decoder import Decoder
from gyre.rollout.engines import tensorrt_llm_worker
from gyre.rollout.engines.tensorrt_llm_worker import buckets, fingerprint
from safetensors.torch import save_file


def test_a_checkpoint_is_read_whole_in_buckets_of_bounded_size(tmp_path: Path) -> None:
    state = Decoder.create(POLICY, 1).state_dict()
    save_checkpoint(tmp_path, POLICY, state)
    found, sizes = {}, []
    for bucket in buckets(tmp_path, 4096):
        read = {name: function(*arguments) for name, (function, arguments) in bucket}
        sizes.append(sum(t.numel() * t.element_size() for t in read.values()))
        found |= read
    assert len(sizes) > 2 and max(sizes) <= 4096
    assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)


def test_a_checkpoint_in_shards_is_read_by_its_index(tmp_path: Path) -> None:
    state = Decoder.create(POLICY, 1).state_dict()
    names = sorted(state)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: state[name] for name in held}, tmp_path / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    read = {name for bucket in buckets(tmp_path, 1 << 30) for name, _ in bucket}
    assert read == state.keys() == load_state(tmp_path).keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_fingerprint_tells_weights_apart_and_depends_on_nothing_else(dtype: torch.dtype) -> None:
    one, same, other = (Decoder.create(POLICY, seed).to(dtype) for seed in (1, 1, 2))
    assert fingerprint(one) == fingerprint(same) != fingerprint(other)
    with torch.no_grad():
        one.model.layers[1].mlp.down_proj.weight[3, 5] += 1.0
    assert fingerprint(one) != fingerprint(same)


def test_the_handles_have_a_place_for_the_receivers_device(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, POLICY, Decoder.create(POLICY, 1).state_dict())
    _, (function, arguments) = next(buckets(tmp_path, 1))[0]
    rebuilt = list(arguments)
    rebuilt[6] = 3  # what a receiver of CUDA handles does to each
    assert function(*rebuilt).device.type == "cpu"


def test_the_extension_exists_where_tensorrt_llm_does() -> None:
    with pytest.raises(ImportError, match="tensorrt_llm"):
        _ = tensorrt_llm_worker.Extension
    with pytest.raises(AttributeError):
        _ = tensorrt_llm_worker.Other
