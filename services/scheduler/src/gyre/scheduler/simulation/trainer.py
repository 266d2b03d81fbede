"""The trainer's side: complete groups join the open step, cells claim its micro-steps longest first, the core updates.

It follows the rules of the trainer service and says its facts; only tensors are missing. Costs are cell-seconds.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from gyre.contracts import events as e
from gyre.contracts.simulation import CellUse, SimulatedStep
from gyre.scheduler.config import Plan
from gyre.scheduler.simulation.agenda import Agenda
from gyre.scheduler.simulation.constants import TrainingConstants
from gyre.scheduler.simulation.measures import Lanes

Say = Callable[[e.Fact], None]


@dataclass(frozen=True, slots=True)
class Ready:
    """A complete group that waits for its step; `order` is its place of arrival."""

    version: int
    order: int
    group: str
    costs: tuple[float, ...]


@dataclass(slots=True)
class _Worker:
    """A cell that takes part. `claim`: counts its claims, so that an interrupted one is not completed."""

    epoch: int
    claim: int = 0
    doing: float | None = None
    done: list[float] = field(default_factory=list)
    last_end: float = 0.0


@dataclass(slots=True)
class Trainer:
    """`streams`: a step is worked on before its last group has joined it."""

    plan: Plan
    streams: bool
    staleness_limit: int
    constants: TrainingConstants
    agenda: Agenda
    lanes: Lanes
    say: Say
    step: int = 0
    burst: int = -1
    burst_end: int = 0
    published: int = 0
    steps: list[SimulatedStep] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    trained_s: float = 0.0  # cost of all micro-steps of finished steps
    trained: list[str] = field(default_factory=list)
    _waiting: list[tuple[int, int, Ready]] = field(default_factory=list)  # oldest version first
    _members: list[Ready] = field(default_factory=list)
    _num_members: int = 0
    _staleness: list[int] = field(default_factory=list)
    _pending: list[float] = field(default_factory=list)  # costs, the longest last
    _unclaimed: float = 0.0  # of pending and of those that wait
    _workers: dict[int, _Worker] = field(default_factory=dict)
    _late: dict[int, int] = field(default_factory=dict)  # cells that came while the step was being reduced -> epoch
    _reducing: bool = False
    _attempt: int = 0
    _serial: int = 0
    _num_known: int = 0
    _num_cut: int = 0
    _cut_s: float = 0.0

    # ------------------------------------------------------------ supply

    def complete(self, group: str, version: int, costs: tuple[float, ...]) -> None:
        """A group is complete."""
        ready = Ready(version, self._num_known, group, costs)
        self._num_known += 1
        self._num_cut += len(costs)
        self._cut_s += sum(costs)
        self._unclaimed += sum(costs)
        insort(self._waiting, (version, ready.order, ready))
        self._fill()
        self._report()
        self._feed()

    def open_burst(self, fact: e.BurstOpened) -> None:
        """Steps up to its end may be trained."""
        self.burst, self.burst_end = fact.burst, fact.version + fact.num_steps
        self._feed()

    @property
    def _sealed(self) -> bool:
        return self._num_members == self.plan.groups_per_step

    def _fill(self) -> None:
        was_sealed = self._sealed
        while self._waiting and not self._sealed:
            ready = self._waiting.pop(0)[2]
            self._num_members += 1
            self._staleness.append(self.step - ready.version)
            if self.step - ready.version > self.staleness_limit:
                self.stale.append(ready.group)
                self._unclaimed -= sum(ready.costs)
                continue
            self._members.append(ready)
            for cost in ready.costs:
                insort(self._pending, cost)
        if self._sealed and not was_sealed:
            self.say(e.StepSealed(self.step, tuple(r.group for r in self._members), (), 0))

    def _report(self) -> None:
        self._serial += 1
        mean = self._cut_s / self._num_cut if self._num_cut else 0.0
        self.say(e.BacklogReported(self._serial, self.step, len(self._waiting), max(0.0, self._unclaimed), mean, 1.0))

    # ------------------------------------------------------------ cells

    def join(self, cell: int, epoch: int) -> None:
        """The cell's trainer holds the devices; while a step is being reduced it waits for the next."""
        if self._reducing:
            self._late[cell] = epoch
            self.lanes.use(cell, self.agenda.now, "update")
            return
        self._workers[cell] = _Worker(epoch)
        self.say(e.CellTrainJoined(cell, epoch, self.step, self.step))
        self._feed()

    def leave(self, cell: int) -> None:
        """The cell is off the step: all it did returns to the queue. Without the core the whole attempt is void."""
        self._late.pop(cell, None)
        worker = self._workers.pop(cell, None)
        if worker is None or self._reducing and cell != 0:
            return  # its buffer has been read already
        for lost in [worker, *self._workers.values()] if cell == 0 else [worker]:
            self._take_back(lost)
        if cell == 0:
            self._attempt += 1
            self._reducing = False
        self._report()
        self._feed()

    def _take_back(self, worker: _Worker) -> None:
        back = [*worker.done, *([] if worker.doing is None else [worker.doing])]
        for cost in back:
            insort(self._pending, cost)
        self._unclaimed += sum(back)
        worker.done, worker.doing, worker.claim = [], None, worker.claim + 1

    # ------------------------------------------------------------ one step

    def _feed(self) -> None:
        """Whoever is free claims the longest micro-step; when nothing is left the core reduces."""
        if self._reducing:
            return
        works = 0 in self._workers and self.step < self.burst_end
        offered = works and (self.streams or self._sealed)
        for cell, worker in self._workers.items():
            if worker.doing is not None:
                continue
            if offered and self._pending:
                self._claim(cell, worker)
            else:
                self.lanes.use(cell, self.agenda.now, self._why_idle(works))
        busy = any(w.doing is not None for w in self._workers.values())
        if works and self._sealed and not self._pending and not busy:
            self._reduce()

    def _why_idle(self, works: bool) -> CellUse:
        if self.step == self.burst_end and self.published < self.step:
            return "update"
        return "end" if works and self._sealed and not self._pending else "data"

    def _claim(self, cell: int, worker: _Worker) -> None:
        worker.doing = self._pending.pop()
        worker.claim += 1
        self._unclaimed -= worker.doing
        claim = worker.claim
        self.lanes.use(cell, self.agenda.now, "train")
        self.agenda.after(worker.doing, lambda: self._completed(cell, worker, claim))
        self._report()

    def _completed(self, cell: int, worker: _Worker, claim: int) -> None:
        if self._workers.get(cell) is not worker or worker.claim != claim or worker.doing is None:
            return
        worker.done.append(worker.doing)
        worker.doing, worker.last_end = None, self.agenda.now
        self._feed()

    def _reduce(self) -> None:
        self._reducing = True
        attempt = self._attempt
        for cell in self._workers:
            self.lanes.use(cell, self.agenda.now, "update")
        self.agenda.after(self.constants.update_s, lambda: self._finish(attempt))

    def _finish(self, attempt: int) -> None:
        if attempt != self._attempt:
            return
        ends = [w.last_end for w in self._workers.values() if w.done]
        spread = max(ends) - min(ends) if ends else 0.0
        self.steps.append(SimulatedStep(self.agenda.now, spread, tuple(self._staleness)))
        self.trained += [r.group for r in self._members]
        self.trained_s += sum(sum(r.costs) for r in self._members)
        self.say(e.StepFinished(self.step, self.step + 1, self._attempt, True, 0, 0, 0, 0.0, 0.0, 0.0))
        self.step += 1
        self._members, self._num_members, self._staleness, self._reducing = [], 0, [], False
        for worker in self._workers.values():
            worker.done = []
        if self.step == self.burst_end:
            self._publish()
        self._fill()
        self._report()
        for cell, epoch in sorted(self._late.items()):
            self.join(cell, epoch)
        self._late.clear()
        self._feed()

    def _publish(self) -> None:
        version, burst = self.step, self.burst

        def publish() -> None:
            self.published = version
            self.say(e.WeightsPublished(version, "c", burst, "checkpoint"))
            self._feed()

        self.agenda.after(self.constants.publish_s, publish)
