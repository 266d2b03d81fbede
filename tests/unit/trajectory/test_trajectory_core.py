"""Stories of groups: facts in any interleaving, twice and late; one `group.completed` each."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from gyre.contracts import codec
from gyre.contracts.events import ExecutionUnscorable, GroupCompleted, Outcome, RoleCounts
from gyre.contracts.microstep import micro_step_from_bytes
from gyre.runtime.effects import KeepingCore, Publish, Tick, WriteBlob
from gyre.trajectory.config import TrajectoryConfig
from gyre.trajectory.core import TrajectoryCore
from gyre.trajectory.inspection import tree_from_bytes, tree_path
from gyre.trajectory.packing import Budget
from gyre.trajectory.state import State

Settings = Callable[..., TrajectoryConfig]


def scripts(script: Any, num: int = 3) -> list[Any]:
    """Executions of one query that differ in their first output token."""
    return [script(execution=f"g00000-000-x{n:02d}").call([1, 2, 3], [10 + n, 5]).call([1, 2, 3, 10 + n, 5, 6], [7, 8])
            for n in range(num)]


def tell(core: TrajectoryCore, state: State, facts: Iterable[Any], now: float = 0.0) -> tuple[State, list[Any]]:
    effects: list[Any] = []
    for fact in facts:
        state, more = core.step(state, fact, now)
        effects += more
    return state, effects


def run(settings: Settings, facts: Iterable[Any], **fields: Any) -> tuple[State, list[Any]]:
    core = TrajectoryCore(settings(**fields))
    return tell(core, core.initial(), facts)


def published(effects: Sequence[Any]) -> list[GroupCompleted]:
    return [e.fact for e in effects if isinstance(e, Publish)]


class Snapshots:
    """What the runtime does with a core that keeps large parts beside its snapshot."""

    def __init__(self, core: TrajectoryCore) -> None:
        self.core = core
        self.kept: dict[str, bytes] = {}
        self.snapshot = b""

    def save(self, state: State) -> None:
        assert isinstance(self.core, KeepingCore)
        kept = self.core.take_kept(state)
        self.kept |= dict(kept.rows)
        self.kept = {name: data for name, data in self.kept.items() if not name.startswith(kept.dropped)}
        self.snapshot = self.core.snapshot(state)

    def restored(self) -> State:
        state = self.core.restore(self.snapshot)
        for name, data in self.kept.items():
            self.core.recall(state, name, data)
        return state


def only(effects: Sequence[Any]) -> GroupCompleted:
    (fact,) = published(effects)
    return fact


def told(settings: Settings, one: Any, **fields: Any) -> GroupCompleted:
    return only(run(settings, one.facts(), **fields)[1])


def test_a_group_completes_when_its_last_execution_is_scored(script: Any, story: Any, settings: Settings) -> None:
    one = story(scripts(script), [1.0, 0.0, 0.0])
    state, effects = run(settings, one.facts()[:-1])
    assert effects == []
    core = TrajectoryCore(settings())
    state, effects = core.step(state, one.facts()[-1], 0.0)
    fact = only(effects)
    assert (fact.group, fact.burst, fact.query, fact.purpose, fact.version, fact.label) == (
        "g00000-000", 0, "q0", "train", 3, "label")
    assert (fact.num_scored, fact.reward_mean) == (3, pytest.approx(1 / 3))
    assert [o.kind for o in fact.outcomes] == ["scored"] * 3
    assert [o.advantage for o in fact.outcomes] == pytest.approx([1.154699, -0.577349, -0.577349], abs=1e-6)
    assert fact.outcomes[0] == Outcome("g00000-000-x00", "scored", "finished", 1.0, fact.outcomes[0].advantage, 2, 4, 4,
                                       {}, 8, 13, 4, "", {"main": RoleCounts(2, 4, 1, 4)})
    assert (state.groups, list(state.completed)) == ({}, ["g00000-000"])


def test_blobs_come_before_the_fact_that_names_them(script: Any, story: Any, settings: Settings) -> None:
    one = story(scripts(script), [1.0, 0.0, 0.0])
    _, effects = run(settings, one.facts())
    assert [type(e) for e in effects] == [WriteBlob] * (len(effects) - 1) + [Publish]
    blobs = {e.path: e.data for e in effects if isinstance(e, WriteBlob)}
    fact = only(effects)
    for ref in fact.micro_steps:
        step = micro_step_from_bytes(blobs[ref.blob.path], ref.digest)
        assert (step.num_tokens, step.num_targets, len(step.executions)) == (
            ref.num_tokens, ref.num_targets, ref.num_executions)
        assert ref.cost == pytest.approx(step.num_tokens + 0.001 * step.num_pairs)
        assert len(blobs[ref.blob.path]) == ref.blob.size
    assert sum(ref.num_targets for ref in fact.micro_steps) == 12
    for script_ in one.scripts:
        file = tree_from_bytes(blobs[tree_path(script_.execution)])
        assert file.header.outcome in fact.outcomes


def test_any_interleaving_with_duplicates_says_the_same_once(script: Any, story: Any, settings: Settings) -> None:
    one = story(scripts(script), [1.0, 0.0, 0.5])
    expected = run(settings, one.facts())[1]
    for seed in range(60):
        rng = random.Random(seed)
        facts = one.facts() + rng.choices(one.facts(), k=8)
        rng.shuffle(facts)
        state, effects = run(settings, [*facts, *one.facts()])
        assert [codec.pack(e) for e in effects] == [codec.pack(e) for e in expected]
        assert state.groups == {}


def test_a_crash_anywhere_and_a_replay_say_the_same(script: Any, story: Any, settings: Settings) -> None:
    """Snapshot at one point, journal from there to another, then go on: identical effects at the same facts."""
    one, core = story(scripts(script), [1.0, 0.0, 0.5]), TrajectoryCore(settings())
    facts = one.facts()
    random.Random(1).shuffle(facts)
    state, expected = core.initial(), []
    for fact in facts:
        state, effects = core.step(state, fact, 0.0)
        expected.append(effects)
    for crash in range(len(facts) + 1):
        for saved in range(0, crash + 1, 3):
            first = saved // 2
            state, store = core.initial(), Snapshots(core)
            state, _ = tell(core, state, facts[:first])
            store.save(state)
            state, _ = tell(core, state, facts[first:saved])
            store.save(state)
            tell(core, state, facts[saved:crash])  # what the crash takes away
            state, _ = tell(core, store.restored(), facts[saved:crash])
            assert core.resume(state, 0.0) == []
            for fact, effects in zip(facts[crash:], expected[crash:], strict=True):
                state, again = core.step(state, fact, 0.0)
                assert [codec.pack(e) for e in again] == [codec.pack(e) for e in effects]
            assert list(state.completed) == ["g00000-000"]
            store.save(state)
            assert store.kept == {}, "a completed group leaves nothing behind"


def test_a_score_before_the_last_record_waits_for_it(script: Any, story: Any, settings: Settings) -> None:
    one = story(scripts(script, 2), [1.0, 0.0])
    late = one.scripts[1].records[-1]
    state, effects = run(settings, [f for f in one.facts() if f is not late])
    assert effects == []
    assert state.groups["g00000-000"].num_settled == 1
    _, effects = TrajectoryCore(settings()).step(state, late, 0.0)
    assert only(effects).outcomes[1].num_targets == 4


def test_equal_rewards_complete_with_nothing_to_train(script: Any, story: Any, settings: Settings) -> None:
    """They count in m_g and make no micro-step; with a KL or entropy term they do."""
    one = story(scripts(script), [0.7] * 3)
    fact = told(settings, one)
    assert (fact.micro_steps, fact.num_scored) == ((), 3)
    assert [o.drops for o in fact.outcomes] == [{"zero_advantage": 4}] * 3
    assert [o.num_trained_targets for o in fact.outcomes] == [0] * 3
    kept = told(settings, one, keep_zero_advantage=True)
    assert sum(r.num_targets for r in kept.micro_steps) == 12


def test_an_evaluation_group_has_outcomes_and_no_micro_steps(script: Any, story: Any, settings: Settings) -> None:
    one = story(scripts(script, 2), [1.0, 0.0], purpose="eval")
    state, effects = run(settings, one.facts())
    fact = only(effects)
    assert (fact.purpose, fact.micro_steps, fact.reward_mean) == ("eval", (), 0.5)
    assert [(o.reward, o.advantage) for o in fact.outcomes] == [(1.0, 0.0), (0.0, 0.0)]
    assert [o.drops for o in fact.outcomes] == [{"eval": 4}] * 2
    assert sum(isinstance(e, WriteBlob) for e in effects) == 2


def test_each_kind_of_outcome_counts_as_it_should(script: Any, story: Any, settings: Settings) -> None:
    one = story(scripts(script, 6), [1.0, 0.0, 0.0, 0.9, 0.9, 0.9])
    one.verdicts[2] = replace(one.verdicts[2], placeholder=True)
    one.verdicts[3] = ExecutionUnscorable(one.scripts[3].execution, one.group, "verifier died", "evaluator-0")
    one.ends[4] = one.end(one.scripts[4], ending="dropped", limit="overall_timeout_s")
    one.scripts[5].records[1] = replace(one.scripts[5].records[1], digest="0" * 32)
    fact = told(settings, one)
    assert [o.kind for o in fact.outcomes] == ["scored", "scored", "placeholder", "unscorable", "dropped", "unscorable"]
    assert [o.advantage for o in fact.outcomes] == pytest.approx([1.154699, -0.577349, 0, 0, 0, 0], abs=1e-6)
    assert (fact.num_scored, fact.reward_mean) == (2, pytest.approx(1 / 3))
    assert [o.reason.split(":")[0] for o in fact.outcomes[2:]] == [
        "nothing gradable", "verifier died", "overall_timeout_s", "digest"]
    assert [o.drops for o in fact.outcomes[2:]] == [
        {"placeholder": 4}, {"unscorable": 4}, {"dropped": 4}, {"unscorable": 2}]
    assert [ref.num_executions for ref in fact.micro_steps] == [2]


def test_a_dropped_execution_waits_for_nothing(script: Any, story: Any, settings: Settings) -> None:
    one = story(scripts(script, 1), [1.0])
    state, effects = run(settings, [one.dispatched, one.end(one.scripts[0], ending="dropped", num_calls=9)])
    fact = only(effects)
    assert (fact.outcomes[0].kind, fact.num_scored, fact.micro_steps, fact.reward_mean) == ("dropped", 0, (), 0.0)


def test_a_workspace_that_was_not_preserved_is_a_placeholder(script: Any, story: Any, settings: Settings) -> None:
    one = story(scripts(script, 1), [1.0])
    state, effects = run(settings, [one.dispatched, *one.scripts[0].records, one.end(one.scripts[0], snapshot=None)])
    assert only(effects).outcomes[0].kind == "placeholder"


def test_an_execution_without_calls_is_scored_and_trains_nothing(script: Any, story: Any, settings: Settings) -> None:
    one = story([script(execution="g00000-000-x00"), *scripts(script, 2)[1:]], [1.0, 0.0])
    fact = told(settings, one)
    assert [(o.kind, o.num_trained_targets) for o in fact.outcomes] == [("scored", 0), ("scored", 4)]
    assert fact.num_scored == 2


def test_a_timeout_keeps_what_was_sampled(script: Any, story: Any, settings: Settings) -> None:
    """C26: reward 0.5 for 2 of 4 checks, finish reason timeout, every seen output trainable."""
    one = story(scripts(script, 2), [0.5, 1.0])
    one.ends[0] = one.end(one.scripts[0], ending="timed_out", limit="timeout_s")
    outcome = told(settings, one).outcomes[0]
    assert (outcome.kind, outcome.ending, outcome.num_trained_targets) == ("scored", "timed_out", 4)


def test_records_that_never_come_end_the_wait(script: Any, story: Any, settings: Settings) -> None:
    one, core = story(scripts(script, 2), [1.0, 0.0]), TrajectoryCore(settings(record_timeout_s=60.0))
    lost = one.scripts[1].records[0]
    state, effects = tell(core, core.initial(), [f for f in one.facts() if f is not lost], now=100.0)
    assert effects == []
    state, effects = core.step(state, Tick(), 160.0)
    assert effects == []
    state, effects = core.step(state, Tick(), 161.0)
    outcome = only(effects).outcomes[1]
    assert (outcome.kind, outcome.reason.split(":")[0]) == ("unscorable", "unknown-base")
    assert {name: num for name, num in state.counts.items() if name.startswith("refused")} == {"refused.unknown-base": 1}
    assert core.step(state, lost, 162.0)[1] == []


def test_a_base_that_does_not_exist_is_refused_at_once(script: Any, story: Any, settings: Settings) -> None:
    one = story(scripts(script, 1), [1.0])
    one.scripts[0].records[1] = replace(one.scripts[0].records[1], base_call="nobody")
    state, effects = run(settings, one.facts())
    assert only(effects).outcomes[0].reason.startswith("unknown-base")
    assert state.counts["refused.unknown-base"] == 1


def test_facts_of_strangers_are_counted(script: Any, story: Any, settings: Settings) -> None:
    one, stranger = story(scripts(script, 1), [1.0]), script(execution="stranger").call([1], [2]).records[0]
    state, effects = run(settings, [stranger, one.dispatched, stranger, *one.facts()[1:]])
    assert [o.execution for o in only(effects).outcomes] == ["g00000-000-x00"]
    assert state.counts["not_taken.unknown-execution"] == 2


def test_what_comes_after_the_end_is_counted_and_ignored(script: Any, story: Any, settings: Settings) -> None:
    one = story(scripts(script, 1), [1.0])
    state, effects = run(settings, [*one.facts(), *one.facts()])
    assert len(published(effects)) == 1
    assert state.counts["not_taken.late"] == len(one.facts())


def test_duplicates_are_counted(script: Any, story: Any, settings: Settings) -> None:
    one = story(scripts(script, 1), [1.0])
    facts = one.facts()
    state, effects = run(settings, [*facts[:-1], *facts[:-1]])
    assert (effects, state.counts) == ([], {"not_taken.duplicate": len(facts) - 1})


def test_groups_that_cannot_teach_are_counted_and_say_so(script: Any, story: Any, settings: Settings) -> None:
    """C19, C20: equal rewards and a group of one train nothing; the step goes on."""
    for rewards, signal in (([0.7] * 4, "zero_variance"), ([0.95], "one_vote"), ([1.0, 0.0], "compared")):
        state, effects = run(settings, story(scripts(script, len(rewards)), rewards).facts())
        fact = only(effects)
        assert (fact.signal, fact.num_scored) == (signal, len(rewards))
        assert state.counts == {f"groups.{signal}": 1, "executions.scored": len(rewards)}
        assert (fact.micro_steps == ()) == (signal != "compared")
    one = story(scripts(script, 2), [1.0, 0.0])
    one.ends = [one.end(s, ending="dropped") for s in one.scripts]
    state, effects = run(settings, one.facts())
    assert (only(effects).signal, state.counts["executions.dropped"]) == ("no_votes", 2)


def test_what_the_harness_never_got_is_not_trained_unless_asked_for(script: Any, story: Any, settings: Settings) -> None:
    """The gateway recorded the second answer of each; the connection was gone and nobody asked again."""
    one = story(scripts(script, 2), [1.0, 0.0])
    one.ends = [one.end(s, undelivered=(s.records[1].call,)) for s in one.scripts]
    outcome = told(settings, one).outcomes[0]
    assert (outcome.num_targets, outcome.num_trained_targets, outcome.not_targets) == (2, 2, {"unseen": 2})
    outcome = told(settings, one, train_unseen=True).outcomes[0]
    assert (outcome.num_targets, outcome.num_trained_targets, outcome.not_targets) == (4, 4, {})


def test_a_path_longer_than_the_budget_is_passed_on_whole_and_marked(script: Any, story: Any, settings: Settings) -> None:
    one = story([script(execution=f"g00000-000-x{n:02d}").call(range(60), [60 + n]) for n in range(2)], [1.0, 0.0])
    state, effects = run(settings, one.facts(), budget=Budget(32, 10**6))
    assert [(ref.num_tokens, ref.oversize) for ref in only(effects).micro_steps] == [(61, True), (61, True)]
    assert state.counts["oversize_micro_steps"] == 2
    fits = told(settings, one, budget=Budget(61, 10**6))
    assert [ref.oversize for ref in fits.micro_steps] == [False, False]


def test_completed_groups_are_remembered_up_to_a_bound(script: Any, story: Any, settings: Settings) -> None:
    core = TrajectoryCore(settings(num_remembered_groups=2))
    state = core.initial()
    for n in range(4):
        group = f"g00000-{n:03d}"
        calls = script(execution=f"{group}-x00", group=group).call([1], [2])
        state, effects = tell(core, state, story([calls], [1.0]).facts())
        assert only(effects).group == group
    assert list(state.completed) == ["g00000-002", "g00000-003"]


def test_a_group_of_nothing_completes_with_its_dispatch(script: Any, story: Any, settings: Settings) -> None:
    one = story(scripts(script, 1), [1.0])
    state, effects = run(settings, [replace(one.dispatched, executions=())])
    assert (only(effects).outcomes, only(effects).num_scored) == ((), 0)


def test_micro_steps_respect_the_configured_budget(script: Any, story: Any, settings: Settings) -> None:
    one = story(scripts(script, 4), [1.0, 0.0, 0.0, 1.0])
    fact = told(settings, one, budget=Budget(16, 10**6))
    assert [r.micro_step for r in fact.micro_steps] == ["g00000-000-m000", "g00000-000-m001"]
    assert [r.num_tokens for r in fact.micro_steps] == [16, 16]
