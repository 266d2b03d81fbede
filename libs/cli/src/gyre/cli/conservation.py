"""What must add up in every run, whatever died in it: executions, calls, tokens, targets, steps.

Each check is one line: a total, the parts it must be the sum of, and what does not fit. A check of a run that goes on
counts what is still open as a part of its own, so that it holds at every moment.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from gyre.cli.facts import FactLog
from gyre.cli.views import Execution, calls_by_execution, executions, steps
from gyre.contracts import events as e

MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class Check:
    """`total` = the sum of `parts`; `problems` name what does not fit (the first of them)."""

    name: str
    total: int
    parts: dict[str, int]
    problems: tuple[str, ...] = ()
    always_shown: tuple[str, ...] = ()  # parts that are shown also when they are zero

    @property
    def ok(self) -> bool:
        return not self.problems and self.total == sum(self.parts.values())

    @property
    def sum_text(self) -> str:
        """The parts that are not zero, as a sum."""
        shown = [(name, num) for name, num in self.parts.items() if num or name in self.always_shown]
        shown = shown or list(self.parts.items())[:1]
        return " + ".join(f"{num:,} {name}" for name, num in shown)

    @property
    def text(self) -> str:
        """One line for the terminal."""
        what = "" if self.ok else f": {'; '.join(self.problems) or 'the parts do not add up'}"
        return f"{self.total:,} {self.name} = {self.sum_text}{what}"


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets of the training groups that are complete, and where each of them went."""

    num_sampled_tokens: int = 0
    num_targets: int = 0
    num_trained: int = 0
    drops: dict[str, int] = field(default_factory=dict)  # reason -> targets
    num_waiting: int = 0  # admitted, in a group that is in no finished step yet

    @property
    def parts(self) -> dict[str, int]:
        dropped = {f"dropped: {reason}": num for reason, num in sorted(self.drops.items())}
        return {"trained": self.num_trained, **dropped, "waiting": self.num_waiting}


def check_all(log: FactLog) -> tuple[Check, ...]:
    """Every check of a run, in the order of a token's journey."""
    rows = executions(log)
    return (_executions(rows), _verdicts(rows), _calls(log, rows), _read_again(log), _sampled(log, rows), _targets(log),
            _steps(log), _trained_once(log), _groups(log), _messages(log))


def _named(found: Iterable[str]) -> tuple[str, ...]:
    names = sorted(found)
    more = (f"and {len(names) - MAX_NAMED} more",) if len(names) > MAX_NAMED else ()
    return (*names[:MAX_NAMED], *more)


def _executions(rows: dict[str, Execution]) -> Check:
    """dispatched = finished + failed + timed out + dropped + live."""
    dispatched = [x for x in rows.values() if x.dispatched]
    endings = Counter(x.terminated.fact.ending if x.terminated else "live" for x in dispatched)
    order = ("finished", "failed", "timed_out", "dropped", "live")
    parts = {name.replace("_", " "): endings[name] for name in order}
    return Check("executions dispatched", len(dispatched), parts,
                 _named(f"{x.execution} was never dispatched" for x in rows.values() if not x.dispatched))


def _verdicts(rows: dict[str, Execution]) -> Check:
    """Every terminated execution gets one verdict: a score, none within its budget, or no vote at all."""
    verdicts: Counter[str] = Counter()
    problems: list[str] = []
    terminated = [x for x in rows.values() if x.terminated]
    for x in terminated:
        verdicts[_verdict(x)] += 1
        if x.scored and x.unscorable:
            problems.append(f"{x.execution} is scored and unscorable")
    for x in rows.values():
        if (x.scored or x.unscorable) and not x.terminated:
            problems.append(f"{x.execution} has a verdict and has not terminated")
        if x.outcome and x.scored and x.outcome.kind == "scored" and x.outcome.reward != x.scored.reward:
            problems.append(f"{x.execution} was scored {x.scored.reward:g} and counts as {x.outcome.reward:g}")
    order = ("scored", "placeholder", "unscorable", "dropped", "not yet")
    return Check("executions terminated", len(terminated), {name: verdicts[name] for name in order}, _named(problems))


def _verdict(x: Execution) -> str:
    if x.outcome:
        return x.outcome.kind
    if x.terminated and x.terminated.fact.ending == "dropped":
        return "dropped"
    if x.scored:
        return "placeholder" if x.scored.placeholder else "scored"
    return "unscorable" if x.unscorable else "not yet"


def _calls(log: FactLog, rows: dict[str, Execution]) -> Check:
    """Calls answered to harnesses that ended = calls on record, each index once."""
    recorded = calls_by_execution(log)
    made = {name: x.terminated.fact.num_calls for name, x in rows.items() if x.terminated}
    problems = [f"{name}: {num} made, {recorded[name].num_calls if name in recorded else 0} recorded"
                for name, num in made.items() if (recorded[name].num_calls if name in recorded else 0) != num]
    problems += [f"{name}: recorded, but nobody ran it" for name in recorded if name not in rows]
    problems += [f"{name} has two calls of one index" for name in _repeated_indices(log)]
    on_record = sum(count.num_calls for name, count in recorded.items() if name in made)
    return Check("calls made", sum(made.values()), {"recorded": on_record}, _named(problems))


def _read_again(log: FactLog) -> Check:
    """Sampled tokens that a later call read as context: by their own ids, or re-tokenised where the ids diverge inside them."""
    exact = retokenised = 0
    for note in log.calls.values():
        base = log.calls.get(note.base_call or "")
        if base is not None and note.keep_len > base.prompt_len:
            kept = min(note.keep_len - base.prompt_len, base.num_sampled)
            exact += kept
            retokenised += base.num_sampled - kept
    return Check("sampled tokens read again", exact + retokenised, {"by their ids": exact, "re-tokenised": retokenised},
                 always_shown=("re-tokenised",))


def _repeated_indices(log: FactLog) -> set[str]:
    seen: Counter[tuple[str, int]] = Counter((c.execution, c.index) for c in log.calls.values())
    return {execution for (execution, _), num in seen.items() if num > 1}


def _sampled(log: FactLog, rows: dict[str, Execution]) -> Check:
    """Tokens sampled, by the call records, = tokens that reached a tree; apart are those of executions that are refused,
    and of dropped ones: their groups wait for no record of theirs."""
    recorded = calls_by_execution(log)
    parts = {"in trees": 0, "of unscorable executions": 0, "of dropped executions": 0, "of executions not accounted for yet": 0}
    problems: list[str] = []
    for name, count in recorded.items():
        outcome = rows[name].outcome if name in rows else None
        if outcome is None:
            parts["of executions not accounted for yet"] += count.num_sampled
        elif outcome.kind in ("unscorable", "dropped"):
            parts[f"of {outcome.kind} executions"] += count.num_sampled
        else:
            parts["in trees"] += outcome.num_sampled_tokens
            if outcome.num_sampled_tokens != count.num_sampled:
                problems.append(f"{name}: {count.num_sampled} on record, {outcome.num_sampled_tokens} in its tree")
    return Check("tokens sampled", sum(c.num_sampled for c in recorded.values()), parts, _named(problems))


def targets(log: FactLog) -> Targets:
    """Where every target of the completed training groups went. What a step did not use is dropped there: of stale
    groups, and of a step whose gradient was not finite."""
    fate = _fates(log)
    drops: Counter[str] = Counter()
    num_sampled = num_targets = num_trained = num_waiting = 0
    for name, completed in log.all(e.GroupCompleted).items():
        if completed.fact.purpose != "train":
            continue
        for outcome in completed.fact.outcomes:
            num_sampled += outcome.num_sampled_tokens
            num_targets += outcome.num_targets
            drops.update(outcome.drops)
            kind = fate.get(name, "waiting")
            num_trained += outcome.num_trained_targets if kind == "trained" else 0
            num_waiting += outcome.num_trained_targets if kind == "waiting" else 0
            if kind not in ("trained", "waiting") and outcome.num_trained_targets:
                drops[kind] += outcome.num_trained_targets
    return Targets(num_sampled, num_targets, num_trained, dict(drops), num_waiting)


def _fates(log: FactLog) -> dict[str, str]:
    """Group -> what became of its micro-steps, for groups of finished steps."""
    fates: dict[str, str] = {}
    for step in steps(log):
        used = "update skipped" if step.finished.metrics.get("not_finite") else "trained"
        fates |= {group.group: used for group in step.groups}
        fates |= dict.fromkeys(step.stale_groups, "stale")
    return fates


def _targets(log: FactLog) -> Check:
    """targets sampled = trained + dropped, by reason + waiting; per execution, too."""
    found = targets(log)
    problems: list[str] = []
    for completed in log.all(e.GroupCompleted).values():
        for o in completed.fact.outcomes:
            dropped = sum(o.drops.values())
            if o.num_targets != o.num_trained_targets + dropped:
                problems.append(f"{o.execution}: {o.num_targets} targets, {o.num_trained_targets} admitted, "
                                f"{dropped} dropped")
    return Check("targets sampled for training", found.num_targets, found.parts, _named(problems))


def _steps(log: FactLog) -> Check:
    """Targets the trainer says it trained = targets of the micro-steps of the groups that joined."""
    problems: list[str] = []
    said = admitted = 0
    for step in steps(log):
        members = [g for g in step.groups if g.group not in step.stale_groups]
        expected = sum(ref.num_targets for g in members for ref in g.micro_steps)
        trained = step.finished.num_targets
        said, admitted = said + trained, admitted + expected
        if trained != expected:
            problems.append(f"step {step.finished.step}: {trained} trained, {expected} in its micro-steps")
    return Check("targets trained, by the trainer", said, {"admitted into finished steps": admitted}, _named(problems))


def _trained_once(log: FactLog) -> Check:
    """No execution in two steps, no micro-step in two seals."""
    in_steps = Counter(x for s in log.all(e.StepFinished).values() for x in s.fact.executions)
    in_seals = Counter(m for s in log.all(e.StepSealed).values() for m in s.fact.micro_steps)
    problems = [f"{name} counts {num} times" for counts in (in_steps, in_seals) for name, num in counts.items()
                if num > 1]
    return Check("executions in finished steps", sum(in_steps.values()), {"each once": len(in_steps)},
                 _named(problems))


def _groups(log: FactLog) -> Check:
    """training groups dispatched = in a finished step + sealed + complete + open."""
    dispatched = {n for n, d in log.all(e.GroupDispatched).items() if d.fact.purpose == "train"}
    sealed = Counter(g for s in log.all(e.StepSealed).values() for g in s.fact.groups)
    completed = {n for n, c in log.all(e.GroupCompleted).items() if c.fact.purpose == "train"}
    finished = {g for step, s in log.all(e.StepSealed).items() if log.get(e.StepFinished, step)
                for g in s.fact.groups}
    problems = [f"{name} is in {num} steps" for name, num in sealed.items() if num > 1]
    problems += [f"{name} is sealed into a step and not complete" for name in sealed if name not in completed]
    problems += [f"{name} was never dispatched" for name in {*sealed, *completed} - dispatched]
    parts = {"in finished steps": len(dispatched & finished), "sealed": len(dispatched & set(sealed) - finished),
             "complete": len(dispatched & completed - set(sealed)), "open": len(dispatched - completed)}
    return Check("training groups dispatched", len(dispatched), parts, _named(problems))


def _messages(log: FactLog) -> Check:
    """No dead letter, nothing unreadable, nothing said twice with different contents."""
    dead = [f"{name}: {d.fact.reason}" for name, d in log.all(e.DeadLettered).items()]
    problems = [*dead, *(f"{name}: {why}" for name, why in log.unreadable.items()),
                *(f"{name} was said twice with different contents" for name in log.conflicts)]
    num = sum(len(found) for found in log.facts.values()) + len(log.calls)
    return Check("facts read", num, {"understood": num}, _named(problems))
