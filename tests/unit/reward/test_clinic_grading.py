"""The clinic's tasks under the functions grader: nothing done is 0, everything repaired is 1, and both graders agree."""

import importlib.util
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType

import pytest_asyncio
from gyre.reward.core import Score
from gyre.reward.graders.base import Task
from gyre.reward.graders.functions import FunctionsGrader, TimeLimits
from gyre.reward.sandbox import Limits, Plain

CLINIC = Path(__file__).resolve().parents[3] / "examples/clinic"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"clinic_{name}", CLINIC / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Clinic:
    """One generated task, graded by the service's grader and by the example's own."""

    def __init__(self, base: Path) -> None:
        tasks, self.own = load("tasks"), load("grader")
        self.query = tasks.generate(0, "train", 0)
        self.task = Task(base / "task")
        tasks.write(self.query, self.task.root)
        self.grader = FunctionsGrader(Plain(), base / "scratch", TimeLimits(), Limits())
        self.num = 0

    async def grade(self, *repaired: str, spoiled: dict[str, str] | None = None) -> Score:
        workspace = self.prepare(*repaired, spoiled=spoiled or {})
        score = await self.grader.grade(self.task, workspace)
        own = self.own.grade(workspace, self.task.root)
        assert abs(score.reward - own.reward) < 1e-9, (score, own)
        return score

    def prepare(self, *repaired: str, spoiled: dict[str, str]) -> Path:
        self.num += 1
        workspace = self.grader.room / str(self.num)
        shutil.copytree(self.task.root / "workspace", workspace)
        for name in repaired:
            shutil.copy(self.task.root / "solution" / f"{name}.py", workspace)
        for name, text in spoiled.items():
            (workspace / name).write_text(text)
        return workspace

    @property
    def broken(self) -> list[str]:
        return [m.name for m in self.query.modules if m.kind]


@pytest_asyncio.fixture
async def clinic(tmp_path: Path) -> AsyncIterator[Clinic]:
    clinic = Clinic(tmp_path)
    yield clinic
    await clinic.grader.close()


async def test_an_untouched_workspace_earns_nothing(clinic: Clinic) -> None:
    assert (await clinic.grade()).reward == 0.0


async def test_the_solution_earns_everything(clinic: Clinic) -> None:
    score = await clinic.grade(*clinic.broken)
    assert (score.reward, score.num_passed, score.num_checks) == (1.0, 12, 12)


async def test_each_repaired_module_earns_its_share(clinic: Clinic) -> None:
    assert 0.0 < (await clinic.grade(clinic.broken[0])).reward < 1.0


async def test_breaking_a_healthy_module_costs_what_was_earned(clinic: Clinic) -> None:
    healthy = next(m.name for m in clinic.query.modules if not m.kind)
    spoiled = await clinic.grade(*clinic.broken, spoiled={f"{healthy}.py": "1/0"})
    assert spoiled.reward < 1.0


async def test_an_object_that_equals_everything_earns_nothing(clinic: Clinic) -> None:
    liar = "class L:\n    def __eq__(self, o): return True\n    def __call__(self, *a): return self\n" \
           "def __getattr__(n): return L()\n"
    score = await clinic.grade(spoiled={f"{m.name}.py": liar for m in clinic.query.modules})
    assert score.reward == 0.0
