"""Where the time of every cell went."""

from collections import defaultdict
from dataclasses import dataclass, field

from gyre.contracts.simulation import CellStretch, CellUse


@dataclass(slots=True)
class Lanes:
    """What each cell does from when on; a change to the same is none."""

    _changes: dict[int, list[tuple[float, CellUse]]] = field(default_factory=lambda: defaultdict(list))
    _full: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])  # from when on so many cells had been enough

    def use(self, cell: int, at: float, use: CellUse) -> None:
        changes = self._changes[cell]
        if changes and changes[-1][0] == at:
            changes.pop()
        if not changes or changes[-1][1] != use:
            changes.append((at, use))

    def needed(self, at: float, num_cells: int) -> None:
        """So many rollout cells hold what runs from `at` on."""
        if not self._full or self._full[-1][1] != num_cells:
            self._full.append((at, num_cells))

    def seconds(self, end: float, busy_s: float) -> dict[CellUse, float]:
        """Cell-seconds by use until `end`; of rollout `busy_s` were filled, the rest is the tail."""
        total: dict[CellUse, float] = dict.fromkeys(("roll", "tail", "train", "data", "end", "update", "move", "lost"), 0.0)
        for stretch in self._stretches(end):
            total[stretch.use] += stretch.end_s - stretch.start_s
        total["roll"], total["tail"] = busy_s, total["roll"] - busy_s
        return total

    def _stretches(self, end: float) -> list[CellStretch]:
        found: list[CellStretch] = []
        for cell, changes in sorted(self._changes.items()):
            ends = [at for at, _ in changes[1:]] + [end]
            found += [CellStretch(cell, use, start, min(stop, end))
                      for (start, use), stop in zip(changes, ends, strict=True) if min(stop, end) > start]
        return found

    def stretches(self, end: float) -> tuple[CellStretch, ...]:
        """For the eye: what runs is thought to be on the last rollout cells, and those before them to be the tail."""
        lanes = self._stretches(end)
        rolling = [s for s in lanes if s.use == "roll"]
        found = [s for s in lanes if s.use != "roll"]
        edges = [*self._full, (end, 0)]
        places = _Places(rolling)
        for (start, num), (stop, _) in zip(edges, edges[1:], strict=False):
            found += places.between(start, stop, num)
        return tuple(sorted(_merged(found), key=lambda s: (s.cell, s.start_s)))


@dataclass(slots=True)
class _Places:
    """Rollout stretches, asked for consecutive windows."""

    rolling: list[CellStretch]

    def between(self, start: float, stop: float, num: int) -> list[CellStretch]:
        """The window's rollout in each cell, the last `num` of those that serve throughout as full."""
        if stop <= start:
            return []
        inside = [s for s in self.rolling if s.start_s < stop and s.end_s > start]
        edges = sorted({start, stop, *(t for s in inside for t in (s.start_s, s.end_s) if start < t < stop)})
        found: list[CellStretch] = []
        for low, high in zip(edges, edges[1:], strict=False):
            cells = sorted(s.cell for s in inside if s.start_s <= low and s.end_s >= high)
            found += [CellStretch(c, "roll" if c in cells[-num:] and num else "tail", low, high) for c in cells]
        self.rolling = [s for s in self.rolling if s.end_s > stop]
        return found


def _merged(stretches: list[CellStretch]) -> list[CellStretch]:
    """Neighbours of one cell that do the same become one."""
    found: list[CellStretch] = []
    for s in sorted(stretches, key=lambda s: (s.cell, s.start_s)):
        last = found[-1] if found else None
        if last is not None and (last.cell, last.use) == (s.cell, s.use) and abs(last.end_s - s.start_s) < 1e-9:
            found[-1] = CellStretch(s.cell, s.use, last.start_s, s.end_s)
        else:
            found.append(s)
    return found
