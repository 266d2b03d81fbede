"""Random shell sessions, in exactly the tokens that the gateway renders: what the warm start reads.

A session is one context of the harness: a report, three uniformly random commands (a few malformed) with their true
observations, and the true summary. No command is chosen because of what the report says: nothing here shows how to
solve a query. The environment is followed on patterns alone (a repair works exactly where its bug is); a test compares
it with real files.

Axes: S sessions, M modules, K kinds of repair, W tokens of a session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    state_SM = patterns[rng.integers(0, len(patterns), num)]
    earlier_S = rng.integers(0, 3, num) * DONE_SHARE
    state_SM = np.where(rng.random(state_SM.shape) < earlier_S[:, None], 0, state_SM)
    writer = Writer(num)
    module_ids_SM = np.tile(MODULE_IDS, (num, 1))
    writer.words("<|user|>", *INSTRUCTION.split())
    writer.report(module_ids_SM, state_SM, REPORT)
    for number in range(NUM_COMMANDS):
        state_SM = turn(writer, rng, state_SM, module_ids_SM, WORDS)
        if number == NUM_COMMANDS - 1:
            writer.words("compact")
    writer.words("<|end|>", "<|assistant|>")
    writer.report(module_ids_SM, state_SM)
    writer.words("<|end|>")
    return writer.sessions()


@dataclass(frozen=True)
class Commands:
    """One command a session; a malformed one has a word in one argument's place that does not belong there.

    `module_S` and `kind_S` are what the words mean where they belong there, and 0 elsewhere.
    """

    module_S: np.ndarray
    kind_S: np.ndarray
    module_ids_S: np.ndarray
    kind_ids_S: np.ndarray
    well_formed_S: np.ndarray


def turn(
    writer: Writer, rng: np.random.Generator, state_SM: np.ndarray, module_ids_SM: np.ndarray, junk: Sequence[str]
) -> np.ndarray:
    """Writes a random command and its true observation; returns the states after it."""
    rows = np.arange(len(state_SM))
    command = random_commands(rng, module_ids_SM, np.array([writer.ids[word] for word in junk]))
    fixed_S = command.well_formed_S & (state_SM[rows, command.module_S] == command.kind_S)
    state_SM = state_SM.copy()
    state_SM[rows, command.module_S] *= ~fixed_S
    writer.words("<|end|>", "<|assistant|>", "F")
    writer.column(command.module_ids_S, MODULE)
    writer.column(command.kind_ids_S, KIND)
    writer.words("<|end|>", "<|user|>")
    for ids_S, place in zip(_observation(state_SM, command, module_ids_SM), (FORMAT, OBSERVED, OBSERVED), strict=True):
        writer.column(ids_S, place)
    return state_SM


def random_commands(rng: np.random.Generator, module_ids_SM: np.ndarray, junk_ids: np.ndarray) -> Commands:
    """Any module with any repair, all equally likely; a few have a junk word instead of one of the two."""
    num, num_modules = module_ids_SM.shape
    module_S, kind_S = rng.integers(0, num_modules, num), rng.integers(1, len(KINDS) + 1, num)
    malformed_S = rng.random(num) < MALFORMED_SHARE
    in_module_S = malformed_S & (rng.random(num) < 0.5)
    junk_S = junk_ids[rng.integers(0, len(junk_ids), num)]
    module_ids_S = np.where(in_module_S, junk_S, module_ids_SM[np.arange(num), module_S])
    kind_ids_S = np.where(malformed_S & ~in_module_S, junk_S, STATE_IDS[kind_S])
    named_SM, meant_SK = module_ids_SM == module_ids_S[:, None], STATE_IDS[1:] == kind_ids_S[:, None]
    kind_S = np.where(meant_SK.any(1), meant_SK.argmax(1) + 1, 0)
    return Commands(named_SM.argmax(1), kind_S, module_ids_S, kind_ids_S, named_SM.any(1) & meant_SK.any(1))


def _observation(
    state_SM: np.ndarray, command: Commands, module_ids_SM: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids of the three words of every observation: the module, its state, the next failing module."""
    rows, good_S, module_S = np.arange(len(state_SM)), command.well_formed_S, command.module_S
    seen_S = STATE_IDS[state_SM[rows, module_S]]
    following_S = next_failing(state_SM, np.where(good_S, module_S, state_SM.shape[1] - 1), module_ids_SM)
    return np.where(good_S, module_ids_SM[rows, module_S], ID["?"]), np.where(good_S, seen_S, ID["?"]), following_S


def next_failing(state_SM: np.ndarray, module_S: np.ndarray, module_ids_SM: np.ndarray) -> np.ndarray:
    """Id of the first failing module after the given one, in a circle; "." when every module passes. [S]."""
    rows, num_modules = np.arange(len(state_SM)), state_SM.shape[1]
    circle_SM = (module_S[:, None] + 1 + np.arange(num_modules)) % num_modules
    fails_SM = state_SM[rows[:, None], circle_SM] > 0
    first_S = circle_SM[rows, fails_SM.argmax(1)]
    return np.where(fails_SM.any(1), module_ids_SM[rows, first_S], STATE_IDS[0])


class Writer:
    """Appends the same places to every session at once. `ids`: the id of every word of the vocabulary."""

    def __init__(self, num: int, ids: Mapping[str, int] = ID) -> None:
        self._num, self.ids = num, ids
        self._columns: list[np.ndarray] = []
        self._places: list[int] = []

    def words(self, *words: str) -> None:
        for word in words:
            self.column(np.full(self._num, self.ids[word]))

    def column(self, ids_S: np.ndarray, place: int = FORMAT) -> None:
        self._columns.append(ids_S)
        self._places.append(place)

    def report(self, module_ids_SM: np.ndarray, state_SM: np.ndarray, place: int = FORMAT) -> None:
        for module in range(module_ids_SM.shape[1]):
            self.column(module_ids_SM[:, module])
            self.column(STATE_IDS[state_SM[:, module]], place)

    def sessions(self) -> Sessions:
        return Sessions(np.stack(self._columns, 1), np.array(self._places))
