"""Executions as they really are: a harness process in its own workspace, killed or finished, then graded."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import harness
from clinic_parts.generation import Generator
from clinic_parts.learning import Execution
from clinic_parts.server import ChatServer, Session
from grader import GraderWorker
from gyre.policy.tokenizer import ChatTokenizer


@dataclass(frozen=True)
class Job:
    """One execution to run: its task directory, and the call during which it is killed."""

    task: Path
    kill_at: int | None


class Ward:
    """Runs jobs in a scratch directory and grades what they leave."""

    def __init__(self, generator: Generator, tokenizer: ChatTokenizer, worker: GraderWorker) -> None:
        self.server = ChatServer(generator, tokenizer)
        self.worker = worker
        self.grading = asyncio.Lock()

    async def run(self, jobs: list[Job]) -> list[Execution]:
        """All jobs together, one slot each."""
        self.server.generator.reset()
        listening, url = await self.server.start()
        decoding = asyncio.create_task(self.server.decode())
        try:
            with tempfile.TemporaryDirectory() as scratch:
                rooms = [Path(scratch) / str(slot) for slot in range(len(jobs))]
                runs = [self._execute(slot, job, rooms[slot], url) for slot, job in enumerate(jobs)]
                return list(await asyncio.gather(*runs))
        finally:
            decoding.cancel()
            listening.close()

    async def _execute(self, slot: int, job: Job, workspace: Path, url: str) -> Execution:
        shutil.copytree(job.task / "workspace", workspace)
        key = f"secret-{slot}"
        environment = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key,
                       "GYRE_TASK_INSTRUCTION": str(job.task / "instruction.md")}
        command = (sys.executable, "-I", "-S", harness.__file__)
        pids: list[int] = []
        session = Session(slot, job.kill_at, lambda: _kill_group(pids[0]))
        self.server.sessions[key] = session
        process = await asyncio.create_subprocess_exec(*command, cwd=workspace, env=environment, start_new_session=True)
        pids.append(process.pid)
        status = await process.wait()
        if status != (0 if job.kill_at is None else -signal.SIGKILL):
            raise RuntimeError(f"harness ended with status {status}")
        async with self.grading:
            reward = await asyncio.to_thread(self.worker.grade, workspace, job.task)
        if reward is None:
            raise RuntimeError(f"{workspace}: the grader gave no reward")
        return Execution([context for context in session.contexts if any(context.sampled)], reward)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def cpu_s(worker: GraderWorker) -> float:
    """CPU seconds of this process, of the harnesses that ended, and of the grader."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used) + worker.cpu_s()
