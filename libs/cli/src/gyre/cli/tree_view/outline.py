"""A tree as an outline of few lines, whatever its size.

Every branch that has branches of its own is a section: its trunk in one column, what hangs off it as single lines, and
a pointer where that is a section too; so nothing is ever indented twice. Trees of too many lines are folded: alike side
branches become one line, stretches of the trunk one line, small sections a side line; each level folds more than the
one before, and the first that fits is shown.
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from gyre.cli.tree_view.anatomy import Anatomy, Branch, Run

Kind = Literal["trunk", "side", "fold", "section"]
ENDLESS = 1 << 30


@dataclass(frozen=True, slots=True)
class Row:
    """One line: a part of the trunk, one side branch, several alike ones, or a branch that is a section of its own.

    start, stop: depth in tokens (of several: least start, greatest stop); `calls` end there; `fates`: sampled tokens by
    what became of them; `drawn`: how often its most frequent output was drawn; `leaf`: last segment, -1 unless the line
    is one whole branch or the end of a trunk; `segments`: whose text it is; `lengths`: shortest and longest side branch.
    """

    kind: Kind
    start: int
    stop: int
    calls: tuple[int, ...]
    fates: dict[str, int]
    versions: tuple[int, ...]
    drawn: int
    label: str
    segments: tuple[int, ...]
    leaf: int = -1
    num: int = 1
    lengths: tuple[int, int] = (0, 0)
    name: str = ""  # of the section it points to

    @property
    def num_sampled(self) -> int:
        return sum(self.fates.values())


@dataclass(frozen=True, slots=True)
class Section:
    """A branch with what hangs off it. The last section has no trunk: roots that nothing hangs off."""

    name: str
    branch: Branch | None
    rows: tuple[Row, ...]

    @property
    def calls(self) -> list[int]:
        """Calls that end on its trunk or on its lines, not those of sections that hang off it."""
        return sorted(n for row in self.rows if row.kind != "section" for n in row.calls)


@dataclass(frozen=True, slots=True)
class Fold:
    """How much is folded: side branches of up to `max_calls` calls where `min_alike` are alike; trunks over up to
    `max_forks` forks; a branch is a section from `min_sides` branches below it on."""

    min_alike: int
    max_calls: int
    max_forks: int
    min_sides: int


FOLDS = (Fold(ENDLESS, 0, 1, 1), Fold(3, 2, 1, 1), Fold(2, 4, 2, 2), Fold(2, 8, 4, 3), Fold(2, 8, 8, 4), Fold(2, 16, 16, 6),
         Fold(2, 24, 32, 8), Fold(2, 32, 64, 12), Fold(2, 64, 64, 20), Fold(2, 128, ENDLESS, 40),
         Fold(2, ENDLESS, ENDLESS, 100), Fold(2, ENDLESS, ENDLESS, ENDLESS))


def outline(tree: Anatomy, max_lines: int = 0) -> tuple[Section, ...]:
    """The sections in order of their first call, folded until they have at most `max_lines` lines (0: not at all)."""
    sections: tuple[Section, ...] = ()
    for fold in FOLDS:
        sections = _Outliner(tree, fold).sections()
        if not max_lines or num_lines(sections) <= max_lines:
            break
    return sections


def num_lines(sections: Sequence[Section]) -> int:
    """Lines that the sections take when each has a heading and an empty line before it."""
    return sum(2 + len(section.rows) for section in sections)


@dataclass(frozen=True, slots=True)
class _Outliner:
    tree: Anatomy
    fold: Fold

    def sections(self) -> tuple[Section, ...]:
        tree = self.tree
        tops = [b for b in tree.branches if self._is_section(b)]
        names = {b.number: letters(i) for i, b in enumerate(sorted(tops, key=lambda b: (b.first_call, b.number)))}
        found = [Section(name, tree.branches[n], tuple(self._rows(tree.branches[n], names))) for n, name in names.items()]
        alone = [b for b in tree.roots if b.number not in names]
        rows = tuple(self._sides(sorted(alone, key=lambda b: b.first_call), names))
        return (*found, *([Section("", None, rows)] if rows else []))

    def _is_section(self, branch: Branch) -> bool:
        """Whether it is long enough; what a folded branch has below it is folded with it."""
        while branch.num_below >= self.fold.min_sides:
            if branch.fork < 0:
                return True
            branch = self.tree.branches[branch.parent]
        return False

    def _rows(self, branch: Branch, names: dict[int, str]) -> Iterator[Row]:
        tree = self.tree
        at: dict[int, list[Branch]] = {}
        for side in branch.sides:
            at.setdefault(tree.branches[side].fork, []).append(tree.branches[side])
        stretch: list[int] = []
        for segment, following in zip(branch.segments, (*branch.segments[1:], -1), strict=True):
            stretch.append(segment)
            is_last = following < 0
            points = any(side.number in names for side in at.get(segment, ()))
            if is_last or points or len(stretch) >= self.fold.max_forks or self._changes(segment, following):
                yield self._row("trunk", stretch, leaf=segment if is_last else -1)
                yield from self._sides([side for s in stretch for side in at.get(s, ())], names)
                stretch = []

    def _changes(self, segment: int, following: int) -> bool:
        """Whether the trunk is another agent's, or another path's, from here on."""
        one, other = (self._character(s) for s in (segment, following))
        return bool(one and other and one != other)

    def _character(self, segment: int) -> set[tuple[str, str]]:
        calls = self.tree.view.calls
        return {(calls[r.call].agent, r.fate) for r in self.tree.runs_of(segment) if r.call >= 0}

    def _sides(self, sides: Sequence[Branch], names: dict[int, str]) -> Iterator[Row]:
        alike: dict[object, list[Row]] = {}
        for side in sides:
            row = self._side(side, names)
            is_alone = row.kind == "section" or len(row.calls) > self.fold.max_calls
            key = side.number if is_alone else self._likeness(row, side)
            alike.setdefault(key, []).append(row)
        for rows in alike.values():
            if len(rows) >= self.fold.min_alike:
                yield _folded(rows)
            else:
                yield from rows

    def _side(self, branch: Branch, names: dict[int, str]) -> Row:
        number = branch.number
        below = [self.tree.branches[n] for n in _descent(self.tree, number, names)]
        segments = [s for b in below for s in b.segments]
        if number in names:
            return self._row("section", segments, name=names[number], label=label_of(self.tree, branch), num=len(below))
        leaf = branch.segments[-1] if len(below) == 1 else -1
        return self._row("side", segments, leaf=leaf, label=label_of(self.tree, branch), num=len(below))

    def _likeness(self, row: Row, branch: Branch) -> object:
        calls = self.tree.view.calls
        roles = sorted({calls[n].role_class for n in row.calls})
        kinds = sorted("path" if fate.startswith("path ") else fate for fate in row.fates)
        if self.fold.max_forks >= 16:  # of a long stretch only what they are counts
            kinds = ["path"] if "path" in kinds else kinds[:1]
        return row.label, tuple(roles), tuple(kinds)

    def _row(self, kind: Kind, segments: Sequence[int], *, leaf: int = -1, label: str = "", num: int = 1,
             name: str = "") -> Row:
        tree = self.tree
        inside = set(segments)
        owners = {tree.branch_of[s] for s in segments}
        calls = sorted(n for b in owners for n in tree.branches[b].calls if tree.view.calls[n].segment in inside)
        runs = [run for s in segments for run in tree.runs_of(s) if run.call >= 0]
        start = int(min(tree.view.depth[s] for s in segments))
        stop = max(tree.end(s) for s in segments)
        return Row(kind, start, stop, tuple(calls), _fates(runs), _versions(tree, runs), _drawn(tree, calls), label,
                   tuple(segments), leaf, num, (stop - start, stop - start), name)


def letters(number: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    text = ""
    number += 1
    while number:
        number, digit = divmod(number - 1, 26)
        text = chr(65 + digit) + text
    return text


def label_of(tree: Anatomy, branch: Branch) -> str:
    """Why there is a branch: what its first call did at the fork."""
    view = tree.view
    if branch.first_call >= len(view.calls):
        return ""
    call = view.calls[branch.first_call]
    if branch.fork < 0:
        return "role unknown" if call.known_by == "unknown" else ""
    begin = int(view.depth[branch.segments[0]])
    if begin < call.prompt_len:
        return "role unknown" if call.known_by == "unknown" else "other prompt"
    trunk = tree.branches[branch.parent].segments
    goes_on = trunk[trunk.index(branch.fork) + 1]
    return "retry" if tree.sampler[view.bounds[goes_on]] >= 0 else "not kept"


def _descent(tree: Anatomy, number: int, names: Container[int]) -> Iterator[int]:
    """A branch and all that hang off it, off those, and so on, but not those that are other sections."""
    stack = [number]
    while stack:
        number = stack.pop()
        yield number
        stack.extend(side for side in reversed(tree.branches[number].sides) if side not in names)


def _folded(rows: Sequence[Row]) -> Row:
    fates: Counter[str] = Counter()
    for row in rows:
        fates.update(row.fates)
    return Row("fold", min(r.start for r in rows), max(r.stop for r in rows), tuple(sorted(n for r in rows for n in r.calls)),
               dict(fates), tuple(sorted({v for r in rows for v in r.versions})), max(r.drawn for r in rows), rows[0].label,
               rows[0].segments, -1, sum(r.num for r in rows),
               (min(r.lengths[0] for r in rows), max(r.lengths[1] for r in rows)))


def _fates(runs: Iterable[Run]) -> dict[str, int]:
    fates: Counter[str] = Counter()
    for run in runs:
        fates[run.fate] += run.num
    return dict(fates)


def _versions(tree: Anatomy, runs: Iterable[Run]) -> tuple[int, ...]:
    found: set[int] = set()
    for run in runs:
        piece = tree.version[run.start:run.stop]
        found |= {int(piece[0])} if (piece == piece[0]).all() else set(piece.tolist())
    return tuple(sorted(found))


def _drawn(tree: Anatomy, calls: Sequence[int]) -> int:
    """How often the output that was drawn most often was drawn."""
    keyed = sorted((c.segment, c.length, c.prompt_len) for c in (tree.view.calls[n] for n in calls) if c.length > c.prompt_len)
    return max((len(list(same)) for _, same in groupby(keyed)), default=1)
