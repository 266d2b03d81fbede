"""The trainer's shells around the real `TrainerCore` and the real `ClaimTable`: coordinator (cell 0) and satellites.

`services/trainer/{coordinator,satellite,reduce}.py`, small. The gradient of a micro-step is a whole number that depends on the
micro-step and on the weights it is computed with, so a step's sum can be checked exactly.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from gyre.contracts import events as e
from gyre.contracts.codec import pack
from gyre.contracts.subjects import CTL, EXEC, TRAIN, TRAJ
from gyre.trainer import core as at
from gyre.trainer.claims import ClaimTable, Offer, Verdict
from gyre.trainer.core import TrainerCore, TrainerState
from gyre.trainer.recovery import rebuild
from gyre.trainer.speeds import Speeds
from gyre.trainer.step import MembershipRules
from gyre.trainer.vacancy import LOOK_S, Vacancy
from sim.bus import Bus
from sim.engines import Checkpoints, Devices, Weights
from sim.kernel import Broken, Process, Refused, Reply, Task, Unreachable, World
from sim.service import SimService, Subscription

CORE = "core"
LEASE_S = 10.0
POLL_S = 0.3
DEVICE_POLL_S = 0.2
RETRY_S = 0.25
LONG_POLL_S = 1.0
BACKLOG_EVERY_S = 1.0


def gradient(micro_step: str, weights: Weights) -> int:
    """g_m(theta)."""
    return zlib.crc32(f"{micro_step} {weights.checksum}".encode()) % 1000 + 1


@dataclass(slots=True)
class Sum:
    """A gradient buffer: what was added, and the sum of it."""

    total: int = 0
    micro_steps: set[str] = field(default_factory=set)

    def add(self, total: int, micro_steps: Collection[str]) -> None:
        if not self.micro_steps.isdisjoint(micro_steps):
            raise Broken(f"added twice: {sorted(self.micro_steps & set(micro_steps))}")
        self.total += total
        self.micro_steps |= set(micro_steps)


@dataclass(frozen=True, slots=True)
class Exported:
    """A buffer that the core may read: its stamp and its sum."""

    worker: str
    step: int
    attempt: int
    micro_steps: frozenset[str]
    total: int


Updated = Callable[[int, int, Weights, Weights], None]


class _Clock:
    """What the process believes the time to be."""

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process

    def now(self) -> float:
        return self._world.clock(self._process)


class Worker:
    """What both shells are: a service with a role, on a cell's devices."""

    def __init__(self, world: World, bus: Bus, process: Process, devices: Devices, rules: MembershipRules) -> None:
        self.world, self.process, self.devices = world, process, devices
        control = Subscription(CTL, (e.CellRoleAssigned, e.BurstOpened))
        cells = Subscription(EXEC, (e.CellRolloutReleased,))
        groups = (Subscription(TRAJ, (e.GroupCompleted,)),) if devices.cell == 0 else ()
        self.service: SimService[TrainerState] = SimService(
            world, bus, process, TrainerCore(devices.cell, rules), (control, cells, *groups), self._perform, self._begin,
            (e.StepSealed,))
        process.stop = lambda: devices.give_back(process)
        self.service.rebuild = lambda: self._rebuilt(bus)

    def ledger(self) -> bytes | None:
        """The copy in the newest checkpoint; only the core has one."""
        return None

    def _rebuilt(self, bus: Bus) -> bytes | None:
        """As `restore.rebuild_lost_ledger` does it: the checkpoint's copy and what was said since."""
        said = [m.fact for m in bus.messages(TRAIN)]
        if not said:
            return None
        core, copy = self.service.core, self.ledger()
        groups = [m.fact for m in bus.messages(TRAJ)] if self.devices.cell == 0 else []
        completed = {g.group: g for g in reversed(groups) if g.purpose == "train"}
        completed = dict(reversed(completed.items()))
        state = core.restore(copy) if copy else core.initial()
        return core.snapshot(rebuild(state, self.devices.cell, said, completed))

    @property
    def state(self) -> TrainerState:
        return self.service.state

    def idle(self, heard: Reply) -> Task:
        """Until the state changes; `Vacancy.wait`, small."""
        if not self.state.cell.waits_for_engine:
            yield heard
            return
        gone = self._vacancy.look(self.state.cell)
        if gone is not None:
            yield from self.service.submit(gone)
        else:
            yield heard, LOOK_S

    @property
    def holds(self) -> bool:
        return self.devices.owner is self.process

    def _begin(self) -> None:
        self._attention = self.world.reply()
        self._vacancy = Vacancy(self.devices, _Clock(self.world, self.process))
        self.prepare()
        self.world.spawn(self.process, self.run())

    def prepare(self) -> None:
        """Forget everything that was in memory."""

    def run(self) -> Task:
        raise NotImplementedError

    def _perform(self, effect: object) -> None:
        self.attend()

    def attend(self) -> None:
        self._attention.give(None)

    def listen(self) -> Reply:
        """What is given something once the state changes from now on."""
        if self._attention.is_there:
            self._attention = self.world.reply()
        return self._attention

    def compute(self, ref: e.MicroStepRef, weights: Weights) -> Task:
        """The gradient of one micro-step, on this cell's devices."""
        if ref.blob.path not in self.world.blobs:
            raise Broken(f"{ref.blob.path} is referred to and was never written")
        yield self.world.pick(0.1, 3.0)
        self.devices.check(self.process, "trains")
        return gradient(ref.micro_step, weights)


class SimCore(Worker):
    """Cell 0's worker. `updated` is told of every update: (step, sum, weights before, weights after)."""

    def __init__(self, world: World, bus: Bus, process: Process, devices: Devices, rules: MembershipRules,
                 checkpoints: Checkpoints, streams: bool, updated: Updated) -> None:
        self.checkpoints, self._streams, self._updated = checkpoints, streams, updated
        self.satellites: dict[int, SimSatellite] = {}
        self.table: ClaimTable | None = None
        super().__init__(world, bus, process, devices, rules)

    def ledger(self) -> bytes | None:
        newest = self.checkpoints.newest()
        return self.checkpoints.ledgers[newest.version] if newest else None

    def prepare(self) -> None:
        self.table = None
        self._changed = self.world.reply()
        self._speeds, self._sum, self._backlog_at = Speeds(), Sum(), 0.0

    # ------------------------------------------------------------ the loop

    def run(self) -> Task:
        self.weights = self.checkpoints.newest() or Weights()
        if self.weights.version < self.state.published:
            raise Broken(f"published version {self.state.published} is lost: {self.weights}")
        yield from self.service.submit(at.WorkerStarted(self.weights.version))
        while True:
            heard = self.listen()
            if not (yield from self._do_what_is_due()):
                yield from self.idle(heard)

    def _do_what_is_due(self) -> Task:
        state = self.state
        if state.owes_checkpoint:
            yield from self._publish_weights()
        elif state.cell.should_hold and not (self.holds and state.cell.has_joined):
            yield from self._take_devices()
        elif state.cell.owes_release or self.holds and state.cell.role == "rollout":
            yield from self._give_devices_back()
        elif self.holds and state.cell.should_hold and not state.at_burst_end:
            yield from self._train_step()
        else:
            return False
        return True

    def _take_devices(self) -> Task:
        epoch = self.state.cell.epoch
        while not self.devices.try_take(self.process, "trainer", epoch):
            if not self.state.cell.should_hold or self.state.cell.epoch != epoch:
                return
            yield DEVICE_POLL_S
        yield self.world.pick(0.05, 0.5)
        if self.state.cell.joined < epoch:
            yield from self.service.submit(at.DevicesTaken(epoch, self.state.position, self.state.position))

    def _give_devices_back(self) -> Task:
        table, self.table = self.table, None
        self._notify()
        if table is not None:
            yield from self.service.submit(at.AttemptFailed(table.step, table.attempt))
        yield self.world.pick(0.02, 0.2)
        self.devices.give_back(self.process)
        self.world.point(self.process, "after giving the devices back")
        if self.state.cell.owes_release:
            yield from self.service.submit(at.DevicesReleased(self.state.cell.epoch, self.state.position))

    # ------------------------------------------------------------ one step

    def _train_step(self) -> Task:
        self._sum, self._backlog_at = Sum(), 0.0
        self.table = table = ClaimTable(self.state.position, self.state.attempt, CORE, LEASE_S, self._speeds)
        self._notify()
        while self.state.cell.should_hold and self.state.cell.has_joined:
            heard = self.listen()
            self._supply(table)
            verdict, ref = table.claim(CORE, self._now())
            if verdict is Verdict.WORK and ref is not None:
                self._sum.add((yield from self.compute(ref, self.weights)), (ref.micro_step,))
                table.complete(CORE, ref.micro_step, {}, self._now())
                self._notify()
            elif (yield from self._try_to_finish(table)):
                return
            else:
                yield heard, POLL_S
            yield from self._report_backlog(table)

    def _now(self) -> float:
        return self.world.clock(self.process)

    def _supply(self, table: ClaimTable) -> None:
        plan = self.state.plan
        before = table.num_micro_steps, table.sealed
        if plan.sealed or self._streams:
            table.add(plan.micro_steps)
        if plan.sealed:
            table.seal()
        if table.expire(self._now()) or before != (table.num_micro_steps, table.sealed):
            self._notify()

    def _report_backlog(self, table: ClaimTable) -> Task:
        now = self._now()
        if now - self._backlog_at >= BACKLOG_EVERY_S and table.unclaimed_cost != self.state.unclaimed_cost:
            self._backlog_at = now
            yield from self.service.submit(at.ClaimsObserved(table.unclaimed_cost, 1.0))

    def _try_to_finish(self, table: ClaimTable) -> Task:
        if not table.reducible or not (yield from self._add_offers(table)) or not table.complete_sum:
            return False
        yield self.world.pick(0.02, 0.3)
        before, plan = self.weights, self.state.plan
        self.devices.check(self.process, "updates")
        num = table.num_micro_steps
        after = Weights(table.step + 1, f"w{zlib.crc32(f'{before.checksum} {self.world.dice.random()}'.encode()):x}",
                        before.trained | self._sum.micro_steps)
        self._updated(table.step, self._sum.total, before, after)
        self.weights, self.table = after, None
        self._notify()
        self.world.point(self.process, "after the update")
        by_cell = {str(c): n for c, n in sorted(table.micro_steps_by_cell().items())}
        yield from self.service.submit(at.StepTrained(
            table.step, table.attempt, num > 0, plan.num_targets, 0, 0.0, 0.0, 0.0, {}, by_cell))
        return True

    def _add_offers(self, table: ClaimTable) -> Task:
        """Read every offered buffer and add it; False if one could not be read and its worker was revoked."""
        for offer in table.offers:
            read = yield from self._read(offer)
            if read is None or (read.step, read.attempt, read.micro_steps) != (
                    table.step, table.attempt, table.done_by(offer.worker)):
                table.revoke(offer.worker)
                return False
            if not table.stands(offer):
                return False
            self._sum.add(read.total, read.micro_steps)
            table.settle(offer.worker)
        return True

    def _read(self, offer: Offer) -> Task:
        satellite = self.satellites[offer.cell]
        yield self.world.pick(0.02, 0.5)
        if not satellite.process.is_alive or not self.world.reaches(self.process.name, satellite.process.name):
            return None
        return satellite.exported

    def _publish_weights(self) -> Task:
        weights = self.weights
        yield self.world.pick(0.1, 1.0)
        self.world.point(self.process, "before the checkpoint")
        oldest = self.checkpoints.write(weights, pack(self.state))
        self.world.point(self.process, "after the checkpoint")
        name = f"version-{weights.version}"
        yield from self.service.submit(at.CheckpointWritten(weights.version, weights.checksum, name, "", oldest))

    # ------------------------------------------------------------ what satellites ask

    def join(self, cell: int, worker: str) -> Task:
        """Step, attempt and weights. Raises Refused while no step can be joined."""
        if self.table is None or self.table.window_closed:
            yield self._changed, LONG_POLL_S
        table = self.table
        if table is None or not table.join(worker, cell, self._now()):
            raise Refused("the join window has closed")
        return table.step, table.attempt, self.weights

    def claim(self, worker: str, step: int, attempt: int) -> Task:
        for is_last in (False, True):
            table = self._find(step, attempt)
            if table is None:
                return Verdict.STALE, ()
            table.expire(self._now())
            verdict, refs = table.claim_chunk(worker, self._now(), 4)
            if verdict is not Verdict.WAIT or is_last:
                return verdict, refs
            yield self._changed, LONG_POLL_S
        raise AssertionError("unreachable")

    def complete(self, worker: str, step: int, attempt: int, micro_step: str) -> bool:
        table = self._find(step, attempt)
        is_taken = table is not None and table.complete(worker, micro_step, {}, self._now())
        self._completed()
        return is_taken

    def heartbeat(self, worker: str, step: int, attempt: int) -> bool:
        table = self._find(step, attempt)
        return table is not None and table.heartbeat(worker, self._now())

    def offer(self, worker: str, step: int, attempt: int, micro_steps: frozenset[str]) -> bool:
        table = self._find(step, attempt)
        is_taken = table is not None and table.offer(worker, micro_steps, "", self._now())
        self._completed()
        return is_taken

    def leave(self, worker: str) -> None:
        if self.table is not None:
            self.table.revoke(worker)
        self._completed()

    def _completed(self) -> None:
        self.attend()
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, self.world.reply()
        changed.give(None)

    def _find(self, step: int, attempt: int) -> ClaimTable | None:
        table = self.table
        return table if table is not None and (table.step, table.attempt) == (step, attempt) else None

    def fetch(self, published: e.WeightsPublished) -> Weights:
        """Published weights as an engine pulls them from this process. Raises Refused."""
        if self.weights.version != published.version:
            raise Refused("other weights are in memory")
        return self.weights


class SimSatellite(Worker):
    """The worker of another cell: joins step after step while its role is `train`."""

    def __init__(self, world: World, bus: Bus, process: Process, devices: Devices, rules: MembershipRules,
                 core: SimCore) -> None:
        self._core = core
        self.exported: Exported | None = None
        self._num_joins = 0
        super().__init__(world, bus, process, devices, rules)
        core.satellites[devices.cell] = self

    def prepare(self) -> None:
        self.exported = None

    def run(self) -> Task:
        yield from self.service.submit(at.WorkerStarted(0))
        while True:
            heard = self.listen()
            cell = self.state.cell
            if cell.should_hold:
                yield from self._train_while_assigned()
            elif cell.owes_release or self.holds:
                yield from self._give_devices_back()
            else:
                yield from self.idle(heard)

    def _train_while_assigned(self) -> Task:
        epoch = self.state.cell.epoch
        while self._assigned(epoch) and not self.devices.try_take(self.process, "trainer", epoch):
            yield DEVICE_POLL_S
        yield self.world.pick(0.05, 0.5)
        while self._assigned(epoch):
            try:
                yield from self._take_part(epoch)
            except (Refused, Unreachable):
                self.exported = None
                yield RETRY_S

    def _assigned(self, epoch: int) -> bool:
        cell = self.state.cell
        return cell.should_hold and cell.epoch == epoch

    def _ask(self, work: Callable[[], object]) -> Task:
        return self.world.call(self.process, self._core.process, work, 10.0)

    def _take_part(self, epoch: int) -> Task:
        self._num_joins += 1
        worker, cell = f"cell-{self.devices.cell}-{self._num_joins}", self.devices.cell
        step, attempt, weights = yield from self._ask(lambda: self._core.join(cell, worker))
        yield self.world.pick(0.02, 0.5)  # pulls the weights
        if self.state.cell.joined < epoch:
            yield from self.service.submit(at.DevicesTaken(epoch, step, weights.version))
        yield from self._work(epoch, worker, step, attempt, weights)
        self.exported = None
        yield from self._ask(lambda: self._core.leave(worker))

    def _work(self, epoch: int, worker: str, step: int, attempt: int, weights: Weights) -> Task:
        done = Sum()
        while self._assigned(epoch):
            verdict, refs = yield from self._ask(lambda: self._core.claim(worker, step, attempt))
            if verdict is Verdict.STALE:
                return
            for ref in refs:
                if self._assigned(epoch):
                    done.add((yield from self.compute(ref, weights)), (ref.micro_step,))
                    if not (yield from self._ask(lambda r=ref: self._core.complete(worker, step, attempt, r.micro_step))):
                        raise Refused("revoked")
            if verdict is Verdict.REDUCE:
                self.exported = Exported(worker, step, attempt, frozenset(done.micro_steps), done.total)
                micro_steps = frozenset(done.micro_steps)
                if not (yield from self._ask(lambda m=micro_steps: self._core.offer(worker, step, attempt, m))):
                    raise Refused("offer refused")

    def _give_devices_back(self) -> Task:
        yield self.world.pick(0.02, 0.2)
        self.devices.give_back(self.process)
        if self.state.cell.owes_release:
            yield from self.service.submit(at.DevicesReleased(self.state.cell.epoch, -1))
