"""What people are told of decisions: how often each gate held a cell back, and the state in one line."""

import logging
from collections import Counter
from dataclasses import dataclass, field

from gyre.scheduler.core import State
from gyre.scheduler.schedules import Gate

log = logging.getLogger(__name__)


@dataclass(slots=True)
class GateCounts:
    """Counts stretches of time in which a gate held the next cell back, not how often one looked."""

    total: Counter[Gate] = field(default_factory=Counter)
    in_burst: Counter[Gate] = field(default_factory=Counter)
    _burst: int = -1
    _last: Gate = ""

    def observe(self, burst: int, blocked: Gate) -> None:
        """What the newest decision was blocked by; "" if by nothing."""
        if burst != self._burst:
            if self.in_burst:
                counts = ", ".join(f"{gate} {num} times" for gate, num in self.in_burst.items())
                log.info("burst %d: held back by %s", self._burst, counts)
            self._burst, self._last, self.in_burst = burst, "", Counter()
        if blocked and blocked != self._last:
            self.total[blocked] += 1
            self.in_burst[blocked] += 1
        self._last = blocked


def summary(state: State) -> str:
    """Everything decisions depend on, in one line; equal for equal states."""
    cells = " ".join(f"{c.cell}:{c.role}@{c.epoch}/{c.confirmed_epoch}v{c.ready_version}{'!' if c.lost else ''}"
                     for c in state.cells)
    return (f"opening {state.opening} burst {state.burst}{'' if state.burst_open else ' closed'} v{state.published_version} "
            f"steps {state.steps_finished} groups {state.num_train_groups}/{state.num_train_completed} w {state.water.level} "
            f"cells {cells}")
