"""What the facts of a run show: executions, evaluations, steps, cells and waterlevel, each derived by a pure function."""

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gyre.cli.facts import FactLog, Stamped
from gyre.contracts import events as e

CellRole = Literal["rollout", "to train", "train", "to rollout"]
STANDS = ("scored", "placeholder")  # outcomes that vote in a group's statistics


@dataclass(frozen=True, slots=True)
class Execution:
    """One execution with all that is known of it; what has not been said yet is None."""

    execution: str
    group: str
    dispatched: Stamped[e.GroupDispatched] | None = None
    spec: e.ExecutionSpec | None = None
    started: Stamped[e.ExecutionStarted] | None = None
    terminated: Stamped[e.ExecutionTerminated] | None = None
    scored: e.ExecutionScored | None = None
    unscorable: e.ExecutionUnscorable | None = None
    outcome: e.Outcome | None = None

    @property
    def task(self) -> str:
        return self.dispatched.fact.task if self.dispatched else ""

    @property
    def is_live(self) -> bool:
        return self.terminated is None


def executions(log: FactLog) -> dict[str, Execution]:
    """Every execution that any fact names, by id."""
    groups = log.all(e.GroupDispatched)
    specs = {spec.execution: (name, spec) for name, d in groups.items() for spec in d.fact.executions}
    outcomes = {o.execution: (name, o) for name, c in log.all(e.GroupCompleted).items() for o in c.fact.outcomes}
    started, terminated = log.all(e.ExecutionStarted), log.all(e.ExecutionTerminated)
    scored, unscorable = log.all(e.ExecutionScored), log.all(e.ExecutionUnscorable)
    said = {name: s.fact.group for kind in (started, terminated, scored, unscorable) for name, s in kind.items()}
    names = sorted({*specs, *outcomes, *said})
    found: dict[str, Execution] = {}
    for name in names:
        group = specs[name][0] if name in specs else outcomes[name][0] if name in outcomes else said[name]
        found[name] = Execution(
            name, group, groups.get(group) if name in specs else None, specs[name][1] if name in specs else None,
            started.get(name), terminated.get(name), _fact(scored.get(name)), _fact(unscorable.get(name)),
            outcomes[name][1] if name in outcomes else None)
    return found


def _fact(stamped: Stamped | None) -> object:
    return None if stamped is None else stamped.fact


@dataclass(frozen=True, slots=True)
class CallCount:
    """Calls and sampled tokens on record of one execution."""

    num_calls: int = 0
    num_sampled: int = 0


def calls_by_execution(log: FactLog) -> dict[str, CallCount]:
    """What is on record of each execution."""
    counts: Counter[str] = Counter()
    sampled: Counter[str] = Counter()
    for note in log.calls.values():
        counts[note.execution] += 1
        sampled[note.execution] += note.num_sampled
    return {name: CallCount(counts[name], sampled[name]) for name in sorted(counts)}


# ---------------------------------------------------------------- held-out evaluation


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One held-out evaluation. `rewards`: mean over the executions that vote, by task."""

    label: str
    rewards: dict[str, float]
    num_tasks: int
    num_executions: int

    @property
    def is_complete(self) -> bool:
        return 0 < self.num_tasks == len(self.rewards)


def evaluation(log: FactLog, label: str) -> Evaluation:
    """The evaluation `label` (`before`, `after`) as far as it has come; no tasks if there was none."""
    tasks = {name: d.fact for name, d in log.all(e.GroupDispatched).items()
             if d.fact.purpose == "eval" and d.fact.label == label}
    rewards: dict[str, float] = {}
    for name, dispatched in tasks.items():
        completed = log.get(e.GroupCompleted, name)
        votes = votes_of(completed.fact) if completed else []
        if votes:
            rewards[dispatched.task] = sum(votes) / len(votes)
    num = sum(len(d.executions) for d in tasks.values())
    return Evaluation(label, dict(sorted(rewards.items())), len(tasks), num)


def votes_of(group: e.GroupCompleted) -> list[float]:
    """Rewards of the executions that vote: scored, and placeholders with 0."""
    return [o.reward for o in group.outcomes if o.kind in STANDS]


# ---------------------------------------------------------------- steps


@dataclass(frozen=True, slots=True)
class Step:
    """One finished step with its groups. `started_s`: end of the step before, or opening of its burst."""

    finished: e.StepFinished
    started_s: float
    ended_s: float
    groups: tuple[e.GroupCompleted, ...]
    stale_groups: tuple[str, ...]
    is_whole: bool  # its seal, its groups and the ends of their executions have all been read

    @property
    def outcomes(self) -> Iterator[e.Outcome]:
        return (o for group in self.groups for o in group.outcomes)

    @property
    def rewards(self) -> list[float]:
        return [r for group in self.groups for r in votes_of(group)]


def steps(log: FactLog) -> list[Step]:
    """Finished steps in order."""
    found = sorted(log.all(e.StepFinished).values(), key=lambda s: s.fact.step)
    opened = [(b.fact.version, b.time_s) for b in log.all(e.BurstOpened).values()]
    groups = log.all(e.GroupCompleted)
    result: list[Step] = []
    for stamped in found:
        step = stamped.fact.step
        begun = [time for version, time in opened if version <= step and time <= stamped.time_s]
        begun += [before.ended_s for before in result[-1:]]
        sealed = log.get(e.StepSealed, str(step))
        members = sealed.fact.groups if sealed else ()
        result.append(Step(stamped.fact, max(begun, default=stamped.time_s), stamped.time_s,
                           tuple(groups[g].fact for g in members if g in groups),
                           sealed.fact.stale_groups if sealed else (), sealed is not None and _is_whole(log, members)))
    return result


def _is_whole(log: FactLog, members: tuple[str, ...]) -> bool:
    completed = [log.get(e.GroupCompleted, name) for name in members]
    return all(c is not None and all(log.get(e.ExecutionTerminated, o.execution) for o in c.fact.outcomes)
               for c in completed)


# ---------------------------------------------------------------- cells


@dataclass(frozen=True, slots=True)
class Bar:
    """Cell `cell` had `role` from `start_s` to `end_s`; `epoch` is that of the assignment it goes back to."""

    cell: int
    role: CellRole
    start_s: float
    end_s: float
    epoch: int


@dataclass(frozen=True, slots=True)
class Join:
    """A satellite took part in a step that was not finished: in second `time_s`, with `num_live` executions unfinished."""

    step: int
    cell: int
    time_s: float
    num_live: int


def joins(log: FactLog) -> tuple[Join, ...]:
    """Every satellite that came to a running step, in order of time."""
    level = waterlevels(log)
    ends = {s.fact.step: s.time_s for s in log.all(e.StepFinished).values()}
    said = [j for j in log.all(e.CellTrainJoined).values() if j.fact.cell != 0 and j.time_s < ends.get(j.fact.step, -math.inf)]
    return tuple(Join(j.fact.step, j.fact.cell, j.time_s, level_at(level, j.time_s)) for j in said)


def cell_timelines(log: FactLog) -> dict[int, tuple[Bar, ...]]:
    """What every cell was, from the opening of the run to its last fact. Confirmations of an older epoch count for
    nothing; a transition lasts from the assignment to the fact that confirms it."""
    end = log.span_s[1]
    marks: dict[int, list[tuple[int, int, float, CellRole]]] = defaultdict(list)  # (epoch, stage, time, role from then)
    begin = min((o.time_s for o in log.all(e.RunOpened).values()), default=log.span_s[0])
    for opened in log.all(e.RunOpened).values():
        for cell in range(opened.fact.num_cells + opened.fact.num_standalone):
            marks[cell].append((-1, 0, begin, "rollout"))
    for given in log.all(e.CellRoleAssigned).values():
        role: CellRole = "to train" if given.fact.role == "train" else "to rollout"
        marks[given.fact.cell].append((given.fact.epoch, 0, given.time_s, role))
    confirmed = _confirmations(log)
    for (cell, epoch), (time, role) in confirmed.items():
        marks[cell].append((epoch, 1, time, role))
    return {cell: _bars(cell, sorted(marks[cell]), end) for cell in sorted(marks)}


def _confirmations(log: FactLog) -> dict[tuple[int, int], tuple[float, CellRole]]:
    """(cell, epoch) -> when the role of that epoch was first confirmed, for epochs that were assigned."""
    assigned = {(a.fact.cell, a.fact.epoch): a.fact.role for a in log.all(e.CellRoleAssigned).values()}
    said: list[tuple[int, int, float, CellRole]] = []
    said += [(s.fact.cell, s.fact.epoch, s.time_s, "train") for s in log.all(e.CellTrainJoined).values()]
    said += [(s.fact.cell, s.fact.epoch, s.time_s, "rollout") for s in log.all(e.CellRolloutReady).values()]
    found: dict[tuple[int, int], tuple[float, CellRole]] = {}
    for cell, epoch, time, role in said:
        if assigned.get((cell, epoch)) == role:
            found[cell, epoch] = min(found.get((cell, epoch), (time, role)), (time, role))
    return found


def _bars(cell: int, marks: list[tuple[int, int, float, CellRole]], end: float) -> tuple[Bar, ...]:
    bars: list[Bar] = []
    at = marks[0][2]
    for number, (epoch, _, time, role) in enumerate(marks):
        start = max(at, time)  # clocks of different processes may disagree; a bar never runs backwards
        after = max(start, marks[number + 1][2] if number + 1 < len(marks) else end)
        if bars and bars[-1].role == role:
            bars[-1] = Bar(cell, role, bars[-1].start_s, after, bars[-1].epoch)
        elif after > start:
            bars.append(Bar(cell, role, start, after, max(epoch, 0)))
        at = start
    return tuple(bars)


def roles_at(timelines: dict[int, tuple[Bar, ...]], time_s: float) -> dict[int, CellRole]:
    """Role of every cell at one moment."""
    return {cell: next((b.role for b in reversed(bars) if b.start_s <= time_s), "rollout")
            for cell, bars in timelines.items()}


# ---------------------------------------------------------------- waterlevel


def waterlevels(log: FactLog) -> list[tuple[float, int]]:
    """(time in s, executions dispatched and not terminated) after every change, in order of time."""
    changes: Counter[float] = Counter()
    specs: dict[str, float] = {}
    for dispatched in log.all(e.GroupDispatched).values():
        for spec in dispatched.fact.executions:
            specs[spec.execution] = dispatched.time_s
            changes[dispatched.time_s] += 1
    for name, terminated in log.all(e.ExecutionTerminated).items():
        if name in specs:
            changes[max(terminated.time_s, specs[name])] -= 1
    level, curve = 0, []
    for time in sorted(changes):
        level += changes[time]
        curve.append((time, level))
    return curve


def level_at(curve: list[tuple[float, int]], time_s: float) -> int:
    """Waterlevel at one moment."""
    place = bisect_right(curve, time_s, key=lambda point: point[0])
    return curve[place - 1][1] if place else 0


def num_live(log: FactLog) -> int:
    """Executions that are dispatched and not terminated."""
    ended = log.facts.get(e.ExecutionTerminated, {})
    return sum(spec.execution not in ended for d in log.facts.get(e.GroupDispatched, {}).values()
               for spec in d.fact.executions)
