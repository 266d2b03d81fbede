"""The core cell's shell: takes the devices, trains the open step with whoever helps, publishes at the burst's end.

Level-triggered: after every change of the ledger's state the loop looks at it and does the first thing that is due.

    role `train`, engine off the devices  -> take the lock, say joined
    a step is open and the burst goes on  -> claim, compute, complete; all done -> reduce, update, say trained
    the burst's last version is in memory -> durable checkpoint, offer the weights, say published
    role `rollout`                        -> let go, say released

Claims and gradients live in this process only. If it dies, the next one starts a new attempt from the checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from gyre.contracts.codec import pack
from gyre.contracts.events import MicroStepRef
from gyre.policy.checkpoint import ForeignPolicy
from gyre.policy.config import PolicyConfig
from gyre.runtime.blobs import BlobStore
from gyre.runtime.clock import Clock
from gyre.runtime.devices import DeviceLock
from gyre.runtime.telemetry import span
from gyre.trainer.backends.base import Backend
from gyre.trainer.checkpoint import prune, rng_state, write_checkpoint
from gyre.trainer.claims import ClaimTable, Verdict
from gyre.trainer.compute import compute
from gyre.trainer.config import DEVICE_POLL_S, POLL_S, READ_TIMEOUT_S, TrainerConfig, learning_rate
from gyre.trainer.core import (
    AttemptFailed,
    CheckpointWritten,
    ClaimsObserved,
    DevicesReleased,
    DevicesTaken,
    StepTrained,
    WorkerStarted,
)
from gyre.trainer.ledger import Ledger
from gyre.trainer.metrics import clip_warning
from gyre.trainer.reduce import Update, add_offers, apply_update, staging_for
from gyre.trainer.restore import restore_weights
from gyre.trainer.speeds import Speeds
from gyre.trainer.traces import RoleTraces
from gyre.trainer.vacancy import Vacancy
from gyre.trainer.weights import PUBLISHED, TRAINING, WeightsTicket, offer_weights
from gyre.transfer import Transfer

log = logging.getLogger(__name__)

CORE_WORKER = "core"
LONG_POLL_S = 1.0
LOOK_AGAIN_S = 0.1  # at what a waiting worker may claim: it depends on time too
BACKLOG_EVERY_S = 1.0


@dataclass(frozen=True)
class Admission:
    """Answer to a join: `ticket` is None if it was refused for `reason`."""

    step: int
    attempt: int
    ticket: WeightsTicket | None
    reason: str = ""


class Coordinator:
    """Owns the claim table of the running attempt; the event loop serialises everything that touches it."""

    def __init__(
        self, config: TrainerConfig, ledger: Ledger, backend: Backend, policy: PolicyConfig | ForeignPolicy, transfer: Transfer,
        blobs: BlobStore, lock: DeviceLock, clock: Clock,
    ) -> None:  # fmt: skip
        self._config, self._ledger, self._backend, self._policy = config, ledger, backend, policy
        self._transfer, self._blobs, self._lock, self._clock = transfer, blobs, lock, clock
        self._vacancy = Vacancy(lock, clock)
        self._table: ClaimTable | None = None
        self._ticket: WeightsTicket | None = None
        self._changed = asyncio.Condition()
        self._attention = asyncio.Event()
        self._traces = RoleTraces(config.cell)
        self._ticketing = asyncio.Lock()
        self._staging = staging_for(backend)
        self._backlog_at = 0.0
        self._speeds = Speeds()

    # ------------------------------------------------------------ the loop

    def attend(self, transition: Mapping[str, str] | None = None) -> None:
        """The ledger's state changed; `transition` is the trace context of a change of role."""
        self._traces.asked(transition)
        self._attention.set()

    async def run(self) -> None:
        """Restore the newest checkpoint, then do what is due, until cancelled."""
        await self._restore()
        while True:
            self._attention.clear()
            if not await self.do_what_is_due():
                await self._vacancy.wait(self._attention, self._ledger)

    async def do_what_is_due(self) -> bool:
        """One thing; False when there is nothing to do until the state changes."""
        state = self._ledger.state
        if state.owes_checkpoint:
            await self._publish_weights()
        elif state.cell.should_hold and not (self._lock.held and state.cell.has_joined):
            await self._take_devices()
        elif state.cell.owes_release or self._lock.held and state.cell.role == "rollout":
            await self._give_devices_back()
        elif self._lock.held and state.cell.should_hold and not state.at_burst_end:
            await self._train_step()
        else:
            return False
        return True

    async def _restore(self) -> None:
        version = await restore_weights(self._config, self._ledger.state, self._backend)
        await self._ledger.submit(WorkerStarted(version))

    # ------------------------------------------------------------ devices

    async def _take_devices(self) -> None:
        cell = self._ledger.state.cell
        epoch = cell.epoch
        with self._traces.changing("gyre.train.join", epoch, cell.joined < epoch) as noted:
            while not self._lock.try_take(epoch):
                if not cell.should_hold or cell.epoch != epoch:
                    if noted is not None:
                        noted.set_attribute("gyre.outcome", "superseded")
                    return
                await self._clock.sleep(DEVICE_POLL_S)
            with span("gyre.train.wake"):
                await asyncio.to_thread(self._backend.wake)
            if cell.joined < epoch:
                position = self._ledger.state.position
                await self._ledger.submit(DevicesTaken(epoch, position, position))

    async def _give_devices_back(self) -> None:
        state = self._ledger.state
        with self._traces.changing("gyre.train.release", state.cell.epoch, state.cell.owes_release):
            self._traces.told(state.cell.epoch)
            table = self._table
            await self._drop_table()
            if table is not None:
                await self._ledger.submit(AttemptFailed(table.step, table.attempt))
            await asyncio.to_thread(self._backend.sleep)
            self._lock.give_back()  # the epoch is the engine's to take
            if self._ledger.state.cell.owes_release:
                await self._ledger.submit(DevicesReleased(state.cell.epoch, state.position))

    # ------------------------------------------------------------ one step

    async def _train_step(self) -> None:
        """Work on the open step until it is trained or the devices have to be given back."""
        table = await self._open_table()
        state = self._ledger.state
        with self._traces.step(table.step, table.attempt, state.burst, state.cell.epoch):
            await self._work_on(table)

    async def _work_on(self, table: ClaimTable) -> None:
        while self._ledger.state.cell.should_hold and self._ledger.state.cell.has_joined:
            self._attention.clear()
            await self._supply(table)
            verdict, ref = table.claim(CORE_WORKER, self._clock.now())
            if verdict is Verdict.WORK and ref is not None:
                await self._compute(table, ref)
            elif await self._try_to_finish(table):
                return
            else:
                await self._pause()
            await self._report_backlog(table)

    async def _open_table(self) -> ClaimTable:
        state = self._ledger.state
        self._backend.zero_gradients()
        self._ticket = None
        self._backlog_at = 0.0
        lease_s = self._config.optimizer.claim_lease_s
        self._table = ClaimTable(state.position, state.attempt, CORE_WORKER, lease_s, self._speeds)
        await self._notify()
        return self._table

    async def _drop_table(self) -> None:
        self._table = None
        self._ticket = None
        await self._notify()

    async def _supply(self, table: ClaimTable) -> None:
        """Give the table what joined the step meanwhile; void the workers that fell silent."""
        plan = self._ledger.state.plan
        before = table.num_micro_steps, table.sealed
        if plan.sealed or self._config.streams:
            table.add(plan.micro_steps)
        if plan.sealed:
            table.seal()
        self._expire(table)
        if before != (table.num_micro_steps, table.sealed):
            await self._notify()

    def _expire(self, table: ClaimTable) -> None:
        for worker in table.expire(self._clock.now()):
            log.warning("step %d attempt %d: lease of %s ended, revoked", table.step, table.attempt, worker)

    async def _compute(self, table: ClaimTable, ref: MicroStepRef) -> None:
        sums = await compute(self._backend, self._blobs, ref, self._clock)
        table.complete(CORE_WORKER, ref.micro_step, sums, self._clock.now())
        if table.window_closed:
            await self._notify()

    async def _try_to_finish(self, table: ClaimTable) -> bool:
        """Reduce and update if everything is there; True when the step is trained."""
        if not table.reducible or not await add_offers(
            table, self._transfer, self._backend, self._staging, READ_TIMEOUT_S
        ):
            return False
        if not table.complete_sum:
            return False
        plan = self._ledger.state.plan
        scale = self._config.loss.scale(plan.num_scored, plan.num_targets)
        rate = learning_rate(table.step, self._config.optimizer, self._config.total_steps)
        update = await asyncio.to_thread(
            apply_update, self._backend, table, scale, rate, self._config.optimizer.max_grad_norm
        )
        await self._drop_table()
        await self._ledger.submit(_trained(table, update))
        self._tell(table.step, plan.num_scored, update)
        return True

    def _tell(self, step: int, num_scored: int, update: Update) -> None:
        log.info(
            "step %d: M %d, norm %.4g, loss %.4g, clip %.1f %%", step, num_scored, update.grad_norm, update.loss,
            100 * update.metrics.get("clipped", 0.0),
        )  # fmt: skip
        loss = self._config.loss
        if warning := clip_warning(update.metrics, loss.kind, (loss.clip_low, loss.clip_high)):
            log.warning("step %d: %s", step, warning)

    async def _pause(self) -> None:
        """Until the ledger changes or a moment has passed (leases end without an event)."""
        try:
            async with asyncio.timeout(POLL_S):
                await self._attention.wait()
        except TimeoutError:
            return

    async def _report_backlog(self, table: ClaimTable) -> None:
        now = self._clock.now()
        if now - self._backlog_at >= BACKLOG_EVERY_S and table.unclaimed_cost != self._ledger.state.unclaimed_cost:
            self._backlog_at = now
            await self._ledger.submit(ClaimsObserved(table.unclaimed_cost, self._speeds.mean))

    # ------------------------------------------------------------ the burst's end

    async def _publish_weights(self) -> None:
        version = self._ledger.state.position
        with self._traces.publishing(version, self._ledger.state.burst):
            await self._make_durable_and_offer(version)

    async def _make_durable_and_offer(self, version: int) -> None:
        weights, optimizer = self._backend.weights(), self._backend.optimizer_state() | rng_state()
        position = {"burst": self._ledger.state.burst, "run": self._config.run}
        directory = await asyncio.to_thread(
            write_checkpoint, self._config.checkpoints, version, self._policy, weights, optimizer, position,
            self._config.policy, pack(self._ledger.state),
        )  # fmt: skip
        retention = self._config.retention
        oldest = await asyncio.to_thread(prune, self._config.checkpoints, retention.keep_last, retention.keep_every)
        ticket = await asyncio.to_thread(offer_weights, self._transfer, PUBLISHED, version, weights)
        await self._ledger.submit(CheckpointWritten(version, ticket.checksum, str(directory), ticket.transfer, oldest))

    # ------------------------------------------------------------ what satellites ask

    async def join(self, cell: int, worker: str) -> Admission:
        """Take part in the running step with zeroed gradients; refused while the join window is closed."""
        table = await self._joinable_table()
        if table is None:
            return Admission(-1, 0, None, "no step is open for joining")
        ticket = await self._training_ticket(table)
        if ticket is None or not table.join(worker, cell, self._clock.now()):
            return Admission(-1, 0, None, "the join window has closed")
        self._traces.joined()
        return Admission(table.step, table.attempt, ticket)

    async def _joinable_table(self) -> ClaimTable | None:
        """The running attempt while its window is open, waiting a while for one."""
        deadline = self._clock.now() + LONG_POLL_S
        while True:
            table, remaining = self._table, deadline - self._clock.now()
            if table is not None and not table.window_closed:
                return table
            if remaining <= 0:
                return None
            await self._wait_for_change(remaining)

    async def _training_ticket(self, table: ClaimTable) -> WeightsTicket | None:
        """Weights of the running step, offered when the first satellite asks."""
        async with self._ticketing:
            if self._ticket is None and self._table is table:
                ticket = await asyncio.to_thread(
                    offer_weights, self._transfer, TRAINING, table.step, self._backend.weights()
                )
                self._ticket = ticket if self._table is table else None
            return self._ticket if self._table is table else None

    def leave(self, worker: str) -> None:
        if self._table is not None:
            self._table.revoke(worker)

    async def claim(
        self, worker: str, step: int, attempt: int, most: int = 1
    ) -> tuple[Verdict, tuple[MicroStepRef, ...]]:
        """Up to `most` micro-steps. Answers at once, except that it waits a while rather than say WAIT."""
        deadline = self._clock.now() + LONG_POLL_S
        while True:
            verdict, refs = self._claim(worker, step, attempt, most)
            remaining = deadline - self._clock.now()
            if verdict is not Verdict.WAIT or remaining <= 0:
                return verdict, refs
            await self._wait_for_change(min(remaining, LOOK_AGAIN_S))

    def _claim(self, worker: str, step: int, attempt: int, most: int) -> tuple[Verdict, tuple[MicroStepRef, ...]]:
        table = self._find(step, attempt)
        if table is None:
            return Verdict.STALE, ()
        self._expire(table)  # also while this cell computes: what a lost worker held is for whoever asks
        return table.claim_chunk(worker, self._clock.now(), most)

    def heartbeat(self, worker: str, step: int, attempt: int) -> bool:
        """The worker is computing what it claimed; False if that counts for nothing any more."""
        table = self._find(step, attempt)
        return table is not None and table.heartbeat(worker, self._clock.now())

    def complete(self, worker: str, step: int, attempt: int, micro_step: str, sums: dict[str, float]) -> bool:
        table = self._find(step, attempt)
        return table is not None and table.complete(worker, micro_step, sums, self._clock.now())

    async def completed(self) -> None:
        """Wake the loop and whoever waits: something was completed or offered."""
        self.attend()
        await self._notify()

    def offer(self, worker: str, step: int, attempt: int, micro_steps: frozenset[str], transfer: str) -> bool:
        table = self._find(step, attempt)
        return table is not None and table.offer(worker, micro_steps, transfer, self._clock.now())

    def _find(self, step: int, attempt: int) -> ClaimTable | None:
        table = self._table
        return table if table is not None and (table.step, table.attempt) == (step, attempt) else None

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait_for_change(self, timeout_s: float) -> None:
        async with self._changed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                return

    # ------------------------------------------------------------ what status shows

    @property
    def version(self) -> int:
        """Of the weights in memory."""
        return self._ledger.state.position

    def gauges(self) -> dict[str, float]:
        state, table = self._ledger.state, self._table
        gauges = {
            "step": float(state.position),
            "attempt": float(state.attempt),
            "groups_waiting": float(len(state.membership.waiting)),
            "unclaimed_cost": 0.0 if table is None else table.unclaimed_cost,
            "join_s": self._speeds.join_s,
        } | {f"speed_cell_{cell}": self._speeds.of(cell) for cell in self._speeds.work}
        by_cell = {} if table is None else table.micro_steps_by_cell()
        return gauges | {f"micro_steps_cell_{cell}": float(num) for cell, num in by_cell.items()}


def _trained(table: ClaimTable, update: Update) -> StepTrained:
    return StepTrained(
        step=table.step, attempt=table.attempt, updated=update.updated, num_targets=update.num_targets,
        num_tokens=update.num_tokens, loss=update.loss, grad_norm=update.grad_norm,
        learning_rate=update.learning_rate, metrics=update.metrics,
        micro_steps_by_cell={str(cell): num for cell, num in sorted(table.micro_steps_by_cell().items())},
    )  # fmt: skip
