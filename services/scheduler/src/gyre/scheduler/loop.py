"""The scheduler's cycle: read facts back, fold, decide, say under the lease, wait until they are read back.

It keeps nothing on disk: on start, and after any gap, the state is folded anew from the streams.
"""

import asyncio
import contextlib
import logging

from gyre.contracts import codec
from gyre.contracts import events as e
from gyre.contracts.errors import BusError, ContractError
from gyre.contracts.subjects import CTL, EXEC, TRAIN, TRAJ, Stream, filter_of
from gyre.runtime.bus import Bus, Received
from gyre.runtime.clock import Clock
from gyre.scheduler.config import RENEW_EVERY_S, Plan
from gyre.scheduler.core import State, decide, fold, initial
from gyre.scheduler.lease import Lease
from gyre.scheduler.schedules import Schedule
from gyre.scheduler.traces import Traces

log = logging.getLogger(__name__)

READS: tuple[tuple[Stream, tuple[type, ...]], ...] = (
    (CTL, (e.RunOpened, e.RunClosed, e.BurstOpened, e.BurstClosed, e.GroupDispatched, e.CellRoleAssigned)),
    (EXEC, (e.ExecutionTerminated, e.CellRolloutReady)),
    (TRAJ, (e.GroupCompleted,)),
    (TRAIN, (e.StepFinished, e.WeightsPublished, e.CellTrainJoined)),
)


class Scheduler:
    """The leader of one run. `start` and `stop` are commands; everything else follows from facts."""

    def __init__(self, run: str, plan: Plan, schedule: Schedule, bus: Bus, lease: Lease, clock: Clock) -> None:
        self._run, self._plan, self._schedule = run, plan, schedule
        self._bus, self._lease, self._clock = bus, lease, clock
        self.state: State = initial(plan.num_cells)
        self._writing = asyncio.Lock()  # renewing and saying share one order
        self.leading = False
        self._start_asked = False
        self._received: asyncio.Queue[list[Received]] = asyncio.Queue(1024)
        self._said = 0  # highest sequence we wrote to CTL
        self._ctl_position = 0
        self._traces = Traces()

    def start(self) -> tuple[bool, int]:
        """Ask for the run to be opened; returns whether it is open already, and the number of the opening."""
        already = self.state.opened and not self.state.closed
        self._start_asked = self._start_asked or not already
        return already, self.state.opening + (not already)

    def stop(self, reason: str) -> None:
        """No further dispatch; the open burst ends, then the run closes."""
        self.state.stop_reason = reason or "asked to stop"

    async def run(self, stopping: asyncio.Event) -> None:
        """Lead until `stopping`. Raises LostLease or BusError; the supervisor starts a fresh process."""
        await self._lease.take()
        self.leading = True
        readers = [asyncio.create_task(self._follow(stream, await self._catch_up(stream, records), records))
                   for stream, records in READS]
        self._traces.resumed()
        renewer = asyncio.create_task(self._renew())
        try:
            while not stopping.is_set():
                await self._cycle()
                failed = next((t for t in (renewer, *readers) if t.done()), None)
                if failed is not None:
                    failed.result()
                    raise BusError("nats: connection closed")
        finally:
            for task in (renewer, *readers):
                task.cancel()

    async def _catch_up(self, stream: Stream, records: tuple[type, ...]) -> int:
        """Fold what is in the stream now; returns the sequence to go on from."""
        received = await self._bus.read_all(stream, [filter_of(self._run, r) for r in records])
        self._fold(received)
        return received[-1].sequence + 1 if received else 1

    async def _follow(self, stream: Stream, start: int, records: tuple[type, ...]) -> None:
        async for batch in self._bus.follow(stream, [filter_of(self._run, r) for r in records], start):
            await self._received.put(batch)

    async def _renew(self) -> None:
        while True:
            await self._clock.sleep(RENEW_EVERY_S)
            async with self._writing:
                await self._lease.renew()

    # ------------------------------------------------------------ one cycle

    async def _cycle(self) -> None:
        """1. read; 2. fold; 3. decide on the snapshot; 4. say it; 5. wait to read it back (by not deciding)."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.25):
                batch = await self._received.get()
            self._fold(batch)
            while not self._received.empty():
                self._fold(self._received.get_nowait())
        if self._unread():
            return
        self._traces.deciding()
        for fact in self._wanted():
            async with self._writing:
                sequence = await self._lease.say(fact, self._traces.decided(fact, self.state))
            self._said = max(self._said, sequence)

    def _unread(self) -> bool:
        return self._said > self._ctl_position

    def _wanted(self) -> list[e.Fact]:
        if self._start_asked and (not self.state.opened or self.state.closed):
            self._start_asked = False
            return [e.RunOpened(self._plan.config_digest, self._plan.seed, self._plan.num_cells,
                                self.state.published_version, self.state.num_train_groups, self.state.opening + 1)]
        return decide(self.state, self._plan, self._schedule)

    def _fold(self, batch: list[Received]) -> None:
        for received in batch:
            if received.stream == CTL.name:
                self._ctl_position = max(self._ctl_position, received.sequence)
            try:
                envelope, fact = codec.decode(received.data)
            except ContractError as error:
                log.error("ignored %s %d: %s", received.subject, received.sequence, error)
                continue
            self.state = fold(self.state, fact)
            self._traces.read(envelope, fact)
