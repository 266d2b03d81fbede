"""The scheduler's cycle: read facts back, fold, decide, say under the lease, wait until they are read back.

It keeps nothing on disk: on start, and after any gap, the state is folded anew from the streams.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable

from gyre.contracts import codec
from gyre.contracts import events as e
from gyre.contracts.errors import BusError, ContractError
from gyre.contracts.subjects import CTL, EXEC, TRAIN, TRAJ, Stream, filter_of
from gyre.runtime.blobs import BlobStore
from gyre.runtime.bus import Bus, Received
from gyre.runtime.clock import Clock
from gyre.scheduler.config import Plan
from gyre.scheduler.core import State, decide, fold, initial
from gyre.scheduler.gates import GateCounts, summary
from gyre.scheduler.lease import Lease
from gyre.scheduler.schedules import Schedule
from gyre.scheduler.traces import Traces

log = logging.getLogger(__name__)

REDERIVE_EVERY_S = 300.0  # the state is a fold of what can be read again, so nothing missed lasts longer than this,
REDERIVE_SHARE = 0.01  # or than a long history takes to be read, over so much of the time: nothing is decided meanwhile
POLL_S = 0.25  # deadlines of transitions and the lease are looked at that often

READS: tuple[tuple[Stream, tuple[type, ...]], ...] = (
    (CTL, (e.RunOpened, e.RunStopRequested, e.RunClosed, e.BurstOpened, e.BurstClosed, e.GroupDispatched, e.CellRoleAssigned)),
    (EXEC, (e.ExecutionTerminated, e.ContextsReported, e.CellRolloutReady, e.CellRolloutLost)),
    (TRAJ, (e.GroupCompleted,)),
    (TRAIN, (e.StepFinished, e.WeightsPublished, e.CellTrainJoined, e.BacklogReported)),
)
# Of these only the newest counts. They are said every few seconds for as long as the run lasts, so those before are not read.
SUPERSEDED: tuple[type, ...] = (e.ContextsReported, e.BacklogReported)


def pause_after(took_s: float) -> float:
    """Seconds until the streams are folded anew, when that took `took_s` the last time."""
    return max(REDERIVE_EVERY_S, took_s / REDERIVE_SHARE)


class Scheduler:
    """The leader of one run. `start` and `stop` are commands; everything else follows from facts.

    One task reads, decides, says and renews, so nothing is ever said under a lease that another task has just lost.
    """

    def __init__(self, run: str, plan: Plan, schedule: Schedule, bus: Bus, blobs: BlobStore, lease: Lease,
                 clock: Clock) -> None:
        self._run, self._plan, self._schedule = run, plan, schedule
        self._bus, self._blobs, self._lease, self._clock = bus, blobs, lease, clock
        self.state: State = self._initial()
        self.gates = GateCounts()
        self.leading = False
        self._asked: list[e.Fact] = []  # by commands, to be said next
        self._received: asyncio.Queue[list[Received]] = asyncio.Queue(1024)
        self._said = 0  # highest sequence we wrote to CTL
        self._ctl_position = 0
        self._derived_at = 0.0
        self._derive_after_s = REDERIVE_EVERY_S
        self._news = asyncio.Event()  # something was read since
        self._traces = Traces()

    def start(self) -> tuple[bool, int]:
        """Ask for the run to be opened; returns whether it is open already, and the number of the opening."""
        state, plan = self.state, self._plan
        already = state.opened and not state.closed
        opening = state.opening + (not already)
        if not already:
            self._asked.append(e.RunOpened(plan.config_digest, plan.seed, plan.num_cells, state.published_version,
                                           state.num_train_groups, opening, plan.num_standalone, self._schedule.name))
        return already, opening

    def stop(self, reason: str) -> int:
        """No further dispatch; the open burst ends, then the run closes. Returns the number of the opening."""
        self._asked.append(e.RunStopRequested(reason or "asked to stop", self.state.opening))
        return self.state.opening

    async def read_back(self, holds: Callable[[State], bool]) -> None:
        """Wait until what a command asked for is in the state. A command that was only heard is lost with this process."""
        while not holds(self.state):
            await self._news.wait()

    async def run(self, stopping: asyncio.Event) -> None:
        """Lead until `stopping`. Raises LostLease or BusError; the supervisor starts a fresh process."""
        await self._lease.take()
        positions = await self._rederive()
        self._traces.resumed()
        self.leading = True  # commands look at the state
        readers = [asyncio.create_task(self._follow(stream, position, records))
                   for (stream, records), position in zip(READS, positions, strict=True)]
        try:
            while not stopping.is_set():
                await self._cycle()
                failed = next((t for t in readers if t.done()), None)
                if failed is not None:
                    failed.result()
                    raise BusError("nats: connection closed")
        finally:
            for task in readers:
                task.cancel()

    # ------------------------------------------------------------ reading

    def _initial(self) -> State:
        return initial(self._plan.num_cells, self._plan.num_standalone)

    async def _rederive(self) -> list[int]:
        """Fold the streams anew; returns the sequences to go on from."""
        began, state, positions = time.monotonic(), self._initial(), []
        for stream, records in READS:
            position = 1
            async for page in self._pages(stream, [r for r in records if r not in SUPERSEDED]):
                state = self._folded_all(state, page)
                position = page[-1].sequence + 1
            positions.append(position)
            async for page in self._pages(stream, [r for r in records if r in SUPERSEDED], newest=True):
                state = self._folded_all(state, page)
        if self._derived_at and summary(state) != summary(self.state):
            log.warning("what was followed differs from the streams: %s is now %s", summary(self.state), summary(state))
        self.state, self._derived_at = state, time.monotonic()
        self._derive_after_s = pause_after(self._derived_at - began)
        return positions

    async def _pages(self, stream: Stream, records: list[type], newest: bool = False) -> AsyncIterator[list[Received]]:
        """What is in a stream of some records. A long history takes longer to read than a lease lives."""
        await self._lease.renew_if_due()
        if records:
            async for page in self._bus.pages(stream, [filter_of(self._run, r) for r in records], newest):
                yield page
                await self._lease.renew_if_due()

    async def _follow(self, stream: Stream, start: int, records: tuple[type, ...]) -> None:
        async for batch in self._bus.follow(stream, [filter_of(self._run, r) for r in records], start):
            await self._received.put(batch)

    def _folded(self, state: State, received: Received) -> State:
        if received.stream == CTL.name:
            self._ctl_position = max(self._ctl_position, received.sequence)
        try:
            envelope = codec.decode_envelope(received.data)
            fact = codec.fact_of(envelope, self._blobs.get(envelope.ref) if envelope.ref else None)
        except ContractError as error:
            log.error("ignored %s %d: %s", received.subject, received.sequence, error)
            return state
        self._traces.read(envelope, fact)
        return fold(state, fact, envelope.time / 1e9)

    def _folded_all(self, state: State, batch: list[Received]) -> State:
        for received in batch:
            state = self._folded(state, received)
        return state

    # ------------------------------------------------------------ one cycle

    async def _cycle(self) -> None:
        """1. read; 2. fold; 3. decide on the snapshot; 4. say it; 5. wait to read it back (by not deciding)."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                batch = await self._received.get()
            self.state = self._folded_all(self.state, batch)
            while not self._received.empty():
                self.state = self._folded_all(self.state, self._received.get_nowait())
            news, self._news = self._news, asyncio.Event()
            news.set()
        await self._lease.renew_if_due()
        if self._said > self._ctl_position:
            return
        if time.monotonic() - self._derived_at > self._derive_after_s:
            await self._rederive()
        self._traces.deciding()
        for fact in self._wanted():
            await self._lease.renew_if_due()
            self._said = max(self._said, await self._lease.say(fact, self._traces.decided(fact, self.state)))

    def _wanted(self) -> tuple[e.Fact, ...]:
        if self._asked:
            asked, self._asked = tuple(self._asked), []
            return asked
        decision = decide(self.state, self._plan, self._schedule, self._clock.now())
        self.gates.observe(self.state.burst, decision.blocked)
        return decision.facts
