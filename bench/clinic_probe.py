"""Can the clinic's policy learn within the demo's budget? The product's riskiest assumption, tried on the real parts.

Real harness processes over HTTP on real files, a grader process, executions killed at random, and the run's loss; only
the services between them are missing. `--in-process` leaves files, processes and HTTP out, for quick searches.

    python bench/clinic_probe.py --seeds 3

The last line reads: clinic_probe gain=... before=... after=... cpu_s_per_execution=... steps=... seeds=...
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples" / "clinic"), str(ROOT / "bench")]

import tasks  # noqa: E402
import warmstart  # noqa: E402
from clinic_parts import inprocess  # noqa: E402
from clinic_parts.generation import Generator  # noqa: E402
from clinic_parts.learning import Execution, Learner, Recipe, set_advantages  # noqa: E402
from clinic_parts.processes import Job, Ward, cpu_s  # noqa: E402
from grader import GraderWorker  # noqa: E402
from gyre.policy.checkpoint import load_decoder  # noqa: E402
from gyre.policy.tokenizer import ChatTokenizer  # noqa: E402


@dataclass(frozen=True)
class Plan:
    """One seed's run. ``groups`` B of ``group_size`` N executions are one step."""

    room: Path
    policy: Path
    seed: int
    steps: int
    eval_tasks: int
    in_process: bool
    blank_summaries: bool = False
    groups: int = 8
    group_size: int = 8


@dataclass(frozen=True)
class Outcome:
    """Held-out reward before and after, and CPU seconds of one training execution, everything included."""

    before: float
    after: float
    cpu_s_per_execution: float


class Trial:
    """The policy, its engine, its optimizer and the ward of one seed."""

    def __init__(self, plan: Plan, recipe: Recipe) -> None:
        self.plan, self.recipe = plan, recipe
        self.tokenizer = ChatTokenizer.load(plan.policy)
        self.learner = Learner(load_decoder(plan.policy), recipe)
        slots = max(plan.groups * plan.group_size, plan.eval_tasks)
        self.generator = Generator(self.learner.decoder, slots, plan.seed, self.tokenizer.stop_ids[0])
        self.worker = GraderWorker()
        self.rng = random.Random(plan.seed)
        self.num_queries = 0

    def run(self) -> Outcome:
        before = self.evaluate()
        started, clock = cpu_s(self.worker), time.perf_counter()
        for step in range(1, self.plan.steps + 1):
            reward = self.train_step()
            if step % 5 == 0:
                pace = (time.perf_counter() - clock) / step
                print(f"seed {self.plan.seed} step {step} train reward {reward:.3f} {pace:.2f} s/step", flush=True)
        used = cpu_s(self.worker) - started
        after = self.evaluate()
        self.worker.close()
        return Outcome(before, after, used / (self.plan.steps * self.plan.groups * self.plan.group_size))

    def train_step(self) -> float:
        """One group for each of B new queries, then one update; the mean reward."""
        numbers = range(self.num_queries, self.num_queries + self.plan.groups)
        self.num_queries += self.plan.groups
        queries = [tasks.generate(self.plan.seed, "train", n) for n in numbers for _ in range(self.plan.group_size)]
        executions = self.execute(queries, inprocess.draw_kills(self.rng, len(queries)))
        for start in range(0, len(executions), self.plan.group_size):
            set_advantages(executions[start : start + self.plan.group_size], self.recipe.advantage)
        self.learner.update(executions)
        return _mean_reward(executions)

    def evaluate(self) -> float:
        """Held-out reward at temperature 1; nothing is killed. The same tasks for every seed."""
        queries = [tasks.generate(0, "held-out", number) for number in range(self.plan.eval_tasks)]
        return _mean_reward(self.execute(queries, [None] * len(queries)))

    def execute(self, queries: list[tasks.Query], kills: list[int | None]) -> list[Execution]:
        if self.plan.in_process:
            patterns = [query.pattern for query in queries]
            return inprocess.run(self.generator, self.tokenizer, patterns, kills, self.plan.blank_summaries)
        jobs = [Job(self._written(query), kill) for query, kill in zip(queries, kills, strict=True)]
        return asyncio.run(Ward(self.generator, self.tokenizer, self.worker).run(jobs))

    def _written(self, query: tasks.Query) -> Path:
        seed = 0 if query.split == "held-out" else self.plan.seed
        directory = self.plan.room / f"tasks-{seed}" / query.split / query.task
        if not (directory / "task.toml").exists():
            tasks.write(query, directory, seed)
        return directory


def _mean_reward(executions: list[Execution]) -> float:
    return sum(execution.reward for execution in executions) / len(executions)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--eval-tasks", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=Recipe.learning_rate)
    parser.add_argument("--in-process", action="store_true")
    parser.add_argument("--blank-summaries", action="store_true", help="with --in-process: compact to nothing")
    parser.add_argument("--room", type=Path, default=ROOT / "runs" / "clinic_probe")
    options = parser.parse_args()
    if options.blank_summaries and not options.in_process:
        parser.error("--blank-summaries: needs --in-process")
    return options


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    policy = options.room / "policy"
    warmstart.build(policy, warmstart.clinic(), warmstart.Settings(), log=True)
    outcomes: list[Outcome] = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        plan = Plan(options.room, policy, seed, options.steps, options.eval_tasks, options.in_process,
                    options.blank_summaries)
        outcomes.append(Trial(plan, Recipe(learning_rate=options.learning_rate)).run())
        print(f"seed {seed}: {outcomes[-1]}", flush=True)
    before, after, cpu = (
        sum(getattr(outcome, name) for outcome in outcomes) / len(outcomes)
        for name in ("before", "after", "cpu_s_per_execution")
    )
    print(f"clinic_probe gain={after - before:.3f} before={before:.3f} after={after:.3f} "
          f"cpu_s_per_execution={cpu:.3f} steps={options.steps} seeds={options.seeds}")


if __name__ == "__main__":
    main()
