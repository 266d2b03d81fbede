"""JetStream as far as the protocol rests on it: streams, message ids, conditional publishes, positions and a work queue.

A publish is retried until it is acknowledged, and its question or its answer may be lost, so that what was refused or is
sent again may be stored already; what was sent while the wires were cut arrives when they are mended. Message ids are
remembered for `window_s` only. One connection keeps its order; what is sent again comes later than what was sent after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gyre.contracts.events import Fact, LeaseTaken
from gyre.contracts.subjects import CTL, STREAMS, Stream, message_id, row_of, subject_of
from sim.kernel import LATE, Process, Reply, Task, World

RUN = "run"
NATS = "nats"
PUBLISH_TIMEOUT_S = 5.0
ACK_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Message:
    """One stored message; `at` is what its writer believed the time to be."""

    stream: str
    sequence: int
    subject: str
    id: str
    fact: Fact
    writer: str
    at: float


@dataclass(frozen=True, slots=True)
class Ask:
    """One publish as the server is asked for it. `expected`: (subject, sequence) that must be the last there."""

    fact: Fact
    id: str
    writer: str
    at: float
    expected: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Fenced:
    """The condition did not hold. That does not say that the message is not stored."""


@dataclass(slots=True)
class _Log:
    stream: Stream
    messages: list[Message] = field(default_factory=list)
    ids: dict[str, tuple[int, float]] = field(default_factory=dict)
    last: dict[str, Message] = field(default_factory=dict)
    readers: list[Reader] = field(default_factory=list)


@dataclass(slots=True)
class Reader:
    """A consumer's position in one stream; `take` is called in its process, in order, once for each message."""

    bus: Bus
    process: Process
    life: int
    log: _Log
    records: tuple[type, ...]
    take: Callable[[list[Message]], None]
    position: int  # index of the next message
    is_due: bool = False

    def pump(self) -> None:
        """Have what is new delivered after a while."""
        if not self.is_due and self.position < len(self.log.messages) and self.process.life == self.life:
            self.is_due = True
            self.bus.world.after(self.bus.delay(), self._deliver)

    def _deliver(self) -> None:
        self.is_due = False
        if self.process.life != self.life or not self.bus.world.passes(NATS, self.process.name):
            return  # a lost delivery is missed, and asked for again when the wires are up
        end = len(self.log.messages)
        if self.bus.world.dice.random() < 0.3:
            end = self.bus.world.dice.randint(self.position + 1, end)
        fresh = [m for m in self.log.messages[self.position:end] if isinstance(m.fact, self.records)]
        self.position = end
        if fresh:
            self.bus.world.after(0.0, lambda: self.take(fresh), self.process)
        self.pump()


@dataclass(slots=True)
class _Work:
    message: Message
    num_delivered: int = 0
    until: float = -1.0
    token: int = 0
    is_done: bool = False


class Bus:
    """The server, and what its clients do. `stored` are told of every message that is stored."""

    def __init__(self, world: World, window_s: float, fences_first: bool) -> None:
        self.world = world
        self.logs = {stream.name: _Log(stream) for stream in STREAMS}
        self.stored: list[Callable[[Message], None]] = []
        self._window_s, self._fences_first = window_s, fences_first
        self._work: list[_Work] = []
        self._arrives: dict[tuple[str, int], float] = {}

    def delay(self) -> float:
        """How long a message is on its way: mostly milliseconds, sometimes seconds."""
        dice = self.world.dice
        return dice.uniform(0.001, 0.02) if dice.random() < 0.9 else dice.uniform(0.05, 3.0)

    # ------------------------------------------------------------ the server

    def store(self, ask: Ask) -> int | Fenced:
        """What the server answers: a sequence (of the first copy, if it knows the id) or a refusal."""
        log = self.logs[row_of(ask.fact).stream.name]
        known = log.ids.get(ask.id)
        is_known = known is not None and self.world.now - known[1] <= self._window_s
        if is_known and not self._fences_first:
            return known[0]
        if ask.expected is not None:
            subject, sequence = ask.expected
            last = log.last.get(subject)
            if (last.sequence if last else 0) != sequence:
                return Fenced()
        return known[0] if is_known else self._append(log, ask)

    def _append(self, log: _Log, ask: Ask) -> int:
        subject = subject_of(ask.fact, RUN)
        message = Message(log.stream.name, len(log.messages) + 1, subject, ask.id, ask.fact, ask.writer, ask.at)
        log.messages.append(message)
        log.ids[ask.id] = (message.sequence, self.world.now)
        log.last[subject] = message
        self.world.note(ask.writer, "said", ask.fact)
        if log.stream.work_queue:
            self._work.append(_Work(message))
        for tell in self.stored:
            tell(message)
        log.readers = [r for r in log.readers if r.process.life == r.life]
        for reader in log.readers:
            reader.pump()
        return message.sequence

    def store_again(self, message: Message) -> None:
        """A retry of `message` arrives when its id is forgotten."""
        leader = self.leader() if message.stream == CTL.name else message.writer
        self._append(self.logs[message.stream], Ask(message.fact, message.id, leader, message.at))

    def leader(self) -> str:
        """Who wrote the newest lease; a retry is stored again under its own lease only."""
        leases = [m for m in self.logs[CTL.name].messages if isinstance(m.fact, LeaseTaken)]
        return leases[-1].writer if leases else ""

    def messages(self, stream: Stream) -> Sequence[Message]:
        return self.logs[stream.name].messages

    def wires_changed(self) -> None:
        """A cut was mended: whoever missed deliveries asks again."""
        for log in self.logs.values():
            for reader in log.readers:
                reader.pump()

    # ------------------------------------------------------------ publishing

    def publish(self, process: Process, fact: Fact, expected: tuple[str, int] | None = None, id_: str = "") -> Task:
        """Publish until it is acknowledged; returns the sequence or Fenced."""
        ask = Ask(fact, id_ or message_id(fact, RUN), process.name, self.world.clock(process), expected)
        delay_s = 0.1
        while True:
            reply = self.world.reply()
            self._send(process, ask, reply)
            answer = yield (reply, PUBLISH_TIMEOUT_S)
            if answer is not LATE:
                return answer
            yield delay_s
            delay_s = min(delay_s * 2, 2.0)

    def _send(self, process: Process, ask: Ask, reply: Reply) -> None:
        """One try over the process's connection, which keeps the order of what it carries."""
        key = (process.name, process.life)
        at = self._arrives[key] = max(self._arrives.get(key, 0.0), self.world.now + self.delay())

        def arrive() -> None:
            if process.name in self.world.mute or not self.world.reaches(process.name, NATS):
                if process.life == key[1]:  # it lies in the client's buffer until it is connected again
                    self.world.after(0.5, arrive)
                return
            answer = self.store(ask)
            if self.world.passes(NATS, process.name):
                self.world.after(self.world.pick(0.001, 0.02), lambda: reply.give(answer))

        if not self.world.is_lost():
            self.world.after(at - self.world.now, arrive)

    # ------------------------------------------------------------ reading

    def ask(self, process: Process, question: Callable[[], Any]) -> Task:
        """Ask the server something until it answers."""
        while True:
            answer = yield from self.try_ask(process, question)
            if answer is not LATE:
                return answer
            yield 0.5

    def try_ask(self, process: Process, question: Callable[[], Any]) -> Task:
        """Ask the server once; LATE if no answer comes."""
        reply = self.world.reply()

        def arrive() -> None:
            answer = question()
            if self.world.passes(NATS, process.name):
                self.world.after(self.world.pick(0.001, 0.01), lambda: reply.give(answer))

        if self.world.passes(process.name, NATS):
            self.world.after(self.world.pick(0.001, 0.01), arrive)
        return (yield (reply, PUBLISH_TIMEOUT_S))

    def last_message(self, process: Process, stream: Stream, subject: str) -> Task:
        """The last message on a subject, or None."""
        return self.ask(process, lambda: self.logs[stream.name].last.get(subject))

    def read_all(self, process: Process, stream: Stream, records: tuple[type, ...]) -> Task:
        """Every message of `records` that is there now, or LATE."""
        return self.try_ask(process, lambda: [m for m in self.logs[stream.name].messages if isinstance(m.fact, records)])

    def read(self, process: Process, stream: Stream, records: tuple[type, ...], start: int,
             take: Callable[[list[Message]], None]) -> None:
        """Have `take` called with everything from sequence `start` on, in order, for the rest of this life."""
        log = self.logs[stream.name]
        reader = Reader(self, process, process.life, log, records, take, start - 1)
        log.readers.append(reader)
        reader.pump()

    # ------------------------------------------------------------ the work queue

    def take_work(self, process: Process) -> Task:
        """One message that nobody works on, as (message, number of its delivery, token); None if there is none."""
        answer = yield from self.try_ask(process, self._next_work)
        return None if answer is LATE else answer

    def _next_work(self) -> tuple[Message, int, int] | None:
        for work in self._work:
            if not work.is_done and work.until <= self.world.now:
                work.until = self.world.now + ACK_WAIT_S
                work.num_delivered += 1
                work.token += 1
                return work.message, work.num_delivered, work.token
        return None

    def ack_work(self, process: Process, message: Message) -> None:
        """Say that it is done; the saying may be lost."""
        def arrive() -> None:
            for work in self._work:
                if work.message is message:
                    work.is_done = True
            self._work = [work for work in self._work if not work.is_done]

        if self.world.passes(process.name, NATS):
            self.world.after(self.delay(), arrive)
