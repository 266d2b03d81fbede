"""The one event loop of every service with a durable state: read, step, persist, perform, ack.

    messages (durable pull consumers) --\
    local events (rpc, gateway, timers) -+-> inbox -> core.step -> one SQLite transaction -> perform effects -> ack
                                         |                         (journal, applied, outbox)      |
    outbox publisher <-------------------+---------------------------------------------------------/

Who waits for whom: `submit` waits for the commit of its event; an ack waits for the commit of its message; nothing
waits for NATS, so an outage only lets the outbox grow. After a crash the snapshot is loaded, the journal replayed
(nothing is performed meanwhile), then `core.resume` says what is outstanding.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgpack
from gyre.contracts import codec
from gyre.contracts.errors import BusError, ContractError, Fenced, MessageTooLarge
from gyre.contracts.events import DeadLettered, Fact
from gyre.contracts.subjects import Stream, filter_of, message_id, subject_of
from gyre.runtime import telemetry
from gyre.runtime.blobs import BlobStore
from gyre.runtime.bus import Bus, Received
from gyre.runtime.clock import Clock
from gyre.runtime.effects import Core, Effect, KeepingCore, Kept, Publish, Tick, WriteBlob
from gyre.runtime.store import Commit, JournalRow, OutboxRow, Store
from gyre.runtime.transition_traces import leads_to_transition

log = logging.getLogger(__name__)
S = TypeVar("S")

MAX_TURN = 64
MAX_INBOX = 4096
MAX_TRIES = 3
CAREFUL_EVENTS = 256  # after a crash, so many events are taken one by one
PUBLISH_BATCH = 128
SNAPSHOT_EVERY = 5000
TICK_S = 1.0
MESSAGE = "message"

Perform = Callable[[Effect, Mapping[str, str]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Subscription:
    """Facts of `records` in `stream`. All must belong to that stream."""

    stream: Stream
    records: tuple[type, ...]


@dataclass(slots=True)
class _Item:
    """One entry of the inbox: a received message or a local event."""

    received: Received | None = None
    event: Any = None
    trace: dict[str, str] = field(default_factory=dict)
    posted_ns: int = field(default_factory=time.time_ns)
    done: asyncio.Future[None] | None = None


@dataclass(frozen=True, slots=True)
class _Cause:
    """Why the core is stepped: the trace context of it, since when it waits for that, and who said it if it was a fact."""

    trace: Mapping[str, str]
    since_ns: int
    source: str = ""


class Service(Generic[S]):
    """Runs one core. `perform` carries out every effect but Publish and WriteBlob, in order, after the commit."""

    def __init__(self, *, name: str, run: str, core: Core[S], store: Store, bus: Bus, blobs: BlobStore, clock: Clock,
                 subscriptions: Sequence[Subscription], perform: Perform,
                 single_writer_subjects: tuple[type, ...] = ()) -> None:
        self.name, self.run_id, self.core, self.bus, self.blobs, self.clock = name, run, core, bus, blobs, clock
        self.state: S = core.initial()
        self._store, self._subscriptions, self._perform = store, subscriptions, perform
        self._single_writer = single_writer_subjects
        self._locals = {t.__name__: t for t in (*core.local_events, Tick)}
        self._inbox: asyncio.Queue[_Item] = asyncio.Queue(MAX_INBOX)
        self._outbox_wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._applied: dict[str, int] = {}
        self._careful = 0
        self._handling: list[telemetry.Span] = []  # of the turn: what was taken is handled once its effects are performed

    # ------------------------------------------------------------ outside

    async def submit(self, event: Any) -> None:
        """Give a local event to the core; returns once everything it caused is durable."""
        done = asyncio.get_running_loop().create_future()
        await self._inbox.put(_Item(event=event, trace=telemetry.inject(), done=done))
        await done

    async def post(self, event: Any, trace: Mapping[str, str] | None = None) -> None:
        """Give a local event to the core without waiting for its commit."""
        await self._inbox.put(_Item(event=event, trace=dict(trace or {})))

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` beside the loop; if it fails, the process ends (and is restarted)."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def stop(self) -> None:
        """Finish what is in the inbox, flush the outbox for a while, and return from `run`."""
        self._stopping.set()

    @property
    def outbox_depth(self) -> int:
        return self._store.num_unsent()

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Recover, then loop until `stop`. Raises whatever broke an invariant or closed the connection."""
        self._recover()
        await self._perform_all([(e, {}) for e in self.core.resume(self.state, self.clock.now())])
        for subscription in self._subscriptions:
            self.spawn(self._read(subscription))
        self.spawn(self._publish_outbox())
        self.spawn(self._tick())
        while not (self._stopping.is_set() and self._inbox.empty()):
            if self._failure is not None:
                raise self._failure
            if self.bus.closed.is_set():
                raise BusError("nats: connection closed")
            turn = await self._next_turn()
            if turn:
                await self._take_turn(turn)
        await self._wind_down()

    async def _next_turn(self) -> list[_Item]:
        try:
            async with asyncio.timeout(0.5):  # not wait_for, which can swallow a cancellation
                turn = [await self._inbox.get()]
        except TimeoutError:
            return []
        if self._careful:
            self._careful -= 1
            return turn
        while len(turn) < MAX_TURN and not self._inbox.empty():
            turn.append(self._inbox.get_nowait())
        return turn

    async def _take_turn(self, turn: list[_Item]) -> None:
        commit = Commit()
        outstanding: list[tuple[Effect, dict[str, str]]] = []
        for item in turn:
            outstanding += self._step(item, commit)
        self._store.commit(commit)
        if commit.outbox:
            self._outbox_wake.set()
        for item in turn:
            if item.done is not None and not item.done.done():
                item.done.set_result(None)
        await self._perform_all(outstanding)
        while self._handling:
            self._handling.pop().end()
        for item in turn:
            if item.received is not None:
                await item.received.ack()
        if self._store.journal_length() > SNAPSHOT_EVERY:
            self._save_snapshot()

    def _step(self, item: _Item, commit: Commit) -> list[tuple[Effect, dict[str, str]]]:
        """Step the core with one item and note in `commit` what has to be durable."""
        now = self.clock.now()
        if item.received is None:
            row = JournalRow(type(item.event).__name__, now, codec.pack(item.event))
            return self._apply(item.event, row, _Cause(item.trace, item.posted_ns), commit)
        received = item.received
        if received.sequence <= self._applied.get(received.stream, 0):
            return []
        self._applied[received.stream] = commit.applied[received.stream] = received.sequence
        try:
            self._refuse_what_kills(received)
            envelope, fact = self._decode(received.data)
        except ContractError as error:
            self._dead_letter(received, error, commit)
            return []
        cause = _Cause(envelope.trace, envelope.time, envelope.source)
        return self._apply(fact, JournalRow(MESSAGE, now, received.data), cause, commit)

    def _refuse_what_kills(self, received: Received) -> None:
        """After a crash, note each message before it is stepped; one that was noted too often is poison."""
        if self._careful:
            num_tries = self._store.note_try(f"{received.stream}:{received.sequence}")
            if num_tries > MAX_TRIES:
                raise ContractError(f"crashed its consumer {MAX_TRIES} times")

    def _apply(self, event: Any, row: JournalRow, cause: _Cause,
               commit: Commit) -> list[tuple[Effect, dict[str, str]]]:
        began_ns = time.time_ns()
        self.state, effects = self.core.step(self.state, event, row.now)
        commit.journal.append(row)
        if "traceparent" not in cause.trace:
            context = dict(cause.trace)
        elif not leads_to_transition(cause.trace):
            context = telemetry.context_of(self._begin_handling(event, cause.trace, began_ns))
        elif effects:  # most services read the facts of all cells and act on few
            context = self._note_transition(event, cause, began_ns)
        else:
            context = {}
        return [(e, context) for e in effects if not self._persist(e, context, commit)]

    def _note_transition(self, event: Any, cause: _Cause, began_ns: int) -> dict[str, str]:
        """No moment of a transition is without a span: its waiting for this loop is one, beside that of the handling."""
        if not cause.source:
            return telemetry.context_of(self._begin_handling(event, cause.trace, cause.since_ns))
        telemetry.note("gyre.fact.delivery", cause.trace, cause.since_ns, began_ns, gyre__fact=type(event).__name__,
                       gyre__source=cause.source)
        return telemetry.context_of(self._begin_handling(event, cause.trace, began_ns))

    def _begin_handling(self, event: Any, trace: Mapping[str, str], start_ns: int) -> telemetry.Span:
        self._handling.append(telemetry.start(f"process {type(event).__name__}", trace, start_ns))
        return self._handling[-1]

    def _persist(self, effect: Effect, trace: Mapping[str, str], commit: Commit) -> bool:
        """Whether the effect was one of the runtime's own, done here or left to the outbox."""
        if isinstance(effect, Publish):
            commit.outbox.append(self._outbox_row(effect, trace))
            return True
        if isinstance(effect, WriteBlob):
            # Before the commit: whoever reads the fact finds the blob. A crash in between rewrites equal bytes.
            self.blobs.put(effect.path, effect.data)
            return True
        return False

    async def _perform_all(self, effects: list[tuple[Effect, dict[str, str]]]) -> None:
        for effect, trace in effects:
            if isinstance(effect, Publish):
                commit = Commit(outbox=[self._outbox_row(effect, trace)])
                self._store.commit(commit)
                self._outbox_wake.set()
            else:
                await self._perform(effect, trace)

    # ------------------------------------------------------------ messages

    def _decode(self, data: bytes) -> tuple[codec.Envelope, Fact]:
        envelope = codec.decode_envelope(data)
        body = self.blobs.get(envelope.ref) if envelope.ref else None
        return envelope, codec.fact_of(envelope, body)

    def _outbox_row(self, publish: Publish, trace: Mapping[str, str]) -> OutboxRow:
        fact = publish.fact
        context = dict(publish.trace or trace)
        body = encode_fact(fact, run=self.run_id, source=self.name, epoch=publish.epoch, trace=context,
                           blobs=self.blobs)
        headers = msgpack.packb({k: v for k, v in context.items() if k == "traceparent"})
        return OutboxRow(message_id(fact, self.run_id), subject_of(fact, self.run_id), headers, body,
                         isinstance(fact, self._single_writer))

    def _dead_letter(self, received: Received, error: ContractError, commit: Commit) -> None:
        log.error("dead letter: %s %d: %s", received.subject, received.sequence, error)
        fact = DeadLettered(received.stream, received.subject, received.sequence, self.name,
                            f"{type(error).__name__}: {error}", received.data[:256 * 1024])
        commit.outbox.append(self._outbox_row(Publish(fact), {}))

    async def _read(self, subscription: Subscription) -> None:
        stream = subscription.stream
        filters = [filter_of(self.run_id, record) for record in subscription.records]
        start = self._applied.get(stream.name, 0) + 1
        async for batch in self.bus.consume(stream, f"{self.run_id}-{self.name}", filters, start):
            for received in batch:
                await self._inbox.put(_Item(received=received))
            if self._stopping.is_set():
                return

    async def _publish_outbox(self) -> None:
        """Publish what is in the outbox, in order, until the end of the process."""
        while True:
            rows = self._store.unsent(PUBLISH_BATCH)
            if not rows:
                self._outbox_wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await self._outbox_wake.wait()
                continue
            await asyncio.gather(*(self._publish_row(row) for row in rows))
            self._store.mark_sent(row.id for row in rows)

    async def _publish_row(self, row: OutboxRow) -> None:
        headers = msgpack.unpackb(row.headers)
        expected = (row.subject, 0) if row.expected_empty else None
        try:
            await self.bus.publish(row.subject, row.body, row.message_id, headers, expected)
        except Fenced:
            await self._check_it_is_ours(row)

    async def _check_it_is_ours(self, row: OutboxRow) -> None:
        """A refusal does not say "not stored": an earlier try may have won. Anything else means a second writer."""
        stored = await self.bus.last_message(row.subject)
        if stored is None or stored.get("Nats-Msg-Id") != row.message_id:
            raise BusError(f"{row.subject} was written by somebody else: {stored}")

    # ------------------------------------------------------------ life cycle

    def _recover(self) -> None:
        started = time.perf_counter()
        snapshot = self._store.snapshot()
        if snapshot is not None:
            self.state = self.core.restore(snapshot)
            if isinstance(self.core, KeepingCore):
                for name, data in self._store.kept():
                    self.core.recall(self.state, name, data)
        num = 0
        for row in self._store.journal():
            event = self._decode(row.body)[1] if row.kind == MESSAGE else codec.unpack(row.body, self._locals[row.kind])
            self.state, _ = self.core.step(self.state, event, row.now)
            num += 1
        self._applied = self._store.applied()
        self._careful = CAREFUL_EVENTS if self._store.note_start() else 0
        log.info("recovered: snapshot %s, %d events in %.2f s", "yes" if snapshot else "no", num,
                 time.perf_counter() - started)

    def _save_snapshot(self) -> None:
        kept = self.core.take_kept(self.state) if isinstance(self.core, KeepingCore) else Kept()
        self._store.save_snapshot(self.core.snapshot(self.state), kept.rows, kept.dropped)

    async def _tick(self) -> None:
        while True:
            await self.clock.sleep(TICK_S)
            if self._inbox.empty():
                await self.post(Tick())

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()

    async def _wind_down(self) -> None:
        deadline = self.clock.now() + 5.0
        while self._store.num_unsent() and self.clock.now() < deadline:
            await self.clock.sleep(0.05)
        for task in list(self._tasks):
            task.cancel()
        self._save_snapshot()
        self._store.note_clean_stop()
        self._store.close()


def encode_fact(fact: Fact, *, run: str, source: str, blobs: BlobStore, epoch: int = 0,
                trace: Mapping[str, str] | None = None) -> bytes:
    """The message of a fact; a body too large for NATS goes to the blob store and its reference travels."""
    common: dict[str, Any] = {"id": uuid.uuid4().hex, "run": run, "source": source, "time_ns": time.time_ns(),
                              "epoch": epoch, "trace": dict(trace or {})}
    try:
        return codec.encode(fact, **common)
    except MessageTooLarge:
        body = codec.body_of(fact)
        path = f"messages/{message_id(fact, run)}"
        return codec.encode(fact, ref=blobs.put(path, body), **common)
