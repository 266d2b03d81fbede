"""Stories: one history as text, a line per event, which is replayed and has to come out as told.

    # what it is about
    run schedule=elastic cells=2 steps=2 seed=7
    after step.finished step=0 kill trainer-0 for 5
    expect step.finished step=0 attempt=0
    expect step.finished step=0 attempt=1
    never execution.unscorable
    closes completed

`run` gives what differs from the defaults of `Setting`. `expect` lines are facts that are stored in this order, others
between them; `never` ones are not stored. A story that a failing seed has written also tells its history, as comments.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from gyre.contracts.events import Fact
from gyre.contracts.subjects import BY_RECORD, row_of
from sim.faults import Fault, Pattern, parse_fault
from sim.setting import Setting
from sim.simulation import Outcome


@dataclass(slots=True)
class Story:
    """One story file."""

    setting: Setting = field(default_factory=Setting)
    faults: list[Fault] = field(default_factory=list)
    expected: list[Pattern] = field(default_factory=list)
    never: list[Pattern] = field(default_factory=list)
    closes: str = "completed"


def read_story(text: str) -> Story:
    """Raises ValueError naming the line that is wrong."""
    story = Story()
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        verb, _, rest = line.partition(" ")
        match verb:
            case "":
                continue
            case "run":
                story.setting = _setting(rest)
            case "expect":
                story.expected.append(_pattern(rest))
            case "never":
                story.never.append(_pattern(rest))
            case "closes":
                story.closes = rest
            case "at" | "after":
                story.faults.append(parse_fault(line))
            case _:
                raise ValueError(f"{line!r}: a line begins with run, at, after, expect, never, closes or #")
    return story


def _pattern(text: str) -> Pattern:
    type_, *pairs = text.split()
    return Pattern(type_, tuple((k, v) for k, _, v in (pair.partition("=") for pair in pairs)))


def _setting(text: str) -> Setting:
    kinds = {f.name: type(f.default) for f in dataclasses.fields(Setting)}
    given: dict[str, object] = {}
    for pair in text.split():
        key, _, value = pair.partition("=")
        if key not in kinds:
            raise ValueError(f"run {key}: unknown; one of {', '.join(kinds)}")
        given[key] = value == "True" if kinds[key] is bool else kinds[key](value)
    return Setting(**given)


def differences(story: Story, outcome: Outcome) -> list[str]:
    """What came out otherwise than told."""
    said = [detail for _, _, what, detail in outcome.history if what == "said"]
    wrong = [outcome.failure] if outcome.failure else []
    at = 0
    for pattern in story.expected:
        found = next((i for i in range(at, len(said)) if pattern.matches(said[i])), None)
        if found is None:
            wrong.append(f"expected {pattern} did not come (after what was told before it)")
            break
        at = found + 1
    wrong += [f"{p} came: {f}" for p in story.never for f in said if p.matches(f)]
    closed = [f.reason for f in said if row_of(f).type == "run.closed"]
    if closed[-1:] != [story.closes]:
        wrong.append(f"closed as {closed}, told was {story.closes!r}")
    return wrong


def write_story(outcome: Outcome) -> str:
    """The story of a seed: its setting, its faults, and its history as comments."""
    default, setting = Setting(), outcome.setting
    given = " ".join(f"{f.name}={getattr(setting, f.name)}" for f in dataclasses.fields(Setting)
                     if getattr(setting, f.name) != getattr(default, f.name))
    lines = [f"# seed {setting.seed}: {outcome.failure or 'nothing broke'}", f"run {given}", *map(str, outcome.faults), ""]
    for at, who, what, detail in outcome.history:
        lines.append(f"# {at:9.3f} {who:12s} {what} {brief(detail) if what == 'said' else detail}")
    return "\n".join(lines) + "\n"


def brief(fact: Fact) -> str:
    """A fact in one short line: its type and its small fields."""
    small = ((f.name, getattr(fact, f.name)) for f in dataclasses.fields(fact))
    shown = " ".join(f"{name}={value}" for name, value in small if isinstance(value, str | int | float) and value != "")
    return f"{BY_RECORD[type(fact)].type} {shown}"
