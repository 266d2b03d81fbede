"""Writing down executions as a gateway would: each call as a delta against the earlier call it shares most with."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from gyre.contracts.digest import token_digest
from gyre.contracts.events import (
    BlobRef,
    CallRecorded,
    ExecutionScored,
    ExecutionSpec,
    ExecutionTerminated,
    GroupDispatched,
    VersionSpan,
)
from gyre.contracts.ids import call_id
from gyre.trajectory.config import TrajectoryConfig
from gyre.trajectory.packing import Budget
from gyre.trajectory.record import Call, CallLog
from gyre.trajectory.roles import ROLE_ORDERS, CallRole
from gyre.trajectory.targets import Eligibility
from gyre.trajectory.tree import Tree, build_tree


class Script:
    """The calls of one execution, in gateway order."""

    def __init__(self, execution: str = "g00000-000-x00", group: str = "g00000-000") -> None:
        self.execution, self.group = execution, group
        self.records: list[CallRecorded] = []
        self.sequences: list[list[int]] = []

    def call(self, prompt: Sequence[int], output: Sequence[int], *, logprobs: Sequence[float] | None = None,
             version: int = 0, base: int | None = None, **fields: Any) -> "Script":
        """Add one call; returns the script, so that calls can be chained. `base` names the call it continues."""
        base, keep = self._base(list(prompt), range(len(self.sequences)) if base is None else [base])
        index = len(self.records)
        values = np.array([-0.01 * (t + 1) for t in range(len(output))] if logprobs is None else logprobs, np.float32)
        spans = (VersionSpan(0, len(output), version),) if output else ()
        record = CallRecorded(
            execution=self.execution, group=self.group, call=call_id(self.execution, index), index=index,
            base_call=None if base is None else self.records[base].call, keep_len=keep, prompt_len=len(prompt),
            prompt_delta=np.array(prompt[keep:], np.int32), output_ids=np.array(output, np.int32), logprobs=values,
            behaviour_logprobs=values, spans=spans, finish_reason="stop",
            digest=token_digest(np.array([*prompt, *output], np.int32)))
        self.records.append(replace(record, **fields))
        self.sequences.append([*prompt, *output])
        return self

    def _base(self, prompt: list[int], candidates: Iterable[int]) -> tuple[int | None, int]:
        best, keep = None, 0
        for number in candidates:
            sequence, common = (self.sequences[number] if number >= 0 else []), 0
            while common < min(len(sequence), len(prompt)) and sequence[common] == prompt[common]:
                common += 1
            if common > keep or (common == keep and keep):
                best, keep = number, common
        return best, keep

    def log(self) -> CallLog:
        log = CallLog()
        for record in self.records:
            log.add(record)
        return log

    def calls(self) -> tuple[Call, ...]:
        log = self.log()
        assert log.refusal is None, log.refusal
        return log.ordered()

    def tree(self) -> Tree:
        return build_tree(self.calls())


class Story:
    """The facts of one group, whatever the order in which they are told."""

    def __init__(self, scripts: Sequence[Script], rewards: Sequence[float], purpose: str = "train") -> None:
        self.scripts, self.group = scripts, scripts[0].group
        specs = tuple(ExecutionSpec(s.execution, 0, 60.0, 120.0) for s in scripts)
        self.dispatched = GroupDispatched(self.group, 0, "q0", "task", purpose, 3, specs, "label")  # type: ignore[arg-type]
        self.ends = [self.end(s) for s in scripts]
        self.verdicts = [self.verdict(s, r) for s, r in zip(scripts, rewards, strict=True)]

    def end(self, script: Script, **fields: Any) -> ExecutionTerminated:
        end = ExecutionTerminated(script.execution, self.group, "q0", "train", "finished", len(script.records), 1.0,
                                  BlobRef("snapshots/x", "0" * 32, 1))
        return replace(end, **fields)

    def verdict(self, script: Script, reward: float, **fields: Any) -> ExecutionScored:
        return replace(ExecutionScored(script.execution, self.group, reward, 1, 2, "evaluator-0"), **fields)

    def facts(self) -> list[Any]:
        records = [record for s in self.scripts for record in s.records]
        return [self.dispatched, *records, *self.ends, *self.verdicts]


def settings(**fields: Any) -> TrajectoryConfig:
    """The service's settings in tests."""
    default = TrajectoryConfig("run", "policy", 5, ROLE_ORDERS["paper"], "grpo", Budget(4096, 4_000_000, 1.0, 0.001))
    return replace(default, **fields)


def random_calls(seed: int, max_calls: int = 14, num_ids: int = 3) -> Script:
    """An execution that continues, forks, rolls back, resamples, compacts and delegates."""
    rng = random.Random(seed)
    calls = Script(f"x{seed}")
    for _ in range(rng.randint(1, max_calls)):
        prompt: list[int] = []
        if calls.sequences and rng.random() < 0.85:
            earlier = rng.choice(calls.sequences)
            prompt = earlier[:len(earlier) if rng.random() < 0.6 else rng.randint(0, len(earlier))]
        prompt = [*prompt, *(rng.randrange(num_ids) for _ in range(rng.randint(0, 5)))]
        output = [rng.randrange(num_ids) for _ in range(rng.randint(0, 6))]
        cut = rng.randint(0, len(output))
        spans = tuple(s for s in (VersionSpan(0, cut, 7), VersionSpan(cut, len(output), 8)) if s.end > s.start)
        calls.call(prompt, output, logprobs=[-rng.random() for _ in output], spans=spans,
                   role_class=rng.choice(ROLE_ORDERS["paper"]), model=rng.choice(["policy", "policy", "policy", "judge"]),
                   finish_reason=rng.choice(["stop", "stop", "length", "abort"]))
    return calls


class RecordedRoles:
    """The role class that is written in the record: for tests of what comes after roles."""

    def classify(self, calls: Sequence[Call]) -> tuple[CallRole, ...]:
        return tuple(CallRole(call.record.role_class, call.record.lineage, "harness") for call in calls)


POLICY = Eligibility("policy")
