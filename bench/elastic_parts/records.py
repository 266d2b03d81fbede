"""The executions of the bench: what each waits and asks for, as task directories, and as a table for the simulator.

    paper      durations lognormal with sigma 0.35, as many cut off at 2.07 times the mean as the published system ends at 4 h
               of a mean of 1.93 h; three calls, a third of the time spent in them
    sessions   stretches of recorded coding-agent sessions (`sessions/README.md`), their median made 20 s, cut off at 100 s;
               neighbouring calls put together until there are four, their times kept

The n-th group of a seed has the same executions under every schedule.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from dataclasses import dataclass
from pathlib import Path

from gyre.contracts.simulation import WorkloadRows
from gyre.runtime.config import RunConfig
from gyre.scheduler.burst import train_task
from gyre.scheduler.config import plan_of

WORKLOADS = ("paper", "sessions")
MEDIAN_S, SIGMA, CAP = 20.5, 0.35, 4.0 / 1.93  # the cap over the mean
NUM_CALLS, CALLING = 3, 0.35
SESSION_MEDIAN_S, SESSION_CAP_S, MAX_CALLS = 20.0, 100.0, 4
STRETCHES = Path(__file__).with_name("sessions") / "stretches.jsonl"
FIRST_TOKENS, CALL_TOKENS = 1, 5  # of a tree that nobody sampled: `begin`, and what is around each reply
HIDDEN_TEST = "def test_outcome():\n    import outcome\n    assert outcome.PASSED\n"


@dataclass(frozen=True, slots=True)
class Record:
    """One execution: (seconds to wait, tokens to ask for) in turn."""

    calls: tuple[tuple[float, int], ...]

    def duration_s(self, token_s: float) -> float:
        return sum(wait + num * token_s for wait, num in self.calls)

    @property
    def num_tokens(self) -> int:
        """Of its tree, what is trained and what is read."""
        return FIRST_TOKENS + sum(CALL_TOKENS + num for _, num in self.calls)


def lognormal(rng: random.Random, token_s: float) -> Record:
    """One execution of the published system's shape."""
    mean = MEDIAN_S * math.exp(SIGMA**2 / 2)
    duration = min(rng.lognormvariate(math.log(MEDIAN_S), SIGMA), CAP * mean)
    num = max(1, round(CALLING * duration / NUM_CALLS / token_s))
    return Record(((round(duration / NUM_CALLS - num * token_s, 3), num),) * NUM_CALLS)


def stretches() -> list[list[tuple[float, float]]]:
    """Recorded stretches as (seconds before a call, seconds of it) in turn, not yet scaled."""
    found = []
    for line in STRETCHES.read_text(encoding="utf-8").splitlines():
        calls, at, pairs = json.loads(line)["calls"], 0.0, []
        for begin, seconds, _ in calls:
            pairs.append((max(0.0, begin - at), seconds))
            at = max(at, begin) + seconds
        found.append(pairs)
    return found


def scaled(pairs: list[tuple[float, float]], factor: float, token_s: float) -> Record:
    """A stretch `factor` times shorter, of at most MAX_CALLS calls, cut off where it gets too long."""
    size = -(-len(pairs) // MAX_CALLS)
    calls, left = [], SESSION_CAP_S
    for start in range(0, len(pairs), size):
        part = pairs[start:start + size]
        wait, calling = (min(sum(p[i] for p in part) / factor, left) for i in (0, 1))
        num = max(1, round(min(calling, left - wait) / token_s)) if left > wait else 0
        left -= wait + num * token_s
        calls.append((round(wait, 3), num))
        if left <= 0:
            break
    return Record(tuple((w, max(n, 1)) for w, n in calls))


def groups_of(workload: str, seed: int, num: int, size: int, token_s: float) -> list[list[Record]]:
    """`num` groups of `size` executions. Those of a group are drawn independently of each other."""
    rng = random.Random(f"{workload}/{seed}")
    if workload == "paper":
        return [[lognormal(rng, token_s) for _ in range(size)] for _ in range(num)]
    pool = stretches()
    factor = statistics.median(sum(map(sum, pairs)) for pairs in pool) / SESSION_MEDIAN_S
    return [[scaled(rng.choice(pool), factor, token_s) for _ in range(size)] for _ in range(num)]


def write_tasks(root: Path, groups: list[list[Record]]) -> None:
    """One task directory for each group."""
    for number, group in enumerate(groups):
        task = root / "train" / f"t{number:04d}"
        for name in ("workspace", "tests"):
            (task / name).mkdir(parents=True)
        texts = {"instruction.md": "replay\n", "tests/test_hidden.py": HIDDEN_TEST,
                 "task.toml": f'schema_version = "1.3"\n\n[task]\nname = "bench/t{number:04d}"\n',
                 "workspace/records.json": json.dumps([r.calls for r in group])}
        for name, text in texts.items():
            (task / name).write_text(text, encoding="utf-8")


def rows_of(config: RunConfig, groups: list[list[Record]]) -> WorkloadRows:
    """The groups in the order of their dispatch, as the simulator takes them."""
    token_s, per_token = config.engine.script_token_ms / 1000, config.training.timed_s_per_token
    plan = plan_of(config, "", Path(config.tasks.root))
    rows = []
    for cursor in range(len(groups)):
        number = int(train_task(plan, cursor).rpartition("t")[2])
        rows += [(r.duration_s(token_s), float(r.num_tokens), r.num_tokens * per_token, f"g{cursor:04d}")
                 for r in groups[number]]
    return WorkloadRows(("seconds", "max_context", "train_s", "group"), tuple(rows), "the bench's records")
