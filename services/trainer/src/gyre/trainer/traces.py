"""What a worker notes of its cell's role transitions, and how steps and publications are linked with them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from gyre.runtime import telemetry
from gyre.runtime.transition_traces import transition_id

MAX_LINKED_STEPS = 32


@dataclass(frozen=True, slots=True)
class _Publication:
    version: int
    began_ns: int
    ended_ns: int
    context: Mapping[str, str]


class RoleTraces:
    """Of one cell's worker."""

    def __init__(self, cell: int) -> None:
        self._cell = cell
        self._asked_ns = 0  # when the cell's role last changed
        self._publication: _Publication | None = None
        self._step: telemetry.Span | None = None
        self._steps: list[dict[str, str]] = []  # trained since weights were last published

    def asked(self, transition: Mapping[str, str] | None) -> None:
        """The ledger's state changed; `transition` is the context of a change of role, if it was one."""
        if transition:
            self._asked_ns = time.time_ns()

    def changing(self, name: str, epoch: int, moves: bool = True) -> AbstractContextManager[telemetry.Span | None]:
        """A span of the transition to `epoch`, since it was asked for; none if the cell has the role already."""
        if not moves:
            return nullcontext()
        return telemetry.span(name, telemetry.transition(self._cell, epoch), start_ns=self._asked_ns or None,
                              gyre__cell__id=self._cell, gyre__cell__epoch=epoch,
                              gyre__transition__id=transition_id(self._cell, epoch))

    @contextmanager
    def step(self, step: int, attempt: int, burst: int, epoch: int) -> Iterator[None]:
        """The span of a step, linked with the transitions that brought cells to it."""
        links = [telemetry.transition(self._cell, epoch)]
        with telemetry.span("gyre.train.step", links=links, gyre__step=step, gyre__attempt=attempt,
                            gyre__burst=burst) as self._step:
            self._steps = [*self._steps[1 - MAX_LINKED_STEPS:], telemetry.inject()]
            yield

    def joined(self) -> None:
        """Whoever asks right now takes part in the running step."""
        context = telemetry.current_context()
        if self._step is not None and context.is_valid:
            self._step.add_link(context)

    @contextmanager
    def publishing(self, version: int, burst: int) -> Iterator[None]:
        """The span of a publication, linked with the steps that made its weights."""
        began_ns = time.time_ns()
        with telemetry.span("gyre.weights.publish", links=self._steps, gyre__weights__version=version, gyre__burst=burst):
            self._steps = []
            yield
            self._publication = _Publication(version, began_ns, time.time_ns(), telemetry.inject())

    def told(self, epoch: int) -> None:
        """The weights for which the cell goes back were published before it was asked to: put that into its trace."""
        found, parent = self._publication, telemetry.transition(self._cell, epoch)
        self._publication = None
        if found is not None and parent:
            telemetry.note("gyre.weights.publish", parent, found.began_ns, found.ended_ns, [found.context],
                           gyre__weights__version=found.version, gyre__before=True)
