"""The simulation can fail: faults that are put in on purpose are found."""

import pytest
from sim.mutants import MUTANTS
from sim.simulation import simulate_seed

NUM_SEEDS = 150
# Where a search may begin, so that it is short; it goes on for as many seeds from there.
FIRST = {"a cell accepts an older epoch": 25, "an engine tells the wrong version": 15,
         "weights are published before they are durable": 55}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_on_purpose_is_found(name):
    first = FIRST.get(name, 0)
    seeds = range(first, first + NUM_SEEDS)
    assert any(simulate_seed(seed, MUTANTS[name]).failure for seed in seeds), f"nobody noticed that {name}"
