"""tools/setup.sh with a Python and a uv that only write down what they were asked."""

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Stands for both the interpreter found on PATH and the one in .venv.
PYTHON = """#!/bin/sh
case "$1 $2" in
    "-c "?*) echo "${FAKE_VERSION:-3.12.1}" ;;
    "-m venv") echo "venv" >> "$FAKE_LOG"; mkdir -p .venv/bin; cp "$0" .venv/bin/python; cp "$FAKE_UV" .venv/bin/uv ;;
    "-m pip") case "$3" in config) echo "global.find-links='/wheels'" ;; *) : ;; esac ;;
esac
"""
UV = """#!/bin/sh
[ "$1" = --version ] && exit 0
echo "uv $* links=$UV_FIND_LINKS" >> "$FAKE_LOG"
case "$*" in ${FAKE_FAIL:-nothing}) exit 1 ;; esac
"""


@dataclass
class Checkout:
    """A copy of what the script reads, and the programs it finds."""

    root: Path
    programs: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        return self.root / "log"

    def write_program(self, name: str, text: str) -> None:
        path = self.programs / name
        path.unlink(missing_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def setup(self, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {"PATH": str(self.programs), "FAKE_LOG": str(self.log), "FAKE_UV": str(self.programs / "uv")}
        return subprocess.run(
            ["sh", "tools/setup.sh"],
            cwd=self.root,
            env=variables | self.environment | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def asked(self) -> list[str]:
        """What python and uv were asked since the last look."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root, programs = tmp_path / "checkout", tmp_path / "bin"
    programs.mkdir()
    for name in ["tools/setup.sh", "tools/uv_settings.sh", "constraints.txt", "pyproject.toml"]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    for project in [*ROOT.glob("libs/*/pyproject.toml"), *ROOT.glob("services/*/pyproject.toml")]:
        (root / project.relative_to(ROOT)).parent.mkdir(parents=True)
        shutil.copy(project, root / project.relative_to(ROOT))
    for name in ("sh", "dirname", "cat", "cmp", "cp", "grep", "head", "mkdir", "mv", "rm", "sed", "tail"):
        found = shutil.which(name, path=os.defpath) or shutil.which(name)
        assert found, name
        (programs / name).symlink_to(found)
    result = Checkout(root, programs)
    result.write_program("python3", PYTHON)
    result.write_program("uv", UV)
    result.write_program("uname", "#!/bin/sh\necho Linux\n")
    return result


def torch_attempts(lines: list[str]) -> list[str]:
    return [line for line in lines if "torch==" in line]


def test_it_installs_the_cpu_build_then_every_package_with_the_pins(checkout: Checkout) -> None:
    done = checkout.setup()
    assert done.returncode == 0, done.stderr
    venv, torch, packages = checkout.asked()
    assert venv == "venv"
    assert "+cpu" in torch
    assert "links=/wheels" in torch, "pip's folder of wheels is uv's too"
    assert "-c constraints.txt" in packages
    assert packages.count(" -e ") == len([*ROOT.glob("libs/*/pyproject.toml"), *ROOT.glob("services/*/pyproject.toml")])


def test_a_second_call_does_nothing_and_says_nothing(checkout: Checkout) -> None:
    checkout.setup()
    checkout.asked()
    again = checkout.setup()
    assert (again.returncode, again.stdout, again.stderr, checkout.asked()) == (0, "", "", [])


def test_a_changed_pin_brings_the_environment_up_to_date_without_a_new_one(checkout: Checkout) -> None:
    checkout.setup()
    checkout.asked()
    with (checkout.root / "constraints.txt").open("a") as file:
        file.write("somewhat==1.0\n")
    assert "up to date" in checkout.setup().stdout
    assert "venv" not in checkout.asked()


def test_an_interrupted_install_starts_anew(checkout: Checkout) -> None:
    assert checkout.setup(FAKE_FAIL="*--group*").returncode != 0
    checkout.asked()
    again = checkout.setup()
    assert again.returncode == 0
    assert "did not finish" in again.stdout
    assert checkout.asked()[0] == "venv"


def test_without_the_wheel_it_asks_the_index_of_pytorch(checkout: Checkout) -> None:
    assert checkout.setup(FAKE_FAIL="*+cpu*").returncode == 0
    wheel, index = torch_attempts(checkout.asked())
    assert "+cpu" in wheel
    assert "--torch-backend=cpu" in index


def test_without_any_cpu_build_it_takes_the_big_one_and_warns(checkout: Checkout) -> None:
    done = checkout.setup(FAKE_FAIL="*cpu*")
    assert done.returncode == 0
    assert "warning" in done.stderr
    attempts = torch_attempts(checkout.asked())
    assert ["+cpu" in a for a in attempts] == [True, False, False]
    assert ["--torch-backend=cpu" in a for a in attempts] == [False, True, False]


def test_macos_has_one_build(checkout: Checkout) -> None:
    checkout.write_program("uname", "#!/bin/sh\necho Darwin\n")
    assert checkout.setup().returncode == 0
    (attempt,) = torch_attempts(checkout.asked())
    assert "cpu" not in attempt


def test_a_chosen_build_is_kept_and_changing_it_starts_anew(checkout: Checkout) -> None:
    checkout.setup(GYRE_TORCH="cuda")
    (attempt,) = torch_attempts(checkout.asked())
    assert "cpu" not in attempt
    checkout.setup()
    assert checkout.asked() == []
    checkout.setup(GYRE_TORCH="cpu")
    assert checkout.asked()[0] == "venv"


def test_it_names_the_pythons_that_are_too_old(checkout: Checkout) -> None:
    done = checkout.setup(FAKE_VERSION="3.9.2")
    assert done.returncode == 1
    assert "3.11" in done.stderr
    assert "python3=3.9.2" in done.stderr


def test_it_says_when_there_is_no_python(checkout: Checkout) -> None:
    (checkout.programs / "python3").unlink()
    done = checkout.setup()
    assert done.returncode == 1
    assert "found: none" in done.stderr
