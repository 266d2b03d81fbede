"""`gyre-rollout serve` and its engines as real processes on a real NATS server, with scripted engines."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gyre.contracts.codec import decode
from gyre.contracts.events import CellRoleAssigned, EvaluationRequested, ExecutionSpec, Fact, GroupDispatched, WeightsPublished
from gyre.contracts.subjects import BY_RECORD, EVAL, Stream, filter_of, message_id, subject_of
from gyre.policy.config import PolicyConfig
from gyre.runtime.blobs import DirectoryBlobs
from gyre.runtime.bus import Bus
from gyre.runtime.service import encode_fact
from rollout_fakes import chatml_tokenizer

RUN = "test"
# Asks `calls` times, one after another, keeps the conversation, writes what it heard.
HARNESS = """
import http.client, json, os, sys, time, urllib.error, urllib.request
messages = [{"role": "user", "content": open(os.environ["GYRE_TASK_INSTRUCTION"]).read()}]
for turn in range(int(sys.argv[1])):
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": int(sys.argv[2])}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {
        "Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    while True:
        try:
            message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
            break
        except urllib.error.HTTPError:
            raise
        except (OSError, ValueError, http.client.HTTPException):
            time.sleep(0.2)
    messages += [message, {"role": "user", "content": f"turn {turn}"}]
    open("heard.json", "w").write(json.dumps(messages))
"""


@dataclass
class RolloutStage:
    """One run's processes. `ports`: gateway, rollout, then one for each engine."""

    root: Path
    nats_url: str
    ports: Sequence[int]
    num_calls: int = 4
    max_tokens: int = 8
    token_ms: float = 1.0
    max_concurrent: int = 64
    sandbox: str = "none"
    processes: dict[str, subprocess.Popen] = field(default_factory=dict)

    @property
    def num_cells(self) -> int:
        return len(self.ports) - 2

    def prepare(self) -> None:
        """Write task, checkpoint, harness, run.toml and deployment.toml."""
        task = self.root / "tasks" / "train" / "t"
        (task / "workspace").mkdir(parents=True)
        (task / "instruction.md").write_text("do it")
        (self.root / "harness.py").write_text(HARNESS)
        tokenizer = chatml_tokenizer()
        tokenizer.save(self.root / "checkpoint")
        policy = PolicyConfig("llama", tokenizer.vocab_size, 8, 8, 1, 1, 1, 8, eos_ids=tokenizer.stop_ids)
        (self.root / "checkpoint" / "config.json").write_text(json.dumps(policy.to_hf()))
        (self.root / "run.toml").write_text(f"""
name = "{RUN}"
[policy]
checkpoint = "checkpoint"
[tasks]
root = "tasks"
[cells]
count = {self.num_cells}
[engine]
backend = "scripted"
script_token_ms = {self.token_ms}
move_min_tokens = 8
[sampling]
max_context = 4096
[harness]
command = ["{{python}}", "-I", "-S", "{{config_dir}}/harness.py", "{self.num_calls}", "{self.max_tokens}"]
timeout_s = 60.0
overall_timeout_s = 120.0
max_concurrent = {self.max_concurrent}
sandbox = "{self.sandbox}"
tool_format = "plain"
""")
        (self.root / "deployment.toml").write_text(f"""
run = "{RUN}"
nats_url = "{self.nats_url}"
state_dir = "state"
cells_dir = "cells"
blobs = "blobs"
log_dir = "log"
checkpoint_dir = "checkpoints"
gateway_url = "http://127.0.0.1:{self.ports[0]}"
allow_unsandboxed = true
durability = "process"
engines = [{", ".join(endpoint(port) for port in self.ports[2:])}]
trainers = []
evaluators = []
transfers = []
gateway = {endpoint(self.ports[0])}
rollout = {endpoint(self.ports[1])}
scheduler = {endpoint(1)}
trajectory = {endpoint(1)}
""")

    def start(self, *names: str) -> None:
        """Start `serve`, `engine-0`, ... or all of them."""
        for name in names or ("serve", *(f"engine-{cell}" for cell in range(self.num_cells))):
            kind, _, cell = name.partition("-")
            command = [sys.executable, "-m", "gyre.rollout.main", kind, "--config", str(self.root / "run.toml"),
                       "--deployment", str(self.root / "deployment.toml"), *(["--cell", cell] if cell else [])]
            self.processes[name] = subprocess.Popen(command, env=os.environ | {"PYTHONUNBUFFERED": "1"})

    def kill(self, name: str) -> None:
        """kill -9."""
        self.processes[name].kill()
        self.processes[name].wait()

    def stop(self) -> None:
        """Stop everything that still runs."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(20)


def endpoint(port: int) -> str:
    """A process that listens where it is reached, as TOML."""
    return f'{{ listen = "127.0.0.1:{port}", address = "127.0.0.1:{port}" }}'


class Witness:
    """Says the facts of the other services and hears those of rollout."""

    def __init__(self, bus: Bus, blobs: DirectoryBlobs) -> None:
        self.bus = bus
        self.blobs = blobs
        self.requests: list[EvaluationRequested] = []

    async def say(self, *facts: Fact) -> None:
        """Publish as their owners would."""
        for fact in facts:
            body = encode_fact(fact, run=RUN, source="test", blobs=self.blobs)
            await self.bus.publish(subject_of(fact, RUN), body, message_id(fact, RUN))

    async def heard(self, *records: type) -> list[Fact]:
        """Every fact of these types that was said so far, by stream in order."""
        streams: dict[Stream, list[str]] = {}
        for record in records:
            streams.setdefault(BY_RECORD[record].stream, []).append(filter_of(RUN, record))
        return [decode(m.data)[1] for stream, filters in streams.items()
                for m in await self.bus.read_all(stream, filters)]

    async def take_requests(self) -> None:
        """Take evaluation requests off their work queue, for ever; `requests` are those taken so far."""
        async for batch in self.bus.share(EVAL, "witness", [filter_of(RUN, EvaluationRequested)]):
            for received in batch:
                self.requests.append(decode(received.data)[1])
                await received.ack()

    async def weights(self, version: int) -> None:
        await self.say(WeightsPublished(version, f"c{version}", 0, f"checkpoints/{version}"))

    async def role(self, cell: int, epoch: int, role: str, version: int) -> None:
        await self.say(CellRoleAssigned(cell, epoch, role, f"t{epoch}", version))

    async def dispatch(self, group: str, num: int, timeout_calls: int | None = None) -> list[str]:
        """A group of `num` executions of the one task; returns their ids."""
        ids = [f"{group}-x{i:02d}" for i in range(num)]
        specs = tuple(ExecutionSpec(i, 7, 60.0, 120.0, timeout_calls) for i in ids)
        await self.say(GroupDispatched(group, 0, "q", "train/t", "train", 0, specs))
        return ids
