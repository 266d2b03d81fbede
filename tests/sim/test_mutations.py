"""The simulation can fail: faults that are put in on purpose are found."""

import pytest
from sim.mutants import MUTANTS
from sim.simulation import simulate_seed

NUM_SEEDS = 150


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_on_purpose_is_found(name):
    assert any(simulate_seed(seed, MUTANTS[name]).failure for seed in range(NUM_SEEDS)), f"nobody noticed that {name}"
