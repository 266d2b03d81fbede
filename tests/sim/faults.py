"""What goes wrong, and when: a list that one number draws, or that a story tells. Each fault ends by itself.

    at 12.5 kill rollout for 3            kill -9, started again after 3 s
    at 12.5 lose trainer-0 for 3          killed, and its SQLite file is lost
    at 12.5 pause scheduler-0 for 9       SIGSTOP, SIGCONT after 9 s
    at 20 cut scheduler-0 nats for 8      neither reaches the other
    at 20 mute scheduler-0 for 8          it hears, and what it says to NATS arrives later
    at 20 down nats for 300               nobody reaches it
    at 20 lossy 0.2 for 60                a fifth of all messages is lost
    at 30 jump trainer-0 -40              its wall clock is set back
    at 20 refuse engine-1 for 60          it answers, and neither wakes nor sleeps nor takes weights
    at 0 crash rollout point 17           it dies at the 17th place where it may
    at 30 again group.completed           the newest such fact is stored once more: a late retry, its id long forgotten
    at 30 again cell.role.assigned 3      the third newest is
    after step.finished step=0 kill trainer-0 for 5
    after cell.role.assigned cell=0 2 pause leader for 9      after the second such fact, whichever scheduler leads then
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from gyre.contracts.events import Fact
from gyre.contracts.subjects import BY_TYPE, row_of
from sim.bus import NATS, Bus, Message
from sim.kernel import World


@dataclass(frozen=True, slots=True)
class Pattern:
    """Facts of a type whose named fields have these values."""

    type: str
    fields: tuple[tuple[str, str], ...] = ()

    def matches(self, fact: Fact) -> bool:
        return row_of(fact).type == self.type and all(str(getattr(fact, k)) == v for k, v in self.fields)

    def __str__(self) -> str:
        return " ".join([self.type, *(f"{k}={v}" for k, v in self.fields)])


@dataclass(frozen=True, slots=True)
class Fault:
    """`when`: a second, or the `nth` fact that matches. `what`: the verb and its arguments. `for_s`: how long it lasts."""

    when: float | Pattern
    what: tuple[str, ...]
    for_s: float = 0.0
    nth: int = 1

    def __str__(self) -> str:
        if isinstance(self.when, Pattern):
            when = f"after {self.when}{f' {self.nth}' if self.nth > 1 else ''}"
        else:
            when = f"at {self.when:g}"
        return f"{when} {' '.join(self.what)}" + (f" for {self.for_s:g}" if self.for_s else "")


def parse_fault(line: str) -> Fault:
    """The inverse of `str`. Raises ValueError naming the line."""
    words = line.split()
    for_s = 0.0
    if len(words) > 2 and words[-2] == "for":
        for_s, words = float(words[-1]), words[:-2]
    if len(words) < 3 or words[0] not in ("at", "after"):
        raise ValueError(f"{line!r}: a fault begins with `at <second>` or `after <fact>`")
    if words[0] == "at":
        return Fault(float(words[1]), tuple(words[2:]), for_s)
    at = 2
    while at < len(words) and "=" in words[at]:
        at += 1
    fields = tuple((k, v) for k, _, v in (word.partition("=") for word in words[2:at]))
    nth = 1
    if at < len(words) and words[at].isdigit():
        nth, at = int(words[at]), at + 1
    return Fault(Pattern(words[1], fields), tuple(words[at:]), for_s, nth)


class Faults:
    """Makes the faults of a list happen; those that wait for a fact may never."""

    def __init__(self, world: World, bus: Bus, faults: tuple[Fault, ...], stop: Callable[[str], None],
                 lose_disk: Callable[[str], None]) -> None:
        self._world, self._bus, self._stop, self._lose_disk = world, bus, stop, lose_disk
        self._waiting = [[fault, fault.nth] for fault in faults if isinstance(fault.when, Pattern)]
        self.num_open = 0  # begun or sure to begin, and not over
        for fault in faults:
            if not isinstance(fault.when, Pattern):
                self.num_open += 1
                world.after(fault.when, lambda f=fault: self._happen(f))
        bus.stored.append(self._heard)

    @property
    def are_over(self) -> bool:
        return self.num_open == 0

    def _heard(self, message: Message) -> None:
        for entry in list(self._waiting):
            if entry[0].when.matches(message.fact):
                entry[1] -= 1
                if entry[1] == 0:
                    self._waiting.remove(entry)
                    self.num_open += 1
                    self._world.after(0.0, lambda f=entry[0]: self._happen(f))

    def _happen(self, fault: Fault) -> None:
        world = self._world
        world.note("fault", str(fault))
        verb, *arguments = (self._bus.leader() or "scheduler-0" if word == "leader" else word for word in fault.what)
        undo = getattr(self, f"_{verb}")(fault, *arguments)

        def over() -> None:
            self.num_open -= 1
            if undo is not None:
                undo()
            world.note("fault", "over", str(fault))

        world.after(fault.for_s, over)

    def _kill(self, fault: Fault, name: str) -> None:
        self._world.kill(self._world.processes[name], max(fault.for_s, 0.1))

    def _lose(self, fault: Fault, name: str) -> None:
        self._kill(fault, name)
        self._lose_disk(name)

    def _pause(self, fault: Fault, name: str) -> None:
        self._world.pause(self._world.processes[name], fault.for_s)

    def _jump(self, fault: Fault, name: str, seconds: str) -> None:
        self._world.processes[name].skew_s = float(seconds)

    def _crash(self, fault: Fault, name: str, word: str, number: str) -> None:
        self._world.processes[name].crash_at.add(int(number))

    def _again(self, fault: Fault, type_: str, nth: str = "1") -> None:
        stored = [m for m in self._bus.messages(BY_TYPE[type_].stream) if row_of(m.fact).type == type_]
        if len(stored) >= int(nth):
            self._bus.store_again(stored[-int(nth)])

    def _cut(self, fault: Fault, one: str, other: str) -> Callable[[], None]:
        pair = frozenset((one, other))
        self._world.cuts.add(pair)

        def mend() -> None:
            self._world.cuts.discard(pair)
            self._bus.wires_changed()

        return mend

    def _mute(self, fault: Fault, name: str) -> Callable[[], None]:
        self._world.mute.add(name)
        return lambda: self._world.mute.discard(name)

    def _refuse(self, fault: Fault, name: str) -> Callable[[], None]:
        self._world.refusing.add(name)
        return lambda: self._world.refusing.discard(name)

    def _down(self, fault: Fault, name: str) -> Callable[[], None]:
        self._world.down.add(name)

        def mend() -> None:
            self._world.down.discard(name)
            self._bus.wires_changed()

        return mend

    def _lossy(self, fault: Fault, share: str) -> Callable[[], None]:
        self._world.lossy = float(share)

        def mend() -> None:
            self._world.lossy = 0.0
            self._bus.wires_changed()

        return mend

    def _ask_to_stop(self, fault: Fault) -> None:
        self._stop("asked")


# Facts that a late retry may store twice; what is conditional on an empty subject or on the lease cannot be.
REPEATED = ("group.completed", "execution.terminated", "execution.scored", "call.recorded", "cell.rollout.released",
            "cell.rollout.ready", "cell.train.joined", "cell.train.released", "weights.published", "step.finished",
            "group.dispatched", "cell.role.assigned", "burst.opened")


# Facts after which something is about to happen elsewhere, and whom it concerns.
CONCERNED: dict[str, tuple[str, ...]] = {
    "burst.opened": ("leader", "trainer-0"), "group.dispatched": ("leader", "rollout"),
    "cell.role.assigned": ("leader", "rollout", "engine-0", "trainer-0"), "execution.terminated": ("rollout", "reward-0"),
    "evaluation.requested": ("reward-0", "reward-1"), "execution.scored": ("trajectory", "reward-0"),
    "group.completed": ("trajectory", "trainer-0"), "cell.rollout.released": ("trainer-0", "engine-0"),
    "cell.train.joined": ("trainer-0", "leader"), "step.sealed": ("trainer-0",), "step.finished": ("trainer-0", "leader"),
    "weights.published": ("trainer-0", "rollout", "engine-0", "leader"), "cell.train.released": ("rollout", "engine-0"),
    "cell.rollout.ready": ("leader", "rollout"), "burst.closed": ("leader",), "backlog.reported": ("trainer-0",),
}


def draw(seed: int, names: list[str], span_s: float) -> tuple[Fault, ...]:
    """Faults of a seed, over the first `span_s` seconds: some seeds have none, most have several of several kinds."""
    dice = random.Random(f"faults {seed}")
    faults = [_at_some_time(dice, names, span_s) for _ in range(dice.choice((0, 2, 4, 8)))]
    faults += [_after_some_fact(dice, names) for _ in range(dice.choice((0, 0, 2, 4)))]
    for _ in range(dice.choice((0, 0, 2, 4))):
        at = round(dice.uniform(0.1 * span_s, 1.3 * span_s), 2)
        faults.append(Fault(at, ("again", dice.choice(REPEATED), str(dice.choice((1, 1, 2, 3))))))
    for name in names * 2:
        if dice.random() < 0.3:
            faults.append(Fault(0.0, ("crash", name, "point", str(int(3 ** dice.uniform(0.0, 5.5))))))
    if dice.random() < 0.3:
        faults.append(Fault(round(dice.uniform(0.0, span_s), 2), ("lossy", "0.15"), round(dice.uniform(5.0, 40.0), 2)))
    if dice.random() < 0.15:
        faults.append(Fault(round(dice.uniform(0.0, span_s), 2), ("down", NATS), dice.choice((8.0, 30.0, 300.0))))
    if dice.random() < 0.2:
        name = dice.choice([n for n in names if n.startswith("trainer")])
        faults.append(Fault(round(dice.uniform(0.0, 1.3 * span_s), 2), ("lose", name), 2.0))
    for verb, prefixes in (("refuse", ("engine",)), ("kill", ("engine", "trainer"))):  # for minutes
        if dice.random() < 0.15:
            name = dice.choice([n for n in names if n.startswith(prefixes)])
            faults.append(Fault(round(dice.uniform(0.0, span_s), 2), (verb, name), dice.choice((30.0, 120.0, 700.0))))
    return tuple(faults)


def _at_some_time(dice: random.Random, names: list[str], span_s: float) -> Fault:
    return _trouble(dice, names, dice.choice([*names, "leader"]), round(dice.uniform(0.0, span_s), 2))


def _after_some_fact(dice: random.Random, names: list[str]) -> Fault:
    """Trouble for who said it or has to act on it, or for anybody."""
    type_ = dice.choice(tuple(CONCERNED))
    name = dice.choice((*CONCERNED[type_], dice.choice(names)))
    return replace(_trouble(dice, names, name, Pattern(type_)), nth=dice.choice((1, 2, 3, 5)))


def _trouble(dice: random.Random, names: list[str], name: str, when: float | Pattern) -> Fault:
    match dice.choice(("kill", "kill", "pause", "cut", "mute", "jump")):
        case "mute":
            return Fault(when, ("mute", dice.choice((name, "leader"))), round(dice.uniform(2.0, 14.0), 2))
        case "kill":
            return Fault(when, ("kill", name), round(dice.uniform(0.2, 8.0), 2))
        case "pause":
            return Fault(when, ("pause", name), round(dice.uniform(0.5, 14.0), 2))
        case "cut":
            other = NATS if dice.random() < 0.7 else dice.choice([n for n in names if n != name])
            return Fault(when, ("cut", name, other), round(dice.uniform(1.0, 20.0), 2))
        case _:
            return Fault(when, ("jump", name, str(dice.choice((-30, -5, 5, 30)))))
