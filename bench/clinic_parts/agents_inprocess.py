"""The clinic with sub-agents without processes, files or HTTP: patterns instead of modules, for quick searches."""

from __future__ import annotations

from collections.abc import Generator as Steps
from dataclasses import dataclass

from agents_harness import (
    COMMANDS_PER_CONTEXT,
    DIRECTORIES,
    NOBODY,
    NUM_COMMANDS,
    NUM_TURNS,
    REPORT_TOKENS,
    SUMMARY_TOKENS,
    TURN_TOKENS,
    TURNS_PER_CONTEXT,
)
from agents_policy import CALL, CALL_END
from clinic_parts.generation import Generator, Request
from clinic_parts.learning import Context, Execution
from gyre.policy.tokenizer import ChatTokenizer
from harness import next_failing
from tasks import INSTRUCTION


@dataclass(frozen=True)
class Ask:
    """One call: a context, what it is given before the model answers, and how much it may answer."""

    context: Context
    max_tokens: int


class Clinic:
    """One execution in memory; `steps` yields calls and is sent the texts of their answers."""

    def __init__(self, tokenizer: ChatTokenizer, pattern: tuple[int, ...], blank_summaries: bool) -> None:
        self.tokenizer, self.before, self.blank_summaries = tokenizer, pattern, blank_summaries
        names = "".join(DIRECTORIES.values())
        self.state = dict(zip(names, pattern, strict=True))
        self.contexts: list[Context] = []
        self.num_delegated = 0

    @property
    def reward(self) -> float:
        pairs = [(b, s) for b, s in zip(self.before, self.state.values(), strict=True) if b]
        return sum(s == 0 for _, s in pairs) / len(pairs)

    def num_failing(self, directory: str) -> str:
        return str(sum(self.state[n] > 0 for n in DIRECTORIES[directory]) or ".")

    def steps(self) -> Steps[Ask, str, None]:
        counts = {name: self.num_failing(name) for name in DIRECTORIES}
        overview = " ".join(f"{name} {count}" if count != "." else ". ." for name, count in counts.items())
        context = self.fresh(f"<|user|> {INSTRUCTION} {overview} <|end|>")
        for number in range(1, NUM_TURNS + 1):
            reply = yield Ask(context, TURN_TOKENS)
            words = reply.removeprefix(CALL).removesuffix(CALL_END).split()
            nowhere, name = NOBODY
            if reply.startswith(CALL) and reply.endswith(CALL_END):
                told = nowhere
                if len(words) == 1 and words[0] in DIRECTORIES:
                    name = words[0]
                    told = yield from self.sub_agent(name)
                outcome = f"<|tool|> {told} <|end|>"
            else:
                done = self.obey(reply.split(), "".join(DIRECTORIES.values()))
                name = next((d for d, names in DIRECTORIES.items() if done and done[0] in names), name)
                outcome = f"<|user|> {f'{name} {self.num_failing(name)}' if done else nowhere} <|end|>"
            following = next_failing(name, {each: self.num_failing(each) for each in DIRECTORIES})
            compact = " compact" if number % TURNS_PER_CONTEXT == 0 and number < NUM_TURNS else ""
            self.given(context, f"{outcome} <|user|> {following}{compact} <|end|>")
            if compact:
                summary = yield Ask(context, SUMMARY_TOKENS)
                context = self.fresh(f"<|user|> {INSTRUCTION} {self.kept(summary)} <|end|>")

    def sub_agent(self, directory: str) -> Steps[Ask, str, str]:
        """A sub-agent's calls; what it says last."""
        self.num_delegated += 1
        task, names = f"repair {directory} now", DIRECTORIES[directory]
        report = " ".join(f"{name} {self.state[name] or '.'}" for name in names)
        context = self.fresh(f"<|system|> modules {report} <|end|> <|user|> {task} <|end|>")
        for number in range(1, NUM_COMMANDS + 1):
            command = yield Ask(context, TURN_TOKENS)
            told = self.obey(command.split(), names) or f"? ? {self.following(names[-1], names)}"
            after = {COMMANDS_PER_CONTEXT: " compact", NUM_COMMANDS: " report"}.get(number, "")
            self.given(context, f"<|user|> {told}{after} <|end|>")
            if number == COMMANDS_PER_CONTEXT:
                summary = yield Ask(context, SUMMARY_TOKENS)
                context = self.fresh(f"<|system|> modules <|end|> <|user|> {task} {self.kept(summary)} <|end|>")
        return (yield Ask(context, REPORT_TOKENS))

    def kept(self, summary: str) -> str:
        return "" if self.blank_summaries else summary

    def obey(self, words: list[str], names: str) -> str:
        """The observation; empty for a malformed command."""
        if len(words) != 3 or words[0] != "F" or words[1] not in list(names) or words[2] not in list("1234"):
            return ""
        if self.state[words[1]] == int(words[2]):
            self.state[words[1]] = 0
        return f"{words[1]} {self.state[words[1]] or '.'} {self.following(words[1], names)}"

    def following(self, name: str, names: str) -> str:
        place = names.index(name) + 1
        return next((n for n in names[place:] + names[:place] if self.state[n]), ".")

    def fresh(self, text: str) -> Context:
        self.contexts.append(Context())
        self.given(self.contexts[-1], text)
        return self.contexts[-1]

    def given(self, context: Context, text: str) -> None:
        """Appends what the model did not write, closing its last answer if it was cut off."""
        stop = self.tokenizer.stop_ids[0]
        if context.ids and context.sampled[-1] and context.ids[-1] != stop:
            context.given([stop])
        context.given(self.tokenizer.encode(text))


def run(
    generator: Generator,
    tokenizer: ChatTokenizer,
    patterns: list[tuple[int, ...]],
    kills: list[int | None],
    blank_summaries: bool = False,
) -> tuple[list[Execution], float]:
    """Runs one execution a pattern to its end, all together; and the mean number of sub-agents of one.

    Blank summaries show what their content is worth.
    """
    generator.reset()
    opening = tokenizer.encode("<|assistant|>")
    clinics = [Clinic(tokenizer, pattern, blank_summaries) for pattern in patterns]
    steps = [clinic.steps() for clinic in clinics]
    num_calls = [0] * len(clinics)
    asked: dict[int, Ask] = {}

    def submit(slot: int, text: str | None) -> None:
        try:
            ask = steps[slot].send(text)
        except StopIteration:
            asked.pop(slot, None)
            return
        num_calls[slot] += 1
        if num_calls[slot] == kills[slot]:
            asked.pop(slot, None)
            return
        ask.context.given(opening)
        asked[slot] = ask
        generator.submit(Request(slot, list(ask.context.ids), ask.max_tokens))

    for slot in range(len(clinics)):
        submit(slot, None)
    while asked:
        for request in generator.step():
            asked[request.slot].context.answered(request.output, request.logprobs)
            submit(request.slot, tokenizer.decode(request.output, skip_special_tokens=True))
    executions = [Execution([c for c in clinic.contexts if any(c.sampled)], clinic.reward) for clinic in clinics]
    return executions, sum(clinic.num_delegated for clinic in clinics) / len(clinics)
