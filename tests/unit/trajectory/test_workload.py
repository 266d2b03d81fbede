"""Made executions: what the tree counts is what the shape says, and the roles come out as made."""

from dataclasses import replace

import numpy as np
import pytest
from executions import POLICY
from gyre.contracts.digest import token_digest
from gyre.trajectory.reading import read_execution
from gyre.trajectory.record import CallLog
from gyre.trajectory.roles import classifier
from gyre.trajectory.workload import NUM_IDS, Counts, Made, Workload, counts, make

SMALL = Workload(turns=9, context_tokens=40, turn_tokens=7, output_tokens=5, task_tokens=6, note_tokens=2)
SHAPES = [
    SMALL,
    replace(SMALL, turns=1, compactions=0, retries=1, sub_agents=2),
    replace(SMALL, strip_thinking=3),
    replace(SMALL, elision_window=1),
    replace(SMALL, elision_window=3, strip_thinking=4),
    replace(SMALL, note_tokens=11, elision_window=2),
    replace(SMALL, compactions=1),
    replace(SMALL, compactions=8, strip_thinking=1),
    replace(SMALL, retries=9),
    replace(SMALL, retries=4, strip_thinking=2),
    replace(SMALL, sub_agents=3, sub_agent_turns=4),
    replace(SMALL, sub_agents=11, sub_agent_turns=5, elision_window=2),
    replace(SMALL, context_tokens=6, compactions=2, sub_agents=2),
    replace(SMALL, turns=60, strip_thinking=2, elision_window=4, compactions=3, sub_agents=5, sub_agent_turns=7, retries=6,
            seed=5),
]


def log_of(made: Made) -> CallLog:
    log = CallLog()
    for record in made.records:
        log.add(record)
    assert log.refusal is None, log.refusal
    return log


@pytest.mark.parametrize("shape", SHAPES)
def test_the_tree_counts_what_the_shape_says(shape: Workload) -> None:
    calls = log_of(make(shape)).ordered()
    reading = read_execution(calls, POLICY, classifier("any"))
    tree, targets = reading.tree, reading.targets
    found = Counts(len(calls), tree.num_flat_tokens, tree.num_tokens, targets.num_drawn)
    assert found == counts(shape)
    assert len(targets) == targets.num_drawn
    whole = {c.record.call: token_digest(tree.tokens(n)) for n, c in enumerate(tree.calls)}
    assert whole == {c.record.call: c.record.digest for c in tree.calls}


@pytest.mark.parametrize("shape", SHAPES)
def test_roles_come_out_as_made(shape: Workload) -> None:
    made = make(shape)
    roles = read_execution(log_of(made).ordered(), POLICY, classifier("any")).roles
    assert tuple(r.role_class for r in roles) == made.roles
    assert tuple(r.agent for r in roles) == made.agents
    assert {r.known_by for r in roles} == {"stream"}
    assert made.roles.count("main-summary") == shape.compactions
    assert made.roles.count("sub-agent") == shape.sub_agents * shape.sub_agent_turns


def test_counts_of_a_plain_session_by_hand() -> None:
    """Three turns of 10 + 2 + 1 tokens, nothing dropped: prompts of 10, 13, 16 and one token drawn after each."""
    plain = Workload(turns=3, context_tokens=10, turn_tokens=2, output_tokens=1, task_tokens=4)
    assert counts(plain) == Counts(3, 10 + 13 + 16 + 3, 17, 3)
    assert counts(replace(plain, compactions=1)) == Counts(4, (10 + 1) + (13 + 4 + 1) + (7 + 1) + (10 + 1), 11 + 7 + 2 + 3, 4)


def test_every_call_keeps_as_much_as_it_can() -> None:
    """A delta never repeats what its tree has: all that is recorded is unique, and ids stay in range."""
    made = make(SHAPES[-1])
    assert sum(len(r.prompt_delta) + len(r.output_ids) for r in made.records) == counts(SHAPES[-1]).unique
    ids = np.concatenate([np.concatenate((r.prompt_delta, r.output_ids)) for r in made.records])
    assert ids.min() >= 0
    assert ids.max() < NUM_IDS


def test_the_same_seed_makes_the_same_and_another_does_not() -> None:
    one, same, other = make(SMALL), make(SMALL), make(replace(SMALL, seed=1))
    assert [r.digest for r in one.records] == [r.digest for r in same.records]
    assert one.records[-1].digest == "00dc87ae15dc152f66ffd4dba4ab773d"
    assert one.records[-1].digest != other.records[-1].digest
    assert np.array_equal(one.records[3].logprobs, same.records[3].logprobs)
    assert float(one.records[3].logprobs.max()) <= 0


def test_sub_agents_of_one_turn_take_turns() -> None:
    made = make(replace(SMALL, turns=1, sub_agents=2, sub_agent_turns=3))
    assert made.agents == ("main", "sub-1", "sub-2", "sub-1", "sub-2", "sub-1", "sub-2")


@pytest.mark.parametrize(("field", "value"), [
    ("turns", 0), ("turn_tokens", 0), ("strip_thinking", 5), ("compactions", 9), ("retries", 10), ("task_tokens", 41),
    ("seed", -1), ("turns", 30_000),
])
def test_numbers_that_make_no_session_are_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=field):
        replace(SMALL, **{field: value})


def test_a_thousand_calls_with_a_long_context() -> None:
    """Prompts of up to 700k tokens: 300 M tokens written out, of which well under a million are stored."""
    shape = Workload(turns=1000, context_tokens=8000, turn_tokens=492, output_tokens=200)
    made = make(shape)
    assert (len(made.records), made.records[-1].prompt_len) == (1000, 8000 + 999 * 692)
    assert sum(len(r.prompt_delta) + len(r.output_ids) for r in made.records) == counts(shape).unique == 699_508
