"""The scheduler's shell: lease, rederive, follow, and one cycle, as `services/scheduler/{lease,loop}.py` do it.

Several of them compete. Whoever loses the lease, or cannot renew it in time, exits and is started again as a standby.
"""

from __future__ import annotations

from collections import deque

from gyre.contracts import events as e
from gyre.contracts.events import Fact
from gyre.contracts.subjects import CTL, EXEC, TRAIN, TRAJ, Stream, message_id, row_of, subject_of
from gyre.scheduler.config import LEASE_TTL_S, RENEW_EVERY_S
from gyre.scheduler.core import State, decide, fold, initial
from sim.bus import RUN, Bus, Fenced, Message
from sim.kernel import LATE, Exit, Process, Refused, Task, World
from sim.setting import Setting

POLL_S = 0.5
REDERIVE_EVERY_S = 60.0
READS: tuple[tuple[Stream, tuple[type, ...]], ...] = (
    (CTL, (e.RunOpened, e.RunStopRequested, e.RunClosed, e.BurstOpened, e.BurstClosed, e.GroupDispatched, e.CellRoleAssigned)),
    (EXEC, (e.ExecutionTerminated, e.ContextsReported, e.CellRolloutReady, e.CellRolloutLost)),
    (TRAJ, (e.GroupCompleted,)),
    (TRAIN, (e.StepFinished, e.WeightsPublished, e.CellTrainJoined, e.BacklogReported)),
)
LEASE = subject_of(e.LeaseTaken("x", 0, LEASE_TTL_S), RUN)


class SimLease:
    """Taken once, renewed often; measured on the monotonic clock, which a wrong wall clock does not touch."""

    def __init__(self, world: World, bus: Bus, process: Process) -> None:
        self._world, self._bus, self._process = world, bus, process
        self.holder = f"{process.name}.{process.life}"
        self._term = self._sequence = 0
        self._renewed = 0.0

    def take(self) -> Task:
        seen, since = -1, self._world.now
        while True:
            last = yield from self._bus.last_message(self._process, CTL, LEASE)
            sequence = last.sequence if last else 0
            if sequence != seen:
                seen, since = sequence, self._world.now
            has_ended = sequence == 0 or self._world.now - since > LEASE_TTL_S
            if has_ended and (yield from self._write(sequence)):
                return
            yield 0.25 + self._world.pick(0.0, 0.5)

    def renew_if_due(self) -> Task:
        if self._world.now - self._renewed < RENEW_EVERY_S:
            return
        if self._world.now - self._renewed > LEASE_TTL_S:
            raise Exit("could not renew in time")
        if not (yield from self._write(self._sequence)):
            raise Exit("lost the lease")

    def _write(self, expected: int) -> Task:
        """Returns whether the lease is ours now."""
        started = self._world.now
        self._term += 1
        fact = e.LeaseTaken(self.holder, self._term, LEASE_TTL_S)
        answer = yield from self._bus.publish(self._process, fact, (LEASE, expected))
        if isinstance(answer, Fenced):
            last = yield from self._bus.last_message(self._process, CTL, LEASE)
            if last is None or last.id != message_id(fact, RUN):
                return False
            answer = last.sequence
        self._sequence, self._renewed = answer, started
        return True

    def say(self, fact: Fact) -> Task:
        """Publish under the lease; returns the sequence."""
        answer = yield from self._bus.publish(self._process, fact, (LEASE, self._sequence))
        if isinstance(answer, Fenced):
            last = yield from self._bus.last_message(self._process, row_of(fact).stream, subject_of(fact, RUN))
            if last is None or last.id != message_id(fact, RUN):
                raise Exit("lost the lease")
            return last.sequence
        return answer


class SimScheduler:
    """One scheduler process. `start` is the command that opens the run."""

    def __init__(self, world: World, bus: Bus, process: Process, setting: Setting) -> None:
        self.world, self.bus, self.process = world, bus, process
        self._plan, self._schedule = setting.plan(), setting.made_schedule()
        self.state: State = initial(self._plan.num_cells, self._plan.num_standalone)
        self.leads = False
        process.start = self._begin

    def make_lease(self) -> SimLease:
        return SimLease(self.world, self.bus, self.process)

    def start(self) -> Task:
        """Ask for the run to be opened; answered once it is. Raises Refused by a standby."""
        if not self.leads:
            raise Refused("does not lead")
        state, plan = self.state, self._plan
        opening = state.opening + (not state.opened or bool(state.closed))
        if opening > state.opening:
            self._asked.append(e.RunOpened(plan.config_digest, plan.seed, plan.num_cells, state.published_version,
                                           state.num_train_groups, opening, plan.num_standalone, self._schedule.name))
        while self.state.opening < opening:
            yield POLL_S

    def stop(self, reason: str) -> Task:
        """Ask for the run to end after its burst; answered once that is known. Raises Refused by a standby."""
        if not self.leads or not self.state.opened:
            raise Refused("does not lead")
        self._asked.append(e.RunStopRequested(reason, self.state.opening))
        while not self.state.stop_reason:
            yield POLL_S

    def _begin(self) -> None:
        self.leads = False
        self._asked: list[Fact] = []
        self._received: deque[Message] = deque()
        self._said = self._position = 0
        self._woken = self.world.reply()
        self._lease = self.make_lease()
        self.world.spawn(self.process, self._run())

    def _run(self) -> Task:
        yield from self._lease.take()
        positions = yield from self._rederive()
        self.leads = True
        for (stream, records), position in zip(READS, positions, strict=True):
            self.bus.read(self.process, stream, records, position, self._take)
        while True:
            yield from self._cycle()

    def _take(self, messages: list[Message]) -> None:
        self._received.extend(messages)
        self._woken.give(None)

    def _rederive(self) -> Task:
        state, positions = initial(self._plan.num_cells, self._plan.num_standalone), []
        for stream, records in READS:
            received = yield from self.bus.read_all(self.process, stream, records)
            if received is LATE:
                raise Exit("nats does not answer")
            for message in received:
                state = self._folded(state, message)
            positions.append(received[-1].sequence + 1 if received else 1)
            yield from self._lease.renew_if_due()
        self.state, self._derived_at = state, self.world.now
        return positions

    def _folded(self, state: State, message: Message) -> State:
        if message.stream == CTL.name:
            self._position = max(self._position, message.sequence)
        return fold(state, message.fact, message.at)

    def _cycle(self) -> Task:
        if not self._received:
            self._woken = self.world.reply()
            yield self._woken, POLL_S
        while self._received:
            self.state = self._folded(self.state, self._received.popleft())
        yield from self._lease.renew_if_due()
        if self._said > self._position:
            return
        if self.world.now - self._derived_at > REDERIVE_EVERY_S:
            yield from self._rederive()
        for fact in self._wanted():
            yield from self._lease.renew_if_due()
            self.world.point(self.process, "before saying a fact")
            sequence = yield from self._lease.say(fact)
            self._said = max(self._said, sequence)
            self.world.point(self.process, "after saying a fact")

    def _wanted(self) -> tuple[Fact, ...]:
        if self._asked:
            asked, self._asked = tuple(self._asked), []
            return asked
        return decide(self.state, self._plan, self._schedule, self.world.clock(self.process)).facts
