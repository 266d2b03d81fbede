"""Builds the checkpoint that the run with sub-agents starts from: the clinic's warm start on this clinic's sessions.

    python agents_warmstart.py --out runs/clinic-agents/policy
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CLINIC = HERE.parent / "clinic"
sys.path.append(str(CLINIC))

import torch  # noqa: E402
import warmstart  # noqa: E402
from agents_policy import POLICY, build  # noqa: E402
from agents_sessions import CHOICES, draw, training_patterns  # noqa: E402

INPUTS = ("agents_policy.py", "agents_sessions.py", "agents_tasks.py", "agents_warmstart.py")
SETTINGS = warmstart.Settings(num_updates=500, sessions_per_update=48)


def course() -> warmstart.Course:
    """Every context of the harness, as often as each other."""
    patterns = training_patterns()
    sources = [CLINIC / name for name in warmstart.INPUTS] + [HERE / name for name in INPUTS]
    return warmstart.Course(POLICY, build, lambda rng, num: draw(rng, patterns, num), CHOICES, sources)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    built = warmstart.build(options.out, course(), SETTINGS, log=True)
    print(f"warm start {'built' if built else 'kept'} at {options.out}")


if __name__ == "__main__":
    main()
