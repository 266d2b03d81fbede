"""What no policy, the solution and uniformly random commands earn, on real files and by the real grader.

    python baselines.py [NUM_TASKS]          runs in a temporary directory
"""

from __future__ import annotations

import contextlib
import random
import shutil
import sys
import tempfile
from pathlib import Path

import grader
import harness
import tasks


def copy_workspace(task: Path, workspace: Path) -> None:
    """The workspace as a harness finds it."""
    shutil.copytree(task / "workspace", workspace)


def do_nothing(task: Path, workspace: Path) -> float:
    """Reward of the untouched workspace."""
    copy_workspace(task, workspace)
    return grader.grade(workspace, task).reward


def oracle(task: Path, workspace: Path) -> float:
    """Reward after the solution's files replaced the broken ones."""
    copy_workspace(task, workspace)
    shutil.copytree(task / "solution", workspace, dirs_exist_ok=True)
    return grader.grade(workspace, task).reward


def random_commands(task: Path, workspace: Path, rng: random.Random) -> float:
    """Reward after the harness obeyed uniformly random commands."""
    copy_workspace(task, workspace)
    with contextlib.chdir(workspace):
        tests = harness.visible_tests()
        states = {name: harness.state_of(name, tests) for name in harness.NAMES}
        for _ in range(harness.NUM_COMMANDS):
            harness.obey(f"F {rng.choice(harness.NAMES)} {rng.choice('1234')}", tests, states)
    return grader.grade(workspace, task).reward


def measure(root: Path, num_tasks: int, seed: int = 0) -> dict[str, float]:
    """Mean reward of the three over held-out tasks, written below ``root``."""
    rng = random.Random(f"baselines/{seed}")
    rewards: dict[str, list[float]] = {"do_nothing": [], "random_commands": [], "oracle": []}
    for index in range(num_tasks):
        query = tasks.generate(seed, "held-out", index)
        task = root / query.task
        tasks.write(query, task, seed)
        rewards["do_nothing"].append(do_nothing(task, root / f"nothing-{index}"))
        rewards["random_commands"].append(random_commands(task, root / f"random-{index}", rng))
        rewards["oracle"].append(oracle(task, root / f"oracle-{index}"))
    return {name: sum(values) / len(values) for name, values in rewards.items()}


def main() -> None:
    num_tasks = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    with tempfile.TemporaryDirectory() as root:
        for name, value in measure(Path(root), num_tasks).items():
            print(f"{name} {value:.3f}")


if __name__ == "__main__":
    main()
