"""Benchmarks go on working while what they measure changes."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
NAMES = sorted(path.stem for path in BENCH.glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_finds_all_that_it_imports(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    assert callable(importlib.import_module(name).main)


def test_workers_in_virtual_time_train_every_micro_step_and_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    join = importlib.import_module("join")
    steps = join.virtual(num_cells=3, num_micro_steps=24, seed=0)
    assert len(steps) == join.STEPS
    assert all(0 <= step.spread_s <= step.largest_s for step in steps)
