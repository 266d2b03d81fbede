"""The rollout shell around the real `RolloutCore`: executor, keepers, gateway, and harnesses that outlive it.

`services/rollout/{serve,executor,keeper}.py`, small. What lies on the disk of the machine (archive of calls, directories of
harnesses) survives the process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from gyre.contracts import events as e
from gyre.contracts.digest import token_digest
from gyre.contracts.ids import call_id
from gyre.contracts.subjects import CTL, TRAIN
from gyre.rollout import local as at
from gyre.rollout.core import RolloutCore, State
from gyre.rollout.execution import due_limit
from sim.bus import Bus
from sim.engines import SimEngine
from sim.kernel import Process, Refused, Reply, Task, Unreachable, World
from sim.service import SimService, Subscription

CHECK_S = 1.0
WATCH_S = 0.7
LOST_AFTER_S = 15.0
RETRY_S = 0.5
Sampled = Callable[[str, int, str], None]


@dataclass(slots=True)
class Harness:
    """A harness under its shim: it goes on while the service is away. `exit`: how it ended, None while it runs."""

    execution: str
    process: Process
    num_calls: int
    answers: dict[int, str] = field(default_factory=dict)
    exit: tuple[int | None, str] | None = None
    hangs: bool = False


@dataclass(slots=True)
class Session:
    """The gateway's side of one execution, in memory."""

    spec: e.ExecutionSpec
    group: str
    is_open: bool = True
    pending: dict[int, Reply] = field(default_factory=dict)
    stall_s: float = 0.0


@dataclass(slots=True)
class Archive:
    """Calls by execution, and the digest of each answer: durable before the harness gets it."""

    calls: dict[str, list[e.CallRecorded]] = field(default_factory=dict)


class SimRollout:
    """`gyre-rollout serve`. `sampled` is told the version and the checksum of all tokens that are recorded."""

    def __init__(self, world: World, bus: Bus, process: Process, engines: list[SimEngine], max_running: int,
                 sampled: Sampled) -> None:
        self.world, self.bus, self.process, self.engines = world, bus, process, engines
        self.archive = Archive()
        self.harnesses: dict[str, Harness] = {}
        self._sampled = sampled
        subscriptions = (Subscription(CTL, (e.GroupDispatched, e.CellRoleAssigned)),
                         Subscription(TRAIN, (e.WeightsPublished, e.CellTrainReleased)))
        core = RolloutCore(max_running, len(engines))
        self.service: SimService[State] = SimService(world, bus, process, core, subscriptions, self._perform, self._begin)

    def _begin(self) -> None:
        self.sessions: dict[str, Session] = {}
        self._watched: set[str] = set()
        self._is_serving = False
        self._admits: set[int] = set()
        self._wanted: dict[int, at.SettleCell] = {}
        self._changed = self.world.reply()
        for engine in self.engines:
            self.world.spawn(self.process, _Keeper(self, engine).run())
        self.world.spawn(self.process, self._watch())

    def _post(self, event: object) -> None:
        self.service.post(event)

    # ------------------------------------------------------------ effects

    def _perform(self, effect: at.Effect) -> None:
        spawn, process = self.world.spawn, self.process
        match effect:
            case at.SettleCell():
                self._wanted[effect.cell] = effect
                if not effect.serve:
                    self._admits.discard(effect.cell)
                self.change()
            case at.OpenGateway():
                if effect.away_s:
                    self._post(at.ServiceWasAway(effect.away_s))
                if effect.may_sweep:
                    for execution in sorted({*self.archive.calls, *self.harnesses} - set(effect.live)):
                        self._discard(execution)
                self._is_serving = True
            case at.StartHarness():
                self._open_session(effect)
                spawn(process, self._start(effect))
            case at.KillHarness():
                self._watched.discard(effect.execution)
                self._close(effect.execution)
                spawn(process, self._kill_and_report(effect.execution))
            case at.PreserveWorkspace():
                self._close(effect.execution)
                spawn(process, self._preserve(effect.execution))
            case at.DiscardExecution():
                self._discard(effect.execution)

    def change(self) -> None:
        """Wake whoever waits for an engine or for something new to do."""
        changed, self._changed = self._changed, self.world.reply()
        changed.give(None)

    def _close(self, execution: str) -> None:
        session = self.sessions.get(execution)
        if session is not None:
            session.is_open = False
            for pending in session.pending.values():
                pending.give(None)

    def _discard(self, execution: str) -> None:
        self._watched.discard(execution)
        self.sessions.pop(execution, None)
        self.archive.calls.pop(execution, None)
        harness = self.harnesses.pop(execution, None)
        if harness is not None:
            self.world.kill(harness.process, None, "discarded")

    # ------------------------------------------------------------ executor

    def _open_session(self, effect: at.StartHarness) -> None:
        execution = effect.execution
        self.sessions.setdefault(execution, Session(effect.spec, effect.group))
        for record in self.archive.calls.get(execution, ()):
            self._post(at.CallFinished(record))

    def _start(self, effect: at.StartHarness) -> Task:
        execution = effect.execution
        yield self.world.pick(0.01, 0.5)
        known = self.service.state.executions.get(execution)
        if known is None or not known.takes_calls:
            return
        if effect.is_running and execution not in self.harnesses:
            self._post(at.ProcessExited(execution, None, 0, "nothing is left of the harness"))
            return
        if execution not in self.harnesses:
            if self.world.dice.random() < 0.03:
                self._post(at.HarnessNotStarted(execution, "no room"))
                return
            self._launch(execution)
            self.world.point(self.process, "after starting a harness")
        self._post(at.HarnessStarted(execution, 1))
        self._watched.add(execution)

    def _launch(self, execution: str) -> None:
        process = Process(f"h/{execution}")
        harness = Harness(execution, process, self.world.dice.randint(1, 3))
        self.harnesses[execution] = harness
        process.start = lambda: self.world.spawn(process, self._harness(harness))
        process.is_alive = True
        process.life = 1
        process.start()

    def _watch(self) -> Task:
        """Report exits and limits; say from time to time how long the contexts are."""
        num = 0
        while True:
            yield WATCH_S
            num += 1
            if num % 4 == 0:
                self._post(at.ContextsDue())
            for execution in sorted(self._watched):
                if self.harnesses[execution].exit is not None:
                    self._watched.discard(execution)
                    self.world.spawn(self.process, self._kill_and_report(execution))
            now = self.world.clock(self.process)
            for execution in list(self.service.state.executions.values()):
                if execution.takes_calls:
                    session = self.sessions.get(execution.id)
                    limit = due_limit(execution, now, session.stall_s if session else 0.0)
                    if limit is not None:
                        self._post(at.LimitFired(execution.id, limit))

    def _kill_and_report(self, execution: str) -> Task:
        yield self.world.pick(0.01, 0.3)
        harness = self.harnesses.get(execution)
        if harness is None:
            self._post(at.ProcessExited(execution, None, 0, "the harness never started"))
            return
        self.world.kill(harness.process, None, "ended")
        if harness.exit is None:
            harness.exit = (-9, "killed")
        self._post(at.ProcessExited(execution, harness.exit[0], 0, harness.exit[1], self._undelivered(harness)))

    def _undelivered(self, harness: Harness) -> tuple[str, ...]:
        archived = self.archive.calls.get(harness.execution, ())
        return tuple(r.call for r in archived if r.index not in harness.answers)

    def _preserve(self, execution: str) -> Task:
        yield self.world.pick(0.01, 0.5)
        if self.world.dice.random() < 0.02:
            self._post(at.WorkspacePreserved(execution, None, "disk full"))
            return
        path = f"workspaces/{execution}.tar"
        self.world.blobs[path] = b"w"
        self._post(at.WorkspacePreserved(execution, e.BlobRef(path, "d", 1)))

    # ------------------------------------------------------------ harnesses

    def _harness(self, harness: Harness) -> Task:
        """Calls until it is done; a call that was cut off is made again."""
        dice = self.world.dice
        kind = dice.random()
        for index in range(harness.num_calls):
            yield dice.uniform(0.05, 1.5)
            while index not in harness.answers:
                try:
                    answer = yield from self.world.call(
                        harness.process, self.process, lambda i=index: self._answer(harness.execution, i), 60.0)
                    harness.answers[index] = answer
                except (Unreachable, Refused):
                    yield RETRY_S
            if kind < 0.04:
                harness.exit = (None, "somebody killed it")
                return
            if kind < 0.08:
                yield self.world.reply()  # hangs for ever
        harness.exit = (1, "failed") if kind > 0.95 else (0, "")

    # ------------------------------------------------------------ gateway

    def _answer(self, execution: str, index: int) -> Task:
        """The answer of call `index`: recorded before, in flight, or new. Raises Refused."""
        session = self.sessions.get(execution)
        if not self._is_serving or session is None or not session.is_open:
            raise Refused("the execution has ended")
        archived = self.archive.calls.get(execution, [])
        if index < len(archived):
            return archived[index].digest
        pending = session.pending.get(index)
        if pending is None:
            pending = session.pending[index] = self.world.reply()
            limit = session.spec.timeout_calls
            if limit is not None and index + 1 >= limit:
                self._post(at.LimitFired(execution, "calls"))
            else:
                self.world.spawn(self.process, self._serve(execution, session, index, pending))
        digest = yield pending
        if digest is None:
            raise Refused("the call was cut off")
        return digest

    def _serve(self, execution: str, session: Session, index: int, pending: Reply) -> Task:
        digest = None
        if (yield from self._was_known(execution, index)):
            spans, cell = yield from self._generate(session)
            if session.is_open:
                digest = yield from self._keep(execution, session, index, spans, cell)
        if session.pending.get(index) is pending:
            del session.pending[index]
        pending.give(digest)

    def _was_known(self, execution: str, index: int) -> Task:
        yield 0.001
        return index == len(self.archive.calls.get(execution, ()))

    def _generate(self, session: Session) -> Task:
        """Two chunks of tokens, each from whoever admits; a chunk whose engine goes away is computed again elsewhere."""
        spans: list[e.VersionSpan] = []
        cell = 0
        while len(spans) < 2 and session.is_open:
            if not self._admits:
                began = self.world.now
                yield self._changed, 5.0
                session.stall_s += self.world.now - began
                continue
            cell = self.world.dice.choice(sorted(self._admits))
            engine = self.engines[cell]
            try:
                version, checksum = yield from self.world.call(self.process, engine.process, engine.generate, 5.0)
            except (Unreachable, Refused):
                yield 0.1
                continue
            self._sampled(engine.process.name, version, checksum)
            spans.append(e.VersionSpan(2 * len(spans), 2 * len(spans) + 2, version))
        return tuple(spans), cell

    def _keep(self, execution: str, session: Session, index: int, spans: tuple[e.VersionSpan, ...], cell: int) -> Task:
        """Durable, then counted, then answered."""
        record = self._record(execution, session.group, index, spans, cell)
        self.archive.calls.setdefault(execution, []).append(record)
        self.world.point(self.process, "after archiving a call")
        stall_s, session.stall_s = session.stall_s, 0.0
        yield from self.service.submit(at.CallFinished(record, stall_s))
        state = self.service.state.executions.get(execution)
        return record.digest if state is not None and state.num_calls > index else None

    def _record(self, execution: str, group: str, index: int, spans: tuple[e.VersionSpan, ...], cell: int) -> e.CallRecorded:
        archived = self.archive.calls.get(execution, [])
        ids = np.asarray([self.world.dice.randrange(50) for _ in range(6)], np.int32)
        before = np.concatenate([np.concatenate((r.prompt_delta, r.output_ids)) for r in archived]) if archived else ids[:0]
        zeros = np.zeros(4, np.float32)
        return e.CallRecorded(
            execution, group, call_id(execution, index), index, call_id(execution, index - 1) if index else None, len(before),
            len(before) + 2, ids[:2], ids[2:], zeros, zeros, spans, "stop", token_digest(np.concatenate((before, ids))),
            cell=cell)


class _Keeper:
    """Keeps one cell's engine at what the core wants, level-triggered."""

    def __init__(self, rollout: SimRollout, engine: SimEngine) -> None:
        self._rollout, self._engine, self._world = rollout, engine, rollout.world
        self._cell = engine.devices.cell
        self._said: tuple[int, int] | None = None
        self._failing_since: float | None = None
        self._lost_epoch = -1

    def run(self) -> Task:
        while True:
            try:
                yield from self._check()
                self._failing_since, self._lost_epoch = None, -1
            except Refused as error:
                self._miss(str(error))
            except Unreachable as error:
                self._rollout._admits.discard(self._cell)
                self._miss(str(error))
            yield self._rollout._changed, CHECK_S

    def _miss(self, why: str) -> None:
        wanted, now = self._rollout._wanted.get(self._cell), self._world.clock(self._rollout.process)
        self._failing_since = now if self._failing_since is None else self._failing_since
        if wanted is None or not wanted.serve or self._lost_epoch == wanted.epoch:
            return
        if now - self._failing_since < LOST_AFTER_S:
            return
        self._said, self._lost_epoch = None, wanted.epoch
        self._rollout._admits.discard(self._cell)
        self._rollout._post(at.EngineLost(self._cell, wanted.epoch, why))

    def _call(self, work: Callable[[], object]) -> Task:
        return self._world.call(self._rollout.process, self._engine.process, work, 10.0)

    def _check(self) -> Task:
        observed = yield from self._call(self._engine.observe)
        wanted = self._rollout._wanted.get(self._cell)
        if wanted is None:
            return
        if not wanted.serve:
            yield from self._put_to_sleep(wanted, observed[1])
        elif wanted.weights is not None:
            yield from self._serve(wanted, wanted.weights, observed)

    def _put_to_sleep(self, wanted: at.SettleCell, is_asleep: bool) -> Task:
        if self._said == (wanted.epoch, -1) and is_asleep:
            return
        if not is_asleep:
            yield from self._call(lambda: self._engine.set_admission(False))
            yield self._world.pick(0.05, 0.5)  # the calls move
        yield from self._call(lambda: self._engine.sleep(wanted.epoch))
        self._said = (wanted.epoch, -1)
        self._rollout._post(at.EngineAsleep(self._cell, wanted.epoch, 0, 0))

    def _serve(self, wanted: at.SettleCell, weights: e.WeightsPublished, observed: tuple[int, bool, bool]) -> Task:
        rollout = self._rollout
        if observed == (weights.version, False, True) and self._said == (wanted.epoch, weights.version):
            if self._cell not in rollout._admits:
                rollout._admits.add(self._cell)
                rollout.change()
            return
        version, is_asleep, is_admitting = observed
        if is_asleep or self._said is None:
            version, checksum = yield from self._call(lambda: self._engine.wake(wanted.epoch, weights))
        elif version != weights.version:
            version, checksum = yield from self._call(lambda: self._engine.load(weights))
        elif not is_admitting:
            yield from self._call(lambda: self._engine.set_admission(True))
            checksum = weights.checksum
        else:
            checksum = weights.checksum
        if version != weights.version or checksum != weights.checksum:
            raise Refused("serves something else")
        if rollout._wanted.get(self._cell) is not wanted:
            return
        rollout._admits.add(self._cell)
        rollout.change()
        if self._said != (wanted.epoch, version):
            self._said = (wanted.epoch, version)
            rollout._post(at.EngineServing(self._cell, wanted.epoch, version, checksum))
