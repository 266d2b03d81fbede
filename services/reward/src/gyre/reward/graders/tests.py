"""What the hidden tests are, read from their source without running it."""

import ast
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gyre.reward.graders.base import Checks, Task, TaskBroken

_PRELOADABLE = sys.stdlib_module_names | {"pytest"}


@dataclass(frozen=True, slots=True)
class HiddenTests:
    """`ids` as `file::name`, grouped by file; `preload`: modules of the standard library that the tests import."""

    kind: Literal["functions", "grader"]
    ids: tuple[str, ...]
    preload: tuple[str, ...]


def list_tests(tests: Path) -> HiddenTests:
    """The checks of a task: the constant CHECKS of its `grader.py`, or else the functions of its `test_*.py`.

    Raises:
        TaskBroken: there are none, or some that this grader cannot run.
    """
    own = tests / "grader.py"
    files = [own] if own.is_file() else sorted(tests.glob("test_*.py"))
    trees = {file: _parse(file) for file in files}
    if own.is_file():
        ids = tuple(f"grader.py::{name}" for name in _checks(trees[own], own))
    else:
        ids = tuple(f"{file.name}::{name}" for file, tree in trees.items() for name in _functions(tree, file))
    if not ids:
        raise TaskBroken(f"{tests}: holds no grader.py and no test_*.py with test functions")
    if len(set(ids)) != len(ids):
        double = sorted(i for i in set(ids) if ids.count(i) > 1)
        raise TaskBroken(f"{tests}: {', '.join(double)} exists twice; the first would never run")
    preload = {name for tree in trees.values() for name in _imports(tree)}
    return HiddenTests("grader" if own.is_file() else "functions", ids, tuple(sorted(preload & _PRELOADABLE)))


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        raise TaskBroken(f"{file}: {error}") from None


def _functions(tree: ast.Module, file: Path) -> list[str]:
    names = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            raise TaskBroken(f"{file}: class {node.name}: only plain functions are run; use grader = 'pytest'")
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith("test"):
            continue
        arguments = node.args
        num = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs) - len(arguments.defaults)
        if isinstance(node, ast.AsyncFunctionDef) or num or node.decorator_list:
            raise TaskBroken(f"{file}: {node.name} is async, decorated or takes arguments; use grader = 'pytest'")
        names.append(node.name)
    return names


def _checks(tree: ast.Module, file: Path) -> tuple[str, ...]:
    """The names in `CHECKS = ("a", "b")`, which has to be a literal: it is believed, what runs later is not."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [t.id for t in node.targets if isinstance(t, ast.Name)] == ["CHECKS"]:
            try:
                checks = ast.literal_eval(node.value)
            except ValueError:
                break
            if isinstance(checks, tuple | list) and checks and all(isinstance(c, str) and c for c in checks):
                return tuple(checks)
    raise TaskBroken(f"{file}: needs CHECKS = (\"name\", ...), a literal tuple of the checks that grade() answers for")


def _imports(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names - {"__future__"}


def choose_checks(task: Task, ids: tuple[str, ...]) -> Checks:
    """`[grader] fail_to_pass` and `pass_to_pass` of the task's description; without them every id is to be repaired.

    Raises:
        TaskBroken: a list names a test that there is not, or twice, or leaves nothing to repair.
    """
    try:
        tables = tomllib.loads(task.description.read_text()) if task.description.exists() else {}
    except tomllib.TOMLDecodeError as error:
        raise TaskBroken(f"{task.description}: {error}") from None
    grader = tables.get("grader", {})
    if not isinstance(grader, dict) or "fail_to_pass" not in grader:
        return Checks(ids)
    repair = tuple(_find(name, ids, task) for name in grader["fail_to_pass"])
    keep = tuple(_find(name, ids, task) for name in grader.get("pass_to_pass", []))
    if not repair or len(set(repair + keep)) != len(repair + keep):
        raise TaskBroken(f"{task.description}: grader.fail_to_pass must name at least one test, and no test twice")
    return Checks(repair, keep)


def _find(name: str, ids: tuple[str, ...], task: Task) -> str:
    """`file::name` or, where only one file has it, `name`."""
    found = [i for i in ids if name in (i, i.partition("::")[2])]
    if len(found) != 1:
        raise TaskBroken(f"{task.description}: grader: {name!r} names {len(found)} tests of {task.tests}, not one")
    return found[0]
