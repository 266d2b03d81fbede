"""A lost ledger is rebuilt: whatever was sealed stays sealed, every group is trained once in the surviving lineage."""

import pytest
from fakes import FakeLedger, assign, burst, completed, to_train
from gyre.contracts.codec import pack
from gyre.contracts.errors import CheckpointError
from gyre.contracts.events import (
    BacklogReported,
    BlobRef,
    CellTrainJoined,
    CellTrainReleased,
    GroupCompleted,
    MicroStepRef,
    StepSealed,
)
from gyre.trainer.core import (
    CheckpointWritten,
    DevicesReleased,
    DevicesTaken,
    StepTrained,
    TrainerCore,
    TrainerState,
    WorkerStarted,
)
from gyre.trainer.recovery import rebuild
from gyre.trainer.step import MembershipRules
from hypothesis import given, settings
from hypothesis import strategies as st

CORE = TrainerCore(0, MembershipRules(groups_per_step=2, staleness_limit=100))


def ref(name: str) -> MicroStepRef:
    return MicroStepRef(name, "d", 1.0, 1, 1, 1, BlobRef(name, "d", 1))


def group(name: str, version: int = 0) -> GroupCompleted:
    return completed(name, (ref(f"{name}-m0"),), version=version)


def trained(state: TrainerState) -> StepTrained:
    return StepTrained(state.position, state.attempt, True, 10, 100, 0.5, 1.0, 1e-3)


def written(version: int) -> CheckpointWritten:
    return CheckpointWritten(version, f"sum{version}", f"dir{version}", "t", version)


def rebuilt(said: list, groups: list[GroupCompleted], copy: bytes = b"", version: int = 0) -> FakeLedger:
    """A process with an empty store, a checkpoint's copy of the ledger, and everything to hear again."""
    state = CORE.restore(copy) if copy else CORE.initial()
    again = FakeLedger(CORE, rebuild(state, 0, said, {g.group: g for g in groups}))
    again.published = list(said)
    again.hear(burst(0, 0, 1_000), *groups, WorkerStarted(version))
    return again


def test_sealed_steps_keep_their_members_although_others_would_be_chosen_now() -> None:
    """`old` arrives after the step of two newer groups was sealed; read from the start, it would come first."""
    groups = [group("a", 1), group("b", 1), group("old", 0), group("c", 1)]
    run = FakeLedger(CORE)
    run.hear(WorkerStarted(0), written(0), burst(0, 0, 1_000), *groups)
    again = rebuilt(run.published, groups)
    assert [g.group for g in again.state.plan.groups] == ["a", "b"]
    again.hear(trained(again.state))
    assert [s.groups for s in again.said(StepSealed)] == [("a", "b"), ("old", "c")]


def test_a_step_that_was_begun_is_begun_again_as_another_attempt() -> None:
    groups = [group(g) for g in "abcd"]
    run = FakeLedger(CORE)
    run.hear(WorkerStarted(0), written(0), burst(0, 0, 1_000), *groups)
    run.hear(trained(run.state))
    again = rebuilt(run.published, groups)
    assert (again.state.position, again.state.attempt) == (0, 2)
    assert (again.state.published, again.state.checksum) == (0, "sum0")
    assert not again.state.owes_checkpoint, "version 0 was published"


def test_what_the_checkpoint_holds_is_not_trained_again_even_if_nobody_was_told() -> None:
    """The outbox is lost with the store: neither the sealed step nor its end nor the weights were published."""
    groups = [group(g) for g in "abcd"]
    run = FakeLedger(CORE)
    run.hear(WorkerStarted(0), written(0), burst(0, 0, 1_000))
    said = list(run.published)
    run.hear(groups[0], groups[1])
    run.hear(trained(run.state))
    copy = pack(run.state)
    again = rebuilt(said, groups, copy, version=1)
    assert again.state.position == 1
    assert [g.group for g in again.state.plan.groups] == ["c", "d"]
    assert again.state.published == 0


def test_epochs_and_the_backlogs_number_go_on_where_they_were() -> None:
    run = FakeLedger(CORE)
    run.hear(WorkerStarted(0), written(0), *to_train(0, 3), DevicesTaken(3, 0, 0))
    run.hear(assign(0, 4, "rollout"), DevicesReleased(4, 0))
    run.hear(*(group(g) for g in "abc"))
    serial = run.said(BacklogReported)[-1].serial
    again = rebuilt(run.published, [group(g) for g in "abc"])
    again.hear(*to_train(0, 3))
    assert not again.state.cell.should_hold, "it let go at epoch 4 and is about to read why"
    again.hear(assign(0, 4, "rollout"))
    assert not again.state.cell.owes_release and not again.state.cell.should_hold
    assert (len(again.said(CellTrainJoined)), len(again.said(CellTrainReleased))) == (1, 1)
    assert all(b.serial > serial for b in again.said(BacklogReported)[len(run.said(BacklogReported)) :])


def test_a_satellite_takes_its_own_epochs_and_no_steps() -> None:
    said = [CellTrainJoined(0, 7, 0, 0), CellTrainJoined(2, 5, 0, 0), StepSealed(0, ("a",), (), 1), CellTrainReleased(2, 6, 0)]
    state = rebuild(TrainerState(), 2, said, {})
    assert (state.cell.joined, state.cell.released, state.membership.known) == (5, 6, set())


def test_a_sealed_group_that_is_gone_from_the_stream_is_said() -> None:
    with pytest.raises(CheckpointError, match="step 0 was sealed with group b"):
        rebuild(TrainerState(), 0, [StepSealed(0, ("a", "b"), (), 1)], {"a": group("a")})


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_whatever_is_lost_whenever_every_group_trains_once(data: st.DataObject) -> None:
    """Random arrivals, updates and checkpoints; the store is lost at any time, with what had not left its outbox."""
    run, copy, durable, num_told = FakeLedger(CORE), b"", 0, 0
    run.hear(WorkerStarted(0), written(0), burst(0, 0, 1_000))
    groups: list[GroupCompleted] = []
    lineage: dict[int, tuple[str, ...]] = {}
    heard: dict[int, tuple[str, ...]] = {}
    for _ in range(data.draw(st.integers(5, 60))):
        action = data.draw(st.sampled_from(["group", "group", "group", "train", "train", "checkpoint", "lose"]))
        if action == "group":
            groups.append(group(f"g{len(groups)}", data.draw(st.integers(0, 3))))
            run.hear(groups[-1])
        elif action == "train" and run.state.plan.sealed:
            lineage[run.state.position] = tuple(g.group for g in run.state.plan.groups)
            run.hear(trained(run.state))
        elif action == "checkpoint":
            durable, copy = run.state.position, pack(run.state)
            run.hear(written(durable))
        elif action == "lose":
            # What the streams had at an earlier loss they still have.
            num_told = kept = data.draw(st.integers(max(num_told, len(run.published) - 3), len(run.published)))
            said = run.published[:kept]
            heard |= {s.step: s.groups for s in said if isinstance(s, StepSealed)}
            run = rebuilt(said, groups, copy, durable)
            lineage = {s: g for s, g in lineage.items() if s < durable}
    while run.state.plan.sealed:
        lineage[run.state.position] = tuple(g.group for g in run.state.plan.groups)
        run.hear(trained(run.state))
    for step, names in heard.items():
        assert step not in lineage or lineage[step] == names
    once = [name for step in sorted(lineage) for name in lineage[step]]
    assert len(once) == len(set(once))
    assert len(groups) - len(once) < 2, "at most the open step's first group waits"
