"""The ledger as stories, and its invariants under Hypothesis."""

from fakes import FakeLedger, assign, burst, completed, to_train
from gyre.contracts.events import (
    BacklogReported,
    BlobRef,
    CellRolloutReleased,
    CellTrainJoined,
    CellTrainReleased,
    MicroStepRef,
    StepFinished,
    StepSealed,
    WeightsPublished,
)
from gyre.runtime.effects import Publish
from gyre.trainer.core import (
    AttemptFailed,
    CheckpointWritten,
    DevicesReleased,
    DevicesTaken,
    StepTrained,
    TrainerCore,
    WorkerStarted,
)
from gyre.trainer.step import MembershipRules
from hypothesis import given, settings
from hypothesis import strategies as st


def ledger(groups_per_step: int = 2, staleness_limit: int = 1, cell: int = 0) -> FakeLedger:
    made = FakeLedger(TrainerCore(cell, MembershipRules(groups_per_step, staleness_limit)))
    made.hear(WorkerStarted(0), written(0), burst(0, 0, 2))
    return made


def ref(name: str, cost: float = 1.0) -> MicroStepRef:
    return MicroStepRef(name, "d", cost, 1, 1, 1, BlobRef(name, "d", 1))


def trained(step: int, attempt: int = 0) -> StepTrained:
    return StepTrained(step, attempt, True, 10, 100, 0.5, 1.0, 1e-3)


def written(version: int, oldest: int | None = None) -> CheckpointWritten:
    return CheckpointWritten(version, f"sum{version}", f"dir{version}", "t", version if oldest is None else oldest)


def test_the_bth_group_seals_the_step_with_the_sum_of_what_was_scored() -> None:
    run = ledger()
    run.hear(completed("a", (ref("a-m0"), ref("a-m1")), num_scored=3))
    assert run.said(StepSealed) == []
    run.hear(completed("b", (), num_scored=4))
    assert run.said(StepSealed) == [StepSealed(0, ("a", "b"), ("a-m0", "a-m1"), 7)]


def test_the_oldest_dispatch_version_joins_first() -> None:
    run = ledger(groups_per_step=2, staleness_limit=5)
    run.hear(*(completed(g, version=v) for g, v in [("a", 0), ("b", 0), ("new", 1), ("old", 0), ("newer", 2)]))
    run.hear(trained(0))
    assert run.said(StepSealed)[1].groups == ("old", "new")
    assert [g.group for g in run.state.membership.waiting] == ["newer"]


def test_a_group_that_is_too_old_counts_towards_b_and_votes_nowhere() -> None:
    run = ledger(groups_per_step=2, staleness_limit=0)
    run.hear(completed("a"), completed("b"), completed("old", (ref("old-m0"),)), completed("new", version=1))
    run.hear(trained(0))
    sealed = run.said(StepSealed)[1]
    assert (sealed.groups, sealed.stale_groups) == (("new", "old"), ("old",))
    assert (sealed.micro_steps, sealed.num_scored) == ((), 4)


def test_a_group_said_twice_and_one_for_evaluation_change_nothing() -> None:
    run = ledger()
    run.hear(completed("a"), completed("a"), completed("e", purpose="eval"))
    assert run.said(StepSealed) == []
    assert run.state.plan.num_members == 1


def test_a_finished_step_opens_the_next_one_for_those_who_wait() -> None:
    run = ledger()
    run.hear(*(completed(g) for g in "abcd"), trained(0))
    assert [s.step for s in run.said(StepSealed)] == [0, 1]
    (finished,) = run.said(StepFinished)
    assert (finished.step, finished.version, finished.num_scored, len(finished.executions)) == (0, 1, 8, 8)


def test_the_burst_ends_with_a_checkpoint_before_anything_more_is_trained() -> None:
    run = ledger()
    run.hear(*(completed(g) for g in "abcd"), trained(0))
    assert not run.state.owes_checkpoint
    run.hear(trained(1))
    assert run.state.owes_checkpoint and run.state.at_burst_end
    run.hear(written(2))
    assert run.said(WeightsPublished)[1:] == [WeightsPublished(2, "sum2", 0, "dir2", "t")]
    assert not run.state.owes_checkpoint and run.state.at_burst_end
    run.hear(burst(1, 2, 2))
    assert not run.state.at_burst_end


def test_the_version_a_run_starts_from_is_published_before_anything_is_trained() -> None:
    run = FakeLedger(TrainerCore(0, MembershipRules(2, 1)))
    run.hear(burst(0, 0, 2))
    assert not run.state.owes_checkpoint, "before the process has said what it holds"
    run.hear(WorkerStarted(0))
    assert run.state.owes_checkpoint
    run.hear(written(0))
    assert not run.state.owes_checkpoint


def test_after_a_crash_undurable_steps_are_trained_again_with_the_same_members_as_a_new_attempt() -> None:
    run = ledger()
    run.hear(*(completed(g, (ref(f"{g}-m0"),)) for g in "abcdef"), trained(0))
    again = run.crash()
    again.hear(WorkerStarted(0))
    assert (again.state.position, again.state.attempt) == (0, 1)
    assert [g.group for g in again.state.plan.groups] == ["a", "b"]
    again.hear(trained(0, attempt=0))
    assert again.state.position == 0, "an update of the lost attempt counts for nothing"
    again.hear(trained(0, attempt=1))
    assert (again.state.position, again.state.attempt) == (1, 1)
    assert [g.group for g in again.state.plan.groups] == ["c", "d"]
    assert again.said(StepSealed) == []


def test_after_a_crash_past_a_checkpoint_nothing_durable_is_trained_again() -> None:
    run = ledger()
    run.hear(*(completed(g) for g in "abcd"), trained(0), trained(1), written(2))
    again = run.crash()
    again.hear(WorkerStarted(2))
    assert again.state.position == 2
    assert not again.state.owes_checkpoint
    assert list(again.state.membership.plans) == [2]


def test_a_crash_between_the_checkpoint_and_its_fact_publishes_after_the_restart() -> None:
    run = ledger()
    run.hear(*(completed(g) for g in "abcd"), trained(0), trained(1))
    again = run.crash()
    again.hear(WorkerStarted(2))
    assert again.state.owes_checkpoint


def test_after_a_restart_sealed_membership_is_said_again_for_a_ledger_whose_outbox_was_lost() -> None:
    run = ledger()
    run.hear(completed("a"), completed("b"))
    core = TrainerCore(0, MembershipRules(2, 1))
    rebuilt = core.restore(core.snapshot(run.state))
    said = [effect.fact for effect in core.resume(rebuilt, 0.0) if isinstance(effect, Publish)]
    assert said == run.said(StepSealed)


def test_a_failed_attempt_begins_the_step_again() -> None:
    run = ledger()
    run.hear(AttemptFailed(0, 0), AttemptFailed(0, 0))
    assert run.state.attempt == 1


def test_the_cell_takes_its_devices_only_when_the_engine_let_go() -> None:
    run = ledger()
    run.hear(assign(0, 3))
    assert not run.state.cell.should_hold
    run.hear(CellRolloutReleased(0, 2))
    assert not run.state.cell.should_hold
    run.hear(CellRolloutReleased(0, 3))
    assert run.state.cell.should_hold
    run.hear(DevicesTaken(3, 0, 0), assign(0, 4, "rollout"))
    assert run.said(CellTrainJoined) == [CellTrainJoined(0, 3, 0, 0)]
    assert run.state.cell.owes_release and not run.state.cell.should_hold
    run.hear(DevicesReleased(4, 1))
    assert run.said(CellTrainReleased) == [CellTrainReleased(0, 4, 1)]
    assert not run.state.cell.owes_release


def test_a_stale_epoch_and_another_cells_role_are_ignored() -> None:
    run = ledger()
    run.hear(*to_train(0, 5), assign(0, 4, "rollout"), assign(1, 9, "rollout"))
    assert run.state.cell.should_hold


def test_the_backlog_is_said_when_it_changes_and_not_otherwise() -> None:
    run = ledger()
    run.hear(*(completed(g, (ref(f"{g}-m0", 2.0),)) for g in "abc"))
    assert [(b.num_groups_waiting, b.unclaimed_cost) for b in run.said(BacklogReported)] == [(0, 0.0), (1, 2.0)]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_crashes_every_group_trains_once_in_the_surviving_lineage(data: st.DataObject) -> None:
    """Random arrivals, trained steps, checkpoints and crashes: each plan is final once sealed, each group in one."""
    rules = MembershipRules(groups_per_step=2, staleness_limit=100)
    run = FakeLedger(TrainerCore(0, rules))
    run.hear(WorkerStarted(0), burst(0, 0, 1_000))
    durable, num_groups = 0, 0
    lineage: dict[int, tuple[str, ...]] = {}
    sealed: dict[int, tuple[str, ...]] = {}
    for _ in range(data.draw(st.integers(5, 60))):
        action = data.draw(st.sampled_from(["group", "group", "group", "train", "train", "checkpoint", "crash"]))
        if action == "group":
            run.hear(completed(f"g{num_groups}", (ref(f"g{num_groups}-m0"),)))
            num_groups += 1
        elif action == "train" and run.state.plan.sealed:
            step = run.state.position
            lineage[step] = tuple(g.group for g in run.state.plan.groups)
            run.hear(trained(step, run.state.attempt))
            assert run.state.position == step + 1
        elif action == "checkpoint":
            durable = run.state.position
            run.hear(written(durable))
        elif action == "crash":
            published = run.published
            run = run.crash()
            run.published = published
            run.hear(WorkerStarted(durable))
            lineage = {s: g for s, g in lineage.items() if s < durable}
        for fact in run.said(StepSealed):
            assert sealed.setdefault(fact.step, fact.groups) == fact.groups
    assert [s.step for s in run.said(StepSealed)] == sorted(sealed)
    trained_groups = [g for step in sorted(lineage) for g in lineage[step]]
    assert len(trained_groups) == len(set(trained_groups))
    members = [g for groups in sealed.values() for g in groups]
    assert len(members) == len(set(members))
    for step, groups in lineage.items():
        assert sealed[step] == groups
