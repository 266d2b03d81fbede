"""What run is simulated: its schedule, its cells, its bursts. Everything follows from one number unless a story says more."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from gyre.runtime.config import TimeoutCalls
from gyre.scheduler.config import Plan
from gyre.scheduler.schedules import Capacity, Schedule, schedule_of

SCHEDULES = ("elastic", "async+streaming", "colocate", "colocate+standalone+streaming", "rollpacker")


@dataclass(frozen=True, slots=True)
class Setting:
    """One run. `executions`: C_e of a cell. `window_s`: how long the server knows a message id."""

    seed: int = 0
    schedule: str = "elastic"
    cells: int = 2
    standalone: int = 0
    training: int = 1
    steps: int = 2
    mu: int = 1
    phi: int = 0
    groups: int = 2
    executions: int = 2
    capacity: int = 4
    kv_tokens: int = 0
    evaluations: int = 0
    schedulers: int = 2
    evaluators: int = 2
    window_s: float = 3600.0
    fences_first: bool = False
    transition_s: float = 600.0

    @property
    def num_engines(self) -> int:
        return self.cells + self.standalone

    @property
    def streams(self) -> bool:
        return self.schedule in ("elastic", "rollpacker") or self.schedule.endswith("+streaming")

    @property
    def staleness_limit(self) -> int:
        return self.phi + self.mu - 1

    def plan(self) -> Plan:
        return Plan(
            num_steps=self.steps, seed=self.seed, num_cells=self.cells, steps_per_burst=self.mu,
            num_outstanding=(self.phi + self.mu) * self.groups, executions_per_group=self.executions,
            train_tasks=("train/a", "train/b", "train/c"), held_out_tasks=("held-out/x",) * self.evaluations,
            executions_per_held_out=1, evaluate_at_start=bool(self.evaluations), evaluate_at_end=bool(self.evaluations),
            timeout_s=60.0, overall_timeout_s=400.0, timeout_calls=TimeoutCalls(0.2, 1, 2), config_digest="d",
            groups_per_step=self.groups, capacity=Capacity(self.capacity, self.kv_tokens), num_standalone=self.standalone,
            transition_timeout_s=self.transition_s)

    def made_schedule(self) -> Schedule:
        return schedule_of(self.schedule, self.training)


def setting_of(seed: int) -> Setting:
    """The run of a seed: the schedules in turn, everything else drawn."""
    dice = random.Random(f"setting {seed}")
    name = SCHEDULES[seed % len(SCHEDULES)]
    mu, cells = dice.choice((1, 1, 2)), dice.randint(1, 4)
    drawn = Setting(
        seed=seed, schedule=name, cells=cells, steps=mu * dice.choice((2, 3)) if mu == 1 else dice.choice((3, 4)), mu=mu,
        phi=dice.choice((0, 1)), groups=dice.choice((1, 2, 3)), executions=dice.choice((1, 2, 3)),
        capacity=dice.choice((2, 4, 8)), kv_tokens=dice.choice((0, 0, 60)), evaluations=dice.choice((0, 0, 1)),
        schedulers=dice.choice((2, 2, 3)), window_s=dice.choice((60.0, 3600.0)), fences_first=dice.random() < 0.5,
        transition_s=dice.choice((90.0, 600.0)))
    if name.startswith("async"):
        cells = max(cells, 2)
        return replace(drawn, cells=cells, training=dice.randint(1, cells - 1), phi=dice.choice((0, 1, 1)))
    if name.startswith("colocate+standalone"):
        return replace(drawn, cells=min(cells, 3), standalone=dice.choice((1, 2)))
    if name == "rollpacker":
        return replace(drawn, cells=max(cells, 2))
    return drawn
