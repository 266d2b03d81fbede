"""A worker of several ranks: the leader speaks for them, the followers do what it says.

    leader (rank 0)                          followers
      tell(Accumulate) ---- command -------->  receive
      its own part     <--- collectives ---->  the same call on theirs
      add up metrics   <--- metrics ---------  reply (after an accumulation)

Every method of a `RankBackend` is collective: all ranks call it in the same order. Commands and replies are MessagePack
over gloo, point to point, also where the collectives themselves run on GPUs. The group is the cell's own; none spans
cells, and none is ever built again: ranks sleep and wake with their leader.

Whatever goes wrong on one rank ends its process; the others' next call then fails, and theirs end too. The worker starts
again as a whole and the step gets a new attempt.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from gyre.contracts.codec import pack, unpack
from gyre.contracts.microstep import MicroStep
from gyre.trainer.backends.base import check_tensors
from gyre.trainer.backends.split import split
from gyre.trainer.metrics import add_sums, of_one_micro_step

log = logging.getLogger(__name__)

PING_S = 30.0  # an idle leader says that it lives, well within the group's timeout
LEADER = 0

Arrays = Mapping[str, np.ndarray]
Tensors = Mapping[str, torch.Tensor]


class RankBackend(Protocol):
    """One rank's share of a `Backend`: each method is called on every rank, in the same order.

    What goes in or comes out whole (arrays, states) counts on the leader alone; followers give None and get {}.
    """

    def wake(self) -> None: ...

    def sleep(self) -> None: ...

    def zero_gradients(self) -> None: ...

    def accumulate(self, part: MicroStep | None) -> dict[str, float]:
        """Add this rank's part of a micro-step; None: it has none, but the others may need it in their collectives."""
        ...

    def gradient_shapes(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Not collective."""
        ...

    def export_gradients(self, into: Arrays | None) -> None: ...

    def add_gradients(self, arrays: Arrays | None) -> None: ...

    def update(self, scale: float, learning_rate: float, max_grad_norm: float) -> float: ...

    def weights(self) -> dict[str, torch.Tensor]: ...

    def load_weights(self, state: Tensors | None) -> None: ...

    def optimizer_state(self) -> dict[str, torch.Tensor]: ...

    def load_optimizer_state(self, state: Tensors | None) -> None: ...


@dataclass(frozen=True, slots=True)
class Call:
    """Do the method of this name, which takes nothing but what the leader holds."""

    method: str


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Add this part of a micro-step."""

    part: MicroStep | None


@dataclass(frozen=True, slots=True)
class Update:
    """Scale, clip, update."""

    scale: float
    learning_rate: float
    max_grad_norm: float


@dataclass(frozen=True, slots=True)
class Ping:
    """Nothing to do; the leader lives."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The worker ends."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """A follower's answer to `Accumulate`."""

    sums: dict[str, float]


Command = Call | Accumulate | Update | Ping | Stop
_COMMANDS: dict[str, type] = {c.__name__: c for c in (Call, Accumulate, Update, Ping, Stop)}
_CALLS = ("wake", "sleep", "zero_gradients", "weights", "optimizer_state")
_CALLS_WITH_DATA = ("export_gradients", "add_gradients", "load_weights", "load_optimizer_state")


class Channel(Protocol):
    """Messages between the ranks of one worker: `GlooChannel`, or a fake in tests."""

    rank: int
    num_ranks: int

    def send(self, to: int, data: bytes) -> None: ...

    def receive(self, sender: int) -> bytes: ...


class GlooChannel:
    """Over the default process group, in host memory. Raises RuntimeError when a peer is gone or silent too long."""

    def __init__(self) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()

    def send(self, to: int, data: bytes) -> None:
        dist.send(torch.tensor([len(data)]), to)
        dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), to)

    def receive(self, sender: int) -> bytes:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, sender)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(data, sender)
        return data.numpy().tobytes()


class LeadingBackend:
    """`Backend` of a worker of several ranks, on its leader. Thread-safe only against its own pings."""

    def __init__(self, local: RankBackend, channel: Channel, ping_s: float = PING_S) -> None:
        self._local, self._channel = local, channel
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        threading.Thread(target=self._ping_while_idle, args=(ping_s,), daemon=True, name="ranks-ping").start()

    def close(self) -> None:
        """Let the followers end, if they have not ended by themselves."""
        self._stopped.set()
        with self._lock, contextlib.suppress(RuntimeError):
            self._tell(Stop())

    def wake(self) -> None:
        with self._lock:
            self._tell(Call("wake"))
            self._local.wake()

    def sleep(self) -> None:
        with self._lock:
            self._tell(Call("sleep"))
            self._local.sleep()

    def zero_gradients(self) -> None:
        with self._lock:
            self._tell(Call("zero_gradients"))
            self._local.zero_gradients()

    def accumulate(self, micro_step: MicroStep) -> dict[str, float]:
        with self._lock:
            own, *others = split(micro_step, self._channel.num_ranks)
            for rank, part in enumerate(others, start=1):
                self._send(rank, Accumulate(part))
            totals = self._local.accumulate(own)
            for rank in range(1, self._channel.num_ranks):
                add_sums(totals, unpack(self._channel.receive(rank), Metrics).sums)
        # Parts of one tree share prefixes; the micro-step's tokens are those it came with.
        return {**of_one_micro_step(totals), "num_tokens": float(micro_step.num_tokens)}

    def gradient_shapes(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        return self._local.gradient_shapes()

    def export_gradients(self, into: Arrays) -> None:
        with self._lock:
            self._tell(Call("export_gradients"))
            self._local.export_gradients(into)

    def add_gradients(self, arrays: Arrays) -> None:
        with self._lock:
            self._tell(Call("add_gradients"))
            self._local.add_gradients(arrays)

    def update(self, scale: float, learning_rate: float, max_grad_norm: float) -> float:
        with self._lock:
            self._tell(Update(scale, learning_rate, max_grad_norm))
            return self._local.update(scale, learning_rate, max_grad_norm)

    def weights(self) -> dict[str, torch.Tensor]:
        with self._lock:
            self._tell(Call("weights"))
            return self._local.weights()

    def load_weights(self, state: Tensors) -> None:
        """Raises ValueError naming a missing or misshapen parameter; nothing has changed then."""
        check_tensors(state, {n: shape for n, (shape, _) in self._local.gradient_shapes().items()})
        with self._lock:
            self._tell(Call("load_weights"))
            self._local.load_weights(state)

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        with self._lock:
            self._tell(Call("optimizer_state"))
            return self._local.optimizer_state()

    def load_optimizer_state(self, state: Tensors) -> None:
        with self._lock:
            self._tell(Call("load_optimizer_state"))
            self._local.load_optimizer_state(state)

    def _tell(self, command: Command) -> None:
        for rank in range(1, self._channel.num_ranks):
            self._send(rank, command)

    def _send(self, rank: int, command: Command) -> None:
        self._channel.send(rank, type(command).__name__.encode().ljust(16) + pack(command))

    def _ping_while_idle(self, ping_s: float) -> None:
        """Followers wait for hours while the cell's role is rollout, but never longer than their timeout for a word."""
        while not self._stopped.wait(ping_s):
            if self._lock.acquire(blocking=False):
                try:
                    self._tell(Ping())
                except RuntimeError as error:
                    log.error("a rank of this worker is gone: %s", error)  # the next call raises
                    return
                finally:
                    self._lock.release()


def follow(local: RankBackend, channel: Channel) -> None:
    """Do what the leader says until it says stop. Raises RuntimeError when it is gone."""
    while True:
        data = channel.receive(LEADER)
        command: Command = unpack(data[16:], _COMMANDS[data[:16].decode().strip()])
        match command:
            case Stop():
                return
            case Accumulate(part):
                channel.send(LEADER, pack(Metrics(local.accumulate(part))))
            case Update(scale, learning_rate, max_grad_norm):
                local.update(scale, learning_rate, max_grad_norm)
            case Call(method) if method in _CALLS:
                getattr(local, method)()
            case Call(method) if method in _CALLS_WITH_DATA:
                getattr(local, method)(None)
