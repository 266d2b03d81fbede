"""A whole deployment in one thread: builds the processes, lets the faults happen, checks, and ends when the run has closed.

After the faults are over the run has `GRACE_S` seconds of simulated time to close as it should.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gyre.contracts import events as e
from gyre.contracts.subjects import CALL, CTL, EXEC, REWARD
from gyre.trainer.step import MembershipRules
from gyre.trajectory.config import TrajectoryConfig
from gyre.trajectory.core import TrajectoryCore
from gyre.trajectory.packing import Budget
from sim.bus import Bus
from sim.engines import Checkpoints, Devices, SimEngine, Weights
from sim.faults import Fault, Faults, draw
from sim.invariants import Invariants
from sim.kernel import Broken, Refused, Task, Unreachable, World
from sim.reward import SimEvaluator
from sim.rollout import SimRollout
from sim.scheduler import SimScheduler
from sim.service import SimService, Subscription
from sim.setting import Setting, setting_of
from sim.trainer import SimCore, SimSatellite, Worker

GRACE_S = 1500.0
FAULTS_OVER_S = 60.0
ROLE_ORDER = ("main", "main-summary", "sub-agent", "sub-agent-summary")


@dataclass(frozen=True, slots=True)
class Parts:
    """The classes a simulation is made of; a mutation replaces one."""

    scheduler: type[SimScheduler] = SimScheduler
    rollout: type[SimRollout] = SimRollout
    core: type[SimCore] = SimCore
    satellite: type[SimSatellite] = SimSatellite
    service: type[SimService] = SimService
    engine: type[SimEngine] = SimEngine
    evaluator: type[SimEvaluator] = SimEvaluator
    mutate: tuple = ()  # functions of the simulation, called once it is built


@dataclass(slots=True)
class Outcome:
    """How a simulation ended. `failure`: why, empty if nothing broke."""

    setting: Setting
    faults: tuple[Fault, ...]
    failure: str = ""
    num_events: int = 0
    seconds: float = 0.0
    num_attempts: int = 0
    history: list[tuple[float, str, str, object]] = field(default_factory=list)


class Simulation:
    """One run of one setting under one list of faults."""

    def __init__(self, setting: Setting, faults: tuple[Fault, ...], parts: Parts) -> None:
        self.setting, self.faults_told = setting, faults
        self.world = World(setting.seed)
        self.bus = Bus(self.world, setting.window_s, setting.fences_first)
        self.invariants = Invariants(self.world, self.bus, setting)
        self.checkpoints = Checkpoints(keep_last=1 + setting.seed % 2)
        self.devices = [Devices(cell) for cell in range(setting.num_engines)]
        self._build_engines(parts)
        self._build_trainers(parts)
        self._build_others(parts)
        self.faults = Faults(self.world, self.bus, faults, self._stop, self._lose_disk)
        for mutate in parts.mutate:
            mutate(self)

    # ------------------------------------------------------------ the processes

    def _build_engines(self, parts: Parts) -> None:
        self.engines = [parts.engine(self.world, self.world.process(f"engine-{cell}"), self.devices[cell], self.checkpoints)
                        for cell in range(self.setting.num_engines)]
        self.rollout = parts.rollout(self.world, self.bus, self.world.process("rollout"), self.engines, 16,
                                     self.invariants.sampled)

    def _build_trainers(self, parts: Parts) -> None:
        rules = MembershipRules(self.setting.groups, self.setting.staleness_limit)
        trainers = [self.world.process(f"trainer-{cell}") for cell in range(self.setting.cells)]
        self.core = parts.core(self.world, self.bus, trainers[0], self.devices[0], rules, self.checkpoints,
                               self.setting.streams, self.invariants.updated)
        self.satellites = [parts.satellite(self.world, self.bus, trainers[c], self.devices[c], rules, self.core)
                           for c in range(1, self.setting.cells)]
        self.invariants.pending_seal = self._pending_seal
        for engine in self.engines:
            engine.fetch = lambda published, engine=engine: self._fetch(engine, published)

    def _build_others(self, parts: Parts) -> None:
        world, bus = self.world, self.bus
        self.schedulers = [parts.scheduler(world, bus, world.process(f"scheduler-{i}"), self.setting)
                           for i in range(self.setting.schedulers)]
        config = TrajectoryConfig("run", "policy", 5, ROLE_ORDER, "grpo", Budget(8, 10_000), keep_zero_advantage=True)
        reads = (Subscription(CTL, (e.GroupDispatched,)), Subscription(CALL, (e.CallRecorded,)),
                 Subscription(EXEC, (e.ExecutionTerminated,)),
                 Subscription(REWARD, (e.ExecutionScored, e.ExecutionUnscorable)))
        self.trajectory = parts.service(world, bus, world.process("trajectory"), TrajectoryCore(config), reads,
                                        lambda effect: None, lambda: None, tick_s=20.0)
        self.evaluators = [parts.evaluator(world, bus, world.process(f"reward-{i}"))
                           for i in range(self.setting.evaluators)]
        self.operator = world.process("operator")
        self.operator.start = lambda: world.spawn(self.operator, self._operate())
        workers: list[Worker] = [self.core, *self.satellites]
        self.services = [self.rollout.service, self.trajectory, *(w.service for w in workers)]
        rollout = self.rollout.service
        rollout.stepped.append(self.invariants.follow_epochs(
            rollout, lambda: {c.cell: c.epoch for c in rollout.state.cells.values()}))
        for worker in workers:
            worker.service.stepped.append(self.invariants.follow_epochs(
                worker.service, lambda w=worker: {w.devices.cell: w.state.cell.epoch}))

    def _fetch(self, engine: SimEngine, published: e.WeightsPublished) -> Task:
        """From the core's memory if it has them, else from the checkpoint."""
        yield self.world.pick(0.05, 2.0)
        try:
            weights: Weights = yield from self.world.call(
                engine.process, self.core.process, lambda: self.core.fetch(published), 3.0)
            return weights
        except (Unreachable, Refused):
            return (yield from engine._no_core(published))

    def _pending_seal(self, step: int) -> e.StepSealed:
        return self.core.state.membership.plans[step].fact()

    # ------------------------------------------------------------ who runs it

    def _operate(self) -> Task:
        """Open the run, as `gyre train` does: ask whoever leads until one says that it is open, and never again."""
        while not (yield from self._ask_leaders(lambda s: s.start())):
            yield 1.0

    def _ask_leaders(self, command: object) -> Task:
        """Returns whether one has done it."""
        for scheduler in self.schedulers:
            try:
                yield from self.world.call(self.operator, scheduler.process, lambda s=scheduler: command(s), 5.0)
            except (Unreachable, Refused):
                continue
            return True
        return False

    def _lose_disk(self, name: str) -> None:
        next(s for s in self.services if s.process.name == name).lose_disk()

    def _stop(self, reason: str) -> None:
        def ask() -> Task:
            while not self.invariants.state.closed and not (yield from self._ask_leaders(lambda s: s.stop(reason))):
                yield 2.0

        self.world.spawn(self.operator, ask())

    # ------------------------------------------------------------ the run

    def run(self) -> None:
        """Raises Broken, or whatever a core raised."""
        for process in self.world.processes.values():
            self.world.begin(process)
        world = self.world
        world.run_until(lambda: self.faults.are_over or bool(self.invariants.state.closed), 1e6)
        world.run_until(lambda: bool(self.invariants.state.closed), world.now + GRACE_S)
        world.run_until(lambda: self.faults.are_over, 1e6)
        for process in list(world.processes.values()):
            process.crash_at.clear()
        world.run_until(self._is_quiet, world.now + GRACE_S)
        self.invariants.at_the_end(self.services)

    def _is_quiet(self) -> bool:
        """Whether everything that was said is stored, and everything stored was folded."""
        if self.world.num_events % 32 or any(s.disk.unsent for s in self.services):
            return False
        return all(self._has_folded(service) for service in self.services)

    def _has_folded(self, service: SimService) -> bool:
        for subscription in service._subscriptions:
            messages = self.bus.messages(subscription.stream)
            last = next((m.sequence for m in reversed(messages) if isinstance(m.fact, subscription.records)), 0)
            if service.disk.applied.get(subscription.stream.name, 0) < last:
                return False
        return True


def faults_of(setting: Setting) -> tuple[Fault, ...]:
    """The faults of a setting's seed."""
    names = ["rollout", "trajectory", *(f"engine-{i}" for i in range(setting.num_engines)),
             *(f"trainer-{i}" for i in range(setting.cells)), *(f"scheduler-{i}" for i in range(setting.schedulers)),
             *(f"reward-{i}" for i in range(setting.evaluators))]
    return draw(setting.seed, names, FAULTS_OVER_S)


def simulate(setting: Setting, faults: tuple[Fault, ...], parts: Parts | None = None) -> Outcome:
    """Run it to its end; what breaks is in the outcome."""
    simulation = Simulation(setting, faults, parts or Parts())
    outcome = Outcome(setting, faults)
    try:
        simulation.run()
    except Broken as broken:
        outcome.failure = str(broken)
    except Exception as error:  # a core that raises is a fault as well; the seed makes it happen again
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        where = f"{place.tb_frame.f_code.co_filename.rpartition('/')[2]}:{place.tb_lineno}" if place else ""
        outcome.failure = f"{type(error).__name__} at {where}: {error}"
    world = simulation.world
    outcome.num_events, outcome.seconds = world.num_events, world.now
    outcome.num_attempts = simulation.invariants.num_attempts
    outcome.history = list(world.trace)
    return outcome


def simulate_seed(seed: int, parts: Parts | None = None) -> Outcome:
    """Setting and faults both follow from the seed."""
    setting = setting_of(seed)
    return simulate(setting, faults_of(setting), parts)

