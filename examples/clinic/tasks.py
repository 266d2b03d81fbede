"""The queries of the bug clinic: six tiny Python modules, most of them with one bug, generated from a seed.

A query's bugs are its *pattern*: for each module 0 (healthy) or the kind of its mutation, 1 operator, 2 off-by-one,
3 wrong constant, 4 swapped arguments. Patterns are divided between the splits, so no held-out pattern is ever trained.

    python tasks.py --root runs/clinic/tasks --seed 0 --train 480 --held-out 64

writes `<root>/<split>/<task>/{instruction.md, task.toml, workspace/, tests/, solution/}`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

NAMES = "abcdef"
KINDS = {1: "operator", 2: "off-by-one", 3: "constant", 4: "arguments"}
SPLITS = ("train", "held-out")
MIN_BUGS = 4
INSTRUCTION = "repair the modules that fail"

#: title, constant, and the names of the functions: accumulate, indices, weigh, one item, all items
THEMES = (
    ("parcel charges", "RATE", "add", "places", "scale", "charge", "bill"),
    ("reading times", "PACE", "join", "pages", "spread", "minutes", "evening"),
    ("garden yields", "SEED", "gather", "rows", "grow", "harvest", "season"),
    ("bus delays", "STOPS", "sum_up", "trips", "delay", "late", "day"),
    ("recipe weights", "SERVINGS", "mix", "steps", "portion", "weight", "meal"),
    ("game scores", "BONUS", "score", "rounds", "boost", "points", "match"),
)


@dataclass(frozen=True)
class Module:
    """One workspace module. ``kind`` 0 is healthy; ``variant`` chooses between spellings of the same mutation."""

    name: str
    kind: int
    theme: int
    constant: int
    wrong: int
    variant: int

    def source(self, kind: int | None = None) -> str:
        """The module's text with mutation ``kind`` (its own unless given; 0 is the solution)."""
        kind = self.kind if kind is None else kind
        title, constant, add, places, scale, charge, bill = THEMES[self.theme]
        operator = "-*"[self.variant] if kind == 1 else "+"
        bounds = ("len(items) - 1", "1, len(items)")[self.variant] if kind == 2 else "len(items)"
        value = self.wrong if kind == 3 else self.constant
        arguments = f"{constant}, amount" if kind == 4 else f"amount, {constant}"
        return (
            f'"""Module {self.name}: {title}. The {constant.lower()} is {self.constant}."""\n\n'
            f"{constant} = {value}\n\n\n"
            f"def {add}(total, amount):\n    return total {operator} amount\n\n\n"
            f"def {places}(items):\n    return list(range({bounds}))\n\n\n"
            f"def {scale}(amount, by):\n    return 10 * amount + by\n\n\n"
            f"def {charge}(amount):\n    return {scale}({arguments})\n\n\n"
            f"def {bill}(items):\n    total = 0\n    for place in {places}(items):\n"
            f"        total = {add}(total, {charge}(items[place]))\n    return total\n"
        )

    def visible_tests(self) -> str:
        """One test per kind; a mutation of kind k fails test k and no other."""
        _, constant, add, places, scale, charge, _ = THEMES[self.theme]
        n = self.name
        return (
            f"def test_{n}_1():\n    import {n}\n    assert {n}.{add}(3, 4) == 7\n\n\n"
            f"def test_{n}_2():\n    import {n}\n    assert {n}.{places}([8, 8, 8]) == [0, 1, 2]\n\n\n"
            f"def test_{n}_3():\n    import {n}\n    assert {n}.{constant} == {self.constant}\n\n\n"
            f"def test_{n}_4():\n    import {n}\n    assert {n}.{charge}(11) == {n}.{scale}(11, {n}.{constant})\n"
        )

    def hidden_tests(self, rng: random.Random) -> str:
        """Two tests on inputs that the visible tests do not use."""
        _, _, add, places, _, charge, bill = THEMES[self.theme]
        n, c = self.name, self.constant
        items = [rng.randint(12, 99) for _ in range(rng.randint(4, 6))]
        x, y = rng.randint(20, 60), rng.randint(20, 60)
        total = sum(10 * item + c for item in items)
        size = rng.randint(4, 9)
        return (
            f"def test_{n}_parts():\n    import {n}\n    assert same({n}.{add}({x}, {y}), {x + y})\n"
            f"    assert same({n}.{places}([0] * {size}), {list(range(size))})\n"
            f"    assert same({n}.{charge}({x}), {10 * x + c})\n\n\n"
            f"def test_{n}_whole():\n    import {n}\n    assert same({n}.{bill}({items}), {total})\n"
        )


@dataclass(frozen=True)
class Query:
    """One task: six modules. ``index`` numbers it inside its split."""

    split: str
    index: int
    modules: tuple[Module, ...]

    @property
    def task(self) -> str:
        return f"{self.split}-{self.index:04d}"

    @property
    def pattern(self) -> tuple[int, ...]:
        return tuple(module.kind for module in self.modules)

    def tests_of(self, broken: bool) -> list[str]:
        """Ids of the hidden tests that fail (``broken``) or pass before anything is done."""
        names = [module.name for module in self.modules if (module.kind > 0) == broken]
        return [f"test_{name}_{part}" for name in names for part in ("parts", "whole")]


Make = Callable[[int, str, int], Query]
Put = Callable[[Query, Path, int], None]


def split_of(pattern: tuple[int, ...]) -> str:
    """The split that owns a pattern: one in eight is held out."""
    return SPLITS[hashlib.sha256(bytes(pattern)).digest()[0] % 8 == 0]


def random_pattern(rng: random.Random) -> tuple[int, ...]:
    """Four to six bugs of uniformly random kinds in random modules."""
    broken = set(rng.sample(range(len(NAMES)), rng.randint(MIN_BUGS, len(NAMES))))
    return tuple(rng.randint(1, len(KINDS)) if place in broken else 0 for place in range(len(NAMES)))


def generate(seed: int, split: str, index: int) -> Query:
    """The query ``index`` of a split; the same arguments give the same bytes everywhere."""
    if split not in SPLITS:
        raise ValueError(f"split: {split!r} must be one of {SPLITS}")
    rng = random.Random(f"clinic/{seed}/{split}/{index}")
    pattern = random_pattern(rng)
    while split_of(pattern) != split:
        pattern = random_pattern(rng)
    themes = rng.sample(range(len(THEMES)), len(NAMES))
    modules = tuple(random_module(rng, *each) for each in zip(NAMES, pattern, themes, strict=True))
    return Query(split, index, modules)


def random_module(rng: random.Random, name: str, kind: int, theme: int) -> Module:
    constant = rng.randint(2, 9)
    wrong = rng.choice([value for value in range(2, 10) if value != constant])
    return Module(name, kind, theme, constant, wrong, rng.randint(0, 1))


def write(query: Query, directory: Path, seed: int = 0) -> None:
    """Writes one task directory. The hidden tests and the solution stay outside the workspace."""
    rng = random.Random(f"clinic/tests/{seed}/{query.task}")
    visible = "\n\n".join(module.visible_tests() for module in query.modules)
    hidden = "\n\n".join(module.hidden_tests(rng) for module in query.modules)
    files = {
        "instruction.md": INSTRUCTION + "\n",
        "task.toml": task_toml(query, "clinic"),
        "workspace/test_visible.py": VISIBLE_HEAD + visible,
        "tests/test_hidden.py": HIDDEN_HEAD + hidden,
    }
    for module in query.modules:
        files[f"workspace/{module.name}.py"] = module.source()
        if module.kind:
            files[f"solution/{module.name}.py"] = module.source(kind=0)
    write_files(directory, files)


def write_files(directory: Path, files: Mapping[str, str]) -> None:
    """Texts by their path below the directory."""
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


VISIBLE_HEAD = f'"""Test k of a module covers bug kind k: {KINDS}."""\n\n\n'
HIDDEN_HEAD = '''"""Hidden tests: they are outside the workspace, on inputs that the visible tests do not use."""


def same(got, want):
    """Equal, and built from plain ints and lists only, so that no object can claim to equal everything."""
    if type(want) is list:
        return type(got) is list and len(got) == len(want) and all(map(same, got, want))
    return type(got) is int and got == want


'''


def task_toml(query: Query, family: str) -> str:
    """The task's description; the grader reads its lists of tests."""
    return (
        'schema_version = "1.3"\n\n'
        f'[task]\nname = "{family}/{query.task}"\ndescription = "Repair {len(query.modules)} tiny modules"\n\n'
        f"[metadata]\npattern = {list(query.pattern)}\n\n"
        "[grader]  # reward = share of fail_to_pass that passes, times share of pass_to_pass that still passes\n"
        f"fail_to_pass = {json.dumps(query.tests_of(broken=True))}\n"
        f"pass_to_pass = {json.dumps(query.tests_of(broken=False))}\n"
    )


def write_all(root: Path, seed: int, sizes: dict[str, int], make: Make = generate, put: Put = write) -> None:
    """Writes every split under ``root``; what is already there is left alone."""
    for split, size in sizes.items():
        for index in range(size):
            query = make(seed, split, index)
            directory = root / split / query.task
            if not (directory / "task.toml").exists():
                put(query, directory, seed)


def run(what: str, make: Make, put: Put) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=480)
    parser.add_argument("--held-out", type=int, default=64)
    options = parser.parse_args()
    write_all(options.root, options.seed, {"train": options.train, "held-out": options.held_out}, make, put)


def main() -> None:
    run(__doc__.splitlines()[0], generate, write)


if __name__ == "__main__":
    main()
