"""Replays the stories of tests/scripts: what was told happens, in the order in which it was told."""

from pathlib import Path

import pytest
from sim.faults import Fault, Pattern, parse_fault
from sim.simulation import faults_of, simulate, simulate_seed
from sim.story import differences, read_story, write_story

STORIES = sorted((Path(__file__).parents[1] / "scripts").glob("*.story"))


@pytest.mark.parametrize("path", STORIES, ids=lambda p: p.stem)
def test_a_story_comes_out_as_told(path):
    story = read_story(path.read_text())
    outcome = simulate(story.setting, tuple(story.faults))
    assert not (wrong := differences(story, outcome)), "\n".join([*wrong, write_story(outcome)[-6000:]])


def test_there_are_stories():
    assert len(STORIES) >= 3


@pytest.mark.parametrize("fault", [
    Fault(12.5, ("kill", "rollout"), 3.0), Fault(0.0, ("crash", "rollout", "point", "17")),
    Fault(Pattern("cell.role.assigned", (("cell", "0"), ("role", "train"))), ("pause", "leader"), 9.0, 2),
    Fault(Pattern("step.finished"), ("kill", "trainer-0"), 5.0)])
def test_a_fault_is_read_as_it_was_written(fault):
    assert parse_fault(str(fault)) == fault


def test_the_story_of_a_seed_replays_its_history():
    outcome = simulate_seed(3)
    story = read_story(write_story(outcome))
    assert story.setting == outcome.setting
    assert tuple(story.faults) == faults_of(outcome.setting)
    assert write_story(simulate(story.setting, tuple(story.faults))) == write_story(outcome)


@pytest.mark.parametrize("line", ["begin the run", "at noon kill rollout", "run colour=blue", "after step.finished"])
def test_a_line_that_cannot_be_read_is_refused(line):
    with pytest.raises(ValueError):
        read_story(line)
