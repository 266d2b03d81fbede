"""The built-in engine as a contender: `TorchEngine` in this process, no gRPC."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gyre.policy.checkpoint import load_checkpoint, state_digest
from gyre.rollout.engines.base import Finish, GenerateRequest
from gyre.rollout.engines.torch import TorchEngine, TorchEngineConfig
from gyre.rollout.torch_engine.scheduler import SchedulerConfig
from side import Answers, serve

KV_TOKENS = 131072


class Gyre:
    """One engine for all jobs, on an event loop that runs while a job does."""

    def __init__(self, directory: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._names = itertools.count()
        self._engine = self._loop.run_until_complete(self._start(directory))

    async def _start(self, directory: Path) -> TorchEngine:
        policy, state = load_checkpoint(directory)
        engine = TorchEngine(policy, TorchEngineConfig(SchedulerConfig(KV_TOKENS, policy.max_position), min_interval_s=0.0))
        await engine.load_weights(0, state_digest(state), state)
        assert (await engine.probe()).ok
        engine.resume()
        return engine

    def __call__(self, job: dict[str, Any]) -> tuple[Answers, dict[str, Any]]:
        before = self._engine.load_report()
        answers, marks = self._loop.run_until_complete(self._all(job))
        after = self._engine.load_report()
        reused = after.num_tokens_reused - before.num_tokens_reused
        return answers, {"reused": reused, "decode_cpu_s": time.process_time() - max(marks)}

    async def _all(self, job: dict[str, Any]) -> tuple[Answers, list[float]]:
        marks: list[float] = []
        sessions = zip(job["prompts"], job["tools"], strict=True)
        answers = await asyncio.gather(*(self._session(p, t, job["num_answer"], marks) for p, t in sessions))
        return list(answers), marks

    async def _session(self, prompt: list[int], tools: list[list[int]], num_answer: int, marks: list[float]) -> list[list[int]]:
        """`marks` gets the CPU time of each call's first token."""
        context, answers = list(prompt), []
        for tool in [*tools, []]:
            ids = np.array(context, dtype=np.int32)
            stream = self._engine.submit(GenerateRequest(f"r{next(self._names)}", ids, num_answer, temperature=0.0))
            events = await stream.take()
            marks.append(time.process_time())
            while not isinstance(events[-1], Finish):
                events += await stream.take(60.0)
            answers.append([event.token_id for event in events[:-1]])
            context += answers[-1] + tool
        return answers


def main() -> None:
    torch.set_num_threads(1)
    serve(Gyre(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
