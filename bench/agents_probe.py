"""Can the policy of the clinic with sub-agents learn within its run? In one process, on patterns: a quick search.

    python bench/agents_probe.py --seeds 3

The last line reads: agents_probe gain=... before=... after=... steps=... seeds=...
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from statistics import fmean

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples" / "clinic-agents"), str(ROOT / "examples" / "clinic"), str(ROOT / "bench")]

import agents_tasks  # noqa: E402
import agents_warmstart  # noqa: E402
import warmstart  # noqa: E402
from clinic_parts import agents_inprocess  # noqa: E402
from clinic_parts.generation import Generator  # noqa: E402
from clinic_parts.inprocess import draw_kills  # noqa: E402
from clinic_parts.learning import Learner, Recipe, set_advantages  # noqa: E402
from gyre.policy.checkpoint import load_decoder  # noqa: E402
from gyre.policy.tokenizer import ChatTokenizer  # noqa: E402

GROUPS, GROUP_SIZE, EVAL_TASKS = 8, 8, 64
KILLS = (0.33, 12, 22)  # share, and between which calls: clinic-agents.toml


class Trial:
    """The policy and its optimizer under one seed."""

    def __init__(self, policy: Path, seed: int, recipe: Recipe, blank_summaries: bool) -> None:
        self.tokenizer = ChatTokenizer.load(policy)
        self.learner = Learner(load_decoder(policy), recipe)
        self.generator = Generator(self.learner.decoder, GROUPS * GROUP_SIZE, seed, self.tokenizer.stop_ids[0])
        self.rng, self.seed, self.blank_summaries = random.Random(seed), seed, blank_summaries

    def run(self, steps: int) -> tuple[float, float]:
        """Held-out reward before and after."""
        before, _ = self.evaluate()
        for step in range(steps):
            reward, delegated = self.train_step(step)
            if (step + 1) % 4 == 0:
                print(f"seed {self.seed} step {step + 1} train reward {reward:.3f} sub-agents {delegated:.2f}", flush=True)
        return before, self.evaluate()[0]

    def train_step(self, step: int) -> tuple[float, float]:
        numbers = range(step * GROUPS, (step + 1) * GROUPS)
        patterns = [agents_tasks.generate(self.seed, "train", n).pattern for n in numbers for _ in range(GROUP_SIZE)]
        kills = draw_kills(self.rng, len(patterns), *KILLS)
        executions, delegated = agents_inprocess.run(
            self.generator, self.tokenizer, patterns, kills, self.blank_summaries
        )
        for start in range(0, len(executions), GROUP_SIZE):
            set_advantages(executions[start : start + GROUP_SIZE], self.learner.recipe.advantage)
        self.learner.update(executions)
        return fmean(execution.reward for execution in executions), delegated

    def evaluate(self) -> tuple[float, float]:
        patterns = [agents_tasks.generate(0, "held-out", number).pattern for number in range(EVAL_TASKS)]
        executions, delegated = agents_inprocess.run(
            self.generator, self.tokenizer, patterns, [None] * EVAL_TASKS, self.blank_summaries
        )
        return fmean(execution.reward for execution in executions), delegated


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--blank-summaries", action="store_true", help="compact to nothing")
    parser.add_argument("--room", type=Path, default=ROOT / "runs" / "agents_probe")
    return parser.parse_args()


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    policy = options.room / "policy"
    warmstart.build(policy, agents_warmstart.course(), agents_warmstart.SETTINGS, log=True)
    found: list[tuple[float, float]] = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        recipe = Recipe(learning_rate=options.learning_rate)
        found.append(Trial(policy, seed, recipe, options.blank_summaries).run(options.steps))
        print(f"seed {seed}: before {found[-1][0]:.3f} after {found[-1][1]:.3f}", flush=True)
    before, after = (fmean(values) for values in zip(*found, strict=True))
    print(f"agents_probe gain={after - before:.3f} before={before:.3f} after={after:.3f} "
          f"steps={options.steps} seeds={options.seeds}")


if __name__ == "__main__":
    main()
