"""The roots of role transitions: begun with the decision, ended by the confirmation, made again by whoever takes over."""

from collections.abc import Callable
from pathlib import Path

import pytest
from gyre.cli.trace_view.spans import read_spans
from gyre.cli.trace_view.tree import UNFINISHED, Transition, transitions
from gyre.contracts import events as e
from gyre.contracts.codec import Envelope
from gyre.runtime import telemetry
from gyre.runtime import transition_traces as ids
from gyre.scheduler.core import State, initial
from gyre.scheduler.traces import Traces
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

NS = 1_000_000
TRAIN = e.CellRoleAssigned(1, 1, "train", "cell-1-epoch-1", 0)
BACK = e.CellRoleAssigned(1, 2, "rollout", "cell-1-epoch-2", 1)
JOINED = e.CellTrainJoined(1, 1, 7, 0)


class Scene:
    """Schedulers that lead one after the other, and what is written of it."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory, self._monkeypatch = directory, monkeypatch
        self.state: State = initial(2)
        self.stream: list[tuple[e.Fact, dict[str, str], int]] = []
        self.lead("scheduler")

    def lead(self, process: str) -> Traces:
        """A fresh process that has read all there is."""
        provider = TracerProvider(id_generator=ids.ChosenIds())
        exporter = telemetry.FileExporter(self.directory / f"{process}.jsonl")
        provider.add_span_processor(ids.WriteThrough(exporter))
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        self._monkeypatch.setattr(telemetry, "tracer", lambda: provider.get_tracer("test"))
        self.traces = Traces()
        for fact, trace, time in self.stream:
            self.traces.read(envelope(fact, trace, time), fact)
        self.traces.resumed()
        return self.traces

    def say(self, fact: e.Fact, reads: bool = True) -> dict[str, str]:
        """Said by the one that leads."""
        self.traces.deciding()
        headers = self.traces.decided(fact, self.state)
        self.hear(fact, headers, reads)
        return headers

    def hear(self, fact: e.Fact, trace: dict[str, str] | None = None, reads: bool = True) -> None:
        """Said by somebody, and read by the one that leads unless nobody does."""
        self.stream.append((fact, trace or {}, (len(self.stream) + 1) * NS))
        if reads:
            self.traces.read(envelope(*self.stream[-1]), fact)

    def found(self) -> dict[str, Transition]:
        return {one.name: one for one in transitions(read_spans(self.directory))}


def envelope(fact: e.Fact, trace: dict[str, str], time: int) -> Envelope:
    return Envelope(1, type(fact).__name__, "i", "r", "trainer", time, "k", trace=trace)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(ids, "run_of_process", lambda: "r")
    return Scene(tmp_path, monkeypatch)


def names(one: Transition) -> list[str]:
    return [child.span.name for child in one.root.children]


def test_a_root_ends_when_the_cell_confirms(scene: Scene) -> None:
    headers = scene.say(TRAIN)
    assert headers == ids.headers_of("r", "cell-1-epoch-1"), "whoever reads the fact is a child of the root"
    assert scene.found()["cell-1-epoch-1"].outcome == UNFINISHED
    scene.hear(JOINED, headers)
    one = scene.found()["cell-1-epoch-1"]
    assert (one.outcome, one.roles, one.says("gyre.step")) == ("completed", "rollout -> train", 7)
    assert sorted(names(one)) == ["gyre.fact.delivery", "gyre.scheduler.assign", "gyre.scheduler.decide"]


def test_a_confirmation_that_comes_again_or_is_of_another_epoch_ends_nothing(scene: Scene) -> None:
    scene.say(TRAIN)
    scene.hear(e.CellRolloutReady(1, 0, 0, "c"))
    scene.hear(e.CellTrainJoined(1, 0, 7, 0))
    assert scene.found()["cell-1-epoch-1"].outcome == UNFINISHED
    scene.hear(JOINED)
    scene.hear(JOINED)
    assert names(scene.found()["cell-1-epoch-1"]).count("gyre.fact.delivery") == 1


def test_a_confirmation_that_is_read_before_its_assignment_ends_the_root_all_the_same(scene: Scene) -> None:
    scene.traces.deciding()
    headers = scene.traces.decided(TRAIN, scene.state)
    scene.hear(JOINED, headers)
    assert scene.found()["cell-1-epoch-1"].outcome == UNFINISHED
    scene.hear(TRAIN, headers)
    assert scene.found()["cell-1-epoch-1"].outcome == "completed"


def test_a_root_ends_when_the_cell_gets_another_role_first(scene: Scene) -> None:
    scene.say(TRAIN)
    scene.say(BACK)
    found = scene.found()
    assert (found["cell-1-epoch-1"].outcome, found["cell-1-epoch-2"].outcome) == ("superseded", UNFINISHED)


def test_a_root_ends_with_the_run_if_the_cell_did_not_come_back_for_it(scene: Scene) -> None:
    headers = scene.say(BACK)
    scene.hear(e.RunClosed("completed", 1))
    assert scene.found()["cell-1-epoch-2"].outcome == UNFINISHED
    assert scene.found()["cell-1-epoch-2"].says("gyre.outcome") == UNFINISHED
    scene.hear(e.CellRolloutReady(1, 2, 1, "c"), headers)
    assert scene.found()["cell-1-epoch-2"].outcome == UNFINISHED


def test_transitions_are_linked_with_their_batch_and_their_weights(scene: Scene) -> None:
    burst = scene.say(e.BurstOpened(3, 0, 1))
    assert ids.leads_to_transition(burst) is False
    scene.say(TRAIN)
    [linked] = scene.found()["cell-1-epoch-1"].links
    assert (linked.name, linked.attributes["gyre.burst"]) == ("gyre.burst.open", 3)


def test_what_no_trace_is_made_of_is_said_without_headers(scene: Scene) -> None:
    assert scene.say(e.BurstClosed(3, 0)) == {}


STEPS: list[Callable[[Scene], object]] = [
    lambda scene: scene.traces.deciding(),
    lambda scene: scene.traces.decided(TRAIN, scene.state),
    lambda scene: scene.hear(TRAIN, reads=False),
    lambda scene: scene.traces.read(envelope(*scene.stream[-1]), TRAIN),
    lambda scene: scene.hear(JOINED, reads=False),
    lambda scene: scene.traces.read(envelope(*scene.stream[-1]), JOINED),
]


@pytest.mark.parametrize("num_done", range(len(STEPS) + 1))
def test_wherever_a_scheduler_dies_the_next_one_brings_the_root_to_its_end(scene: Scene, num_done: int) -> None:
    for step in STEPS[:num_done]:
        step(scene)
    scene.lead("scheduler")  # the process of that name, once more
    if num_done < 3:
        scene.say(TRAIN)
    if num_done < 5:
        scene.hear(JOINED)
    found = scene.found()
    assert list(found) == ["cell-1-epoch-1"], "one trace, whoever led"
    one = found["cell-1-epoch-1"]
    assert (one.outcome, one.num_orphans, one.cell) == ("completed", 0, 1)
    assert ("gyre.resumed" in one.root.span.attributes) == (3 <= num_done < 6), "the one that came first counts"
