"""Stand-ins for rollout tests: a ChatML byte tokenizer, a scripted engine, a gateway without a service behind it."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from gyre.contracts.digest import token_digest
from gyre.contracts.events import Sampling
from gyre.policy.tokenizer import ChatTokenizer
from gyre.rollout.attempt import Attempt, Chunk, EngineGone
from gyre.rollout.gateway.archive import ArchivedCall, CallArchive
from gyre.rollout.gateway.calls import Calls, CallSettings
from gyre.rollout.gateway.evidence import Evidence
from gyre.rollout.gateway.messages import Answer, ChatRequest, Message
from gyre.rollout.gateway.render import Renderer
from gyre.rollout.gateway.render import Tokenizer as GatewayTokenizer
from gyre.rollout.gateway.session import Session, Sessions, SessionSpec
from gyre.rollout.router import Router, RouterLimits
from gyre.runtime.clock import Clock, SystemClock
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# The shape of Qwen's template: tools in the system turn, tool calls as Hermes blocks, tool results in a user turn.
TEMPLATE = """{%- if tools %}{{ "<|im_start|>system\\n# Tools\\n" }}
{%- for tool in tools %}{{ tool | tojson }}{{ "\\n" }}{% endfor %}{{ "<|im_end|>\\n" }}{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}
{%- if loop.first or loop.previtem.role != "tool" %}{{ "<|im_start|>user" }}{% endif %}
{{- "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
{%- if loop.last or loop.nextitem.role != "tool" %}{{ "<|im_end|>\\n" }}{% endif %}
{%- else %}
{{- "<|im_start|>" + message.role + "\\n" + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- "<|im_end|>\\n" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""
SPECIAL = ("<|im_start|>", "<|im_end|>")
MERGES = (("e", "r"), ("u", "s"), ("us", "er"), ("l", "l"), ("o", "k"), ("Ċ", "Ċ"))


def chatml_tokenizer(template: str = TEMPLATE) -> ChatTokenizer:
    """Bytes plus a few merges, so that tokenising a text in two halves differs from tokenising it whole."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*alphabet, *(a + b for a, b in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(vocabulary)}, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return ChatTokenizer(tokenizer, template, {"eos_token": SPECIAL[1]})


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Look at other processes until `condition` holds. Raises AssertionError when they take too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        threading.Event().wait(0.01)


Script = Callable[[Attempt], Sequence[int]]


class FakeEngine:
    """Says `script(attempt)`, the whole output; a replay continues where the tries before it ended.

    `die_after` ids the engine is gone; while `gate` is clear nothing is said.
    """

    def __init__(self, script: Script, version: int = 0, chunk: int = 4, die_after: int | None = None) -> None:
        self.script, self.version, self.chunk, self.die_after = script, version, chunk, die_after
        self.attempts: list[Attempt] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.said = asyncio.Event()

    async def generate(self, attempt: Attempt) -> AsyncIterator[Chunk]:
        self.attempts.append(attempt)
        ids = list(self.script(attempt))[:attempt.num_emitted + attempt.max_tokens]
        finish = "stop" if ids and ids[-1] in attempt.stop_ids else "length"
        for start in range(attempt.num_emitted, len(ids), self.chunk):
            if self.die_after is not None and start >= self.die_after:
                raise EngineGone("killed")
            await self.gate.wait()
            part = np.asarray(ids[start:start + self.chunk], np.int32)
            last = start + self.chunk >= len(ids)
            logprobs = np.full(len(part), -0.5, np.float32)
            yield Chunk(start, part, logprobs, logprobs * 2, (self.version,) * len(part), finish if last else "")
            self.said.set()
            await asyncio.sleep(0)


def says(tokenizer: ChatTokenizer, *texts: str) -> Script:
    """Each new call is answered the next text and the stop token; the last text is repeated."""
    numbers: dict[str, int] = {}

    def script(attempt: Attempt) -> Sequence[int]:
        number = numbers.setdefault(attempt.request_id.partition(".")[0], len(numbers))
        return [*tokenizer.encode(texts[min(number, len(texts) - 1)]), tokenizer.eos_id]

    return script


@dataclass
class Bench:
    """A gateway without a service behind it: `records` are the calls that were committed while `commits` was set."""

    tokenizer: GatewayTokenizer
    engine: FakeEngine
    router: Router
    archive: CallArchive
    sessions: Sessions
    calls: Calls
    records: list[ArchivedCall] = field(default_factory=list)
    limits_fired: list[str] = field(default_factory=list)
    refuse_commits: bool = False
    commits: asyncio.Event = field(default_factory=asyncio.Event)
    commit_asked: asyncio.Event = field(default_factory=asyncio.Event)

    def open(self, execution: str = "g00000-000-x00", timeout_calls: int | None = None) -> Session:
        """The session of an execution, opened if it is not."""
        self.sessions.open(SessionSpec(execution, execution.rpartition("-")[0], 7, Sampling(), timeout_calls))
        session = self.sessions.get(execution)
        assert session is not None
        return session


def make_bench(directory: Path, *texts: str, clock: Clock | None = None, settings: CallSettings | None = None,
               engine: FakeEngine | None = None, tokenizer: GatewayTokenizer | None = None) -> Bench:
    """A gateway whose one engine answers `texts` in turn. Needs a running event loop."""
    tokenizer = tokenizer or chatml_tokenizer()
    engine = engine or FakeEngine(says(tokenizer, *texts))
    clock = clock or SystemClock()
    router = Router({0: engine}, RouterLimits(), clock)
    router.set_admitting(0, True)
    archive = CallArchive(directory / "calls.sqlite", "process")

    async def commit(call: ArchivedCall) -> bool:
        bench.commit_asked.set()
        await bench.commits.wait()
        if not bench.refuse_commits:
            bench.records.append(call)
        return not bench.refuse_commits

    async def fire(execution: str) -> None:
        bench.limits_fired.append(execution)

    calls = Calls(settings or CallSettings(), Renderer(tokenizer), router, archive, commit, fire, clock)
    bench = Bench(tokenizer, engine, router, archive, Sessions(b"k" * 32, archive), calls)
    bench.commits.set()
    return bench


async def ask(bench: Bench, messages: Sequence[Message], tools: tuple = (), evidence: Evidence | None = None,
              deliver: bool = True, **changes: object) -> Answer:
    """The answer to `messages`; with `deliver` the harness gets it."""
    session = bench.open()
    key, pending = bench.calls.start(session, replace(ChatRequest(tuple(messages), tools), **changes),
                                     evidence or Evidence())
    answer = await pending.result
    if deliver:
        session.delivered(key)
    return answer


def sequences(bench: Bench) -> dict[str, np.ndarray]:
    """Prompt + output of every recorded call, rebuilt from the deltas alone as the trajectory service does."""
    built: dict[str, np.ndarray] = {}
    for call in bench.records:
        record = call.record
        base = built[record.base_call][:record.keep_len] if record.base_call else record.prompt_delta[:0]
        built[record.call] = np.concatenate((base, record.prompt_delta, record.output_ids))
        assert token_digest(built[record.call]) == record.digest
        assert record.keep_len + len(record.prompt_delta) == record.prompt_len
    return built
