"""One cell's devices and its engine process: `gyre.runtime.devices` and `rollout/engine_cell.py`, small.

Weights are a name for what was computed: `checksum` differs between any two updates, so two weights of one version are
told apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gyre.contracts.events import WeightsPublished
from sim.kernel import Broken, Process, Refused, Reply, Task, Unreachable, World

DEVICE_POLL_S = 0.2
DEVICE_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Weights:
    """`trained`: the micro-steps that made them what they are, in this lineage."""

    version: int = 0
    checksum: str = "w0"
    trained: frozenset[str] = frozenset()


@dataclass(slots=True)
class Checkpoints:
    """The durable store, by version: weights and the core's ledger at the time."""

    versions: dict[int, Weights] = field(default_factory=dict)
    ledgers: dict[int, bytes] = field(default_factory=dict)
    keep_last: int = 2

    def newest(self) -> Weights | None:
        return self.versions[max(self.versions)] if self.versions else None

    def write(self, weights: Weights, ledger: bytes) -> int:
        """Returns the oldest version that is kept."""
        if weights.version not in self.versions:
            self.versions[weights.version], self.ledgers[weights.version] = weights, ledger
        for old in sorted(self.versions)[:-self.keep_last]:
            del self.versions[old], self.ledgers[old]
        return min(self.versions)


@dataclass(slots=True)
class Devices:
    """A cell's lock and its epoch file; the kernel frees the lock of a process that dies."""

    cell: int
    epoch: int = -1
    last_holder: str = "nobody"
    owner: Process | None = None

    def is_free(self) -> bool:
        return self.owner is None

    def try_take(self, process: Process, side: str, epoch: int) -> bool:
        if self.owner not in (None, process) or self.epoch > epoch:
            return False
        self.owner, self.epoch, self.last_holder = process, epoch, side
        return True

    def give_back(self, process: Process, epoch: int | None = None) -> None:
        if epoch is not None and epoch > self.epoch:
            self.epoch, self.last_holder = epoch, "nobody"
        if self.owner is process:
            self.owner = None

    def check(self, process: Process, what: str) -> None:
        """Raises Broken if `process` uses devices that it does not own."""
        if self.owner is not process:
            raise Broken(f"cell {self.cell}: {process.name} {what} on devices of {self.owner and self.owner.name}")


class SimEngine:
    """The engine of a cell. Commands are fenced by epoch and carried out one at a time."""

    def __init__(self, world: World, process: Process, devices: Devices, checkpoints: Checkpoints) -> None:
        self.world, self.process, self.devices = world, process, devices
        self._checkpoints = checkpoints
        self.fetch: Callable[[WeightsPublished], Task] = self._no_core
        process.start, process.stop = self._begin, self._end

    def _begin(self) -> None:
        self.weights: Weights | None = None
        self.admits = False
        self._busy: Reply | None = None

    def _end(self) -> None:
        self.devices.give_back(self.process)

    @property
    def is_awake(self) -> bool:
        return self.devices.owner is self.process

    def observe(self) -> tuple[int, bool, bool]:
        """Version (-1: none), asleep, admitting."""
        return (self.weights.version if self.weights else -1), not self.is_awake, self.is_awake and self.admits

    def set_admission(self, is_open: bool) -> None:
        self.admits = is_open

    # ------------------------------------------------------------ commands

    def wake(self, epoch: int, published: WeightsPublished) -> Task:
        """Devices, weights, checksum, admission. Returns version and checksum. Raises Refused."""
        return self._one_at_a_time(lambda: self._wake(epoch, published))

    def load(self, published: WeightsPublished) -> Task:
        """Swap weights of an awake engine at a token boundary. Raises Refused."""
        return self._one_at_a_time(lambda: self._swap(published))

    def sleep(self, epoch: int) -> Task:
        """Close admission, give the devices back. Raises Refused."""
        return self._one_at_a_time(lambda: self._sleep(epoch))

    def _wake(self, epoch: int, published: WeightsPublished) -> Task:
        self._fence(epoch, "engine")
        if not self.is_awake:
            yield from self._take_devices(epoch)
        elif not self.devices.try_take(self.process, "engine", epoch):
            raise Refused(f"stale epoch {epoch}")
        yield self.world.pick(0.05, 0.5)
        return (yield from self._load(published))

    def _swap(self, published: WeightsPublished) -> Task:
        if not self.is_awake:
            raise Refused("asleep")
        return (yield from self._load(published))

    def _sleep(self, epoch: int) -> Task:
        if self.is_awake or epoch != self.devices.epoch:
            self._fence(epoch, "nobody")
        yield self.world.pick(0.02, 0.2)
        self.admits, self.weights = False, None
        self.devices.give_back(self.process, epoch)

    def _load(self, published: WeightsPublished) -> Task:
        wanted = (published.version, published.checksum)
        if self.weights is None or (self.weights.version, self.weights.checksum) != wanted:
            weights = yield from self.fetch(published)
            self.world.point(self.process, "after the weights came")
            if (weights.version, weights.checksum) != wanted:
                raise Refused(f"got weights {weights.version} {weights.checksum}, wanted {wanted}")
            self.devices.check(self.process, "loads weights")
            self.weights = weights
        yield self.world.pick(0.01, 0.1)
        self.admits = True
        return wanted

    def _no_core(self, published: WeightsPublished) -> Task:
        """From the checkpoint in the durable store."""
        yield self.world.pick(0.05, 0.3)
        found = self._checkpoints.versions.get(published.version)
        if found is None:
            raise Refused(f"no checkpoint of version {published.version}")
        return found

    def _fence(self, epoch: int, side: str) -> None:
        devices = self.devices
        if epoch < devices.epoch or (epoch == devices.epoch and devices.last_holder != side):
            raise Refused(f"epoch {epoch}: the cell is at {devices.epoch} of {devices.last_holder}")

    def _take_devices(self, epoch: int) -> Task:
        for _ in range(round(DEVICE_WAIT_S / DEVICE_POLL_S)):
            if self.devices.try_take(self.process, "engine", epoch):
                return
            yield DEVICE_POLL_S
        raise Refused("the trainer still holds the devices")

    def _one_at_a_time(self, command: Callable[[], Task]) -> Task:
        while self._busy is not None:
            yield self._busy
        if self.process.name in self.world.refusing:
            raise Refused("carries out nothing")
        busy = self._busy = self.world.reply()
        try:
            done = yield from command()
        except (Refused, Unreachable) as error:  # not `finally`: what a killed process held is not given back by it
            done = error
        self._busy = None
        busy.give(None)
        if isinstance(done, Exception):
            raise done
        return done

    # ------------------------------------------------------------ tokens

    def generate(self) -> Task:
        """Some tokens of one call; returns the version they are labelled with and the checksum they were sampled under."""
        if not self.is_awake or not self.admits or self.weights is None:
            raise Refused("does not admit")
        yield self.world.pick(0.05, 1.0)
        if not self.is_awake or self.weights is None:
            raise Refused("went to sleep")
        self.devices.check(self.process, "samples tokens")
        return self.weights.version, self.weights.checksum
