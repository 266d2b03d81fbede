"""Who computes which micro-step of one step attempt. Pure and volatile: losing it means a new attempt.

A worker's whole contribution in an attempt counts or none of it: revoking a worker puts every micro-step it claimed
or finished back, and its gradient buffer is never read. So each micro-step is in exactly one of `pending`, `leased`,
`done` and `settled` at any time, and the sum over `settled` and the core's own `done` is what is reduced.

Workers schedule themselves: whoever is free claims, longest first, so that small ones are left for the end and all end
within about one micro-step of each other. A claim may bring several short micro-steps: a second's worth, at most half of
the worker's share of what is left. Near the end a slow worker leaves a long one to whoever would be done with it earlier.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass, field
from enum import Enum

from gyre.contracts.events import MicroStepRef
from gyre.trainer.metrics import add_sums
from gyre.trainer.speeds import Speeds

CHUNK_S = 1.0  # a claim costs milliseconds; more than this is not worth taking from who may still join
STALL_LEASES = 10  # heartbeats alone hold a claim for so many leases,
STALL_FACTOR = 20.0  # or for so many times what its micro-steps should take, whichever is longer


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
    """`since`: when it last claimed or completed. `asked`: it has claimed at least once."""

    cell: int
    deadline: float
    since: float
    asked: bool = False
    leased: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)
    offer: Offer | None = None


class ClaimTable:
    """All claims of attempt `attempt` at step `step`.

    A remote worker's lease is renewed by everything it says; the core's own worker has none, it dies with the table.
    `speeds` outlives the table; what it says of a micro-step's work is taken once, when the micro-step is added.
    """

    def __init__(
        self, step: int, attempt: int, core_worker: str, lease_s: float, speeds: Speeds | None = None
    ) -> None:
        self.step = step
        self.attempt = attempt
        self.sealed = False
        self._core = core_worker
        self._lease_s = lease_s
        self._speeds = Speeds() if speeds is None else speeds
        # One cell alone keeps to the declared order: there is nobody to end together with, and it stays repeatable.
        self._per_token, self._per_cost = self._speeds.fit.weights() if len(self._speeds.work) > 1 else (0.0, 1.0)
        self._refs: dict[str, MicroStepRef] = {}
        self._pending: list[tuple[float, str]] = []  # (work, name), the longest last
        self._settled: set[str] = set()
        self._workers: dict[str, _Worker] = {core_worker: _Worker(0, float("inf"), 0.0)}
        self._sums: dict[str, tuple[int, dict[str, float]]] = {}

    # ------------------------------------------------------------ supply

    def add(self, refs: tuple[MicroStepRef, ...]) -> None:
        """More micro-steps of the step; ones that are known are ignored."""
        for ref in refs:
            if ref.micro_step not in self._refs:
                self._refs[ref.micro_step] = ref
                insort(self._pending, (self._work(ref.micro_step), ref.micro_step))

    def seal(self) -> None:
        """No more micro-steps will be added."""
        self.sealed = True

    # ------------------------------------------------------------ workers

    def join(self, worker: str, cell: int, now: float) -> bool:
        """Take part with zeroed gradients. Refused once everything is done: the join window is closed.

        Refused too when a sealed step would be over before the newcomer had finished its first micro-step.
        """
        if self.window_closed or worker in self._workers or not self._worth_joining(cell, now):
            return False
        self._workers[worker] = _Worker(cell, now + self._lease_s, now)
        return True

    def claim(self, worker: str, now: float) -> tuple[Verdict, MicroStepRef | None]:
        """The longest micro-step nobody has, so that small ones are left for the end."""
        verdict, refs = self.claim_chunk(worker, now, 1)
        return verdict, refs[0] if refs else None

    def claim_chunk(self, worker: str, now: float, most: int) -> tuple[Verdict, tuple[MicroStepRef, ...]]:
        """Up to `most` micro-steps, the longest first, for a second, or for half of what is left; at least one."""
        entry = self._renew(worker, now)
        if entry is None:
            return Verdict.STALE, ()
        if not entry.asked and worker != self._core:
            self._speeds.joined(now - entry.since)
        entry.asked, entry.since = True, entry.since if entry.leased else now
        chosen = self._choose(entry, now, most) if entry.offer is None else []
        if chosen:
            entry.leased.update(chosen)
            return Verdict.WORK, tuple(self._refs[name] for name in chosen)
        if self.window_closed and entry.done and entry.offer is None:
            return Verdict.REDUCE, ()
        return Verdict.WAIT, ()

    def complete(self, worker: str, micro_step: str, sums: dict[str, float], now: float) -> bool:
        """The gradient of a leased micro-step is in the worker's buffer; `sums` are metrics over its targets."""
        entry = self._renew(worker, now)
        if entry is None or micro_step not in entry.leased:
            return False
        entry.leased.remove(micro_step)
        entry.done.add(micro_step)
        self._sums[micro_step] = (entry.cell, sums)
        self._speeds.measured(entry.cell, self._refs[micro_step], now - entry.since)
        entry.since = now
        return True

    def heartbeat(self, worker: str, now: float) -> bool:
        """The worker is computing; False if it need not go on. What never ends is not renewed for ever."""
        entry = self._workers.get(worker)
        if entry is None:
            return False
        expected_s = sum(self._work(m) for m in entry.leased) / self._speeds.of(entry.cell)
        if now - entry.since <= max(STALL_LEASES * self._lease_s, STALL_FACTOR * expected_s):
            self._renew(worker, now)
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
            for name in entry.leased | entry.done:
                insort(self._pending, (self._work(name), name))
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
        return sum(self._refs[name].cost for _, name in self._pending)

    @property
    def num_micro_steps(self) -> int:
        return len(self._refs)

    def done_by(self, worker: str) -> frozenset[str]:
        """What the worker has completed; nothing for one that was revoked."""
        entry = self._workers.get(worker)
        return frozenset() if entry is None else frozenset(entry.done)

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
        for _, name in self._pending:
            where[name].append("pending")
        for name in self._settled:
            where[name].append("settled")
        for worker, entry in self._workers.items():
            for name in entry.leased:
                where[name].append(f"leased:{worker}")
            for name in entry.done:
                where[name].append(f"done:{worker}")
        return where

    # ------------------------------------------------------------ who should take what

    def _work(self, name: str) -> float:
        """What the micro-step costs, as far as it has been measured."""
        ref = self._refs[name]
        return self._per_token * ref.num_tokens + self._per_cost * ref.cost

    def _choose(self, entry: _Worker, now: float, most: int) -> list[str]:
        """Take micro-steps out of the queue for this worker; empty if it had better wait."""
        speed, total = self._speeds.of(entry.cell), self._total_speed()
        share = min(sum(work for work, _ in self._pending) / (2.0 * total), CHUNK_S) * speed
        at = self._first_for(entry, now)
        chosen, taken = [], 0.0
        while at is not None and at >= 0:
            work, name = self._pending.pop(at)
            chosen.append(name)
            taken += work
            if len(chosen) == (most if self._speeds.is_known(entry.cell) else 1):
                break
            fits = (share - taken) * (1.0 + 1e-9)
            at = bisect_right(self._pending, fits, key=lambda pending: pending[0]) - 1  # the longest that fits
        return chosen

    def _first_for(self, entry: _Worker, now: float) -> int | None:
        """Index of the longest micro-step that this worker may take without making the step end later."""
        if not self._pending:
            return None
        speed = self._speeds.of(entry.cell)
        left = sum(work for work, _ in self._pending)
        end_s = (left + self._under_way(now)) / self._total_speed()  # if everything divided evenly
        for at in range(len(self._pending) - 1, -1, -1):
            work = self._pending[at][0]
            if work / speed <= end_s or work / speed <= self._soonest_elsewhere(entry, work, now):
                return at
        return None

    def _soonest_elsewhere(self, entry: _Worker, work: float, now: float) -> float:
        """In how many seconds another worker would have done `work`, after what it is at."""
        others = [w for w in self._workers.values() if w is not entry and w.offer is None]
        return min((self._busy_s(w, now) + work / self._speeds.of(w.cell) for w in others), default=float("inf"))

    def _busy_s(self, entry: _Worker, now: float) -> float:
        """Until a worker asks again. One that is overdue is expected to need as long again: nobody is waited for long."""
        joining_s = 0.0 if entry.asked else self._speeds.join_s
        expected_s = joining_s + sum(self._work(m) for m in entry.leased) / self._speeds.of(entry.cell)
        return abs(expected_s - (now - entry.since))

    def _under_way(self, now: float) -> float:
        """Work that is leased and not done yet."""
        return sum(self._busy_s(w, now) * self._speeds.of(w.cell) for w in self._workers.values() if w.leased)

    def _total_speed(self) -> float:
        return sum(self._speeds.of(w.cell) for w in self._workers.values() if w.offer is None)

    def _worth_joining(self, cell: int, now: float) -> bool:
        if not self.sealed or not self._pending or not self._speeds.work:
            return True
        left = sum(work for work, _ in self._pending)
        end_s = (left + self._under_way(now)) / self._total_speed()  # without the newcomer
        return self._speeds.join_s + self._pending[0][0] / self._speeds.of(cell) <= end_s

    def _renew(self, worker: str, now: float) -> _Worker | None:
        entry = self._workers.get(worker)
        if entry is not None and worker != self._core:
            entry.deadline = now + self._lease_s
        return entry
