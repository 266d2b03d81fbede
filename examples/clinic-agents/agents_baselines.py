"""What the held-out tasks are worth without a policy, on real files and with the run's own grader.

do_nothing: the workspace as the agent finds it. random: turns that send an agent to a random directory or are a
command, equally likely, and uniformly random commands throughout. oracle: the task's solution in place of the modules.

    python agents_baselines.py --root TASKS --num-tasks 64 --seed 0     prints one line of JSON
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

sys.path.append(str(Path(__file__).resolve().parents[1] / "clinic"))

from agents_harness import DIRECTORIES, NUM_COMMANDS, NUM_TURNS  # noqa: E402
from gyre.reward.graders.base import Grader, Task  # noqa: E402
from gyre.reward.graders.functions import FunctionsGrader, TimeLimits  # noqa: E402
from gyre.reward.sandbox import Limits, open_sandbox  # noqa: E402
from harness import repair  # noqa: E402

Act = Callable[[Path, Path, random.Random], None]


def leave_it(workspace: Path, task: Path, dice: random.Random) -> None:
    """Do nothing."""


def act_at_random(workspace: Path, task: Path, dice: random.Random) -> None:
    """Random turns, all well-formed."""
    for _ in range(NUM_TURNS):
        directory = dice.choice(list(DIRECTORIES))
        for _ in range(dice.choice((1, NUM_COMMANDS))):
            path = workspace / directory / f"{dice.choice(DIRECTORIES[directory])}.py"
            path.write_text(repair(path.read_text(encoding="utf-8"), dice.randint(1, 4)), encoding="utf-8")


def solve(workspace: Path, task: Path, dice: random.Random) -> None:
    """Put the task's solution in place."""
    shutil.copytree(task / "solution", workspace, dirs_exist_ok=True)


async def value_of(act: Act, tasks: list[Path], seed: int, grader: Grader) -> float:
    """Mean reward of `act` over the tasks."""
    rewards = []
    for number, task in enumerate(tasks):
        workspace = grader.room / f"{act.__name__}-{number}"
        shutil.copytree(task / "workspace", workspace)
        act(workspace, task, random.Random(f"{seed}/{number}"))
        rewards.append((await grader.grade(Task(task), workspace)).reward)
    return fmean(rewards)


async def values(tasks: list[Path], seed: int) -> dict[str, float]:
    """The three values by name."""
    ways: dict[str, Act] = {"do_nothing": leave_it, "random": act_at_random, "oracle": solve}
    with tempfile.TemporaryDirectory() as scratch:
        sandbox = open_sandbox("auto", shipped_example=True, allow_unsandboxed=False)
        grader = FunctionsGrader(sandbox, Path(scratch), TimeLimits(), Limits())
        try:
            return {name: await value_of(act, tasks, seed, grader) for name, act in ways.items()}
        finally:
            await grader.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="task directories")
    parser.add_argument("--num-tasks", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tasks = sorted(p.parent for p in (arguments.root / "held-out").glob("*/instruction.md"))[: arguments.num_tasks]
    if not tasks:
        raise SystemExit(f"{arguments.root}: no held-out tasks; make them with agents_tasks.py")
    found = asyncio.run(values(tasks, arguments.seed))
    print(json.dumps({name: round(value, 4) for name, value in found.items()}))


if __name__ == "__main__":
    main()
