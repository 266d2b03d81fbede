"""The trainer's pure state machine: membership, position in the run, attempts, and this cell's role.

Time, devices, gradients and claims live in the shell. What has to survive a crash is here: which groups train in which
step, how many steps are done in this lineage, and how often a step was begun again. A step that was trained but is not
in a durable checkpoint is trained again after a crash, with the same sealed membership, as a new attempt.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gyre.contracts.codec import pack, unpack
from gyre.contracts.events import (
    BacklogReported,
    BurstOpened,
    CellRoleAssigned,
    CellRolloutReleased,
    CellTrainJoined,
    CellTrainReleased,
    GroupCompleted,
    StepFinished,
    WeightsPublished,
)
from gyre.runtime.effects import Effect, Publish
from gyre.trainer.elastic import CellState
from gyre.trainer.step import Membership, MembershipRules, Plan


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """The process is up; its newest durable checkpoint (or the initial policy) holds `version`."""

    version: int


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """The attempt's sum is lost although the process lives: begin the step again."""

    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class StepTrained:
    """The update of `step` is applied (or skipped: nothing to train)."""

    step: int
    attempt: int
    updated: bool
    num_targets: int
    num_tokens: int
    loss: float
    grad_norm: float
    learning_rate: float
    metrics: dict[str, float] = field(default_factory=dict)
    micro_steps_by_cell: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """`version` is durable at `checkpoint`; no checkpoint older than `oldest` is kept."""

    version: int
    checksum: str
    checkpoint: str
    transfer: str
    oldest: int


@dataclass(frozen=True, slots=True)
class DevicesTaken:
    """This worker holds the cell's devices at `epoch` and takes part in `step` with weights `version`."""

    epoch: int
    step: int
    version: int


@dataclass(frozen=True, slots=True)
class DevicesReleased:
    """This worker is off the devices; `epoch` is that of the assignment that sent it back."""

    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class EngineGone:
    """The engine was to let go of the devices for `epoch`, nobody has held them for long: its process is gone."""

    epoch: int


@dataclass(frozen=True, slots=True)
class ClaimsObserved:
    """Cost of the open step's micro-steps that nobody has claimed, and what a cell gets done in a second (0: not known)."""

    unclaimed_cost: float
    cost_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Attend:
    """Look at the state: something the shell may have to act on has changed. `transition`: the cell's role has."""

    transition: bool = False


LocalEvent = (
    WorkerStarted | AttemptFailed | StepTrained | CheckpointWritten | DevicesTaken | DevicesReleased | EngineGone
    | ClaimsObserved
)


@dataclass(slots=True)
class TrainerState:
    """position: steps completed in this lineage (= weights version in memory). durable: those in a checkpoint.
    published, checksum: newest published version and the digest of its weights.

    attempts: number of the running attempt by step, absent for the first. burst_end: version at which the newest burst
    ends. backlog: the last one reported, as (step, groups waiting, unclaimed cost).
    """

    position: int = 0
    durable: int = -1
    published: int = -1
    begun: bool = False
    attempts: dict[int, int] = field(default_factory=dict)
    burst: int = -1
    burst_end: int = 0
    backlog_serial: int = 0
    backlog: tuple[int, int, float] = (-1, 0, 0.0)
    unclaimed_cost: float = 0.0
    cost_per_s: float = 0.0
    cell: CellState = field(default_factory=CellState)
    membership: Membership = field(default_factory=Membership)
    checksum: str = ""

    @property
    def plan(self) -> Plan:
        """The step to train now."""
        return self.membership.plans[self.position]

    @property
    def attempt(self) -> int:
        return self.attempts.get(self.position, 0)

    @property
    def at_burst_end(self) -> bool:
        """Nothing may be trained before the weights are published and a new burst is opened."""
        return self.position >= self.burst_end

    @property
    def owes_checkpoint(self) -> bool:
        """The version the run starts from, or a burst's last one, is not published yet."""
        return self.begun and self.published < self.position and (self.at_burst_end or self.published < 0)


class TrainerCore:
    """`gyre.runtime.effects.Core` of one trainer worker; only cell 0's sees groups and steps."""

    local_events: tuple[type, ...] = (
        WorkerStarted, AttemptFailed, StepTrained, CheckpointWritten, DevicesTaken, DevicesReleased, EngineGone,
        ClaimsObserved,
    )  # fmt: skip

    def __init__(self, cell: int, rules: MembershipRules) -> None:
        self._cell = cell
        self._rules = rules

    def initial(self) -> TrainerState:
        return TrainerState()

    def snapshot(self, state: TrainerState) -> bytes:
        return pack(state)

    def restore(self, data: bytes) -> TrainerState:
        return unpack(data, TrainerState)

    def resume(self, state: TrainerState, now: float) -> list[Effect]:
        """Membership that is sealed is said again: a ledger rebuilt from a checkpoint may know what never left its outbox."""
        sealed = (plan for plan in state.membership.plans.values() if plan.sealed)
        return [*(Publish(plan.fact()) for plan in sealed), Attend()]

    def step(self, state: TrainerState, event: object, now: float) -> tuple[TrainerState, list[Effect]]:
        """Apply one fact or local event. Unknown events change nothing."""
        match event:
            case GroupCompleted():
                effects = self._group_completed(state, event)
            case BurstOpened():
                effects = _burst_opened(state, event)
            case CellRoleAssigned() if event.cell == self._cell:
                state.cell.assign(event)
                effects = [Attend(transition=True)]
            case CellRolloutReleased() if event.cell == self._cell:
                state.cell.engine_released(event)
                effects = [Attend(transition=True)]
            case _:
                effects = self._local(state, event)
        return state, effects

    def _local(self, state: TrainerState, event: object) -> list[Effect]:
        match event:
            case WorkerStarted():
                return _started(state, event)
            case AttemptFailed():
                return _attempt_failed(state, event)
            case StepTrained():
                return self._trained(state, event)
            case CheckpointWritten():
                return _checkpoint_written(state, event)
            case DevicesTaken():
                state.cell.joined = max(state.cell.joined, event.epoch)
                return [Publish(CellTrainJoined(self._cell, event.epoch, event.step, event.version)), Attend()]
            case DevicesReleased():
                state.cell.let_go(event.epoch)
                return [Publish(CellTrainReleased(self._cell, event.epoch, event.version)), Attend()]
            case EngineGone() if event.epoch == state.cell.epoch and state.cell.waits_for_engine:
                state.cell.rollout_released = event.epoch
                return [Attend(transition=True)]
            case ClaimsObserved():
                state.unclaimed_cost = event.unclaimed_cost
                state.cost_per_s = event.cost_per_s
                return self._report(state)
        return []

    def _group_completed(self, state: TrainerState, fact: GroupCompleted) -> list[Effect]:
        if self._cell != 0 or not state.membership.add(fact):
            return []
        return [*self._fill(state), *self._report(state), Attend()]

    def _fill(self, state: TrainerState) -> list[Effect]:
        sealed = state.membership.fill(self._rules)
        return [] if sealed is None else [Publish(sealed.fact())]

    def _trained(self, state: TrainerState, event: StepTrained) -> list[Effect]:
        if event.step != state.position or event.attempt != state.attempt:
            return []
        plan = state.plan
        state.position += 1
        finished = StepFinished(
            step=event.step, version=event.step + 1, attempt=event.attempt, updated=event.updated,
            num_scored=plan.num_scored, num_targets=event.num_targets, num_tokens=event.num_tokens, loss=event.loss,
            grad_norm=event.grad_norm, learning_rate=event.learning_rate, metrics=event.metrics,
            micro_steps_by_cell=event.micro_steps_by_cell, executions=plan.executions,
        )  # fmt: skip
        state.membership.open_next(state.position)
        effects = self._fill(state)
        state.unclaimed_cost = sum(ref.cost for ref in state.plan.micro_steps)
        return [Publish(finished), *effects, *self._report(state), Attend()]

    def _report(self, state: TrainerState) -> list[Effect]:
        """Say what waits for training, when it is not what was said last."""
        waiting = state.membership.waiting
        # What waits for a later burst is no reason for a cell to join this one.
        places = max(0, state.burst_end - state.position - 1) * self._rules.groups_per_step
        refs = [ref for group in waiting[:places] for ref in group.micro_steps]
        backlog = (state.position, len(waiting), state.unclaimed_cost + sum(ref.cost for ref in refs))
        if backlog == state.backlog:
            return []
        state.backlog = backlog
        state.backlog_serial += 1
        known = [*state.plan.micro_steps, *refs]
        mean = sum(ref.cost for ref in known) / len(known) if known else 0.0
        return [Publish(BacklogReported(state.backlog_serial, *backlog, mean, state.cost_per_s))]


def _burst_opened(state: TrainerState, fact: BurstOpened) -> list[Effect]:
    if fact.burst > state.burst:
        state.burst, state.burst_end = fact.burst, fact.version + fact.num_steps
    return [Attend()]


def _started(state: TrainerState, event: WorkerStarted) -> list[Effect]:
    """Go back to what is durable. Steps that had been begun beyond it get a new attempt."""
    if state.begun:
        for step in range(event.version, state.position + 1):
            state.attempts[step] = state.attempts.get(step, 0) + 1
    state.begun = True
    state.position = event.version
    state.durable = event.version
    return [Attend()]


def _attempt_failed(state: TrainerState, event: AttemptFailed) -> list[Effect]:
    if event.step == state.position and event.attempt == state.attempt:
        state.attempts[event.step] = event.attempt + 1
    return [Attend()]


def _checkpoint_written(state: TrainerState, event: CheckpointWritten) -> list[Effect]:
    state.durable = max(state.durable, event.version)
    if event.version >= state.published:
        state.published, state.checksum = event.version, event.checksum
    state.membership.forget_before(event.oldest)
    state.attempts = {s: a for s, a in state.attempts.items() if s >= event.oldest}
    fact = WeightsPublished(event.version, event.checksum, state.burst, event.checkpoint, event.transfer)
    return [Publish(fact), Attend()]
