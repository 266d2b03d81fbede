"""What has to hold after every event, looked at from outside: at every stored fact, every update, every sampled token.

The numbers are the guarantees of DESIGN.md: 1 nothing lost, nothing twice; 2 a stale scheduler can do nothing; 5 tokens
carry the version they were sampled under.
"""

from __future__ import annotations

from collections.abc import Callable

from gyre.contracts import events as e
from gyre.contracts.subjects import CTL, STREAMS, row_of
from gyre.scheduler import core as scheduler
from sim.bus import Bus, Message
from sim.engines import Weights
from sim.kernel import Broken, World
from sim.service import SimService
from sim.setting import Setting
from sim.trainer import gradient

MAX_SKEW_S = 70.0  # of two wall clocks, when they disagree on how long a transition takes
NEWS_S = 10.0  # what was stored less than so long ago a leader may not have read


def require(holds: bool, what: str) -> None:
    """Raise Broken with `what` unless it holds."""
    if not holds:
        raise Broken(what)


class Invariants:
    """Folds everything that is stored, in the order in which it is, and checks each fact against it."""

    def __init__(self, world: World, bus: Bus, setting: Setting) -> None:
        self._world, self._bus, self._setting, self._plan = world, bus, setting, setting.plan()
        self.state = scheduler.initial(setting.cells, setting.standalone)
        self._said: dict[str, e.Fact] = {}
        self._leader = ""
        self._groups: dict[str, e.GroupDispatched] = {}
        self._completed: dict[str, e.GroupCompleted] = {}
        self._calls: dict[str, int] = {}
        self._sealed: dict[int, e.StepSealed] = {}
        self._sealed_groups: set[str] = set()
        self._published: dict[int, str] = {}
        self._sampled: dict[int, set[str]] = {}
        self._assigned_at: dict[int, float] = {}
        self._lost_until: dict[int, float] = {}
        self._epochs: dict[tuple[str, int], int] = {}
        self.lineage = Weights()
        self.num_attempts = 0
        self._checks: dict[type, Callable[..., None]] = {
            e.CellRoleAssigned: self._assigned, e.GroupDispatched: self._dispatched, e.CallRecorded: self._call,
            e.ExecutionTerminated: self._terminated, e.GroupCompleted: self._group, e.StepSealed: self._step_sealed,
            e.WeightsPublished: self._weights, e.BurstOpened: self._burst}
        bus.stored.append(self.stored)

    # ------------------------------------------------------------ facts

    def stored(self, message: Message) -> None:
        """One more message is in its stream."""
        fact = message.fact
        if message.stream == CTL.name:
            self._under_the_lease(message)
        known = self._said.get(message.id)
        if known is None:
            self._said[message.id] = fact
            check = self._checks.get(type(fact))
            if check is not None:
                check(fact)
        elif not isinstance(fact, e.ExecutionScored | e.ExecutionUnscorable):  # of two results the first counts
            require(_same(known, fact), f"1: {message.id} was said twice, differently: {known} and {fact}")
            require(not isinstance(fact, e.StepSealed), f"{fact} is stored twice")
        lost = [c.cell for c in self.state.cells if c.lost]
        self.state = scheduler.fold(self.state, fact, message.at)
        self._lost_until |= dict.fromkeys(lost, self._world.now)
        water = self.state.water
        require(water.level == len(water.dispatched - water.terminated), "the waterlevel is wrong")

    def _under_the_lease(self, message: Message) -> None:
        if isinstance(message.fact, e.LeaseTaken):
            self._leader = message.writer
            return
        require(message.writer == self._leader, f"2: {message.writer} says {message.fact} under the lease of {self._leader}")

    def _burst(self, fact: e.BurstOpened) -> None:
        require(fact.burst == self.state.burst + 1 and not self.state.burst_open, f"{fact} inside a burst")
        require(fact.version == self.state.published_version, f"{fact} begins at a version that is not the newest")

    def _dispatched(self, fact: e.GroupDispatched) -> None:
        self._groups[fact.group] = fact
        if fact.purpose == "train":
            require(self.state.burst_open and fact.burst == self.state.burst, f"{fact.group} is dispatched outside its burst")
            require(fact.version == self.state.burst_version, f"{fact.group} is dispatched within a burst")
            outstanding = sum(g.purpose == "train" for g in self._groups.values()) - len(self._sealed_groups)
            require(outstanding <= self._plan.num_outstanding, f"{outstanding} groups are outstanding at {fact.group}")

    def _assigned(self, fact: e.CellRoleAssigned) -> None:
        cell = self.state.cells[fact.cell]
        require(fact.epoch == cell.epoch + 1, f"{fact} does not follow epoch {cell.epoch}")
        self._assigned_at[fact.cell] = self._world.now
        if fact.role != "train":
            return
        require(not cell.never_trains, f"{fact} of a standalone cell")
        others = [c for c in self.state.cells if c is not cell]
        waits = [c.cell for c in others if not c.settled and not self._may_be_late(c.cell)]
        require(not waits, f"{fact} while cells {waits} are in transition")
        holes = [c.cell for c in others if c.cell < cell.cell and c.role != "train" and not self._is_absent(c.cell)]
        require(not holes, f"{fact} before cells {holes}: not a growing prefix")
        stays = sum(c.role == "rollout" for c in others)
        gated = self._setting.schedule == "elastic" or (cell.cell == 0 and not self._setting.schedule.startswith("async"))
        if gated and self._setting.schedule != "rollpacker":
            if self._setting.schedule.startswith("colocate"):
                stays = self._setting.standalone
            level = self.state.water.level
            require(level <= stays * self._setting.capacity, f"{fact}: {level} executions do not fit {stays} cells")

    def _may_be_late(self, cell: int) -> bool:
        """Whether a scheduler's clock may say that the cell's transition takes too long."""
        state = self.state.cells[cell]
        was_lost = self._world.now - self._lost_until.get(cell, -NEWS_S) < NEWS_S
        since = self._world.now - self._assigned_at.get(cell, 0.0)
        return state.lost or was_lost or since > self._plan.transition_timeout_s - MAX_SKEW_S

    def _is_absent(self, cell: int) -> bool:
        return not self.state.cells[cell].settled or self._may_be_late(cell)

    def _call(self, fact: e.CallRecorded) -> None:
        self._calls[fact.execution] = self._calls.get(fact.execution, 0) + 1

    def _terminated(self, fact: e.ExecutionTerminated) -> None:
        group = self._groups.get(fact.group)
        require(group is not None and any(s.execution == fact.execution for s in group.executions), f"{fact} of nobody")

    def _group(self, fact: e.GroupCompleted) -> None:
        self._completed[fact.group] = fact
        require([o.execution for o in fact.outcomes] == [s.execution for s in self._groups[fact.group].executions],
                f"{fact.group} has other outcomes than executions")
        require(fact.num_scored == sum(o.kind == "scored" for o in fact.outcomes), f"{fact.group}: m_g is wrong")

    def _step_sealed(self, fact: e.StepSealed) -> None:
        require(fact.step not in self._sealed, f"step {fact.step} is sealed twice")
        self._sealed[fact.step] = fact
        require(len(fact.groups) == self._plan.groups_per_step == len(set(fact.groups)), f"{fact} has not B groups")
        again = self._sealed_groups & set(fact.groups)
        require(not again, f"1: groups {sorted(again)} are in two steps")
        self._sealed_groups |= set(fact.groups)
        counted = [self._completed[g] for g in fact.groups if g not in fact.stale_groups]
        require(fact.num_scored == sum(g.num_scored for g in counted), f"{fact}: M is not the sum of m_g")
        require(fact.micro_steps == tuple(r.micro_step for g in counted for r in g.micro_steps), f"{fact}: wrong micro-steps")
        for name in fact.groups:
            age = fact.step - self._completed[name].version
            is_stale = age > self._setting.staleness_limit
            require(is_stale == (name in fact.stale_groups), f"{name} joins step {fact.step} {age} versions old")

    def _weights(self, fact: e.WeightsPublished) -> None:
        require(self._published.setdefault(fact.version, fact.checksum) == fact.checksum, f"{fact}: other weights before")
        for checksum in self._sampled.get(fact.version, ()):
            require(checksum == fact.checksum, f"5: tokens of version {fact.version} came from {checksum}")

    # ------------------------------------------------------------ what is done

    def sampled(self, who: str, version: int, checksum: str) -> None:
        """Tokens labelled `version` were sampled under weights `checksum`."""
        self._sampled.setdefault(version, set()).add(checksum)
        require(self._published.get(version) == checksum, f"5: {who} labels tokens of {checksum} as version {version}")

    def updated(self, step: int, total: int, before: Weights, after: Weights) -> None:
        """An update of `step` is made from the sum of all cells."""
        sealed = self._sealed_or_said(step)
        expected = sum(gradient(m, before) for m in sealed.micro_steps)
        require(total == expected, f"step {step}: the sum is {total}, not {expected}")
        require(before.version == step, f"step {step} is trained on {before}")
        require(before.trained.isdisjoint(sealed.micro_steps), f"1: step {step} trains something again")
        require(after.trained == before.trained | set(sealed.micro_steps), f"step {step}: something is missing")
        self.lineage = after
        self.num_attempts += 1

    def _sealed_or_said(self, step: int) -> e.StepSealed:
        """Membership as it is stored, or as it lies in the core's outbox while NATS cannot be reached."""
        return self._sealed.get(step) or self.pending_seal(step)

    pending_seal: Callable[[int], e.StepSealed]

    def follow_epochs(self, service: SimService, epochs: Callable[[], dict[int, int]]) -> Callable[[], None]:
        """A check that no cell goes back to an older epoch in a service's state; to be called after each of its turns.

        One that lost its disk reads all of them again; the devices' epoch keeps it from acting on old ones.
        """
        name = service.process.name

        def check() -> None:
            if service.lost_its_disk:
                return
            for cell, epoch in epochs().items():
                key = (name, cell)
                require(epoch >= self._epochs.get(key, -1), f"{name}: cell {cell} goes back to epoch {epoch}")
                self._epochs[key] = epoch
        return check

    # ------------------------------------------------------------ at the end

    def at_the_end(self, services: list[SimService]) -> None:
        """The run has closed and everything has been delivered."""
        state = self.state
        require(state.closed == "completed" or state.stop_reason != "", f"closed as {state.closed!r}")
        require(state.water.level == 0, f"1: {state.water.level} executions never terminated")
        require(state.water.dispatched == state.water.terminated, "1: an execution terminated that was not dispatched")
        require(set(self._completed) == set(self._groups), "1: a group never completed")
        terminated = {f.execution: f for f in self._said.values() if isinstance(f, e.ExecutionTerminated)}
        for execution, fact in terminated.items():
            num = self._calls.get(execution, 0)
            require(num == fact.num_calls, f"1: {execution} made {fact.num_calls} calls, {num} are recorded")
        if state.closed == "completed":
            self._all_is_trained()
        for service in services:
            self._conserved(service)

    def _all_is_trained(self) -> None:
        steps = range(self._plan.num_steps)
        require(sorted(self._sealed) == list(steps), f"steps {sorted(self._sealed)} are sealed")
        wanted = {m for step in steps for m in self._sealed[step].micro_steps}
        require(self.lineage.trained == wanted, "1: the last weights are not made of every sealed step")

    def _conserved(self, service: SimService) -> None:
        """What a service said is stored; what is stored was folded once, in order."""
        name = service.process.name
        lost = [row.id for row in service.disk.outbox.values() if row.id not in self._said]
        require(not lost, f"1: {name} said {lost[:3]}, which is not stored")
        for stream in STREAMS:
            folded = service.disk.folded.get(stream.name)
            if folded is None or service.lost_its_disk:
                continue
            records = {type(m.fact) for m in self._bus.messages(stream) if m.sequence in set(folded)}
            stored = [m.sequence for m in self._bus.messages(stream) if type(m.fact) in records]
            require(folded == stored, f"1: {name} folded {folded} of {stream.name}, where {stored} are")


def _same(one: e.Fact, other: e.Fact) -> bool:
    if isinstance(one, e.CallRecorded):
        return row_of(one).key(one) == row_of(other).key(other) and one.digest == other.digest
    if isinstance(one, e.RunStopRequested | e.RunOpened):
        return True
    if isinstance(one, e.StepFinished) and isinstance(other, e.StepFinished):
        return other.attempt >= one.attempt  # what was trained and is in no checkpoint is trained again
    return one == other

