"""The loop of a contender's process: a job per line of input, a line of JSON per answer. Imports nothing of ours.

Scripts that import this run in environments of their own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil

Answers = list[list[list[int]]]  # [session][turn][token]
Run = Callable[[dict[str, Any]], tuple[Answers, dict[str, Any]]]


def cpu_seconds() -> float:
    """Of this process and all that descends from it and is alive."""
    own = time.process_time()
    for child in psutil.Process().children(recursive=True):
        times = child.cpu_times()
        own += times.user + times.system
    return own


def serve(run: Run) -> None:
    """`run` gets a job (`workload.Job` as a dictionary) and returns the answers and what else is to be said."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        wall, cpu = time.perf_counter(), cpu_seconds()
        answers, more = run(job)
        cpu, wall = cpu_seconds() - cpu, time.perf_counter() - wall
        print(json.dumps({"cpu_s": cpu, "wall_s": wall, "answers": answers, **more}), flush=True)
