"""The clinic with sub-agents without processes, files or HTTP: patterns instead of modules, for quick searches."""

from __future__ import annotations

from collections.abc import Generator as Steps
from dataclasses import dataclass

from agents_policy import CALL, CALL_END
from agents_tasks import DIRECTORIES
from clinic_parts.generation import Generator, Request
from clinic_parts.learning import Context, Execution
from gyre.policy.tokenizer import ChatTokenizer
from tasks import INSTRUCTION


@dataclass(frozen=True)
class Rules:
    """How long an execution is."""

    turns: int = 4
    turns_per_context: int = 2
    commands: int = 4
    commands_per_context: int = 2


@dataclass(frozen=True)
class Ask:
    """One call: a context, what it is given before the model answers, and how much it may answer."""

    context: Context
    max_tokens: int


class Clinic:
    """One execution in memory; `steps` yields calls and is sent the texts of their answers."""

    def __init__(self, tokenizer: ChatTokenizer, pattern: tuple[int, ...], rules: Rules, blank: bool = False) -> None:
        self.tokenizer, self.rules, self.before, self.blank = tokenizer, rules, pattern, blank
        names = "".join(DIRECTORIES.values())
        self.state = dict(zip(names, pattern, strict=True))
        self.contexts: list[Context] = []
        self.num_delegated = 0

    @property
    def reward(self) -> float:
        pairs = [(b, s) for b, s in zip(self.before, self.state.values(), strict=True) if b]
        return sum(s == 0 for _, s in pairs) / len(pairs)

    def counted(self, directory: str) -> str:
        return f"{directory} {sum(self.state[n] > 0 for n in DIRECTORIES[directory]) or '.'}"

    def steps(self) -> Steps[Ask, str, None]:
        report = " ".join(self.counted(directory) for directory in DIRECTORIES)
        context = self.fresh(f"<|user|> {INSTRUCTION} {report} <|end|>")
        for number in range(1, self.rules.turns + 1):
            reply = yield Ask(context, 4)
            words = reply.split()
            if reply.startswith(CALL) and len(reply.split(CALL_END)) == 2 and reply.endswith(CALL_END):
                task = "repair" + reply[len(CALL) : -len(CALL_END)] + "now"
                outcome = yield from self.sub_agent(task)
                self.given(context, f"<|tool|> {outcome} <|end|>")
            else:
                told = "? ?"
                if self.obey(words, "".join(DIRECTORIES.values())):
                    told = self.counted(next(d for d, names in DIRECTORIES.items() if words[1] in names))
                self.given(context, f"<|user|> {told} <|end|>")
            if number % self.rules.turns_per_context == 0 and number < self.rules.turns:
                self.given(context, "<|user|> compact <|end|>")
                summary = yield Ask(context, 7)
                context = self.fresh(f"<|user|> {INSTRUCTION} {'' if self.blank else summary} <|end|>")

    def sub_agent(self, task: str) -> Steps[Ask, str, str]:
        directory = task.split()[1] if len(task.split()) == 3 else ""
        if directory not in DIRECTORIES:
            return "? ?"
        self.num_delegated += 1
        names = DIRECTORIES[directory]
        report = " ".join(f"{n} {self.state[n] or '.'}" for n in names)
        context = self.fresh(f"<|system|> modules {report} <|end|> <|user|> {task} <|end|>")
        for number in range(1, self.rules.commands + 1):
            words = (yield Ask(context, 4)).split()
            told = self.obey(words, names)
            last = number == self.rules.commands
            compact = number % self.rules.commands_per_context == 0 and not last
            self.given(context, f"<|user|> {told or '? ? ' + self.following(names[-1], names)}"
                                f"{' compact' if compact else ' report' if last else ''} <|end|>")
            if compact:
                summary = yield Ask(context, 7)
                context = self.fresh(f"<|system|> modules <|end|> <|user|> {task} {'' if self.blank else summary} <|end|>")
        return (yield Ask(context, 3))

    def obey(self, words: list[str], names: str) -> str:
        """The observation; empty for a malformed command."""
        if len(words) != 3 or words[0] != "F" or words[1] not in names or len(words[1]) != 1 or words[2] not in "1234":
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
    generator: Generator, tokenizer: ChatTokenizer, patterns: list[tuple[int, ...]], kills: list[int | None], rules: Rules,
    blank: bool = False,
) -> tuple[list[Execution], float, float]:
    """Runs one execution a pattern to its end, all together; also mean delegations and calls of an execution."""
    generator.reset()
    opening = tokenizer.encode("<|assistant|>")
    clinics = [Clinic(tokenizer, pattern, rules, blank) for pattern in patterns]
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
    return executions, sum(c.num_delegated for c in clinics) / len(clinics), sum(num_calls) / len(clinics)
