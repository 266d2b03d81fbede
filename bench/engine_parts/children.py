"""Contenders as child processes that serve one job at a time."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_parts.workload import Job

HERE = Path(__file__).parent
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class Missing(RuntimeError):
    """A contender that cannot take part; says why."""


@dataclass(frozen=True)
class Result:
    """One job's outcome. `answers[session][turn]` are token ids; `more` is what only this contender says."""

    cpu_s: float
    wall_s: float
    answers: list[list[list[int]]]
    more: dict[str, Any]


class Contender:
    """A process that answers jobs."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log
        self._answer()

    def run(self, job: Job, patience_s: float = 900.0) -> Result:
        """Raises Missing if the process ends instead of answering, or has to be ended because it does not."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; what it said last is in its log
            print(json.dumps(job.to_wire()), file=self._process.stdin, flush=True)
        watch = threading.Timer(patience_s, self._process.kill)
        watch.start()
        try:
            answer = self._answer()
        finally:
            watch.cancel()
        result = Result(answer.pop("cpu_s"), answer.pop("wall_s"), answer.pop("answers"), answer)
        lengths = {len(ids) for turns in result.answers for ids in turns}
        if lengths != {job.num_answer}:
            raise Missing(f"{self.name} answered with {sorted(lengths)} tokens instead of {job.num_answer}")
        return result

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"'):
                return json.loads(line)
        self._process.wait()
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        raise Missing(f"it ended with status {self._process.returncode}: {lines[-1] if lines else 'it said nothing'}")


@contextmanager
def contender(name: str, command: Sequence[str], log: Path, ours: bool) -> Iterator[Contender]:
    """Raises Missing if it does not come up. Without `ours` it sees nothing of this repository's packages."""
    environment = {**os.environ, **ONE_THREAD, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    if not ours:
        environment.pop("PYTHONPATH", None)
    with ExitStack() as stack:
        errors = stack.enter_context(log.open("w"))
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        stack.callback(_end, process)
        yield Contender(name, process, log)


def _end(process: subprocess.Popen[str]) -> None:
    """Its input ends, and so it does; one that does not is killed."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.close()
        process.wait(timeout=20)
    except (subprocess.TimeoutExpired, BrokenPipeError):
        process.kill()
        process.wait()
    process.stdout.close()
