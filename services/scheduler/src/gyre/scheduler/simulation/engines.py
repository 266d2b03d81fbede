"""Executions on the rollout cells: they share what the serving cells can do, and the router spreads them evenly.

All executions advance at one rate, so that one virtual clock serves them all: an execution ends when that clock has gone
on by its duration. Contexts grow evenly, so the tokens held are linear in the virtual clock too.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from gyre.scheduler.schedules import Capacity
from gyre.scheduler.simulation.constants import RolloutConstants
from gyre.scheduler.simulation.workload import Demand

ROOM = 0.95  # of the KV pool that must not be exceeded before a preempted execution goes on


@dataclass(slots=True)
class _Live:
    """A running execution. Times are the virtual clock's; `slope`: tokens per virtual second."""

    demand: Demand
    start: float
    end: float
    slope: float
    cell: int = -1

    def tokens(self, clock: float, share: float) -> float:
        return share * self.demand.max_context + self.slope * (clock - self.start)


@dataclass(slots=True)
class Engines:
    """`advance` brings it to a moment; everything else happens at that moment.

    busy_s: cell-seconds of serving cells that executions filled.
    """

    capacity: Capacity
    constants: RolloutConstants
    max_concurrent: int
    now: float = 0.0
    clock: float = 0.0
    busy_s: float = 0.0
    num_moved: int = 0
    num_preempted: int = 0
    serving: dict[int, dict[str, None]] = field(default_factory=dict)  # cell -> its executions
    _live: dict[str, _Live] = field(default_factory=dict)
    _homeless: dict[str, None] = field(default_factory=dict)  # live, while no cell serves
    _ends: list[tuple[float, str]] = field(default_factory=list)
    _queue: deque[tuple[str, Demand]] = field(default_factory=deque)
    _preempted: deque[tuple[str, _Live]] = field(default_factory=deque)
    _pause: float = 0.0
    _base: float = 0.0  # tokens held = _base + _slope * clock
    _slope: float = 0.0

    # ------------------------------------------------------------ time

    @property
    def rate(self) -> float:
        """Virtual seconds per second, outside a pause."""
        room = len(self.serving) * self.capacity.executions
        if not room or not self._live:
            return 0.0
        load = len(self._live) / room
        slow = 1.0 + self.constants.slowdown * min(load, 1.0)
        return 1.0 / (slow * max(load, 1.0) ** self.constants.overload)

    def advance(self, now: float) -> None:
        """Go on to second `now`; nothing may be due before it."""
        passed = now - self.now
        self.busy_s += passed * min(len(self._live) / self.capacity.executions, len(self.serving))
        standing = min(self._pause, passed)
        self._pause -= standing
        self.clock += (passed - standing) * self.rate
        self.now = now

    @property
    def next_time(self) -> float:
        """When the next execution ends or the KV pool overflows; infinity if neither will."""
        rate = self.rate
        if not rate:
            return float("inf")
        self._drop_outdated()
        due = self._ends[0][0] if self._ends else float("inf")
        return self.now + self._pause + max(0.0, min(due, self._overflows_at()) - self.clock) / rate

    def due(self) -> Iterator[str]:
        """What ends now; preempts if the KV pool overflows now."""
        while True:
            self._drop_outdated()
            if not self._ends or self._ends[0][0] > self.clock + 1e-6:
                break
            name = heapq.heappop(self._ends)[1]
            self._remove(name)
            yield name
        self._settle()

    # ------------------------------------------------------------ executions

    def dispatch(self, name: str, demand: Demand) -> None:
        """It runs as soon as the executor has room for it."""
        self._queue.append((name, demand))
        self._settle()

    def contexts(self) -> dict[str, int]:
        """Tokens of every running execution."""
        share = self.constants.context_start
        return {name: max(1, int(x.tokens(self.clock, share))) for name, x in self._live.items()}

    @property
    def kv_tokens(self) -> float:
        return self._base + self._slope * self.clock

    @property
    def num_running(self) -> int:
        return len(self._live)

    # ------------------------------------------------------------ cells

    def admit(self, cell: int) -> None:
        """The cell serves."""
        self.serving.setdefault(cell, {})
        for name in self._homeless:
            self._place(name)
        self._homeless.clear()
        self._settle()

    def release(self, cell: int, is_lost: bool = False) -> None:
        """The cell serves no longer; what ran on it goes on elsewhere after a stall."""
        moved = self.serving.pop(cell, {})
        stall = self.constants.replay_stall_s if is_lost else self.constants.move_stall_s
        for name in moved:
            self._stall(name, stall)
            self._place(name)
        self.num_moved += len(moved)
        self._settle()

    def stand_still(self, seconds: float) -> None:
        """New weights: everything waits."""
        self._pause = max(self._pause, seconds)

    # ------------------------------------------------------------ inside

    def _settle(self) -> None:
        """Preempt the youngest while the KV pool overflows; then start what there is room for, the preempted first."""
        while self.capacity.kv_tokens and len(self._live) > len(self.serving) and self.kv_tokens > self._room() * (1 + 1e-9):
            self._preempt()
        while self._preempted and self._may_start(self._preempted[0][1].demand, self._preempted[0][1]):
            name, was = self._preempted.popleft()
            was.end += self.constants.replay_stall_s + self.clock  # its times had been taken relative to its preemption
            was.start += self.constants.replay_stall_s + self.clock
            self._add(name, was)
        while self._queue and not self._preempted and self._may_start(self._queue[0][1]):
            name, demand = self._queue.popleft()
            slope = (1 - self.constants.context_start) * demand.max_context / max(demand.duration_s, 1e-9)
            self._add(name, _Live(demand, self.clock, self.clock + demand.duration_s, slope))

    def _room(self) -> float:
        return float(len(self.serving) * self.capacity.kv_tokens)

    def _may_start(self, demand: Demand, was: _Live | None = None) -> bool:
        if self.max_concurrent and len(self._live) >= self.max_concurrent:
            return False
        if not self.capacity.kv_tokens or len(self._live) < len(self.serving) or was is None:
            return True
        return self.kv_tokens + was.tokens(0.0, self.constants.context_start) <= ROOM * self._room()

    def _overflows_at(self) -> float:
        """The virtual time at which the pool is full; infinity if it is not limited, or only one execution a cell runs."""
        if not self.capacity.kv_tokens or self._slope <= 0 or len(self._live) <= len(self.serving):
            return float("inf")
        return (self._room() * (1 + 2e-9) - self._base) / self._slope

    def _preempt(self) -> None:
        name = next(reversed(self._live))
        was = self._live[name]
        self._remove(name)
        was.start -= self.clock
        was.end -= self.clock
        self._preempted.append((name, was))
        self.num_preempted += 1

    def _add(self, name: str, live: _Live) -> None:
        self._live[name] = live
        self._account(live, 1)
        self._place(name)
        heapq.heappush(self._ends, (live.end, name))

    def _remove(self, name: str) -> None:
        live = self._live.pop(name)
        self._account(live, -1)
        if live.cell in self.serving:
            self.serving[live.cell].pop(name, None)
        self._homeless.pop(name, None)

    def _account(self, live: _Live, sign: int) -> None:
        self._base += sign * (self.constants.context_start * live.demand.max_context - live.slope * live.start)
        self._slope += sign * live.slope

    def _place(self, name: str) -> None:
        """On the serving cell with the fewest, of several the one that will stay in rollout longest."""
        cell = min(self.serving, key=lambda c: (len(self.serving[c]), -c), default=-1)
        self._live[name].cell = cell
        (self.serving[cell] if cell >= 0 else self._homeless)[name] = None

    def _stall(self, name: str, seconds: float) -> None:
        """It does not advance for `seconds` at full rate; neither does its context."""
        live = self._live[name]
        self._account(live, -1)
        live.start += seconds
        live.end += seconds
        self._account(live, 1)
        heapq.heappush(self._ends, (live.end, name))

    def _drop_outdated(self) -> None:
        """Entries of executions that ended, were preempted or stalled since."""
        while self._ends:
            end, name = self._ends[0]
            if name in self._live and self._live[name].end == end:
                return
            heapq.heappop(self._ends)
