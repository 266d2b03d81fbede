"""`gyre.runtime.service.Service` once more, small: the real cores behind a store that survives and a process that does not.

read, step, persist (journal, applied sequences and outbox in one commit), perform, acknowledge; after a crash: snapshot,
journal, `resume`. Between any two of these the process may die.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from gyre.contracts.events import Fact
from gyre.contracts.subjects import Stream, message_id, row_of, subject_of
from gyre.runtime.effects import Core, KeepingCore, Publish, Tick, WriteBlob
from sim.bus import RUN, Bus, Fenced, Message
from sim.kernel import Broken, Process, Reply, Task, World

S = TypeVar("S")
PUBLISH_BATCH = 128


@dataclass(slots=True)
class Row:
    """One message to publish."""

    fact: Fact
    id: str
    expected_empty: bool
    is_sent: bool = False


@dataclass(slots=True)
class Disk:
    """What a service's SQLite file holds. `folded` is for the invariants: every sequence that ever was journalled."""

    snapshot: bytes | None = None
    kept: dict[str, bytes] = field(default_factory=dict)
    journal: list[tuple[Any, float]] = field(default_factory=list)
    applied: dict[str, int] = field(default_factory=dict)
    outbox: dict[str, Row] = field(default_factory=dict)
    unsent: deque[Row] = field(default_factory=deque)
    folded: dict[str, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class _Item:
    message: Message | None = None
    event: Any = None
    done: Reply | None = None


@dataclass(frozen=True, slots=True)
class Subscription:
    """Facts of `records` in `stream`."""

    stream: Stream
    records: tuple[type, ...]


class SimService(Generic[S]):
    """Runs one core in one process. `perform` carries out an effect, `begin` starts the shell's tasks after recovery."""

    def __init__(self, world: World, bus: Bus, process: Process, core: Core[S], subscriptions: tuple[Subscription, ...],
                 perform: Callable[[Any], None], begin: Callable[[], None], single_writer: tuple[type, ...] = (),
                 tick_s: float = 0.0) -> None:
        self.world, self.bus, self.process, self.core = world, bus, process, core
        self.disk, self.blobs = Disk(), world.blobs
        self.snapshot_every = world.dice.choice((15, 60, 1000))
        self.stepped: list[Callable[[], None]] = []
        self.rebuild: Callable[[], bytes | None] = lambda: None  # a snapshot from what is left when the disk was lost
        self.lost_its_disk = False
        self._subscriptions, self._perform, self._begin = subscriptions, perform, begin
        self._single_writer, self._tick_s = single_writer, tick_s
        self.state: S = core.initial()
        self._inbox: deque[_Item] = deque()
        self._applied: dict[str, int] = {}
        self._is_due = self._is_publishing = False
        process.start = self._start

    # ------------------------------------------------------------ outside

    def submit(self, event: Any) -> Task:
        """Give a local event to the core; goes on once everything it caused is durable."""
        done = self.world.reply()
        self._put(_Item(event=event, done=done))
        yield done

    def post(self, event: Any) -> None:
        """Give a local event to the core without waiting."""
        self._put(_Item(event=event))

    def _put(self, item: _Item) -> None:
        self._inbox.append(item)
        if not self._is_due:
            self._is_due = True
            self.world.after(self.world.pick(0.0005, 0.005), self._turn, self.process)

    # ------------------------------------------------------------ the loop

    def _turn(self) -> None:
        dice = self.world.dice
        num = min(len(self._inbox), dice.randint(1, 8))
        items = [self._inbox.popleft() for _ in range(num)]
        journal: list[tuple[Any, float]] = []
        applied: list[Message] = []
        rows: list[Row] = []
        outstanding: list[Any] = []
        for item in items:
            outstanding += self._step(item, journal, applied, rows)
        self.world.point(self.process, "before the commit")
        self._commit(journal, applied, rows)
        for item in items:
            if item.done is not None:
                item.done.give(None)
        self.world.point(self.process, "after the commit")
        self._perform_all(outstanding)
        self._is_due = False
        if self._inbox:
            self._put(self._inbox.pop())
        if len(self.disk.journal) > self.snapshot_every:
            self._save_snapshot()
        for tell in self.stepped:
            tell()

    def _step(self, item: _Item, journal: list[tuple[Any, float]], applied: list[Message], rows: list[Row]) -> list[Any]:
        message, event = item.message, item.event
        if message is not None:
            if message.sequence <= self._applied.get(message.stream, 0):
                return []
            self._applied[message.stream] = message.sequence
            applied.append(message)
            event = message.fact
        now = self.world.clock(self.process)
        self.state, effects = self.core.step(self.state, event, now)
        journal.append((event, now))
        others = []
        for effect in effects:
            if isinstance(effect, Publish):
                rows.append(self._row(effect.fact))
            elif isinstance(effect, WriteBlob):
                self.blobs[effect.path] = effect.data
            else:
                others.append(effect)
        return others

    def _row(self, fact: Fact) -> Row:
        return Row(fact, message_id(fact, RUN), isinstance(fact, self._single_writer))

    def _commit(self, journal: list[tuple[Any, float]], applied: list[Message], rows: list[Row]) -> None:
        disk = self.disk
        disk.journal += journal
        for message in applied:
            disk.applied[message.stream] = message.sequence
            disk.folded.setdefault(message.stream, []).append(message.sequence)
        for row in rows:
            if row.id not in disk.outbox:
                disk.outbox[row.id] = row
                disk.unsent.append(row)
        if disk.unsent and not self._is_publishing:
            self._is_publishing = True
            self.world.spawn(self.process, self._publish_outbox())

    def _perform_all(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Publish):
                self._commit([], [], [self._row(effect.fact)])
            else:
                self._perform(effect)
            self.world.point(self.process, f"after {type(effect).__name__}")

    # ------------------------------------------------------------ the outbox

    def _publish_outbox(self) -> Task:
        while self.disk.unsent:
            rows = [self.disk.unsent[i] for i in range(min(len(self.disk.unsent), PUBLISH_BATCH))]
            done = [self.world.reply() for _ in rows]
            for row, its in zip(rows, done, strict=True):
                self.world.spawn(self.process, self._publish_row(row, its))
            for its in done:
                yield its
            self.world.point(self.process, "before marking as sent")
            for row in rows:
                row.is_sent = True
                self.disk.unsent.popleft()
        self._is_publishing = False

    def _publish_row(self, row: Row, done: Reply) -> Task:
        subject = subject_of(row.fact, RUN)
        expected = (subject, 0) if row.expected_empty else None
        answer = yield from self.bus.publish(self.process, row.fact, expected)
        if isinstance(answer, Fenced):
            stored = yield from self.bus.last_message(self.process, row_of(row.fact).stream, subject)
            if stored is None or stored.id != row.id:
                raise Broken(f"{subject} was written by somebody else: {stored}")
        done.give(None)

    # ------------------------------------------------------------ life cycle

    def lose_disk(self) -> None:
        """The SQLite file is gone, with what was in the outbox."""
        self.disk, self.lost_its_disk = Disk(), True

    def _start(self) -> None:
        if self.lost_its_disk and not (self.disk.journal or self.disk.snapshot or self.disk.applied):
            self.disk.snapshot = self.rebuild()
        disk = self.disk
        self._inbox.clear()
        self._is_due = self._is_publishing = False
        self.state = self.core.initial() if disk.snapshot is None else self.core.restore(disk.snapshot)
        if isinstance(self.core, KeepingCore):
            for name, data in disk.kept.items():
                self.core.recall(self.state, name, data)
        for event, now in disk.journal:
            self.state, _ = self.core.step(self.state, event, now)
        self._applied = dict(disk.applied)
        self._begin()
        self._perform_all(self.core.resume(self.state, self.world.clock(self.process)))
        for subscription in self._subscriptions:
            start = self._applied.get(subscription.stream.name, 0) + 1
            self.bus.read(self.process, subscription.stream, subscription.records, start, self._take)
        if disk.unsent and not self._is_publishing:
            self._is_publishing = True
            self.world.spawn(self.process, self._publish_outbox())
        if self._tick_s:
            self.world.spawn(self.process, self._tick())

    def _take(self, messages: list[Message]) -> None:
        for message in messages:
            self._put(_Item(message=message))

    def _save_snapshot(self) -> None:
        disk = self.disk
        if isinstance(self.core, KeepingCore):
            kept = self.core.take_kept(self.state)
            disk.kept.update(kept.rows)
            disk.kept = {n: d for n, d in disk.kept.items() if not n.startswith(kept.dropped)} if kept.dropped else disk.kept
        disk.snapshot = self.core.snapshot(self.state)
        disk.journal.clear()

    def _tick(self) -> Task:
        while True:
            yield self._tick_s
            if not self._inbox:
                self.post(Tick())
