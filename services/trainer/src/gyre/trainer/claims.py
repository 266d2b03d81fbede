"""Who computes which micro-step of one step attempt. Pure and volatile: losing it means a new attempt.

A worker's whole contribution in an attempt counts or none of it: revoking a worker puts every micro-step it claimed
or finished back, and its gradient buffer is never read. So each micro-step is in exactly one of `pending`, `leased`,
`done` and `settled` at any time, and the sum over `settled` and the core's own `done` is what is reduced.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from gyre.contracts.events import MicroStepRef
from gyre.trainer.metrics import add_sums


class Verdict(Enum):
    """What a claim is answered with."""

    WORK = "work"  # a micro-step under a lease
    WAIT = "wait"  # nothing to do now
    REDUCE = "reduce"  # everything is done: offer the gradient buffer
    STALE = "stale"  # not (any longer) a worker of this attempt: join again


@dataclass(frozen=True, slots=True)
class Offer:
    """A worker's finished gradient buffer: the sum over exactly the micro-steps it completed, and where it lies."""

    worker: str
    cell: int
    transfer: str


@dataclass(slots=True)
class _Worker:
    cell: int
    deadline: float
    leased: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)
    offer: Offer | None = None


class ClaimTable:
    """All claims of attempt `attempt` at step `step`.

    A remote worker's lease is renewed by everything it says; the core's own worker has none, it dies with the table.
    """

    def __init__(self, step: int, attempt: int, core_worker: str, lease_s: float) -> None:
        self.step = step
        self.attempt = attempt
        self.sealed = False
        self._core = core_worker
        self._lease_s = lease_s
        self._refs: dict[str, MicroStepRef] = {}
        self._pending: set[str] = set()
        self._settled: set[str] = set()
        self._workers: dict[str, _Worker] = {core_worker: _Worker(0, float("inf"))}
        self._sums: dict[str, tuple[int, dict[str, float]]] = {}

    # ------------------------------------------------------------ supply

    def add(self, refs: tuple[MicroStepRef, ...]) -> None:
        """More micro-steps of the step; ones that are known are ignored."""
        for ref in refs:
            if ref.micro_step not in self._refs:
                self._refs[ref.micro_step] = ref
                self._pending.add(ref.micro_step)

    def seal(self) -> None:
        """No more micro-steps will be added."""
        self.sealed = True

    # ------------------------------------------------------------ workers

    def join(self, worker: str, cell: int, now: float) -> bool:
        """Take part with zeroed gradients. Refused once everything is done: the join window is closed."""
        if self.window_closed or worker in self._workers:
            return False
        self._workers[worker] = _Worker(cell, now + self._lease_s)
        return True

    def claim(self, worker: str, now: float) -> tuple[Verdict, MicroStepRef | None]:
        """The longest micro-step nobody has, so that small ones are left for the end."""
        entry = self._renew(worker, now)
        if entry is None:
            return Verdict.STALE, None
        if entry.offer is None and self._pending:
            name = max(self._pending, key=lambda m: (self._refs[m].cost, m))
            self._pending.remove(name)
            entry.leased.add(name)
            return Verdict.WORK, self._refs[name]
        if self.window_closed and entry.done and entry.offer is None:
            return Verdict.REDUCE, None
        return Verdict.WAIT, None

    def complete(self, worker: str, micro_step: str, sums: dict[str, float], now: float) -> bool:
        """The gradient of a leased micro-step is in the worker's buffer; `sums` are metrics over its targets."""
        entry = self._renew(worker, now)
        if entry is None or micro_step not in entry.leased:
            return False
        entry.leased.remove(micro_step)
        entry.done.add(micro_step)
        self._sums[micro_step] = (entry.cell, sums)
        return True

    def offer(self, worker: str, micro_steps: frozenset[str], transfer: str, now: float) -> bool:
        """Accept a buffer only if it holds exactly what the worker completed and nothing is open any more."""
        entry = self._renew(worker, now)
        if entry is None or not self.window_closed or micro_steps != entry.done or entry.offer is not None:
            return False
        entry.offer = Offer(worker, entry.cell, transfer)
        return True

    def expire(self, now: float) -> list[str]:
        """Revoke every worker whose lease ended; returns them. An accepted offer needs no lease any more."""
        late = [name for name, w in self._workers.items() if w.deadline <= now and w.offer is None]
        for name in late:
            self.revoke(name)
        return late

    def revoke(self, worker: str) -> None:
        """Void the worker's contribution: all its micro-steps return to the queue. Unknown workers are ignored."""
        entry = self._workers.pop(worker, None)
        if entry is not None:
            self._pending |= entry.leased | entry.done
            for name in entry.done:
                del self._sums[name]

    def settle(self, worker: str) -> None:
        """The worker's offered buffer was added by the core; it has to join again for anything more."""
        entry = self._workers.pop(worker)
        assert entry.offer is not None, f"{worker} offered nothing"
        self._settled |= entry.done

    def stands(self, offer: Offer) -> bool:
        """Whether an offer still counts; its worker may have been revoked while the buffer was read."""
        entry = self._workers.get(offer.worker)
        return entry is not None and entry.offer is offer

    # ------------------------------------------------------------ reading

    @property
    def window_closed(self) -> bool:
        """Sealed, and every micro-step is computed: only the reduction is left."""
        return self.sealed and not self._pending and not any(w.leased for w in self._workers.values())

    @property
    def offers(self) -> list[Offer]:
        """Buffers to read, in cell order."""
        return sorted((w.offer for w in self._workers.values() if w.offer), key=lambda o: (o.cell, o.worker))

    @property
    def reducible(self) -> bool:
        """Every remote worker that computed something has offered."""
        remote = (w for name, w in self._workers.items() if name != self._core)
        return self.window_closed and all(w.offer is not None for w in remote if w.done)

    @property
    def complete_sum(self) -> bool:
        """Every micro-step is in the core's own buffer now."""
        return self.window_closed and self._settled | self._workers[self._core].done == set(self._refs)

    @property
    def unclaimed_cost(self) -> float:
        return sum(self._refs[m].cost for m in self._pending)

    @property
    def num_micro_steps(self) -> int:
        return len(self._refs)

    def totals(self) -> dict[str, float]:
        """Metrics summed over the completed micro-steps, in micro-step order, so that they do not depend on timing."""
        totals: dict[str, float] = {}
        for name in sorted(self._sums):
            add_sums(totals, self._sums[name][1])
        return totals

    def micro_steps_by_cell(self) -> dict[int, int]:
        """How many of the completed micro-steps each cell computed."""
        counts: dict[int, int] = {}
        for cell, _ in self._sums.values():
            counts[cell] = counts.get(cell, 0) + 1
        return counts

    def places(self) -> dict[str, list[str]]:
        """Every micro-step's places, for invariant checks: exactly one each."""
        where: dict[str, list[str]] = {name: [] for name in self._refs}
        for name in self._pending:
            where[name].append("pending")
        for name in self._settled:
            where[name].append("settled")
        for worker, entry in self._workers.items():
            for name in entry.leased:
                where[name].append(f"leased:{worker}")
            for name in entry.done:
                where[name].append(f"done:{worker}")
        return where

    def _renew(self, worker: str, now: float) -> _Worker | None:
        entry = self._workers.get(worker)
        if entry is not None and worker != self._core:
            entry.deadline = now + self._lease_s
        return entry
