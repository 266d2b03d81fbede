"""The queries of the clinic with sub-agents: three directories of three tiny modules, generated from a seed.

One directory may be healthy, the others have two or three of the clinic's bugs. A directory's bugs are its *pattern*;
patterns are divided between the splits, so no directory of a held-out query starts as one that was ever trained.

    python agents_tasks.py --root runs/clinic-agents/tasks --seed 0 --train 480 --held-out 64

writes `<root>/<split>/<task>/{instruction.md, task.toml, workspace/, tests/, solution/}`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "clinic"))

import tasks as clinic  # noqa: E402

DIRECTORIES = {"x": "abc", "y": "def", "z": "ghi"}
NAMES = "".join(DIRECTORIES.values())
NUM_MODULES = 3  # of a directory
MIN_BUGS = 2  # of a directory that is not healthy
Pattern = tuple[int, ...]
HEALTHY: Pattern = (0,) * NUM_MODULES


@dataclass(frozen=True)
class Query(clinic.Query):
    """One task: nine modules, in the order of `NAMES`."""

    def directories(self) -> Iterator[tuple[str, tuple[clinic.Module, ...]]]:
        for number, directory in enumerate(DIRECTORIES):
            yield directory, self.modules[number * NUM_MODULES : (number + 1) * NUM_MODULES]


def patterns_of(split: str) -> list[Pattern]:
    """All patterns that a directory that is not healthy may have in a split."""
    every = product(range(len(clinic.KINDS) + 1), repeat=NUM_MODULES)
    return [pattern for pattern in every if num_bugs(pattern) >= MIN_BUGS and clinic.split_of(pattern) == split]


def num_bugs(pattern: Pattern) -> int:
    return sum(kind > 0 for kind in pattern)


def random_pattern(rng: random.Random, patterns: list[Pattern]) -> Pattern:
    """Two or three bugs, equally likely."""
    wanted = rng.randint(MIN_BUGS, NUM_MODULES)
    return rng.choice([pattern for pattern in patterns if num_bugs(pattern) == wanted])


def generate(seed: int, split: str, index: int) -> Query:
    """The query ``index`` of a split; the same arguments give the same bytes everywhere."""
    if split not in clinic.SPLITS:
        raise ValueError(f"split: {split!r} must be one of {clinic.SPLITS}")
    rng = random.Random(f"clinic-agents/{seed}/{split}/{index}")
    patterns = patterns_of(split)
    healthy = rng.choice([*DIRECTORIES] + [None] * len(DIRECTORIES))  # one in half of the queries
    modules: list[clinic.Module] = []
    for directory, names in DIRECTORIES.items():
        themes = rng.sample(range(len(clinic.THEMES)), NUM_MODULES)
        pattern = HEALTHY if directory == healthy else random_pattern(rng, patterns)
        each = zip(names, pattern, themes, strict=True)
        modules += [clinic.random_module(rng, name, kind, theme) for name, kind, theme in each]
    return Query(split, index, tuple(modules))


def write(query: Query, directory: Path, seed: int = 0) -> None:
    """Writes one task directory. The hidden tests and the solution stay outside the workspace."""
    rng = random.Random(f"clinic-agents/tests/{seed}/{query.task}")
    files = {"instruction.md": clinic.INSTRUCTION + "\n", "task.toml": clinic.task_toml(query, "clinic-agents")}
    hidden: list[str] = []
    for place, modules in query.directories():
        visible = [module.visible_tests() for module in modules]
        files[f"workspace/{place}/test_visible.py"] = clinic.VISIBLE_HEAD + "\n\n".join(visible)
        for module in modules:
            files[f"workspace/{place}/{module.name}.py"] = module.source()
            if module.kind:
                files[f"solution/{place}/{module.name}.py"] = module.source(kind=0)
            # Visible tests are run in the directory, hidden ones at the root of the workspace.
            tests = module.hidden_tests(rng)
            hidden.append(tests.replace(f"import {module.name}\n", f"from {place} import {module.name}\n"))
    files["tests/test_hidden.py"] = clinic.HIDDEN_HEAD + "\n\n".join(hidden)
    clinic.write_files(directory, files)


def write_all(root: Path, seed: int, sizes: dict[str, int]) -> None:
    """Writes every split under ``root``; what is already there is left alone."""
    clinic.write_all(root, seed, sizes, generate, write)


def main() -> None:
    clinic.run(__doc__.splitlines()[0], generate, write)


if __name__ == "__main__":
    main()
