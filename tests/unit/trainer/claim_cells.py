"""Cells of known speed that work a claim table off, in time that only the simulation moves."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

from gyre.contracts.events import BlobRef, MicroStepRef
from gyre.trainer.claims import ClaimTable, Verdict
from gyre.trainer.speeds import Speeds

LEASE_S = 1e9


def ref(name: str, cost: float, num_tokens: int = 1) -> MicroStepRef:
    return MicroStepRef(name, "d", cost, num_tokens, 1, 1, BlobRef(name, "d", 1))


def known(speeds: dict[int, float]) -> Speeds:
    """Measured before: each cell has computed the cost it does in a second, in a second."""
    return Speeds(work=dict(speeds), seconds=dict.fromkeys(speeds, 1.0))


@dataclass
class Worked:
    """How a simulated step went: when each cell ended its last micro-step, and who computed what."""

    ends: dict[int, float] = field(default_factory=dict)
    by: dict[str, int] = field(default_factory=dict)

    @property
    def makespan(self) -> float:
        return max(self.ends.values(), default=0.0)

    @property
    def spread(self) -> float:
        return self.makespan - min(self.ends.values())


@dataclass
class Cells:
    """cell -> speed (cost per second) and when it joins; `poll_s`: how often a waiting one asks again."""

    speeds: dict[int, float]
    joins: dict[int, float] = field(default_factory=dict)
    most: int = 1
    poll_s: float = 0.01
    heard: Speeds | None = None

    def work_off(self, costs: list[float]) -> Worked:
        table = ClaimTable(0, 0, "c0", LEASE_S, known(self.speeds) if self.heard is None else self.heard)
        table.add(tuple(ref(f"m{i:03d}", cost) for i, cost in enumerate(costs)))
        table.seal()
        made, order = Worked(), itertools.count()
        queues: dict[int, list[MicroStepRef]] = {cell: [] for cell in self.speeds}
        events = [(self.joins.get(cell, 0.0), next(order), cell) for cell in self.speeds]
        heapq.heapify(events)
        joined = {cell for cell in self.speeds if cell == 0 or (cell not in self.joins and table.join(f"c{cell}", cell, 0.0))}
        while events:
            now, _, cell = heapq.heappop(events)
            name = f"c{cell}"
            if cell not in joined:
                if not table.join(name, cell, now):
                    continue
                joined.add(cell)
            if queues[cell]:
                done = queues[cell].pop(0)
                assert table.complete(name, done.micro_step, {}, now)
                made.ends[cell], made.by[done.micro_step] = now, cell
            if not queues[cell]:
                verdict, refs = table.claim_chunk(name, now, self.most)
                queues[cell] = list(refs)
                if verdict is Verdict.WAIT and not table.window_closed:
                    heapq.heappush(events, (now + self.poll_s, next(order), cell))
            if queues[cell]:
                heapq.heappush(events, (now + queues[cell][0].cost / self.speeds[cell], next(order), cell))
        assert table.window_closed, "somebody starved"
        return made


def optimum(costs: list[float], speeds: list[float], ready: list[float] | None = None) -> float:
    """The shortest makespan there is, by trying every assignment."""
    starts = ready or [0.0] * len(speeds)
    best = float("inf")
    for owners in itertools.product(range(len(speeds)), repeat=len(costs)):
        loads = [0.0] * len(speeds)
        for owner, cost in zip(owners, costs, strict=True):
            loads[owner] += cost / speeds[owner]
        best = min(best, max((s + x if x else 0.0) for s, x in zip(starts, loads, strict=True)))
    return best
