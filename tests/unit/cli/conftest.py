"""A synthetic run: its facts with their times, and a run directory with tasks, trees, snapshots and a tokenizer.

Two cells, colocated: every burst of one step dispatches groups, ends them, trains them and publishes weights. Every
third training execution is ended by a limit. The books balance.
"""

import io
import json
import math
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from gyre.cli.treefile import Call, Header, TreeView, tree_path
from gyre.cli.treefile import Path as TreePath
from gyre.contracts import events as e
from gyre.contracts.codec import pack
from gyre.contracts.digest import token_digest
from gyre.contracts.ids import call_id, evaluation_group_id, execution_id, group_id, micro_step_id
from gyre.policy.tokenizer import ChatTokenizer
from gyre.runtime.blobs import BlobStore, DirectoryBlobs
from gyre.runtime.config import (
    Deployment,
    Endpoint,
    HarnessConfig,
    PolicyConfigRef,
    RunConfig,
    TasksConfig,
)
from gyre.runtime.settings import to_toml
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

BEGIN = 1_700_000_000.0
SPECIAL = ("<|unk|>", "<|end|>", "<|user|>", "<|assistant|>")
WORDS = (*SPECIAL, *"abcdef1234F.?", "compact", "repair", "the", "modules", "that", "fail", "<script>")
PROMPT, REPLY = "<|user|> repair the modules that fail a 3 b . <|end|> <|assistant|>", "F a 3 <|end|>"
ANSWER, AGAIN = "<|user|> a . <|end|> <|assistant|>", "F b 1 <|end|>"
SUMMARY = "a . b . c 1 <|end|>"
ids_of = {word: index for index, word in enumerate(WORDS)}
NUM_CALLS, NUM_SAMPLED = 3, len(REPLY.split()) + len(AGAIN.split()) + len(SUMMARY.split())


def spell(text: str) -> np.ndarray:
    return np.array([ids_of[word] for word in text.split()], np.int32)


@dataclass
class Recorder:
    """Facts in the order in which they are said, each with its time."""

    said: list[tuple[e.Fact, float]] = field(default_factory=list)
    now: float = BEGIN

    def say(self, fact: e.Fact, after: float = 0.05) -> None:
        self.now += after
        self.said.append((fact, round(self.now, 6)))


def calls_of(execution: str, group: str) -> list[e.CallRecorded]:
    """Two calls in one context, the second continuing the first, and a third in a context of its own."""
    found, base = [], None
    sequence = np.empty(0, np.int32)
    for index, (prompt, reply) in enumerate(((PROMPT, REPLY), (ANSWER, AGAIN), (PROMPT, SUMMARY))):
        fresh = index == 2
        keep = 0 if fresh else len(sequence)
        base = None if fresh else base
        delta, output = spell(prompt), spell(reply)
        prompt_ids = np.concatenate((sequence[:keep], delta))
        sequence = np.concatenate((prompt_ids, output))
        probability = np.full(len(output), -0.5, np.float32)
        name = call_id(execution, index)
        found.append(e.CallRecorded(execution, group, name, index, base, keep, len(prompt_ids), delta, output,
                                    probability, probability, (e.VersionSpan(0, len(output), 0),), "stop",
                                    token_digest(sequence)))
        base = name
    return found


def tree_of(execution: str) -> TreeView:
    """The tree of `calls_of`: both contexts begin with the same prompt, so it forks where their replies differ."""
    prompt, reply, answer, again, summary = map(spell, (PROMPT, REPLY, ANSWER, AGAIN, SUMMARY))
    segments = [prompt, np.concatenate((reply, answer, again)), summary]
    ids, bounds = np.concatenate(segments), np.cumsum([0, *map(len, segments)]).astype(np.int32)
    p, r, a, g, s = map(len, (prompt, reply, answer, again, summary))
    calls = tuple(Call(call_id(execution, i), i, call_id(execution, 0) if i == 1 else None, segment, start, length,
                       "main-summary" if i == 2 else "main", "main", "stop", (e.VersionSpan(0, length - start, 0),),
                       0 if i == 2 else start, "main", "harness")
                  for i, (segment, start, length) in enumerate(((1, p, p + r), (1, p + r + a, p + r + a + g),
                                                                (2, p, p + s))))
    target = np.concatenate((np.arange(p, p + r), np.arange(p + r + a, p + r + a + g),
                             np.arange(p + r + a + g, p + r + a + g + s))).astype(np.int32)
    outcome = e.Outcome(execution, "scored", "finished", 0.5, 0.1, 3, len(target), r + g, {"max_paths": s}, len(ids), 60,
                        len(target), roles={"main": e.RoleCounts(2, r + g, 1, r + g), "main-summary": e.RoleCounts(1, s)})
    return TreeView(ids, bounds, np.array([-1, 0, 0], np.int32), np.array([0, p, p], np.int32),
                    np.array([-1, 0, -1], np.int32), calls, (TreePath(1, "main", r + g),), target,
                    np.array([0] * r + [1] * g + [2] * s, np.int32), np.zeros(len(target), np.int32),
                    Header("train-0", execution.rpartition("-")[0], "train", "policy", outcome))


def snapshot_of(blobs: BlobStore | None, execution: str, text: str) -> e.BlobRef:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        entry = tarfile.TarInfo("a.py")
        entry.size = len(text.encode())
        tar.addfile(entry, io.BytesIO(text.encode()))
    path = f"workspaces/{execution}.tar"
    return blobs.put(path, buffer.getvalue()) if blobs else e.BlobRef(path, "0" * 32, 1)


@dataclass
class SyntheticRun:
    """Says the facts of a whole run; `blobs` gets trees and snapshots."""

    num_steps: int = 6
    num_groups: int = 2
    num_executions: int = 3
    num_held_out: int = 8
    blobs: BlobStore | None = None
    recorder: Recorder = field(default_factory=Recorder)
    epoch: int = 0

    def facts(self) -> list[tuple[e.Fact, float]]:
        say = self.recorder.say
        say(e.RunOpened("d" * 32, 0, 2))
        self._evaluate("before", 0, 0.3)
        for step in range(self.num_steps):
            self._burst(step)
        self._evaluate("after", self.num_steps, 0.8)
        say(e.RunClosed("completed", self.num_steps))
        return self.recorder.said

    def reward(self, step: int, place: int) -> float:
        learned = 0.3 + 0.5 * (1 - math.exp(-step / 15))
        return round(min(1.0, max(0.0, learned + 0.28 * math.sin(7.1 * place + 3.3 * step))), 3)

    def _evaluate(self, label: str, version: int, level: float) -> None:
        groups = []
        for index in range(self.num_held_out):
            name = evaluation_group_id(label, index)
            reward = round(min(1.0, max(0.0, level + 0.25 * math.sin(5.7 * index + version))), 3)
            groups.append((name, f"held-out/held-out-{index:04d}", [reward]))
        self._run_groups(groups, "eval", max(version - 1, -1), version, label)

    def _burst(self, step: int) -> None:
        say = self.recorder.say
        say(e.BurstOpened(step, step, 1))
        places = [(group_id(step, g), f"train/train-{step * self.num_groups + g:04d}",
                   [self.reward(step, g * self.num_executions + i) for i in range(self.num_executions)])
                  for g in range(self.num_groups)]
        completed = self._run_groups(places, "train", step, step)
        self.epoch += 1
        for cell in range(2):
            say(e.CellRoleAssigned(cell, self.epoch, "train", f"t-{cell}-{self.epoch}", step))
            say(e.CellRolloutReleased(cell, self.epoch), 0.1)
            say(e.CellTrainJoined(cell, self.epoch, step, step), 0.1)
        members = tuple(g.group for g in completed)
        refs = [ref for g in completed for ref in g.micro_steps]
        scored = tuple(o.execution for g in completed for o in g.outcomes if o.kind == "scored")
        say(e.StepSealed(step, members, tuple(r.micro_step for r in refs), len(scored)))
        metrics = {"ratio": 1.0, "clipped": 0.02 + 0.01 * math.sin(step), "abs_dlogp": 2e-6 * (1 + step % 3),
                   "kl_k3": 1e-9, "entropy": 1.1 - 0.01 * step, "ess": 0.97, "staleness": 0.25, "staleness_0": 0.75,
                   "staleness_1": 0.25}
        say(e.StepFinished(step, step + 1, 0, True, len(scored), sum(r.num_targets for r in refs), 400,
                           -0.01 * math.cos(step), 0.5 + 0.3 * math.sin(step), 3e-4, metrics,
                           {"0": len(refs) - 1, "1": 1}, scored), 1.2)
        say(e.WeightsPublished(step + 1, "c" * 32, step, f"checkpoints/{step + 1}"))
        self.epoch += 1
        for cell in range(2):
            say(e.CellRoleAssigned(cell, self.epoch, "rollout", f"t-{cell}-{self.epoch}", step + 1))
            say(e.CellTrainReleased(cell, self.epoch, step + 1), 0.1)
            say(e.CellRolloutReady(cell, self.epoch, step + 1, "c" * 32), 0.1)
        say(e.BurstClosed(step, step + 1))

    def _run_groups(self, places: list[tuple[str, str, list[float]]], purpose: e.Purpose, burst: int, version: int,
                    label: str = "") -> list[e.GroupCompleted]:
        say = self.recorder.say
        for name, task, rewards in places:
            specs = tuple(e.ExecutionSpec(execution_id(name, i), i, 60.0, 120.0, self._limit(purpose, i))
                          for i in range(len(rewards)))
            say(e.GroupDispatched(name, burst, task.replace("/", "-"), task, purpose, version, specs, label), 0.001)
        for name, task, rewards in places:
            for i, reward in enumerate(rewards):
                self._execute(execution_id(name, i), name, task, purpose, version, reward, self._limit(purpose, i))
        completed = [self._complete(name, task, purpose, burst, version, rewards, label)
                     for name, task, rewards in places]
        for group in completed:
            say(group)
        return completed

    def _limit(self, purpose: e.Purpose, place: int) -> int | None:
        return 4 if purpose == "train" and place % 3 == 2 else None

    def _execute(self, name: str, group: str, task: str, purpose: e.Purpose, version: int, reward: float,
                 limit: int | None) -> None:
        say = self.recorder.say
        say(e.ExecutionStarted(name, group, purpose, version), 0.02)
        for call in calls_of(name, group):
            say(call, 0.02)
        if self.blobs:
            self.blobs.put(tree_path(name), pack(tree_of(name)))
        say(e.ExecutionTerminated(
            name, group, task.replace("/", "-"), purpose, "timed_out" if limit else "finished", NUM_CALLS, 0.3,
            snapshot_of(self.blobs, name, "RATE = 7\n\ndef add(total, amount):\n    return total + amount\n"),
            "calls" if limit else "", num_harness_errors=1 if limit else 0))
        say(e.ExecutionScored(name, group, reward, int(10 * reward), 10, "evaluator-0"))

    def _complete(self, name: str, task: str, purpose: e.Purpose, burst: int, version: int, rewards: list[float],
                  label: str) -> e.GroupCompleted:
        mean = sum(rewards) / len(rewards)
        owned = len(REPLY.split()) + len(AGAIN.split())
        outcomes, refs = [], []
        for i, reward in enumerate(rewards):
            trains = purpose == "train"
            drops = {"max_paths": NUM_SAMPLED - owned} if trains else {"eval": NUM_SAMPLED}
            outcomes.append(e.Outcome(execution_id(name, i), "scored", "timed_out" if self._limit(purpose, i) else
                                      "finished", reward, reward - mean if trains else 0.0, NUM_CALLS, NUM_SAMPLED,
                                      owned if trains else 0, drops, 31, 60, NUM_SAMPLED))
            if trains:
                refs.append(e.MicroStepRef(micro_step_id(name, i), "e" * 32, 30.0, 31, owned, 1,
                                           e.BlobRef(f"micro-steps/{name}/{i}", "e" * 32, 100)))
        return e.GroupCompleted(name, burst, task.replace("/", "-"), purpose, version, tuple(outcomes), len(rewards),
                                mean, 0.1, tuple(refs), label)


@pytest.fixture
def facts() -> list[tuple[e.Fact, float]]:
    """A complete run of six steps."""
    return SyntheticRun().facts()


@dataclass(frozen=True)
class Written:
    """A run that lies in a directory."""

    path: Path
    config: RunConfig
    facts: list[tuple[e.Fact, float]]


def write_tokenizer(path: Path) -> None:
    tokenizer = Tokenizer(WordLevel(dict(ids_of), unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    ChatTokenizer(tokenizer, "{{ messages }}", {"eos_token": "<|end|>"}).save(path)


def write_run(path: Path, run: SyntheticRun) -> Written:
    """The directory of a run named `<b>odd</b>`, to see that it is escaped."""
    path.mkdir(parents=True, exist_ok=True)
    tasks, checkpoint = path / "tasks", path / "start"
    run.blobs = DirectoryBlobs(path / "blobs")
    facts = run.facts()
    for dispatched in (f for f, _ in facts if isinstance(f, e.GroupDispatched)):
        workspace = tasks / dispatched.task / "workspace"
        workspace.mkdir(parents=True, exist_ok=True)
        (workspace / "a.py").write_text("RATE = 7\n\ndef add(total, amount):\n    return total - amount  # <i>\n")
    write_tokenizer(checkpoint)
    config = RunConfig("clinic", PolicyConfigRef(str(checkpoint)), TasksConfig(str(tasks)), HarnessConfig(("agent",)),
                       steps=run.num_steps)
    end = Endpoint("unused:1", "unused:1")
    deployment = Deployment("clinic", "nats://unused:1", "state", "cells", "blobs", "logs", "checkpoints", end,
                            "http://unused:1", end, end, end, (end, end), (end, end), (end, end), (end, end))
    (path / "deployment.toml").write_text(to_toml(deployment))
    manifest = {"command": ["gyre", "train", "examples/clinic/clinic.toml", "--set", "name=<b>odd</b>"], "seed": 0,
                "commit": "0" * 40, "versions": {"torch": "2.13"}}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return Written(path, config, facts)


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """A complete run of six steps in a directory."""
    return write_run(tmp_path / "clinic", SyntheticRun())


@pytest.fixture
def synthetic() -> list[tuple[e.Fact, float]]:
    """The facts of a whole run of six steps of two groups."""
    return SyntheticRun().facts()
