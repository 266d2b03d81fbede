"""What the held-out tasks are worth without a policy, on real files and with the real grader.

do_nothing: the workspace as the agent finds it. random: as many uniformly random commands as the harness allows.
oracle: the task's solution in place of the modules.

    python baselines.py --root TASKS --num-tasks 64 --seed 0     prints one line of JSON
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from grader import NAMES, grade
from harness import NUM_COMMANDS, repair


def leave_it(workspace: Path, task: Path, dice: random.Random) -> None:
    """Do nothing."""


def act_at_random(workspace: Path, task: Path, dice: random.Random) -> None:
    """Random well-formed commands: any module, any repair."""
    for _ in range(NUM_COMMANDS):
        path = workspace / f"{dice.choice(NAMES)}.py"
        path.write_text(repair(path.read_text(encoding="utf-8"), dice.randint(1, 4)), encoding="utf-8")


def solve(workspace: Path, task: Path, dice: random.Random) -> None:
    """Put the task's solution in place."""
    for path in (task / "solution").glob("*.py"):
        shutil.copyfile(path, workspace / path.name)


def value_of(act: Callable[[Path, Path, random.Random], None], tasks: list[Path], seed: int) -> float:
    """Mean reward of `act` over the tasks."""
    rewards = []
    for number, task in enumerate(tasks):
        with tempfile.TemporaryDirectory() as directory:
            workspace = Path(directory) / "workspace"
            shutil.copytree(task / "workspace", workspace)
            act(workspace, task, random.Random(f"{seed}/{number}"))
            rewards.append(grade(workspace, task).reward)
    return fmean(rewards)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="task directories")
    parser.add_argument("--num-tasks", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tasks = sorted(p.parent for p in (arguments.root / "held-out").glob("*/instruction.md"))[: arguments.num_tasks]
    if not tasks:
        raise SystemExit(f"{arguments.root}: no held-out tasks; make them with tasks.py")
    ways = {"do_nothing": leave_it, "random": act_at_random, "oracle": solve}
    print(json.dumps({name: round(value_of(act, tasks, arguments.seed), 4) for name, act in ways.items()}))


if __name__ == "__main__":
    main()
