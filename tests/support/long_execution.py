"""A long execution as a harness makes it: tool loops, retries, compactions, sub-agents, a judge, aborted calls."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from executions import settings
from gyre.contracts.digest import token_digest
from gyre.contracts.events import CallEvidence, CallRecorded, Outcome, VersionSpan
from gyre.contracts.ids import call_id
from gyre.trajectory.admission import admit
from gyre.trajectory.inspection import Header, TreeFile, tree_file
from gyre.trajectory.reading import read_execution
from gyre.trajectory.record import CallLog
from gyre.trajectory.roles import ROLE_ORDERS, classifier
from gyre.trajectory.targets import Eligibility

EXECUTION, GROUP = "g00007-003-x02", "g00007-003"
TEXT = ("the file test run error line in function returns value open read fix module import def class self list value "
        "config path parse token index loop check print assert expected got failed passed <b> </script> & commit diff "
        "patch apply search replace edit result output shell git status branch")
WORDS = TEXT.split()


def decode(ids: Sequence[int]) -> str:
    """Ids as words."""
    return " ".join(WORDS[i % len(WORDS)] for i in ids)


@dataclass
class Writer:
    """Records calls; a context is the sequence that the next call of its agent continues."""

    seed: int
    scale: int
    records: list[CallRecorded] = field(default_factory=list)
    sequences: list[np.ndarray] = field(default_factory=list)
    version: int = 3

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.numpy = np.random.default_rng(self.seed)
        self.opening = self.words(3)  # of every prompt, as chat templates have it

    def words(self, num: int) -> np.ndarray:
        return self.numpy.integers(0, len(WORDS), num, dtype=np.int32)

    def prompt(self, num: int) -> np.ndarray:
        """The prompt that opens a context."""
        return np.concatenate((self.opening, self.words(num)))

    def call(self, base: int | None, keep: int, delta: np.ndarray, output: np.ndarray, **fields: Any) -> int:
        """Record one call; returns its number."""
        index = len(self.records)
        before = self.sequences[base][:keep] if base is not None else np.empty(0, np.int32)
        sequence = np.concatenate((before, delta, output)).astype(np.int32)
        values = -self.numpy.random(len(output)).astype(np.float32)
        spans = (VersionSpan(0, len(output), self.version),) if len(output) else ()
        tags = {"x-gyre-lineage": "main"} if "lineage" not in fields else {}
        self.records.append(CallRecorded(
            EXECUTION, GROUP, call_id(EXECUTION, index), index, None if base is None else call_id(EXECUTION, base), keep,
            keep + len(delta), delta, output, values, values, spans, fields.pop("finish_reason", "stop"),
            token_digest(sequence), evidence=CallEvidence(tags), **fields))
        self.sequences.append(sequence)
        return index

    def output(self, least: int = 20, most: int = 160) -> np.ndarray:
        return self.words(self.chance.randint(least, most) * self.scale // 4)


def write(num_calls: int = 312, seed: int = 0, scale: int = 4, rewrites: float = 0.04) -> list[CallRecorded]:
    """The records. `scale`: quarter of the factor on all lengths; `rewrites`: share of answers that are not kept."""
    writer = Writer(seed, scale)
    system = writer.prompt(300 * scale)
    last = writer.call(None, 0, np.concatenate((system, writer.words(200 * scale))), writer.output())
    compacted = 0
    while len(writer.records) < num_calls:
        writer.version = 3 + 2 * len(writer.records) // num_calls
        chance = writer.chance.random()
        if len(writer.records) - compacted >= 75:
            compacted = len(writer.records)
            last = _compact(writer, last, len(system))
        elif chance < 0.06:
            _delegate(writer, num_calls)
        elif chance < 0.2:
            last = _retry(writer, last)
        elif chance < 0.2 + rewrites:
            last = _rewrite(writer, last)
        else:
            last = _turn(writer, last)
    return writer.records[:num_calls]


def _turn(writer: Writer, last: int, **fields: Any) -> int:
    keep = len(writer.sequences[last])
    return writer.call(last, keep, writer.words(writer.chance.randint(40, 900) * writer.scale // 4), writer.output(), **fields)


def _retry(writer: Writer, last: int) -> int:
    """The same prompt a few times, some answers equal, one cut off; the harness goes on with one of them."""
    keep, delta = len(writer.sequences[last]), writer.words(100)
    ending = "abort" if writer.chance.random() < 0.3 else "stop"
    first = writer.call(last, keep, delta, writer.output(5, 40), finish_reason=ending)
    prompt, same = keep + len(delta), writer.output(5, 40)
    others = [writer.call(first, prompt, delta[:0], same) for _ in range(writer.chance.randint(1, 3))]
    return writer.chance.choice(others)


def _rewrite(writer: Writer, last: int) -> int:
    """The harness goes on without the beginning of an answer, as one that strips thoughts does."""
    call = _turn(writer, last)
    prompt = writer.records[call].prompt_len
    return writer.call(call, prompt, writer.words(60), writer.output())


def _compact(writer: Writer, last: int, shared: int) -> int:
    """A summary, then a context that begins with it; beside it a judge of another model."""
    summary = _turn(writer, last, role_class="main-summary")
    writer.call(None, 0, writer.words(200), writer.output(5, 20), model="judge")
    answer = writer.records[summary].output_ids
    return writer.call(last, shared, np.concatenate((writer.words(20), answer)), writer.output())


def _delegate(writer: Writer, num_calls: int) -> None:
    """A sub-agent with a prompt of its own."""
    agent = f"explorer-{len(writer.records)}"
    last = writer.call(None, 0, writer.prompt(150 * writer.scale), writer.output(), role_class="sub-agent", lineage=agent)
    for _ in range(writer.chance.randint(2, 9)):
        last = _turn(writer, last, role_class="sub-agent", lineage=agent)


def file_of(records: Sequence[CallRecorded], max_paths: int = 5, kind: str = "scored") -> TreeFile:
    """The tree of records as trajectory writes it; admitted only if it is scored."""
    log = CallLog()
    for record in records:
        log.add(record)
    assert log.refusal is None, log.refusal
    reading = read_execution(log.ordered(), Eligibility("policy"), classifier("any"))
    config = settings(max_paths=max_paths)
    admission = admit(reading.tree, reading.targets, reading.leaf_roles(), ROLE_ORDERS["paper"], config.max_paths,
                      ("run", EXECUTION)) if kind == "scored" else None
    bare = Outcome(EXECUTION, kind, "finished", 0.75, 0.312, len(records), 0, 0)  # type: ignore[arg-type]
    outcome = reading.fill(bare, admission, "eval" if kind != "scored" else "")
    return tree_file(Header("train-0042", GROUP, "train", "policy", outcome), reading.tree, reading.targets, admission,
                     reading.roles)


def long_tree(num_calls: int = 312, seed: int = 0, scale: int = 4, rewrites: float = 0.04) -> TreeFile:
    """The tree file of a long execution."""
    return file_of(write(num_calls, seed, scale, rewrites))


def small_records() -> list[CallRecorded]:
    """Nine calls: an answer, two equal retries of it (one cut off), a turn, a summary, the context that begins with it,
    a sub-agent of two calls and a judge."""
    writer = Writer(0, 4)

    def ids(first: int, num: int = 0) -> np.ndarray:
        return np.arange(first, first + num, dtype=np.int32)

    first = writer.call(None, 0, ids(0, 10), ids(10, 4))
    writer.call(first, 10, ids(0), ids(20, 3))
    writer.call(first, 10, ids(0), ids(20, 3), finish_reason="abort")
    turn = writer.call(first, 14, ids(30, 5), ids(40, 6))
    writer.version = 4
    writer.call(turn, 25, ids(50, 2), ids(3, 4), role_class="main-summary")
    writer.call(turn, 5, ids(3, 4), ids(60, 5))
    sub = writer.call(None, 0, ids(70, 6), ids(80, 3), role_class="sub-agent", lineage="explorer")
    writer.call(sub, 9, ids(90, 2), ids(95, 2), role_class="sub-agent", lineage="explorer")
    writer.call(None, 0, ids(30, 3), ids(35, 2), model="judge")
    return writer.records
