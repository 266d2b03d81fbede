"""How long the executions of a group take, what they hold at the end, and what training them costs.

The n-th group of a run has the same executions under every schedule: schedules are compared on equal work.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from gyre.contracts.errors import ConfigError
from gyre.contracts.simulation import WorkloadRows
from gyre.scheduler.simulation.constants import LognormalConstants

GRID = 4096  # quantiles that stand for the distribution where its mean is fitted


@dataclass(frozen=True, slots=True)
class Demand:
    """One execution: seconds of a slot at full speed, context at its end in tokens, training in cell-seconds."""

    duration_s: float
    max_context: int
    train_s: float


class Workload(Protocol):
    """Gives each group of a run its executions."""

    def group(self, cursor: int, num: int) -> tuple[Demand, ...]:
        """The `num` executions of the cursor-th training group."""
        ...


def _normals(seed: int, cursor: int, num: int) -> tuple[float, np.ndarray, np.ndarray]:
    """What a group's executions have in common, what they have not (twice): standard normals."""
    rng = np.random.Generator(np.random.PCG64([seed, cursor]))
    return float(rng.standard_normal()), rng.standard_normal(num), rng.standard_normal(num)


def _correlated(correlation: float, common: float, own: np.ndarray) -> np.ndarray:
    return math.sqrt(correlation) * common + math.sqrt(1.0 - correlation) * own


class Lognormal:
    """Durations lognormal and capped, shifted so that the capped ones have the wanted mean."""

    def __init__(self, constants: LognormalConstants, train_rate: float, seed: int) -> None:
        self._c, self._train_rate, self._seed = constants, train_rate, seed
        self._location = _location(constants)

    def group(self, cursor: int, num: int) -> tuple[Demand, ...]:
        c = self._c
        common, own, other = _normals(self._seed, cursor, num)
        z = _correlated(c.correlation, common, own)
        durations = np.minimum(np.exp(self._location + c.sigma * z), c.cap_s)
        mixed = c.context_correlation * z + math.sqrt(1.0 - c.context_correlation**2) * other
        contexts = c.context_median * np.exp(c.context_sigma * mixed)
        return tuple(Demand(float(d), int(x), float(d) * self._train_rate)
                     for d, x in zip(durations, contexts, strict=True))


@functools.lru_cache(maxsize=16)
def _location(c: LognormalConstants) -> float:
    """The mean of log duration that gives the capped durations their mean."""
    z = _quantiles()
    low, high = math.log(c.mean_s) - 10.0, math.log(c.cap_s) + 10.0
    for _ in range(80):
        middle = (low + high) / 2
        mean = float(np.minimum(np.exp(middle + c.sigma * z), c.cap_s).mean())
        low, high = (middle, high) if mean < c.mean_s else (low, middle)
    return (low + high) / 2


@functools.cache
def _quantiles() -> np.ndarray:
    return np.array([_quantile((i + 0.5) / GRID) for i in range(GRID)])


def _quantile(p: float) -> float:
    """The standard normal's quantile, by bisection of its distribution."""
    low, high = -9.0, 9.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _share_below(middle) < p else (low, middle)
    return (low + high) / 2


def _share_below(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2.0))


class Drawn:
    """Recorded executions, drawn with replacement; those of a group from neighbouring lengths, as far as they correlate."""

    def __init__(self, rows: Sequence[Demand], correlation: float, seed: int) -> None:
        self._rows = sorted(rows, key=lambda d: (d.duration_s, d.max_context))
        self._correlation, self._seed = correlation, seed

    def group(self, cursor: int, num: int) -> tuple[Demand, ...]:
        common, own, _ = _normals(self._seed, cursor, num)
        places = [_share_below(float(z)) for z in _correlated(self._correlation, common, own)]
        return tuple(self._rows[min(int(p * len(self._rows)), len(self._rows) - 1)] for p in places)


class Replayed:
    """The groups of a run as they were; after the last the first again. Short groups are filled with their own executions.

    Another seed begins at another group, so that seeds differ.
    """

    def __init__(self, groups: Sequence[tuple[Demand, ...]], seed: int) -> None:
        self._groups, self._first = groups, seed

    def group(self, cursor: int, num: int) -> tuple[Demand, ...]:
        group = self._groups[(self._first + cursor) % len(self._groups)]
        return tuple(group[i % len(group)] for i in range(num))


@dataclass(frozen=True, slots=True)
class Capped:
    """A workload whose executions are ended at `cap_s` and whose contexts hold no more than `max_context` tokens."""

    workload: Workload
    cap_s: float
    max_context: int

    def group(self, cursor: int, num: int) -> tuple[Demand, ...]:
        return tuple(self._capped(d) for d in self.workload.group(cursor, num))

    def _capped(self, demand: Demand) -> Demand:
        share = min(1.0, self.cap_s / demand.duration_s) if demand.duration_s else 1.0
        context = min(int(demand.max_context * share), self.max_context)
        return Demand(min(demand.duration_s, self.cap_s), context, demand.train_s * share)


def from_rows(rows: WorkloadRows, train_rate: float, correlation: float, seed: int) -> Workload:
    """The workload of a file. Raises ConfigError if it has no executions, or a column is missing."""
    names = {name: i for i, name in enumerate(rows.fields)}
    if "seconds" not in names:
        raise ConfigError(f"fields = {list(rows.fields)}: there is no column 'seconds'")
    if not rows.rows:
        raise ConfigError("rows = []: there are no executions")

    def demand(number: int, row: tuple[float | str, ...]) -> Demand:
        def value(name: str, default: float) -> float:
            found = row[names[name]] if name in names else default
            if isinstance(found, str) or found < 0:
                raise ConfigError(f"rows[{number}].{name} = {found!r}: must be a number, not negative")
            return float(found)

        if len(row) != len(rows.fields):
            raise ConfigError(f"rows[{number}] = {list(row)}: has {len(row)} columns, not {len(rows.fields)}")
        seconds = value("seconds", 0.0)
        return Demand(seconds, int(value("max_context", 0.0)), value("train_s", seconds * train_rate))

    demands = [demand(i, row) for i, row in enumerate(rows.rows)]
    if "group" not in names:
        return Drawn(demands, correlation, seed)
    groups: dict[float | str, list[Demand]] = {}
    for row, found in zip(rows.rows, demands, strict=True):
        groups.setdefault(row[names["group"]], []).append(found)
    return Replayed([tuple(g) for g in groups.values()], seed)
