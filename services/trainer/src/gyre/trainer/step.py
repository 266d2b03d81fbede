"""Which groups train in which step. Pure; part of the core's durable state.

Complete groups wait, and join the open step oldest dispatch version first; the B-th seals it. The open step is the one
being trained, so the version it trains at is known and the staleness limit holds where a group joins: a group that is
too old counts towards B and votes nowhere (`stale`). Every group counts towards B, also with nothing to train.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gyre.contracts.events import GroupCompleted, MicroStepRef, StepSealed


@dataclass(frozen=True, slots=True)
class Group:
    """What training needs of one completed group; `order` is its place of arrival."""

    group: str
    version: int
    order: int
    num_scored: int
    executions: tuple[str, ...]
    micro_steps: tuple[MicroStepRef, ...]

    @classmethod
    def of(cls, fact: GroupCompleted, order: int) -> Group:
        scored = tuple(o.execution for o in fact.outcomes if o.kind == "scored")
        return cls(fact.group, fact.version, order, fact.num_scored, scored, fact.micro_steps)


@dataclass(slots=True)
class Plan:
    """Membership of one step; final once `sealed`."""

    step: int
    groups: list[Group] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    sealed: bool = False

    @property
    def num_members(self) -> int:
        return len(self.groups) + len(self.stale)

    @property
    def num_scored(self) -> int:
        """M: executions that count in the step."""
        return sum(g.num_scored for g in self.groups)

    @property
    def num_targets(self) -> int:
        """Targets of the step's micro-steps, as they were sealed."""
        return sum(ref.num_targets for ref in self.micro_steps)

    @property
    def micro_steps(self) -> tuple[MicroStepRef, ...]:
        return tuple(ref for group in self.groups for ref in group.micro_steps)

    @property
    def executions(self) -> tuple[str, ...]:
        """Executions that count in M, in membership order."""
        return tuple(e for group in self.groups for e in group.executions)

    def fact(self) -> StepSealed:
        members = tuple(g.group for g in self.groups) + tuple(self.stale)
        names = tuple(ref.micro_step for ref in self.micro_steps)
        return StepSealed(self.step, members, names, self.num_scored, tuple(self.stale))


@dataclass(frozen=True, slots=True)
class MembershipRules:
    """groups_per_step: B. staleness_limit: largest allowed (version trained at - version dispatched at)."""

    groups_per_step: int
    staleness_limit: int


@dataclass(slots=True)
class Membership:
    """Plans of all steps that a restart may have to train again, and the groups that wait for the next one."""

    plans: dict[int, Plan] = field(default_factory=lambda: {0: Plan(0)})
    waiting: list[Group] = field(default_factory=list)
    known: set[str] = field(default_factory=set)

    @property
    def open_step(self) -> int:
        """The newest plan: the one groups join."""
        return max(self.plans)

    def add(self, fact: GroupCompleted) -> bool:
        """A group is complete; returns False if it is known or not for training."""
        if fact.purpose != "train" or fact.group in self.known:
            return False
        self.waiting.append(Group.of(fact, len(self.known)))
        self.known.add(fact.group)
        return True

    def fill(self, rules: MembershipRules) -> Plan | None:
        """Let waiting groups join the open step; returns its plan if this sealed it."""
        plan = self.plans[self.open_step]
        if plan.sealed:
            return None
        self.waiting.sort(key=lambda g: (g.version, g.order))
        while self.waiting and plan.num_members < rules.groups_per_step:
            group = self.waiting.pop(0)
            if plan.step - group.version > rules.staleness_limit:
                plan.stale.append(group.group)
            else:
                plan.groups.append(group)
        plan.sealed = plan.num_members == rules.groups_per_step
        return plan if plan.sealed else None

    def open_next(self, step: int) -> None:
        """Make `step` joinable, if it is not planned yet: the one before it has been trained."""
        if step not in self.plans:
            assert step == self.open_step + 1 and self.plans[self.open_step].sealed
            self.plans[step] = Plan(step)

    def forget_before(self, step: int) -> None:
        """No checkpoint that could be resumed from is older than `step`."""
        for old in [s for s in self.plans if s < min(step, self.open_step)]:
            del self.plans[old]
