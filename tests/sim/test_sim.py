"""300 seeded histories of the whole protocol: five schedules, crashes, cuts, lost and late messages, wrong clocks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sim.setting import SCHEDULES, setting_of
from sim.simulation import simulate_seed
from sim.story import write_story

NUM_SEEDS = 300
BATCH = 20
TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, BATCH))
def test_the_protocol_keeps_its_guarantees(first):
    for seed in range(first, first + BATCH):
        outcome = simulate_seed(seed)
        assert not outcome.failure, (f"seed {seed}: {outcome.failure}; again: make sim SEEDS=1 FIRST={seed}\n"
                                     f"{write_story(outcome)[-6000:]}")


def test_the_seeds_cover_all_schedules_and_sizes():
    settings = [setting_of(seed) for seed in range(NUM_SEEDS)]
    assert {s.schedule for s in settings} == set(SCHEDULES)
    assert {s.cells for s in settings} == {1, 2, 3, 4}
    assert {(s.mu, s.phi) for s in settings} == {(mu, phi) for mu in (1, 2) for phi in (0, 1)}


def test_a_seed_gives_one_history_whatever_the_process():
    program = ("from sim.simulation import simulate_seed\nfrom sim.story import write_story\n"
               "print(write_story(simulate_seed(7)))")
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    told = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True,
                           env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": number}).stdout for number in ("1", "2")]
    assert told[0] == told[1]
