"""The leader's words and the followers' obedience, without a network."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from gyre.contracts.microstep import MicroStep
from gyre.trainer.backends.ranks import LeadingBackend, follow
from trees import random_micro_step

SHAPES = {"w": ((2, 3), np.dtype(np.float64))}
WAIT_S = 30.0


class Post:
    """Mail between the ranks; `broken` is what a dead peer looks like."""

    def __init__(self, num_ranks: int) -> None:
        self.boxes = {(a, b): queue.Queue[bytes]() for a in range(num_ranks) for b in range(num_ranks)}
        self.num_ranks, self.broken = num_ranks, threading.Event()

    def at(self, rank: int) -> FakeChannel:
        return FakeChannel(self, rank)


class FakeChannel:
    def __init__(self, post: Post, rank: int) -> None:
        self._post, self.rank, self.num_ranks = post, rank, post.num_ranks

    def send(self, to: int, data: bytes) -> None:
        if self._post.broken.is_set():
            raise RuntimeError("connection closed by peer")
        self._post.boxes[self.rank, to].put(data)

    def receive(self, sender: int) -> bytes:
        return self._post.boxes[sender, self.rank].get(timeout=WAIT_S)


class Recorder:
    """A rank's backend that notes what it is asked."""

    def __init__(self, sums: dict[str, float]) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._sums = sums

    def accumulate(self, part: MicroStep | None) -> dict[str, float]:
        self.calls.append(("accumulate", None if part is None else part.num_targets))
        return {} if part is None else dict(self._sums)

    def gradient_shapes(self) -> dict[str, Any]:
        return SHAPES

    def update(self, *values: float) -> float:
        self.calls.append(("update", *values))
        return 3.0

    def __getattr__(self, name: str) -> Any:
        def call(*values: Any) -> dict[str, Any]:
            self.calls.append((name, *values))
            return {}

        return call


@contextmanager
def cell(num_ranks: int) -> Iterator[tuple[LeadingBackend, list[Recorder]]]:
    """A leader and followers on threads, who all end with it."""
    post = Post(num_ranks)
    ranks = [Recorder({"loss": 1.0, "max_ratio": float(rank), "num_tokens": 5.0}) for rank in range(num_ranks)]
    threads = [threading.Thread(target=follow, args=(ranks[r], post.at(r))) for r in range(1, num_ranks)]
    for thread in threads:
        thread.start()
    leading = LeadingBackend(ranks[0], post.at(0), ping_s=3600)
    yield leading, ranks
    leading.close()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_every_rank_is_asked_the_same_and_only_the_leader_has_what_is_whole() -> None:
    state, arrays = {"w": torch.zeros(2, 3)}, {"w": np.zeros((2, 3))}
    with cell(3) as (leading, ranks):
        leading.wake()
        leading.load_weights(state)
        leading.add_gradients(arrays)
        assert leading.update(0.5, 0.01, 1.0) == 3.0
        leading.sleep()
    asked = [[c[0] for c in r.calls] for r in ranks]
    assert asked[0] == asked[1] == asked[2] == ["wake", "load_weights", "add_gradients", "update", "sleep"]
    assert ranks[0].calls[1] == ("load_weights", state) and ranks[1].calls[1] == ("load_weights", None)
    assert ranks[2].calls[3] == ("update", 0.5, 0.01, 1.0)


def test_metrics_add_up_maxima_are_kept_and_tokens_are_the_micro_steps() -> None:
    micro_step = random_micro_step(0, num_trees=6)
    with cell(3) as (leading, ranks):
        assert leading.accumulate(micro_step) == {"loss": 3.0, "max_ratio": 2.0, "num_tokens": float(micro_step.num_tokens)}
    assert sum(r.calls[0][1] for r in ranks) == micro_step.num_targets


def test_a_rank_without_a_part_is_asked_all_the_same() -> None:
    with cell(2) as (leading, ranks):
        leading.accumulate(random_micro_step(0, num_trees=1, fork=0.0))
    assert ranks[1].calls == [("accumulate", None)]


def test_weights_that_do_not_fit_are_refused_before_anybody_is_told() -> None:
    with cell(2) as (leading, ranks), pytest.raises(ValueError, match="w has shape"):
        leading.load_weights({"w": torch.zeros(3)})
    assert ranks[1].calls == []


def test_an_idle_leader_says_that_it_lives_until_a_rank_is_gone() -> None:
    post = Post(2)
    leading = LeadingBackend(Recorder({}), post.at(0), ping_s=0.001)
    for _ in range(3):
        assert post.at(1).receive(0).startswith(b"Ping")
    post.broken.set()
    with pytest.raises(RuntimeError, match="closed by peer"):
        leading.wake()
