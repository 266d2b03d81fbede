"""Random sessions of the clinic with sub-agents, in exactly the tokens that the gateway renders.

What the warm start reads: every context of the harness with random turns. A main context sends agents to random
directories or names random repairs; a sub-agent repairs at random; summaries and reports are true. How much an agent
repairs is drawn too. Nothing is chosen because of what a context says: nothing here shows how to solve a query.

Axes: S sessions, M modules of a directory, D directories, W tokens of a session.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "clinic"))

import numpy as np  # noqa: E402
from agents_policy import CALL, CALL_END, NEW_WORDS, VOCABULARY  # noqa: E402
from agents_tasks import DIRECTORIES, NUM_MODULES, patterns_of  # noqa: E402
from policy import WORDS  # noqa: E402
from sessions import FORMAT, KIND, MALFORMED_SHARE, MODULE, OBSERVED, REPORT, STATE_IDS, Sessions, Writer, next_failing, turn  # noqa: E402
from tasks import INSTRUCTION  # noqa: E402

COMMANDS_PER_CONTEXT = 2  # of a sub-agent
TURNS_PER_CONTEXT = 2  # of the main agent
DONE_SHARES = (0.0, 0.2, 0.5, 0.9)  # of a directory's modules that earlier agents repaired, equally likely
DELEGATED_SHARE = 0.75  # of the main agent's turns

#: what a place may hold, beside the clinic's: how a turn of the main agent begins, its second word, its last one
OPENING, SECOND, LAST = range(10, 13)

ID = {word: index for index, word in enumerate(VOCABULARY)}
DIRECTORY_IDS = np.array([ID[directory] for directory in DIRECTORIES])
MODULE_IDS_DM = np.array([[ID[name] for name in names] for names in DIRECTORIES.values()])
CHOICES = {
    MODULE: MODULE_IDS_DM.ravel(),
    KIND: STATE_IDS[1:],
    OPENING: np.array([ID["F"], ID[CALL]]),
    SECOND: np.concatenate([DIRECTORY_IDS, MODULE_IDS_DM.ravel()]),
    LAST: np.concatenate([STATE_IDS[1:], [ID[CALL_END]]]),
}
JUNK = WORDS + NEW_WORDS


def training_patterns() -> np.ndarray:
    """The patterns of the training split, as often as they are drawn there, [P, M]."""
    patterns = np.array(patterns_of("train"))
    num_bugs_P = (patterns > 0).sum(1)
    most = np.bincount(num_bugs_P).max()
    return np.repeat(patterns, [round(most / (num_bugs_P == num).sum()) for num in num_bugs_P], axis=0)


def draw(rng: np.random.Generator, patterns: np.ndarray, num: int) -> list[Sessions]:
    """``num`` random sessions of each kind of context."""
    return [sub_agents(rng, patterns, num, again) for again in (False, True)] + [main_agents(rng, num)]


def sub_agents(rng: np.random.Generator, patterns: np.ndarray, num: int, again: bool) -> Sessions:
    """A sub-agent's first context, which ends in a summary, or the one ``again`` after it, which ends in a report."""
    directory_S = rng.integers(0, len(DIRECTORIES), num)
    module_ids_SM = MODULE_IDS_DM[directory_S]
    state_SM = patterns[rng.integers(0, len(patterns), num)]
    done_S = rng.choice(DONE_SHARES, num)
    state_SM = np.where(rng.random(state_SM.shape) < done_S[:, None], 0, state_SM)
    writer = Writer(num, ID)
    writer.words("<|system|>", "modules")
    if not again:
        writer.report(module_ids_SM, state_SM, REPORT)
    writer.words("<|end|>", "<|user|>", "repair")
    writer.column(DIRECTORY_IDS[directory_S], REPORT)
    writer.words("now")
    if again:
        writer.report(module_ids_SM, state_SM, REPORT)
    for _ in range(COMMANDS_PER_CONTEXT):
        state_SM = turn(writer, rng, state_SM, module_ids_SM, JUNK)
    writer.words("report" if again else "compact", "<|end|>", "<|assistant|>")
    if again:
        writer.column(DIRECTORY_IDS[directory_S])
        writer.column(count_ids((state_SM > 0).sum(1)))
    else:
        writer.report(module_ids_SM, state_SM)
    writer.words("<|end|>")
    return writer.sessions()


def count_ids(count_S: np.ndarray) -> np.ndarray:
    """Ids of how many modules fail: "." for none."""
    return STATE_IDS[count_S]


def main_agents(rng: np.random.Generator, num: int) -> Sessions:
    """A main context: turns that delegate or repair, each answered with how many modules fail there, and a summary."""
    count_SD = rng.integers(0, NUM_MODULES + 1, (num, len(DIRECTORIES)))
    writer = Writer(num, ID)
    writer.words("<|user|>", *INSTRUCTION.split())
    _overview(writer, count_SD, REPORT)
    for _ in range(TURNS_PER_CONTEXT):
        count_SD = _main_turn(writer, rng, count_SD)
    writer.words("compact", "<|end|>", "<|assistant|>")
    _overview(writer, count_SD)
    writer.words("<|end|>")
    return writer.sessions()


def _overview(writer: Writer, count_SD: np.ndarray, place: int = FORMAT) -> None:
    """The directories where modules fail and how many; two dots for any other."""
    for directory, count_S in enumerate(count_SD.T):
        writer.column(np.where(count_S > 0, DIRECTORY_IDS[directory], ID["."]), place)
        writer.column(count_ids(count_S), place)


def _main_turn(writer: Writer, rng: np.random.Generator, count_SD: np.ndarray) -> np.ndarray:
    """Writes a random turn and its outcome, which is drawn too; returns how many modules fail after it."""
    num = len(count_SD)
    rows, directory_S, module_S = np.arange(num), rng.integers(0, len(DIRECTORIES), num), rng.integers(0, NUM_MODULES, num)
    delegated_S, malformed_S = rng.random(num) < DELEGATED_SHARE, rng.random(num) < MALFORMED_SHARE
    before_S = count_SD[rows, directory_S]
    helped_S = rng.random(num) * NUM_MODULES * 4 < before_S  # the right one of four repairs, of a module that fails
    left_S = np.where(delegated_S, rng.integers(0, before_S + 1), before_S - helped_S)
    count_SD = count_SD.copy()
    count_SD[rows, directory_S] = np.where(malformed_S, before_S, left_S)
    second_S = np.where(delegated_S, DIRECTORY_IDS[directory_S], MODULE_IDS_DM[directory_S, module_S])
    writer.words("<|end|>", "<|assistant|>")
    writer.column(np.where(delegated_S, ID[CALL], ID["F"]), OPENING)
    writer.column(np.where(malformed_S, ID["?"], second_S), SECOND)
    writer.column(np.where(delegated_S, ID[CALL_END], STATE_IDS[rng.integers(1, 5, num)]), LAST)
    writer.words("<|end|>")
    writer.column(np.where(delegated_S, ID["<|tool|>"], ID["<|user|>"]))
    writer.column(np.where(malformed_S, ID["?"], DIRECTORY_IDS[directory_S]))
    writer.column(np.where(malformed_S, ID["?"], count_ids(left_S)), REPORT)
    writer.words("<|end|>", "<|user|>")
    about_S = np.where(malformed_S, len(DIRECTORIES) - 1, directory_S)
    writer.column(next_failing(count_SD, about_S, np.tile(DIRECTORY_IDS, (num, 1))), OBSERVED)
    return count_SD
