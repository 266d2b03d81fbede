"""The simulated machine room: time, processes, tasks and the wires between them, all decided by one seed.

A task is a generator. It may yield seconds (sleep), a `Reply` (wait for it) or `(Reply, seconds)` (wait so long at most and
be given `LATE`). A process that is killed loses its tasks at whatever they were waiting for; one that is paused (SIGSTOP)
goes on later with everything that happened meanwhile.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

Task = Generator[Any, Any, Any]
TRACE_LENGTH = 4000
MAX_AT_ONCE = 10_000


class _Late:
    """What a task is given that waited for too long."""


LATE = _Late()


class Unreachable(Exception):
    """The other process did not answer: it is dead, cut off, or its answer was lost."""


class Killed(Exception):
    """A crash point fired: the process it belongs to is gone."""


class Exit(Exception):
    """A process ends itself, to be started again by its supervisor."""


class Broken(AssertionError):
    """An invariant of the protocol does not hold."""


@dataclass(slots=True)
class Reply:
    """A value that comes later, once."""

    world: World
    value: Any = None
    is_there: bool = False
    waiters: list[Callable[[Any], None]] = field(default_factory=list)

    def give(self, value: Any) -> None:
        if self.is_there:
            return
        self.is_there, self.value = True, value
        for waiter in self.waiters:
            waiter(value)
        self.waiters.clear()


@dataclass(slots=True)
class Process:
    """One process of the deployment. `life` counts its starts; `skew_s` is how wrong its wall clock is."""

    name: str
    start: Callable[[], None] = lambda: None
    stop: Callable[[], None] = lambda: None  # what the kernel does for a process that dies: locks, memory
    life: int = 0
    is_alive: bool = False
    is_paused: bool = False
    skew_s: float = 0.0
    num_points: int = 0  # crash points passed
    crash_at: set[int] = field(default_factory=set)
    held_back: list[tuple[int, Callable[[], None]]] = field(default_factory=list)


Entry = tuple[float, int, Process | None, int, Callable[[], None]]


@dataclass(slots=True)
class World:
    """Everything that happens, in order of time."""

    seed: int
    now: float = 0.0
    lossy: float = 0.0  # share of messages that are lost
    num_events: int = 0
    num_at_once: int = 0  # events at this very moment
    processes: dict[str, Process] = field(default_factory=dict)
    cuts: set[frozenset[str]] = field(default_factory=set)  # pairs that cannot reach each other
    down: set[str] = field(default_factory=set)  # what nobody can reach
    mute: set[str] = field(default_factory=set)  # whose messages to the bus do not get out, while it hears everything
    refusing: set[str] = field(default_factory=set)  # engines that carry out no command
    trace: deque[tuple[float, str, str, Any]] = field(default_factory=lambda: deque(maxlen=TRACE_LENGTH))
    restart_s: float = 1.0
    blobs: dict[str, bytes] = field(default_factory=dict)
    dice: random.Random = field(default_factory=random.Random)
    _heap: list[Entry] = field(default_factory=list)
    _order: int = 0

    def __post_init__(self) -> None:
        self.dice.seed(self.seed)

    # ------------------------------------------------------------ time

    def after(self, delay_s: float, do: Callable[[], None], process: Process | None = None) -> None:
        """Do it in `delay_s` seconds, if `process` is in the same life then."""
        self._order += 1
        entry = (self.now + delay_s, self._order, process, process.life if process else 0, do)
        heapq.heappush(self._heap, entry)

    def run_until(self, ended: Callable[[], bool], max_s: float) -> None:
        """Run until `ended`, for `max_s` seconds of simulated time at most. Raises Broken when they are over."""
        while not ended():
            if not self._heap or self.now > max_s:
                raise Broken(f"not ended after {self.now:.0f} s and {self.num_events} events")
            self.step()

    def step(self) -> None:
        """The next thing that happens."""
        before = self.now
        self.now, _, process, life, do = heapq.heappop(self._heap)
        self.num_at_once = self.num_at_once + 1 if self.now == before else 0
        if self.num_at_once > MAX_AT_ONCE:
            raise Broken(f"{process.name if process else 'somebody'} goes round without waiting")
        if process is not None:
            if process.life != life:
                return
            if process.is_paused:
                process.held_back.append((life, do))
                return
        self.num_events += 1
        try:
            do()
        except Killed:
            assert process is not None
            self.kill(process, self.dice.uniform(0.2, 3.0), "crash point")
        except Exit as reason:
            assert process is not None
            self.kill(process, self.restart_s, f"exits: {reason}")

    def pick(self, low: float, high: float) -> float:
        return low + (high - low) * self.dice.random()

    # ------------------------------------------------------------ tasks

    def reply(self) -> Reply:
        return Reply(self)

    def spawn(self, process: Process, task: Task) -> None:
        """Begin a task of `process` now."""
        self.after(0.0, lambda: self._resume(process, task, None), process)

    def _resume(self, process: Process, task: Task, value: Any) -> None:
        try:
            asked = task.send(value)
        except StopIteration:
            return
        if isinstance(asked, Reply):
            self._await(process, task, asked)
        elif isinstance(asked, tuple):
            self._await(process, task, asked[0], asked[1])
        else:
            self.after(asked, lambda: self._resume(process, task, None), process)

    def _await(self, process: Process, task: Task, reply: Reply, timeout_s: float | None = None) -> None:
        life, is_over = process.life, [False]

        def go_on(value: Any) -> None:
            if not is_over[0] and process.life == life:
                is_over[0] = True
                self.after(0.0, lambda: self._resume(process, task, value), process)

        if reply.is_there:
            go_on(reply.value)
            return
        reply.waiters.append(go_on)
        if timeout_s is not None:
            self.after(timeout_s, lambda: go_on(LATE), process)

    # ------------------------------------------------------------ processes

    def process(self, name: str) -> Process:
        process = Process(name)
        self.processes[name] = process
        return process

    def clock(self, process: Process) -> float:
        """What the process believes the time to be, in seconds since the epoch."""
        return 1000.0 + self.now + process.skew_s

    def begin(self, process: Process) -> None:
        process.life += 1
        process.is_alive = True
        self.note(process.name, "starts", process.life)
        self.after(0.0, process.start, process)

    def kill(self, process: Process, away_s: float | None, why: str = "killed") -> None:
        """kill -9; started again after `away_s` seconds (None: never)."""
        if not process.is_alive:
            return
        self.note(process.name, "dies", why)
        process.life += 1
        process.is_alive = process.is_paused = False
        process.held_back.clear()
        process.stop()
        if away_s is not None:
            self.after(away_s, lambda: self.begin(process))

    def pause(self, process: Process, seconds: float) -> None:
        """SIGSTOP now, SIGCONT later."""
        if not process.is_alive or process.is_paused:
            return
        process.is_paused = True
        life = process.life

        def go_on() -> None:
            if process.life == life:
                process.is_paused = False
                held, process.held_back = process.held_back, []
                for its_life, do in held:
                    if its_life == process.life:
                        self.after(0.0, do, process)

        self.after(seconds, go_on)

    def point(self, process: Process, where: str) -> None:
        """A place where the process may die. Raises Killed."""
        process.num_points += 1
        if process.num_points in process.crash_at:
            self.note(process.name, "crash point", f"{process.num_points} {where}")
            raise Killed

    # ------------------------------------------------------------ wires

    def reaches(self, one: str, other: str) -> bool:
        return one not in self.down and other not in self.down and frozenset((one, other)) not in self.cuts

    def passes(self, one: str, other: str) -> bool:
        """Whether one message gets through."""
        return self.reaches(one, other) and not self.is_lost()

    def is_lost(self) -> bool:
        """Whether a message vanishes although the wires are up."""
        return bool(self.lossy) and self.dice.random() < self.lossy

    def call(self, caller: Process, callee: Process, work: Callable[[], Any], timeout_s: float = 10.0) -> Task:
        """Remote procedure call: `work` is done in `callee` (a generator is run as its task). Raises Unreachable.

        What is lost may be the question or the answer. An exception of `work` is raised here.
        """
        reply = self.reply()

        def answer(value: Any) -> None:
            if self.passes(callee.name, caller.name):
                self.after(self.pick(0.001, 0.02), lambda: reply.give(value))

        def arrive() -> None:
            if not callee.is_alive:
                reply.give(Unreachable(f"{callee.name} refuses"))
                return
            self.after(0.0, begin, callee)

        def begin() -> None:
            try:
                done = work()
            except RPC_ERRORS as error:
                done = error
            if isinstance(done, Generator):
                self.spawn(callee, _answered(done, answer))
            else:
                answer(done)

        if self.passes(caller.name, callee.name):
            self.after(self.pick(0.001, 0.02), arrive)
        value = yield (reply, timeout_s)
        if value is LATE:
            raise Unreachable(f"{callee.name} does not answer")
        if isinstance(value, Exception):
            raise value
        return value

    # ------------------------------------------------------------ history

    def note(self, who: str, what: str, detail: Any = "") -> None:
        self.trace.append((self.now, who, what, detail))

    def last(self, num: int) -> Iterator[str]:
        """The last `num` events as lines."""
        for at, who, what, detail in list(self.trace)[-num:]:
            yield f"{at:9.3f} {who:12s} {what} {detail}"


class Refused(Exception):
    """A command was understood and not carried out."""


RPC_ERRORS = (Refused, Unreachable)


def _answered(work: Task, answer: Callable[[Any], None]) -> Task:
    try:
        value = yield from work
    except RPC_ERRORS as error:
        value = error
    answer(value)
