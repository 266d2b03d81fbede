"""A satellite cell's shell: while its role is `train` it joins step after step, and leaves nothing behind.

join -> pull the step's weights, verify, zero gradients -> claim, compute, complete ... -> offer the gradient buffer
-> the core reads it -> this worker is no longer of the step: join again. Whatever goes wrong, the answer is to join
again under a new name; the core has voided the old one or will when its lease ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from gyre.contracts.errors import GyreError
from gyre.contracts.events import MicroStepRef
from gyre.runtime.blobs import BlobStore
from gyre.runtime.clock import Clock
from gyre.runtime.devices import DeviceLock
from gyre.runtime.telemetry import span
from gyre.trainer.backends.base import Backend
from gyre.trainer.claims import Verdict
from gyre.trainer.compute import compute
from gyre.trainer.config import DEVICE_POLL_S, READ_TIMEOUT_S, TrainerConfig
from gyre.trainer.coordinator import Admission
from gyre.trainer.core import DevicesReleased, DevicesTaken, WorkerStarted
from gyre.trainer.ledger import Ledger
from gyre.trainer.reduce import GRADIENTS, export_sum, withdraw_sum
from gyre.trainer.traces import RoleTraces
from gyre.trainer.vacancy import Vacancy
from gyre.trainer.weights import pull_weights
from gyre.transfer import Transfer

log = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_S = 0.25
MAX_CHUNK = 4  # micro-steps per claim; near the end of a step the core gives fewer
HEARTBEATS_PER_LEASE = 4


class CoreUnreachable(GyreError):
    """The core did not answer; it may be restarting."""


class CorePeer(Protocol):
    """The core as a satellite sees it: `gyre.trainer.rpc.CoreClient`. Every call may raise `CoreUnreachable`."""

    async def join(self, cell: int, epoch: int, worker: str) -> Admission: ...

    async def leave(self, cell: int, worker: str) -> None: ...

    async def claim(
        self, worker: str, step: int, attempt: int, most: int
    ) -> tuple[Verdict, tuple[MicroStepRef, ...]]: ...

    async def heartbeat(self, worker: str, step: int, attempt: int) -> bool: ...

    async def complete(
        self, worker: str, step: int, attempt: int, micro_step: str, seconds: float, sums: dict[str, float]
    ) -> bool: ...

    async def offer(
        self, worker: str, step: int, attempt: int, micro_steps: frozenset[str], transfer: str
    ) -> bool: ...


@dataclass(slots=True)
class _Membership:
    """This worker in one attempt: `done` is what its gradient sum holds."""

    worker: str
    step: int
    attempt: int
    done: set[str]


class Satellite:
    """One worker of a cell other than the core."""

    def __init__(
        self, config: TrainerConfig, ledger: Ledger, backend: Backend, core: CorePeer, transfer: Transfer,
        blobs: BlobStore, lock: DeviceLock, clock: Clock,
    ) -> None:  # fmt: skip
        self._config, self._ledger, self._backend, self._core = config, ledger, backend, core
        self._transfer, self._blobs, self._lock, self._clock = transfer, blobs, lock, clock
        self._vacancy = Vacancy(lock, clock)
        self._attention = asyncio.Event()
        self._traces = RoleTraces(config.cell)
        self.version = -1

    def attend(self, transition: Mapping[str, str] | None = None) -> None:
        """The ledger's state changed; `transition` is the trace context of a change of role."""
        self._traces.asked(transition)
        self._attention.set()

    def gauges(self) -> dict[str, float]:
        """What `gyre status` shows."""
        return {"step": float(self.version)}

    async def run(self) -> None:
        """Do what the cell's role asks for, until cancelled."""
        await self._ledger.submit(WorkerStarted(0))
        while True:
            self._attention.clear()
            cell = self._ledger.state.cell
            if cell.should_hold:
                await self._train_while_assigned()
            elif cell.owes_release or self._lock.held:
                await self._give_devices_back()
            else:
                await self._vacancy.wait(self._attention, self._ledger)

    async def _train_while_assigned(self) -> None:
        epoch = self._ledger.state.cell.epoch
        with self._traces.changing("gyre.train.join", epoch, self._ledger.state.cell.joined < epoch) as noted:
            while self._assigned(epoch) and not self._lock.try_take(epoch):
                await self._clock.sleep(DEVICE_POLL_S)
            if self._lock.held:
                with span("gyre.train.wake"):
                    await asyncio.to_thread(self._backend.wake)
            member = await self._become_member(epoch)
            if noted is not None and member is None:
                noted.set_attribute("gyre.outcome", "superseded")
        while member is not None:
            await self._guarded(self._work(epoch, member))
            member = await self._become_member(epoch)

    async def _become_member(self, epoch: int) -> _Membership | None:
        """Ask until an attempt takes this worker; None once the cell is not to train any more."""
        while self._assigned(epoch):
            member = await self._guarded(self._join(epoch))
            if member is not None:
                return member
        return None

    async def _guarded(self, work: Awaitable[T]) -> T | None:
        """What `work` returns; None if it failed, after which the answer is to join again."""
        try:
            return await work
        except GyreError as error:
            log.warning("cell %d joins again: %s", self._config.cell, error)
            await self._clock.sleep(RETRY_S)
            return None

    def _assigned(self, epoch: int) -> bool:
        cell = self._ledger.state.cell
        return cell.should_hold and cell.epoch == epoch

    async def _join(self, epoch: int) -> _Membership | None:
        """Join one attempt with its weights and zeroed gradients; None if none can be joined right now."""
        worker = f"cell-{self._config.cell}-{uuid.uuid4().hex[:8]}"
        answer = await self._ask_to_join(epoch, worker)
        if answer is None:
            return None
        if answer.ticket is None:
            await self._clock.sleep(RETRY_S)
            return None
        if answer.ticket.version != self.version:
            with span("gyre.weights.pull", gyre__weights__version=answer.ticket.version) as pulling:
                state = await pull_weights(self._transfer, answer.ticket, READ_TIMEOUT_S)
                pulling.set_attribute("gyre.bytes", sum(tensor.nbytes for tensor in state.values()))
            self._backend.load_weights(state)
            self.version = answer.ticket.version
        self._backend.zero_gradients()
        if self._ledger.state.cell.joined < epoch:
            await self._ledger.submit(DevicesTaken(epoch, answer.step, self.version))
        return _Membership(worker, answer.step, answer.attempt, set())

    async def _ask_to_join(self, epoch: int, worker: str) -> Admission | None:
        """The core's answer, which waits for a step to open; None if this cell is to leave meanwhile."""
        asking = asyncio.get_running_loop().create_task(self._core.join(self._config.cell, epoch, worker))
        try:
            while not asking.done() and self._assigned(epoch):
                await asyncio.wait({asking}, timeout=DEVICE_POLL_S)
        finally:
            if not asking.done():
                asking.cancel()
        if not asking.cancelled() and asking.done():
            return asking.result()
        with contextlib.suppress(GyreError):
            await self._core.leave(self._config.cell, worker)  # it may have been admitted with nobody left to hear of it
        return None

    async def _work(self, epoch: int, member: _Membership) -> None:
        try:
            while self._assigned(epoch):
                verdict, refs = await self._core.claim(member.worker, member.step, member.attempt, MAX_CHUNK)
                if verdict is Verdict.STALE:
                    return
                for ref in refs:
                    if self._assigned(epoch):
                        await self._compute(member, ref)
                if verdict is Verdict.REDUCE:
                    await self._offer(member)
        finally:
            withdraw_sum(self._transfer)
        with contextlib.suppress(CoreUnreachable):
            await self._core.leave(self._config.cell, member.worker)

    async def _compute(self, member: _Membership, ref: MicroStepRef) -> None:
        started = self._clock.now()
        async with self._heartbeats(member):
            sums = await compute(self._backend, self._blobs, ref, self._clock)
        seconds = self._clock.now() - started
        member.done.add(ref.micro_step)
        if not await self._core.complete(
            member.worker, member.step, member.attempt, ref.micro_step, seconds, sums
        ):
            raise GyreError(f"{ref.micro_step} was refused: this worker was revoked from attempt {member.attempt}")

    @asynccontextmanager
    async def _heartbeats(self, member: _Membership) -> AsyncIterator[None]:
        """Keep the lease while a micro-step is computed on its thread, however long it takes."""

        async def beat() -> None:
            while True:
                await self._clock.sleep(self._config.optimizer.claim_lease_s / HEARTBEATS_PER_LEASE)
                with contextlib.suppress(CoreUnreachable):
                    await self._core.heartbeat(member.worker, member.step, member.attempt)

        beating = asyncio.create_task(beat())
        try:
            yield
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)

    async def _offer(self, member: _Membership) -> None:
        text = export_sum(self._transfer, self._backend, member.step, member.attempt, member.done)
        if not await self._core.offer(member.worker, member.step, member.attempt, frozenset(member.done), text):
            raise GyreError(f"offer for step {member.step} attempt {member.attempt} was refused")

    async def _give_devices_back(self) -> None:
        epoch = self._ledger.state.cell.epoch
        with self._traces.changing("gyre.train.release", epoch, self._ledger.state.cell.owes_release):
            await asyncio.to_thread(self._backend.sleep)
            self._transfer.release(GRADIENTS)  # host memory that the engine can use
            self._lock.give_back()
            if self._ledger.state.cell.owes_release:
                await self._ledger.submit(DevicesReleased(self._ledger.state.cell.epoch, self.version))
