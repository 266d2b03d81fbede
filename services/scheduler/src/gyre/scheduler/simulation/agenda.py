"""Virtual time: what happens next, in order; what happens at one moment, in the order in which it was planned."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

Act = Callable[[], None]


@dataclass(slots=True)
class Agenda:
    """`now` in seconds from the run's beginning."""

    now: float = 0.0
    _planned: list[tuple[float, int, Act]] = field(default_factory=list)
    _number: int = 0

    def after(self, delay_s: float, act: Act) -> None:
        self._number += 1
        heapq.heappush(self._planned, (self.now + delay_s, self._number, act))

    @property
    def next_time(self) -> float:
        """When the next thing is planned; infinity if nothing is."""
        return self._planned[0][0] if self._planned else float("inf")

    def pop(self) -> Act:
        """What is planned next; time goes on to it."""
        self.now, _, act = heapq.heappop(self._planned)
        return act
