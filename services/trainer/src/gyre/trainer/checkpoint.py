"""Durable checkpoints: a directory per version that is there whole or not at all.

`version-000012/` is a Hugging Face directory (config.json, model.safetensors, the tokenizer's files) plus
`optimizer.safetensors` (masters, moments, random-number states), `trainer.json` (position in the run) and `ledger.msgpack`
(the ledger as it was). `manifest.json` holds a digest of every file and is
written last; the directory gets its name by a rename after everything in it, and before its parent, is on the disk.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gyre.contracts.errors import CheckpointError
from gyre.policy.checkpoint import ForeignPolicy, load_state, save_checkpoint
from gyre.policy.config import PolicyConfig
from safetensors.torch import load_file, save_file

log = logging.getLogger(__name__)

MANIFEST_FILE = "manifest.json"
OPTIMIZER_FILE = "optimizer.safetensors"
POSITION_FILE = "trainer.json"
LEDGER_FILE = "ledger.msgpack"
_NAME = re.compile(r"version-(\d{6,})")
_SEALED_BY_US = {"config.json", "model.safetensors", "model.safetensors.index.json"}


@dataclass(frozen=True)
class Checkpoint:
    """What a resumed core starts from. `position` is the content of trainer.json."""

    version: int
    directory: Path
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    position: dict[str, Any]


def write_checkpoint(
    root: Path,
    version: int,
    policy: PolicyConfig | ForeignPolicy,
    weights: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
    position: Mapping[str, Any],
    companions: Path,
    ledger: bytes = b"",
) -> Path:
    """Make `version` durable and return its directory; an existing whole one is kept as it is, a damaged one replaced.

    companions: directory whose other files (tokenizer, chat template) are copied beside the weights.
    """
    target = root / f"version-{version:06d}"
    if target.exists():
        try:
            check_files(target)
            return target
        except CheckpointError as error:
            log.warning("checkpoint is written anew: %s", error)
            _remove(target)
    staged = root / f".staged-{version:06d}-{os.getpid()}"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    _copy_companions(companions, staged)
    save_checkpoint(staged, policy, weights)
    save_file({n: t.contiguous() for n, t in optimizer.items()}, staged / OPTIMIZER_FILE)
    (staged / POSITION_FILE).write_text(json.dumps({**position, "version": version}, indent=1), encoding="utf-8")
    if ledger:
        (staged / LEDGER_FILE).write_bytes(ledger)
    digests = {path.name: _file_digest(path) for path in sorted(staged.iterdir())}
    (staged / MANIFEST_FILE).write_text(json.dumps(digests, indent=1), encoding="utf-8")
    for path in staged.iterdir():
        _sync(path)
    _sync(staged)
    staged.rename(target)
    _sync(root)
    return target


def newest_checkpoint(root: Path) -> Checkpoint | None:
    """The newest one that is whole; a damaged one is skipped with a warning. None if there is none."""
    skipped = False
    for directory in reversed(list_checkpoints(root)):
        try:
            found = read_checkpoint(directory)
        except CheckpointError as error:
            log.warning("checkpoint skipped: %s", error)
            skipped = True
            continue
        if skipped:
            log.warning("going back to %s", found.directory)
        return found
    return None


def read_checkpoint(directory: Path) -> Checkpoint:
    """Verify every digest and load. Raises CheckpointError naming the file that is missing or damaged."""
    check_files(directory)
    position = json.loads((directory / POSITION_FILE).read_text(encoding="utf-8"))
    return Checkpoint(
        int(position["version"]), directory, load_state(directory), load_file(directory / OPTIMIZER_FILE), position
    )


def check_files(directory: Path) -> None:
    """Raises CheckpointError naming the first file that is missing or damaged."""
    try:
        digests = json.loads((directory / MANIFEST_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory / MANIFEST_FILE}: {error}") from error
    for name, expected in digests.items():
        path = directory / name
        if not path.is_file() or _file_digest(path) != expected:
            raise CheckpointError(f"{path}: {'is damaged' if path.is_file() else 'is missing'}")


def list_checkpoints(root: Path) -> list[Path]:
    """Directories with a version's name, oldest first."""
    if not root.is_dir():
        return []
    return sorted((p for p in root.iterdir() if _NAME.fullmatch(p.name)), key=_version_of)


def prune(root: Path, keep_last: int, keep_every: int) -> int:
    """Delete all but the last `keep_last` (at least one) and, with `keep_every` > 0, every version it divides.

    Also removes what a killed writer left. Returns the oldest version kept that a restart could go back to.
    """
    for leftover in root.glob(".staged-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    found = list_checkpoints(root)
    last = found[-max(keep_last, 1) :]
    for directory in found:
        periodic = keep_every > 0 and _version_of(directory) % keep_every == 0
        if directory not in last and not periodic:
            _remove(directory)
    return _version_of(last[0]) if last else 0


def rng_state() -> dict[str, torch.Tensor]:
    """The states of torch's random-number generators in this process. Nothing in the trainer draws from them yet."""
    states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"rng.cpu": torch.get_rng_state()} | {f"rng.cuda.{i}": state for i, state in enumerate(states)}


def restore_rng(state: Mapping[str, torch.Tensor]) -> None:
    """Put back what `rng_state` gave, as far as it is in `state` and the devices are here."""
    if "rng.cpu" in state:
        torch.set_rng_state(state["rng.cpu"])
    for index in range(torch.cuda.device_count()):
        if f"rng.cuda.{index}" in state:
            torch.cuda.set_rng_state(state[f"rng.cuda.{index}"], index)


def _remove(directory: Path) -> None:
    """First out of sight, so that half of it is never taken for a checkpoint."""
    doomed = directory.with_name(f".staged-doomed-{directory.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    directory.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _version_of(directory: Path) -> int:
    match = _NAME.fullmatch(directory.name)
    assert match is not None
    return int(match[1])


def _copy_companions(source: Path, target: Path) -> None:
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name not in _SEALED_BY_US and path.suffix in (".json", ".jinja", ".model", ".txt"):
            shutil.copyfile(path, target / path.name)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
