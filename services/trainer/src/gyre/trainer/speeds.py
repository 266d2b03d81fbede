"""What has been measured of the cells: how fast each is, what a micro-step really costs, how long joining takes. Pure.

All of it only orders and sizes claims; it never changes a micro-step, so a wrong measurement costs time and nothing else.
Kept from attempt to attempt, lost with the process.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gyre.contracts.events import MicroStepRef

KEPT = 0.7  # of an earlier measurement when a new one comes
MIN_MEASURED = 8  # micro-steps before the fit is believed


@dataclass(slots=True)
class CostFit:
    """Least squares, forgetting, of seconds on (tokens, declared cost), the declared cost's scale kept.

    The declared cost is a*tokens + b*pairs with guessed a and b, so tokens and cost span what tokens and pairs span.
    `seconds` come multiplied by the cell's speed, so that cells of unequal speed can be put together.
    """

    num: int = 0
    tt: float = 0.0
    tc: float = 0.0
    cc: float = 0.0
    ty: float = 0.0
    cy: float = 0.0
    tokens: float = 0.0
    cost: float = 0.0

    def measured(self, tokens: float, cost: float, seconds: float) -> None:
        """One more micro-step; older ones fade slowly."""
        fade = 0.99
        self.num += 1
        self.tt = fade * self.tt + tokens * tokens
        self.tc = fade * self.tc + tokens * cost
        self.cc = fade * self.cc + cost * cost
        self.ty = fade * self.ty + tokens * seconds
        self.cy = fade * self.cy + cost * seconds
        self.tokens = fade * self.tokens + tokens
        self.cost = fade * self.cost + cost

    def weights(self) -> tuple[float, float]:
        """(per token, per declared cost): (0, 1) until enough is measured, and where the fit makes no sense."""
        determinant = self.tt * self.cc - self.tc * self.tc
        if self.num < MIN_MEASURED or determinant <= 1e-6 * self.tt * self.cc:
            return 0.0, 1.0
        per_token = (self.ty * self.cc - self.cy * self.tc) / determinant
        per_cost = (self.cy * self.tt - self.ty * self.tc) / determinant
        if per_token <= 0.0:
            return 0.0, 1.0
        per_cost = max(per_cost, 0.0)
        scale = self.cost / (per_token * self.tokens + per_cost * self.cost)
        return scale * per_token, scale * per_cost


@dataclass(slots=True)
class Speeds:
    """Cost per second by cell, as exponential averages of work and of seconds, so that long micro-steps weigh more."""

    work: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    join_s: float = 0.0
    fit: CostFit = field(default_factory=CostFit)

    def measured(self, cell: int, ref: MicroStepRef, seconds: float) -> None:
        """A cell computed a micro-step in `seconds`, everything included that keeps it from the next one."""
        if seconds <= 0.0:
            return
        self.work[cell] = KEPT * self.work.get(cell, 0.0) + ref.cost
        self.seconds[cell] = KEPT * self.seconds.get(cell, 0.0) + seconds
        self.fit.measured(float(ref.num_tokens), ref.cost, seconds * self.work[cell] / self.seconds[cell])

    def joined(self, seconds: float) -> None:
        """A satellite needed so long from being admitted to asking for work."""
        self.join_s = seconds if self.join_s == 0.0 else KEPT * self.join_s + (1.0 - KEPT) * seconds

    def is_known(self, cell: int) -> bool:
        return cell in self.work

    def of(self, cell: int) -> float:
        """Cost per second; of a cell that was never measured what the others do on average, 1 if nothing is known."""
        return self.work[cell] / self.seconds[cell] if cell in self.work else self.mean or 1.0

    @property
    def mean(self) -> float:
        """Cost per second of a cell on average, 0 if nothing is known."""
        return sum(self.work[c] / self.seconds[c] for c in self.work) / len(self.work) if self.work else 0.0
