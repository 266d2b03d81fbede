"""Every dispatched execution ends exactly once, in any order of events and over any restart."""

from dataclasses import replace

import numpy as np
import pytest
from gyre.contracts import codec
from gyre.contracts import events as e
from gyre.rollout import local as lo
from gyre.rollout.core import RolloutCore, State
from gyre.rollout.execution import Execution, due_limit
from gyre.runtime.effects import Publish
from hypothesis import given
from hypothesis import strategies as st

IDS = ("g00000-000-x00", "g00000-000-x01", "g00000-000-x02")
BLOB = e.BlobRef("workspaces/x.tar", "00" * 16, 1)


def dispatched(ids: tuple[str, ...] = IDS) -> e.GroupDispatched:
    specs = tuple(e.ExecutionSpec(i, 1, 10.0, 20.0) for i in ids)
    return e.GroupDispatched("g00000-000", 0, "q", "train/q", "train", 0, specs)


def call(execution: str, index: int) -> e.CallRecorded:
    one = np.zeros(1, np.float32)
    return e.CallRecorded(execution, "g00000-000", f"{execution}-c{index:04d}", index, None, 0, 1,
                          np.ones(1, np.int32), np.ones(1, np.int32), one, one, (e.VersionSpan(0, 1, 0),), "stop", "d")


class Run:
    """A core with what it said; `crash` replays everything it was told, as the service does."""

    def __init__(self, max_running: int = 8) -> None:
        self.core = RolloutCore(max_running, 0)
        self.state = self.core.initial()
        self.told: list[tuple[object, float]] = []
        self.facts: list[object] = []
        self.effects: list[object] = []
        self.now = 0.0

    def tell(self, event: object) -> list[object]:
        self.told.append((event, self.now))
        self.state, effects = self.core.step(self.state, event, self.now)
        self.facts += [f.fact for f in effects if isinstance(f, Publish)]
        work = [f for f in effects if not isinstance(f, Publish)]
        self.effects += work
        return work

    def crash(self) -> list[object]:
        state = self.core.initial()
        for event, now in self.told:
            state, _ = self.core.step(state, event, now)
        assert state == self.state
        self.state = self.core.restore(self.core.snapshot(state))
        assert self.state == state
        return self.core.resume(self.state, self.now)

    def of(self, kind: type) -> list[object]:
        return [f for f in self.facts if isinstance(f, kind)]


def test_the_story_of_an_execution_that_finishes() -> None:
    run = Run()
    [start] = run.tell(dispatched(IDS[:1]))
    assert isinstance(start, lo.StartHarness) and not start.is_running
    run.now = 1.0
    run.tell(lo.HarnessStarted(IDS[0], 42))
    assert run.of(e.ExecutionStarted) == [e.ExecutionStarted(IDS[0], "g00000-000", "train", 0)]
    run.tell(lo.CallFinished(call(IDS[0], 0), 0.5))
    run.now = 4.0
    assert run.tell(lo.ProcessExited(IDS[0], 0)) == [lo.PreserveWorkspace(IDS[0])]
    assert run.tell(lo.WorkspacePreserved(IDS[0], BLOB)) == [lo.DiscardExecution(IDS[0])]
    [end] = run.of(e.ExecutionTerminated)
    assert (end.ending, end.num_calls, end.wall_s, end.snapshot, end.stall_s) == ("finished", 1, 3.0, BLOB, 0.5)
    [request] = run.of(e.EvaluationRequested)
    assert (request.task, request.snapshot, request.ending) == ("train/q", BLOB, "finished")
    assert not run.state.executions


def test_calls_that_the_harness_never_saw_are_named_if_they_count() -> None:
    run = Run()
    run.tell(dispatched(IDS[:2]))
    for execution in IDS[:2]:
        run.tell(lo.HarnessStarted(execution, 42))
        run.tell(lo.CallFinished(call(execution, 0)))
        run.tell(lo.CallFinished(call(execution, 1)))
    run.tell(lo.LimitFired(IDS[1], "harness_timeout"))
    run.tell(lo.CallFinished(call(IDS[1], 2)))
    run.tell(lo.ProcessExited(IDS[0], 0))
    run.tell(lo.ProcessExited(IDS[1], 143, undelivered=(f"{IDS[1]}-c0001", f"{IDS[1]}-c0002")))
    run.crash()
    for execution in IDS[:2]:
        run.tell(lo.WorkspacePreserved(execution, BLOB))
    assert [t.undelivered for t in run.of(e.ExecutionTerminated)] == [(), (f"{IDS[1]}-c0001",)]


@pytest.mark.parametrize(("limit", "ending", "is_scored"), [
    ("harness_timeout", "timed_out", True), ("calls", "timed_out", True), ("overall_timeout", "dropped", False)])
def test_a_limit_kills_names_itself_and_decides_whether_the_rest_is_scored(limit: str, ending: str,
                                                                           is_scored: bool) -> None:
    run = Run()
    run.tell(dispatched(IDS[:1]))
    run.tell(lo.HarnessStarted(IDS[0], 42))
    assert run.tell(lo.LimitFired(IDS[0], limit)) == [lo.KillHarness(IDS[0])]
    assert run.tell(lo.LimitFired(IDS[0], "overall_timeout")) == [], "the limit that fired first is the one named"
    run.tell(lo.CallFinished(call(IDS[0], 0)))
    assert not run.of(e.CallRecorded), "an execution that is being killed takes no call"
    run.tell(lo.ProcessExited(IDS[0], 143))
    run.tell(lo.WorkspacePreserved(IDS[0], BLOB))
    [end] = run.of(e.ExecutionTerminated)
    assert (end.ending, end.limit, end.exit_code) == (ending, limit, 143)
    assert bool(run.of(e.EvaluationRequested)) == is_scored


def test_a_harness_that_fails_is_scored_and_one_that_cannot_start_is_dropped() -> None:
    run = Run()
    run.tell(dispatched(IDS[:2]))
    run.tell(lo.HarnessStarted(IDS[0], 42))
    run.tell(lo.ProcessExited(IDS[0], 1))
    run.tell(lo.WorkspacePreserved(IDS[0], BLOB))
    [again] = run.tell(lo.HarnessNotStarted(IDS[1], "no such task"))
    assert isinstance(again, lo.StartHarness)
    run.tell(lo.HarnessNotStarted(IDS[1], "no such task"))
    assert [(t.ending, t.reason) for t in run.of(e.ExecutionTerminated)] == [
        ("failed", ""), ("dropped", "not started: no such task")]
    assert len(run.of(e.EvaluationRequested)) == 1


def test_a_workspace_that_cannot_be_preserved_drops_the_execution() -> None:
    run = Run()
    run.tell(dispatched(IDS[:1]))
    run.tell(lo.HarnessStarted(IDS[0], 42))
    run.tell(lo.ProcessExited(IDS[0], 0))
    run.tell(lo.WorkspacePreserved(IDS[0], None, "blob store full"))
    [end] = run.of(e.ExecutionTerminated)
    assert (end.ending, end.reason) == ("dropped", "workspace not preserved: blob store full")
    assert not run.of(e.EvaluationRequested)


def test_no_more_run_at_once_than_may_and_the_rest_follows() -> None:
    run = Run(max_running=2)
    assert len(run.tell(dispatched())) == 2
    run.tell(lo.HarnessStarted(IDS[0], 42))
    run.tell(lo.ProcessExited(IDS[0], 0))
    work = run.tell(lo.WorkspacePreserved(IDS[0], BLOB))
    assert [w.execution for w in work if isinstance(w, lo.StartHarness)] == [IDS[2]]


def test_a_restart_adopts_what_runs_and_takes_up_what_was_under_way() -> None:
    run = Run(max_running=3)
    run.tell(dispatched())
    run.tell(lo.HarnessStarted(IDS[0], 42))
    run.tell(lo.HarnessStarted(IDS[1], 43))
    run.tell(lo.LimitFired(IDS[1], "calls"))
    work = run.crash()
    starts = {w.execution: w.is_running for w in work if isinstance(w, lo.StartHarness)}
    assert starts == {IDS[0]: True, IDS[2]: False}
    assert lo.KillHarness(IDS[1]) in work
    run.tell(lo.ProcessExited(IDS[1], 143))
    assert lo.PreserveWorkspace(IDS[1]) in run.crash()


def test_stalls_are_given_back_to_the_harness_but_not_to_the_overall_timeout() -> None:
    running = Execution(e.ExecutionSpec("x", 1, 10.0, 20.0), "g", "q", "t", "train", 0, "running", 1.0, 2.0)
    assert due_limit(running, 11.9, 0.0) is None
    assert due_limit(running, 12.0, 0.0) == "harness_timeout"
    assert due_limit(replace(running, stall_s=4.0), 17.9, 2.0) is None
    assert due_limit(replace(running, stall_s=4.0), 18.0, 2.0) == "harness_timeout"
    assert due_limit(running, 21.0, 60.0) == "overall_timeout"


def test_the_time_this_service_was_away_is_a_stall() -> None:
    run = Run()
    run.now = 5.0
    run.tell(dispatched(IDS[:1]))
    run.tell(lo.HarnessStarted(IDS[0], 42))
    run.now = 35.0
    work = run.crash()
    assert work[-1] == lo.OpenGateway(30.0, (IDS[0],), may_sweep=True)
    run.tell(lo.ServiceWasAway(30.0))
    assert run.state.executions[IDS[0]].stall_s == 30.0


ID = st.sampled_from(IDS)
EVENTS = st.one_of(
    st.just(dispatched()), st.builds(lo.HarnessStarted, ID, st.just(1)),
    st.builds(lo.HarnessNotStarted, ID, st.just("r")),
    st.builds(lambda i, n: lo.CallFinished(call(i, n)), ID, st.integers(0, 3)),
    st.builds(lo.LimitFired, ID, st.sampled_from(("harness_timeout", "overall_timeout", "calls"))),
    st.builds(lo.ProcessExited, ID, st.sampled_from((0, 1, None))),
    st.builds(lo.WorkspacePreserved, ID, st.sampled_from((BLOB, None))),
)


@given(st.lists(EVENTS, max_size=40), st.integers(1, 3))
def test_any_order_of_events_ends_each_execution_once(events: list[object], max_running: int) -> None:
    run = Run(max_running)
    for number, event in enumerate([dispatched(), *events]):
        run.now = float(number)
        run.tell(codec.unpack(codec.pack(event), type(event)))
        if number % 7 == 0:
            run.crash()
    for _ in range(len(IDS)):
        for execution in IDS:
            run.tell(lo.HarnessStarted(execution, 1))
            run.tell(lo.ProcessExited(execution, 0))
            run.tell(lo.WorkspacePreserved(execution, BLOB))
    ended = [t.execution for t in run.of(e.ExecutionTerminated)]
    assert sorted(ended) == sorted(IDS)
    assert isinstance(run.state, State) and not run.state.executions
    for end in run.of(e.ExecutionTerminated):
        recorded = [c.index for c in run.of(e.CallRecorded) if c.execution == end.execution]
        assert recorded == list(range(end.num_calls))
        asked = [r for r in run.of(e.EvaluationRequested) if r.execution == end.execution]
        assert len(asked) == (end.ending != "dropped")


def test_contexts_are_said_when_they_changed_and_the_longest_at_the_end() -> None:
    run = Run()
    run.tell(dispatched(IDS[:2]))
    run.tell(lo.ContextsDue())
    for execution in IDS[:2]:
        run.tell(lo.HarnessStarted(execution, 42))
    run.tell(lo.CallFinished(call(IDS[0], 0)))
    run.tell(lo.ContextsDue())
    run.tell(lo.ContextsDue())
    assert run.of(e.ContextsReported) == [e.ContextsReported(1, {IDS[0]: 2})]
    run.tell(lo.ProcessExited(IDS[0], 0))
    run.tell(lo.WorkspacePreserved(IDS[0], BLOB))
    run.tell(lo.ContextsDue())
    assert run.of(e.ContextsReported)[1:] == [e.ContextsReported(2, {})]
    assert [t.max_context for t in run.of(e.ExecutionTerminated)] == [2]
    run.crash()
