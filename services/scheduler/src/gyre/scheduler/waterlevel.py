"""The waterlevel: what is dispatched and not terminated, in executions and in KV tokens.

Executions: w = dispatched - terminated, whatever the order in which the two facts arrive. Tokens: what the live executions
will hold, each as a quantile of what earlier executions grew to that had come as far. Counts alone misjudge memory by more
than twice on real agent traffic; the largest possible context would hardly ever let a cell go.
"""

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field

HISTORY = 512  # terminated executions the forecast looks back on
QUANTILE = 0.9
RENEWED = 16  # all are forecast anew when so many times the executions ended since are those that live


@dataclass(slots=True)
class Waterlevel:
    """An execution counts as live from its dispatch until its termination; a termination that is seen first is kept."""

    dispatched: set[str] = field(default_factory=set)
    terminated: set[str] = field(default_factory=set)
    live: set[str] = field(default_factory=set)
    contexts: dict[str, int] = field(default_factory=dict)  # tokens, of live executions that have made a call
    reported: int = -1  # serial of the newest report of contexts
    _forecasts: dict[str, int] = field(default_factory=dict)  # tokens, of live executions with a context
    _known: int = 0  # their sum
    _num_since: int = 0  # executions terminated since all of them were forecast
    _recent: deque[int] = field(default_factory=deque)  # longest contexts of terminated executions, oldest first
    _sorted: list[int] = field(default_factory=list)  # the same

    @property
    def level(self) -> int:
        """w, the number of executions that are dispatched and not terminated."""
        return len(self.live)

    def dispatch(self, executions: list[str]) -> None:
        self.dispatched.update(executions)
        for execution in executions:
            if execution not in self.terminated:
                self.live.add(execution)
                self._foresee(execution)

    def terminate(self, execution: str, max_context: int = 0) -> None:
        """It has ended; `max_context` is its longest context in tokens, 0 if it never made a call."""
        if execution in self.terminated:
            return
        self.terminated.add(execution)
        self.live.discard(execution)
        self.contexts.pop(execution, None)
        self._known -= self._forecasts.pop(execution, 0)
        if max_context > 0:
            self._remember(max_context)
        self._num_since += 1
        if self._num_since * RENEWED >= len(self._forecasts):
            self._foresee_all()

    def observe(self, serial: int, contexts: dict[str, int]) -> None:
        """A report of what the running executions have in their contexts; an older one changes nothing."""
        if serial > self.reported:
            self.reported = serial
            self.contexts = {x: n for x, n in contexts.items() if x not in self.terminated}
            self._foresee_all()

    def kv_tokens(self, added: int = 0) -> int:
        """Tokens the live executions are forecast to hold, and `added` more of which nothing is known yet."""
        return self._known + (len(self.live) + added - len(self._forecasts)) * self._grown(0)

    def _foresee(self, execution: str) -> None:
        if execution in self.contexts and execution not in self._forecasts:
            self._forecasts[execution] = self._grown(self.contexts[execution])
            self._known += self._forecasts[execution]

    def _foresee_all(self) -> None:
        """Forecast anew. What has ended since changes every forecast a little, so it may wait a while."""
        self._forecasts = {x: self._grown(n) for x, n in self.contexts.items() if x in self.live}
        self._known, self._num_since = sum(self._forecasts.values()), 0

    def _grown(self, context: int) -> int:
        """The quantile of what executions that had `context` tokens ended with; `context` if none was seen."""
        first = bisect_left(self._sorted, context)
        num = len(self._sorted) - first
        return self._sorted[first + min(int(QUANTILE * num), num - 1)] if num else context

    def _remember(self, max_context: int) -> None:
        self._recent.append(max_context)
        insort(self._sorted, max_context)
        if len(self._recent) > HISTORY:
            oldest = self._recent.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
