"""The roots of role transitions, and what the scheduler does in them: decide, assign, read the confirmation.

    deciding()             before the core is asked
    decided(fact, state)   a fact is about to be said; returns the headers it is said with
    read(envelope, fact)   a fact was read back from its stream, in the order of the streams
    resumed()              everything that was said before this process led has been read

A root ends when the cell confirms its role, or when the cell gets another one first. It has the same ids in every process
that makes it, so a scheduler that takes over makes the root of an unfinished transition again, and that of each cell's
newest one, of which nobody can tell whether the one before came to end it.
"""

import time
from dataclasses import dataclass
from typing import Protocol

from gyre.contracts import events as e
from gyre.contracts.codec import Envelope
from gyre.runtime import telemetry
from gyre.scheduler.transition import CellState


class Seen(Protocol):
    """What of the scheduler's state is noted in a trace: `gyre.scheduler.core.State`."""

    cells: list[CellState]
    burst: int
    steps_finished: int


@dataclass(slots=True)
class _Newest:
    """A cell's newest assignment: when it was said, and when it was confirmed."""

    fact: e.CellRoleAssigned
    said_ns: int
    role_before: str
    confirmed_ns: int = 0


Confirmation = e.CellTrainJoined | e.CellRolloutReady


class Traces:
    """One trace for each transition of any cell."""

    def __init__(self) -> None:
        self._decides_since = time.time_ns()
        self._roots: dict[str, telemetry.Span] = {}
        self._saying: dict[str, telemetry.Span] = {}
        self._newest: dict[int, _Newest] = {}
        self._early: dict[int, tuple[Envelope, Confirmation]] = {}  # read before the assignments they confirm
        self._burst: dict[str, str] = {}
        self._weights: dict[str, str] = {}

    def deciding(self) -> None:
        """What is decided from here on belongs to the transitions it leads to."""
        self._decides_since = time.time_ns()

    def decided(self, fact: e.Fact, state: Seen) -> dict[str, str]:
        """Headers for a fact that is about to be said; empty for one that no trace is made of."""
        if isinstance(fact, e.BurstOpened):
            with telemetry.span("gyre.burst.open", gyre__burst=fact.burst, gyre__weights__version=fact.version) as span:
                return telemetry.context_of(span)
        if not isinstance(fact, e.CellRoleAssigned):
            return {}
        # A refused publish is tried again by the next cycle: then the root is there already.
        if fact.transition not in self._roots:
            self._begin(fact, state)
        return telemetry.context_of(self._roots[fact.transition])

    def _begin(self, fact: e.CellRoleAssigned, state: Seen) -> None:
        root = telemetry.start_transition(
            fact.transition, self._decides_since, (self._burst, self._weights), **_of(fact, state.cells[fact.cell].role),
            gyre__burst=state.burst, gyre__step=state.steps_finished)
        water = getattr(state, "water", None)
        if water is not None:
            root.set_attribute("gyre.scheduler.waterlevel", water.level)
        self._roots[fact.transition] = root
        context, decided_ns = telemetry.context_of(root), time.time_ns()
        telemetry.note("gyre.scheduler.decide", context, self._decides_since, decided_ns, gyre__role__to=fact.role)
        self._saying[fact.transition] = telemetry.start("gyre.scheduler.assign", context, decided_ns,
                                                        gyre__cell__id=fact.cell, gyre__cell__epoch=fact.epoch)

    def read(self, envelope: Envelope, fact: e.Fact) -> None:
        """Note what a fact that was read means for the traces."""
        match fact:
            case e.CellRoleAssigned():
                self._assigned(envelope, fact)
            case e.CellTrainJoined() | e.CellRolloutReady():
                self._confirmed(envelope, fact)
            case e.BurstOpened():
                self._burst = dict(envelope.trace)
            case e.WeightsPublished():
                self._weights = dict(envelope.trace)
            case e.RunClosed():
                for transition in tuple(self._roots):  # of cells that did not come back, for whom nobody waited
                    self._end(transition, "unfinished")

    def _assigned(self, envelope: Envelope, fact: e.CellRoleAssigned) -> None:
        before = self._newest.get(fact.cell)
        if before is not None and before.fact.epoch >= fact.epoch:
            return
        if before is not None:
            self._end(before.fact.transition, "superseded")
        self._newest[fact.cell] = _Newest(fact, envelope.time, before.fact.role if before else "rollout")
        saying = self._saying.pop(fact.transition, None)
        if saying is not None:
            saying.end()
        if fact.cell in self._early:
            self._confirmed(*self._early.pop(fact.cell))

    def _confirmed(self, envelope: Envelope, fact: Confirmation) -> None:
        newest = self._newest.get(fact.cell)
        if fact.epoch > (newest.fact.epoch if newest else 0):
            self._early[fact.cell] = (envelope, fact)
            return
        role = "train" if isinstance(fact, e.CellTrainJoined) else "rollout"
        if newest is None or newest.confirmed_ns or (newest.fact.epoch, newest.fact.role) != (fact.epoch, role):
            return
        newest.confirmed_ns = envelope.time
        root, now = self._roots.get(newest.fact.transition), time.time_ns()
        if root is None:
            return
        telemetry.note("gyre.fact.delivery", envelope.trace or telemetry.context_of(root), envelope.time, now,
                       gyre__fact=type(fact).__name__, gyre__source=envelope.source)
        if isinstance(fact, e.CellTrainJoined):
            root.set_attribute("gyre.step", fact.step)
        root.set_attribute("gyre.weights.version", fact.version)
        self._end(newest.fact.transition, "completed", now)

    def resumed(self) -> None:
        """Make the roots again of what is under way, and of what may have ended while nobody led."""
        for newest in self._newest.values():
            root = telemetry.start_transition(newest.fact.transition, newest.said_ns, (self._burst, self._weights),
                                              **_of(newest.fact, newest.role_before), gyre__resumed=True)
            self._roots[newest.fact.transition] = root
            if newest.confirmed_ns:
                self._end(newest.fact.transition, "completed", newest.confirmed_ns)

    def _end(self, transition: str, outcome: str, end_ns: int | None = None) -> None:
        root = self._roots.pop(transition, None)
        if root is not None:
            root.set_attribute("gyre.outcome", outcome)
            root.end(end_ns)


def _of(fact: e.CellRoleAssigned, role_before: str) -> dict[str, telemetry.Value]:
    return {"gyre__transition__id": fact.transition, "gyre__cell__id": fact.cell, "gyre__cell__epoch": fact.epoch,
            "gyre__role__from": role_before, "gyre__role__to": fact.role, "gyre__weights__version": fact.version}
