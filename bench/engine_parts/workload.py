"""What every contender serves: agents whose every prompt extends the context before.

Its proportions are those of recorded coding agents (710 sessions, 49,334 calls of `callanjfox/kv-cache-tester`, see DESIGN.md):
there a context grows by 2.0 (median) to 3.3 (mean) tokens per answer token, the answer included, and a session reads 246
prompt tokens per answer token (median; 86 in the lowest tenth). Here it grows by 3.2 and reads about 65, because sessions are
short enough for a bench: fewer than in nine tenths of the recorded ones, which favours those that compute contexts again.

All sessions of all jobs share one system prompt, as in a service that has run for a while. Each has a task of its own and
then turns: the contender's own answer and a tool's output of prescribed ids and length follow the prompt before. Answers are
greedy, never end early and have one length, so that everybody computes the same tokens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

SYSTEM_TOKENS = 1280
TASK_TOKENS = (64, 128)
TOOL_TOKENS = (16, 88)


@dataclass(frozen=True)
class Job:
    """`prompts`: the first prompt of every session; `tools[session][turn]`: the ids between an answer and the next one."""

    prompts: list[list[int]]
    tools: list[list[list[int]]]
    num_answer: int

    @property
    def num_tokens(self) -> int:
        """Answer tokens in all."""
        return sum(len(tools) + 1 for tools in self.tools) * self.num_answer

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all calls, shared or not."""
        total = 0
        for prompt, tools in zip(self.prompts, self.tools, strict=True):
            length = total_of_session = len(prompt)
            for tool in tools:
                length += self.num_answer + len(tool)
                total_of_session += length
            total += total_of_session
        return total

    def to_wire(self) -> dict:
        """For JSON."""
        return asdict(self)


def agentic(seed: int, num_live: int, num_turns: int, num_answer: int, num_vocab: int) -> Job:
    """`num_live` sessions at the same time. Equal arguments give equal jobs."""
    rng = np.random.default_rng([seed, num_live])

    def ids(count: int) -> list[int]:
        return rng.integers(2, num_vocab, count).tolist()

    def between(bounds: tuple[int, int]) -> int:
        return int(rng.integers(bounds[0], bounds[1] + 1))

    system = np.random.default_rng(0).integers(2, num_vocab, SYSTEM_TOKENS).tolist()
    prompts = [system + ids(between(TASK_TOKENS)) for _ in range(num_live)]
    tools = [[ids(between(TOOL_TOKENS)) for _ in range(num_turns - 1)] for _ in range(num_live)]
    return Job(prompts, tools, num_answer)


def together(seed: int, num_live: int, num_context: int, num_answer: int, num_vocab: int) -> Job:
    """One turn of `num_live` sessions with equally long contexts: for what a decode step costs."""
    rng = np.random.default_rng([seed, num_live, num_context])
    prompts = rng.integers(2, num_vocab, (num_live, num_context)).tolist()
    return Job(prompts, [[] for _ in range(num_live)], num_answer)
