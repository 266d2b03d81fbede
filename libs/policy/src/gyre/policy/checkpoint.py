"""Hugging Face checkpoint directories in and out: ``config.json`` and safetensors, never a pickle."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder, check_state
from safetensors.torch import load_file, save_file

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class ForeignPolicy:
    """A policy that another library runs: its `config.json` is kept as it is, its tensors have that library's names."""

    config: Mapping[str, Any]

    @classmethod
    def of(cls, directory: Path) -> ForeignPolicy:
        return cls(json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8")))


def load_config(directory: Path) -> PolicyConfig:
    """Reads ``config.json``. Raises FileNotFoundError, or ValueError naming the field that is wrong."""
    raw = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    if not isinstance(raw, dict):
        raise ValueError(f"{directory / CONFIG_FILE}: must hold a JSON object")
    return PolicyConfig.from_hf(raw)


def load_state(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint by name, on the CPU. Reads one file, or the shards that the index lists."""
    index = directory / INDEX_FILE
    if not index.exists():
        return load_file(directory / WEIGHTS_FILE)
    weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    state: dict[str, torch.Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise ValueError(f"weight_map: {shard!r} in {index} must be a plain file name beside the index")
        state.update(load_file(directory / shard))
    missing = sorted(set(weight_map) - set(state))
    if missing:
        raise ValueError(f"weight_map: {missing[0]} is listed in {index} but is in none of its shards")
    return state


def load_checkpoint(directory: Path) -> tuple[PolicyConfig, dict[str, torch.Tensor]]:
    """Config and checked tensors. Raises ValueError naming the parameter that is missing or has another shape."""
    config, state = load_config(directory), load_state(directory)
    check_state(config, state)
    return config, state


def load_decoder(directory: Path, dtype: torch.dtype | None = None) -> Decoder:
    """The decoder of a checkpoint, in the dtype it was saved in unless another one is asked for."""
    decoder = Decoder.from_state(*load_checkpoint(directory))
    return decoder if dtype is None else decoder.to(dtype)


def save_checkpoint(directory: Path, config: PolicyConfig | ForeignPolicy, state: Mapping[str, torch.Tensor]) -> None:
    """Writes ``model.safetensors`` and then ``config.json``, each whole or not at all (written beside, renamed)."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    if isinstance(config, PolicyConfig):
        check_state(config, state)
        if config.tie_word_embeddings:
            tensors.pop("lm_head.weight", None)
    staged = directory / f".{WEIGHTS_FILE}.{os.getpid()}"
    save_file(tensors, staged, metadata={"format": "pt"})
    staged.replace(directory / WEIGHTS_FILE)
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    staged = directory / f".{CONFIG_FILE}.{os.getpid()}"
    fields = config.to_hf(dtype) if isinstance(config, PolicyConfig) else {**config.config, "dtype": dtype}
    staged.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    staged.replace(directory / CONFIG_FILE)


def state_digest(state: Mapping[str, torch.Tensor]) -> str:
    """Checksum (SHA-256, hex) over names, dtypes, shapes and bytes; the order of the mapping does not matter."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        header = f"{name}\0{str(tensor.dtype).removeprefix('torch.')}\0{','.join(map(str, tensor.shape))}\0"
        digest.update(header.encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
