"""From configuration to a backend: one process, or the ranks of a cell that meet and agree who leads.

A worker of several ranks is started in one of two ways:
- alone, on one machine: `gyre-trainer worker` starts its followers (`gyre-trainer rank`) and meets them through a file;
- by torchrun or a cluster's launcher, which sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT: every
  process runs `gyre-trainer worker`, and rank 0 leads.

Followers end when they are told to, or when their leader is gone.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from gyre.contracts.errors import ConfigError
from gyre.policy.checkpoint import ForeignPolicy, load_config, load_decoder
from gyre.policy.config import PolicyConfig
from gyre.policy.model import PolicyModel
from gyre.trainer.backends.base import Backend
from gyre.trainer.backends.ranks import GlooChannel, LeadingBackend, RankBackend, follow
from gyre.trainer.backends.timed import TimedBackend
from gyre.trainer.backends.torch import TorchBackend
from gyre.trainer.config import TrainerConfig

log = logging.getLogger(__name__)

STORE_VARIABLE = "GYRE_RANKS_STORE"
# Longer than any micro-step: whoever is done early waits for the others. A peer that dies is noticed at once.
SILENCE = timedelta(hours=4)
STOP_S = 10.0


@dataclass(frozen=True)
class Place:
    """This process among the ranks of its worker; `store`: the file at which they meet, "" to use MASTER_ADDR."""

    rank: int
    num_ranks: int
    local_rank: int
    store: str

    @classmethod
    def of(cls, environment: Mapping[str, str], num_ranks: int) -> Place | None:
        """None if nobody has placed this process. Raises ConfigError if there are not as many ranks as configured."""
        if "RANK" not in environment:
            return None
        place = cls(
            int(environment["RANK"]), int(environment["WORLD_SIZE"]), int(environment.get("LOCAL_RANK", "0")),
            environment.get(STORE_VARIABLE, ""),
        )  # fmt: skip
        if place.num_ranks != num_ranks:
            raise ConfigError(f"training.ranks = {num_ranks}: this worker was started with WORLD_SIZE={place.num_ranks}")
        return place

    def meet(self, device: str) -> GlooChannel:
        """Wait for all ranks of the worker; after that no group is ever built again."""
        if device == "cuda":
            torch.cuda.set_device(self.local_rank)
        os.environ["LOCAL_RANK"] = str(self.local_rank)  # DeepSpeed reads it
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", init_method=f"file://{self.store}" if self.store else "env://",
            rank=self.rank, world_size=self.num_ranks, timeout=SILENCE,
        )  # fmt: skip
        return GlooChannel()


@dataclass
class Opened:
    """A worker's backend, what its policy is, and how to let its other ranks end."""

    backend: Backend
    policy: PolicyConfig | ForeignPolicy
    _leading: LeadingBackend | None = None
    _followers: Followers | None = None

    def close(self) -> None:
        """Let the followers end; those that do not are killed."""
        if self._followers is not None:
            self._followers.expect_the_end()
        if self._leading is not None:
            self._leading.close()
        if self._followers is not None:
            self._followers.wait(STOP_S)


class Followers:
    """The ranks that this worker has started itself. If one ends unasked, so does the worker, wherever it is."""

    def __init__(self, place: Place) -> None:
        self._closing = False
        self._processes = [_start_follower(rank, place) for rank in range(1, place.num_ranks)]
        for process in self._processes:
            threading.Thread(target=self._watch, args=(process,), daemon=True, name="ranks-watch").start()

    def expect_the_end(self) -> None:
        self._closing = True

    def wait(self, timeout_s: float) -> None:
        for process in self._processes:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._closing:
            log.error("a rank of this worker ended with code %d", code)
            # The leader may be inside a collective call that waits for that rank, where nothing else reaches it.
            os._exit(1)


def open_backend(config: TrainerConfig, place: Place | None) -> Opened:
    """The backend of this worker, or of the leader of its ranks, whose followers it starts unless somebody else did."""
    policy = ForeignPolicy.of(config.policy) if config.implementation == "transformers" else load_config(config.policy)
    optimizer = config.optimizer if config.is_core else None
    if config.training.backend == "timed":
        times = config.training.timed_s_per_token, config.training.timed_update_s
        return Opened(TimedBackend(load_model(config), config.loss, optimizer, config.device, *times), policy)
    if config.training.backend == "torch" and config.training.ranks == 1:
        _load_checkpointing()
        model = load_model(config)
        backend = TorchBackend(model, config.loss, optimizer, config.device, load_reference(config, model), config.memory_bytes)
        return Opened(backend, policy)
    followers = None
    if place is None:
        store = Path(tempfile.mkdtemp(prefix="ranks-", dir=_made(config.cells_dir / str(config.cell)))) / "store"
        place = Place(0, config.training.ranks, 0, str(store))
        followers = Followers(place)
    channel = place.meet(config.device)
    leading = LeadingBackend(rank_backend(config, place), channel)
    return Opened(leading, policy, leading, followers)


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _start_follower(rank: int, place: Place) -> subprocess.Popen[bytes]:
    """The same command line as this worker's, as a rank that ends with it."""
    environment = os.environ | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(place.num_ranks), STORE_VARIABLE: place.store,
        "GYRE_LAUNCHER_PID": str(os.getpid()),
    }  # fmt: skip
    command = [sys.executable, "-m", "gyre.trainer.main", "rank", *sys.argv[2:]]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)


async def follow_leader(config: TrainerConfig, place: Place, stopping: asyncio.Event) -> None:
    """Be a follower until the leader says stop, or until this process is told to. Raises RuntimeError if it is gone."""
    channel = await asyncio.to_thread(place.meet, config.device)
    local = await asyncio.to_thread(rank_backend, config, place)
    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def work() -> None:
        try:
            follow(local, channel)
            result, error = done.set_result, None
        except RuntimeError as broken:
            result, error = done.set_exception, broken
        loop.call_soon_threadsafe(result, error)

    # A daemon: what waits for a word from the leader cannot be interrupted, and must not keep the process.
    threading.Thread(target=work, daemon=True, name="follow").start()
    told = asyncio.create_task(stopping.wait())
    await asyncio.wait((done, told), return_when=asyncio.FIRST_COMPLETED)
    if done.done():
        told.cancel()
        await done


def rank_backend(config: TrainerConfig, place: Place) -> RankBackend:
    """This rank's share of the worker's backend. Raises ConfigError if DeepSpeed is asked for and not installed."""
    _load_checkpointing()
    optimizer, model = config.optimizer if config.is_core else None, load_model(config)
    device = f"cuda:{place.local_rank}" if config.device == "cuda" else config.device
    kind, stage, memory = config.training.backend, config.training.stage, config.memory_bytes
    if kind == "torch":
        from gyre.trainer.backends.replicas import ReplicatedBackend

        return ReplicatedBackend(model, config.loss, optimizer, device, load_reference(config, model), memory)
    if kind == "fsdp":
        from gyre.trainer.backends.fsdp import FsdpBackend

        return FsdpBackend(model, config.loss, optimizer, device, stage, load_reference(config, model), memory)
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError("training.backend = 'deepspeed': it is not installed; install opengyre-trainer[deepspeed]")
    from gyre.trainer.backends.deepspeed import DeepSpeedBackend

    return DeepSpeedBackend(model, config.loss, optimizer, device, stage, load_reference(config, model), memory)


def _load_checkpointing() -> None:
    """torch.utils.checkpoint loads torch's compiler on first use, 800 modules in seconds: now, not in a micro-step."""
    importlib.import_module("torch._dynamo")


def load_reference(config: TrainerConfig, model: PolicyModel) -> PolicyModel | None:
    """The policy that a KL is taken to, where that is not version 0. Raises ConfigError if it has another vocabulary."""
    if config.reference is None or not config.loss.has_reference_policy:
        return None
    other = load_model(replace(config, policy=config.reference))
    if other.config.vocab_size != model.config.vocab_size:
        raise ConfigError(f"loss.kl_reference = {str(config.reference)!r}: has {other.config.vocab_size} tokens in its "
                          f"vocabulary, the policy {model.config.vocab_size}")
    return other


def load_model(config: TrainerConfig) -> PolicyModel:
    """The policy's initial weights in the compute dtype. Raises ConfigError if transformers is asked for and missing."""
    if config.implementation == "gyre":
        return load_decoder(config.policy, config.dtype)
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("policy.implementation = 'transformers': it is not installed; install opengyre-policy[transformers]")
    from gyre.policy.hf import TransformersModel

    return TransformersModel.load(config.policy, config.dtype)
