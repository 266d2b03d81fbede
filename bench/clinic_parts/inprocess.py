"""The clinic without processes, files or HTTP: patterns instead of modules. For finding hyperparameters quickly."""

from __future__ import annotations

import random

from clinic_parts.generation import Generator, Request
from clinic_parts.learning import Context, Execution
from gyre.policy.tokenizer import ChatTokenizer
from harness import COMMAND_TOKENS, COMMANDS_PER_CONTEXT, NAMES, NUM_COMMANDS, SUMMARY_TOKENS, next_failing
from tasks import INSTRUCTION


class Patient:
    """One execution in memory; `prompt` is the next call's token ids, `answer` takes the model's output."""

    def __init__(
        self, tokenizer: ChatTokenizer, pattern: tuple[int, ...], kill_at: int | None, blank_summaries: bool
    ) -> None:
        self.tokenizer, self.kill_at, self.blank_summaries = tokenizer, kill_at, blank_summaries
        self.before, self.state = pattern, list(pattern)
        self.contexts: list[Context] = []
        self.num_calls = self.num_commands = 0
        self.summarising = False
        self.words: list[dict[str, str]] = []
        self.pending: list[int] = []
        self._fresh(" ".join(f"{n} {k or '.'}" for n, k in zip(NAMES, self.state, strict=True)))

    @property
    def ended(self) -> bool:
        return self.num_commands >= NUM_COMMANDS or self.num_calls + 1 == self.kill_at

    @property
    def max_tokens(self) -> int:
        return SUMMARY_TOKENS if self.summarising else COMMAND_TOKENS

    @property
    def reward(self) -> float:
        pairs = [(b, s) for b, s in zip(self.before, self.state, strict=True) if b]
        return sum(s == 0 for _, s in pairs) / len(pairs)

    def prompt(self) -> list[int]:
        return self.contexts[-1].ids + self.pending

    def answer(self, output: list[int], logprobs: list[float]) -> None:
        context = self.contexts[-1]
        context.given(self.pending)
        context.answered(output, logprobs)
        self.num_calls += 1
        text = self.tokenizer.decode(output, skip_special_tokens=True)
        closing = [] if output[-1] in self.tokenizer.stop_ids else list(self.tokenizer.stop_ids)
        if self.summarising:
            self.summarising = False
            self._fresh("" if self.blank_summaries else text)
            return
        self.num_commands += 1
        observation = self._obey(text)
        self.summarising = self.num_commands % COMMANDS_PER_CONTEXT == 0
        self.pending = closing + self._user(observation + (" compact" if self.summarising else ""))

    def _fresh(self, report: str) -> None:
        self.contexts.append(Context())
        self.pending = self._user(f"{INSTRUCTION} {report}")

    def _user(self, content: str) -> list[int]:
        return self.tokenizer.encode(f"<|user|> {content} <|end|> <|assistant|>")

    def _obey(self, command: str) -> str:
        states = {name: str(kind or ".") for name, kind in zip(NAMES, self.state, strict=True)}
        words = command.split()
        if len(words) != 3 or words[0] != "F" or words[1] not in states or words[2] not in ("1", "2", "3", "4"):
            return f"? ? {next_failing(NAMES[-1], states)}"
        name, kind = words[1], words[2]
        if states[name] == kind:
            self.state[NAMES.index(name)] = 0
            states[name] = "."
        return f"{name} {states[name]} {next_failing(name, states)}"


def run(
    generator: Generator,
    tokenizer: ChatTokenizer,
    patterns: list[tuple[int, ...]],
    kills: list[int | None],
    blank_summaries: bool = False,
) -> list[Execution]:
    """Runs one execution a pattern to its end, all together. Blank summaries show what their content is worth."""
    generator.reset()
    patients = [Patient(tokenizer, pattern, kill, blank_summaries) for pattern, kill in zip(patterns, kills, strict=True)]
    active = dict(enumerate(patients))
    for slot, patient in active.items():
        generator.submit(Request(slot, patient.prompt(), patient.max_tokens))
    while active:
        for request in generator.step():
            patient = active[request.slot]
            patient.answer(request.output, request.logprobs)
            if patient.ended:
                del active[request.slot]
            else:
                generator.submit(Request(request.slot, patient.prompt(), patient.max_tokens))
    return [Execution([c for c in p.contexts if c.ids], p.reward) for p in patients]


def draw_kills(rng: random.Random, num: int, share: float = 0.33, low: int = 5, high: int = 8) -> list[int | None]:
    """For a share of executions the call during which it is killed."""
    return [rng.randint(low, high) if rng.random() < share else None for _ in range(num)]
