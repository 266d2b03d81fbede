"""Random shell sessions, in exactly the tokens that the gateway renders: what the warm start reads.

A session is one context of the harness: a report, three uniformly random commands (a few malformed) with their true
observations, and the true summary. No command is chosen because of what the report says: nothing here shows how to
solve a query. The environment is followed on patterns alone (a repair works exactly where its bug is); a test compares
it with real files.

Axes: S sessions, M modules, W tokens of a session.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from policy import VOCABULARY, WORDS
from tasks import INSTRUCTION, KINDS, MIN_BUGS, NAMES, split_of

#: what a place of a session holds: words that follow from the format, the first report, a random command's two
#: arguments, the state that an observation tells
FORMAT, REPORT, MODULE, KIND, OBSERVED = range(5)

NUM_COMMANDS = 3
DONE_SHARE = 0.12  # share of modules already repaired, per earlier context
MALFORMED_SHARE = 0.04  # of the random commands

ID = {word: index for index, word in enumerate(VOCABULARY)}
MODULE_IDS = np.array([ID[name] for name in NAMES])
STATE_IDS = np.array([ID["."]] + [ID[str(kind)] for kind in KINDS])


@dataclass(frozen=True)
class Sessions:
    """``ids_SW``, and what each place holds, ``places_W``: one of the place names below."""

    ids_SW: np.ndarray
    places_W: np.ndarray


def training_patterns() -> np.ndarray:
    """All bug patterns of the training split, [P, M]."""
    grid = np.stack(np.meshgrid(*[np.arange(len(KINDS) + 1)] * len(NAMES), indexing="ij"), -1).reshape(-1, len(NAMES))
    grid = grid[(grid > 0).sum(1) >= MIN_BUGS]
    return grid[[split_of(tuple(row)) == "train" for row in grid.tolist()]]


def draw(rng: np.random.Generator, patterns: np.ndarray, num: int) -> Sessions:
    """``num`` random sessions on training patterns."""
    rows = np.arange(num)
    state_SM = patterns[rng.integers(0, len(patterns), num)]
    earlier_S = rng.integers(0, 3, num) * DONE_SHARE
    state_SM = np.where(rng.random(state_SM.shape) < earlier_S[:, None], 0, state_SM)
    writer = _Writer(num)
    writer.words("<|user|>", *INSTRUCTION.split())
    writer.report(state_SM, REPORT)
    for number in range(NUM_COMMANDS):
        command = _random_commands(rng, num)
        state_SM = state_SM.copy()
        fixed_S = command.well_formed_S & (state_SM[rows, command.module_S] == command.kind_S)
        state_SM[rows, command.module_S] *= ~fixed_S
        writer.words("<|end|>", "<|assistant|>", "F")
        writer.column(command.module_ids_S, MODULE)
        writer.column(command.kind_ids_S, KIND)
        writer.words("<|end|>", "<|user|>")
        for ids_S, place in zip(_observation(state_SM, command), (FORMAT, OBSERVED, OBSERVED), strict=True):
            writer.column(ids_S, place)
        if number == NUM_COMMANDS - 1:
            writer.words("compact")
    writer.words("<|end|>", "<|assistant|>")
    writer.report(state_SM)
    writer.words("<|end|>")
    return writer.sessions()


@dataclass(frozen=True)
class _Commands:
    """One command a session; a malformed one has a word in one argument's place that does not belong there."""

    module_S: np.ndarray
    kind_S: np.ndarray
    module_ids_S: np.ndarray
    kind_ids_S: np.ndarray

    @property
    def well_formed_S(self) -> np.ndarray:
        return np.isin(self.module_ids_S, MODULE_IDS) & np.isin(self.kind_ids_S, STATE_IDS[1:])


def _random_commands(rng: np.random.Generator, num: int) -> _Commands:
    module_S, kind_S = rng.integers(0, len(NAMES), num), rng.integers(1, len(KINDS) + 1, num)
    malformed_S = rng.random(num) < MALFORMED_SHARE
    in_module_S = malformed_S & (rng.random(num) < 0.5)
    junk_S = np.array([ID[word] for word in WORDS])[rng.integers(0, len(WORDS), num)]
    module_ids_S = np.where(in_module_S, junk_S, MODULE_IDS[module_S])
    kind_ids_S = np.where(malformed_S & ~in_module_S, junk_S, STATE_IDS[kind_S])
    module_S = np.where(np.isin(module_ids_S, MODULE_IDS), module_ids_S - MODULE_IDS[0], 0)
    kind_S = np.where(np.isin(kind_ids_S, STATE_IDS[1:]), kind_ids_S - STATE_IDS[1] + 1, 0)
    return _Commands(module_S, kind_S, module_ids_S, kind_ids_S)


def _observation(state_SM: np.ndarray, command: _Commands) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids of the three words of every observation: the module, its state, the next failing module."""
    good_S, module_S = command.well_formed_S, command.module_S
    seen_S = STATE_IDS[state_SM[np.arange(len(state_SM)), module_S]]
    following_S = _next_failing(state_SM, np.where(good_S, module_S, len(NAMES) - 1))
    return np.where(good_S, MODULE_IDS[module_S], ID["?"]), np.where(good_S, seen_S, ID["?"]), following_S


def _next_failing(state_SM: np.ndarray, module_S: np.ndarray) -> np.ndarray:
    """Id of the first failing module after the given one, in a circle; "." when every module passes. [S]."""
    rows = np.arange(len(state_SM))
    circle_SM = (module_S[:, None] + 1 + np.arange(len(NAMES))) % len(NAMES)
    fails_SM = state_SM[rows[:, None], circle_SM] > 0
    first_S = circle_SM[rows, fails_SM.argmax(1)]
    return np.where(fails_SM.any(1), MODULE_IDS[first_S], STATE_IDS[0])


class _Writer:
    """Appends the same places to every session at once."""

    def __init__(self, num: int) -> None:
        self._num = num
        self._columns: list[np.ndarray] = []
        self._places: list[int] = []

    def words(self, *words: str) -> None:
        for word in words:
            self.column(np.full(self._num, ID[word]))

    def column(self, ids_S: np.ndarray, place: int = FORMAT) -> None:
        self._columns.append(ids_S)
        self._places.append(place)

    def report(self, state_SM: np.ndarray, place: int = FORMAT) -> None:
        for module in range(len(NAMES)):
            self.column(np.full(self._num, MODULE_IDS[module]))
            self.column(STATE_IDS[state_SM[:, module]], place)

    def sessions(self) -> Sessions:
        return Sessions(np.stack(self._columns, 1), np.array(self._places))
