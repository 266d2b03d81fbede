"""Which box is chosen, and what a box holds back."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from gyre.contracts.errors import ConfigError, SandboxError
from gyre.reward.config import evaluator_config, open_grader
from gyre.reward.process import run_box
from gyre.reward.sandbox import (
    Box,
    Bubblewrap,
    Limits,
    Mount,
    Plain,
    clean_environment,
    find_bubblewrap,
    open_sandbox,
    remove_tree,
)
from gyre.reward.scratch import open_scratch
from gyre.runtime.config import Deployment, Endpoint, HarnessConfig, PolicyConfigRef, RewardConfig, RunConfig, TasksConfig

HERE = Endpoint("127.0.0.1:0", "127.0.0.1:0")


@pytest.fixture
def no_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")


@pytest.fixture
def broken_bubblewrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "bin/bwrap"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))


def test_without_a_sandbox_only_a_shipped_example_or_an_explicit_yes_runs(no_bubblewrap: None) -> None:
    for shipped, allowed in ((True, False), (False, True)):
        assert not open_sandbox("auto", shipped_example=shipped, allow_unsandboxed=allowed).isolated
    with pytest.raises(ConfigError, match="bwrap is not on PATH.*allow_unsandboxed = true"):
        open_sandbox("auto", shipped_example=False, allow_unsandboxed=False)


def test_a_sandbox_that_is_demanded_is_never_replaced(broken_bubblewrap: None) -> None:
    with pytest.raises(ConfigError, match="harness.sandbox = 'bwrap'.*No permissions to create new namespace"):
        open_sandbox("bwrap", shipped_example=True, allow_unsandboxed=True)


def test_a_sandbox_that_does_not_start_counts_as_none(broken_bubblewrap: None) -> None:
    assert open_sandbox("auto", shipped_example=True, allow_unsandboxed=False).name == "none"


def test_a_plain_process_cannot_show_things_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="/app.*install bubblewrap"):
        Plain().command(Box(("true",), "/app", (Mount(tmp_path, "/app"),)))


def test_the_command_of_a_box_unshares_everything_and_binds_nothing_writable_unasked(tmp_path: Path) -> None:
    argv = Bubblewrap("bwrap").command(Box(("true",), "/app", (Mount(tmp_path, "/app", writable=True),)))
    assert {"--unshare-all", "--die-with-parent", "--new-session"} <= set(argv)
    assert [argv[i + 1:i + 3] for i, part in enumerate(argv) if part == "--bind"] == [[str(tmp_path), "/app"]]
    assert "--remount-ro" in argv and "--share-net" not in argv


async def run(code: str, tmp_path: Path, timeout_s: float = 20.0, limits: Limits | None = None) -> tuple[int | None, str]:
    box = Box((sys.executable, "-c", code), str(tmp_path), environment=clean_environment(), limits=limits or Limits())
    finished = await run_box(Plain(), box, timeout_s, tmp_path / "log")
    return finished.exit_code, finished.output


async def test_a_limit_that_fires_leaves_the_partial_output_and_kills_the_whole_session(tmp_path: Path) -> None:
    code = ("import subprocess, sys, time\nprint('partial', flush=True)\n"
            "print(subprocess.Popen(['sleep', '1000']).pid, flush=True)\ntime.sleep(1000)")
    exit_code, output = await run(code, tmp_path, timeout_s=1.0)
    assert exit_code is None and output.startswith("partial")
    async with asyncio.timeout(20):
        while is_alive(int(output.split()[1])):
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def test_a_process_that_is_gone_before_it_is_killed_is_no_error(tmp_path: Path) -> None:
    assert await run("print('done')", tmp_path) == (0, "done\n")


async def test_output_is_kept_at_both_ends_and_bounded_on_disk(tmp_path: Path) -> None:
    code = "import sys\nsys.stdout.write('first' + '\\xff' * 1_000_000)\nsys.stdout.flush()\nprint('x' * 10**7 + 'last')"
    _, output = await run(code, tmp_path, limits=Limits(file_bytes=3_000_000))
    assert output.startswith("first") and "bytes left out" in output and len(output) < 9_000
    assert (tmp_path / "log").stat().st_size <= 3_000_000


async def test_nothing_of_ours_is_in_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYRE_SECRET", "s")
    _, output = await run("import os; print(sorted(os.environ))", tmp_path)
    assert "GYRE_SECRET" not in output and "PYTHONPATH" not in output


def test_a_tree_with_hostile_modes_is_removed(tmp_path: Path) -> None:
    deep = tmp_path / "t/a/b"
    deep.mkdir(parents=True)
    (deep / "f").write_text("x")
    (tmp_path / "t/link").symlink_to(tmp_path)
    for directory in (deep, deep.parent):
        directory.chmod(0)
    remove_tree(tmp_path / "t")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------ configuration


def run_config(**reward: object) -> RunConfig:
    return RunConfig("r", PolicyConfigRef("p"), TasksConfig("tasks"),
                     HarnessConfig(("h",), sandbox="none", shipped_example=True, max_workspace_bytes=77),
                     reward=RewardConfig(**reward))


def deployment() -> Deployment:
    return Deployment("r", "nats", "state", "cells", "blobs", "log", "ckpt", HERE, "url", HERE, HERE, HERE, (HERE,),
                      (HERE,), (HERE, HERE), (HERE,))


def test_the_configuration_of_an_evaluator_comes_from_both_files(tmp_path: Path) -> None:
    config = evaluator_config(run_config(max_attempts=7), tmp_path, deployment(), 1)
    assert (config.tasks_root, config.budget.max_attempts, config.snapshot.total_bytes) == (tmp_path / "tasks", 7, 77)


@pytest.mark.parametrize(("make", "message"), [
    (lambda base: evaluator_config(run_config(), base, deployment(), 2), "--index 2.*2 evaluators"),
    (lambda base: evaluator_config(run_config(timeout_s=0.0), base, deployment(), 0), "reward.timeout_s = 0.0"),
    (lambda base: evaluator_config(run_config(max_attempts=0), base, deployment(), 0), "reward.max_attempts = 0"),
])
def test_a_wrong_value_is_named(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path)


@pytest.mark.skipif(find_bubblewrap()[0] is None, reason=find_bubblewrap()[1])
@pytest.mark.parametrize("grader", ["functions", "harbor", "pytest"])
def test_every_grader_opens_where_bubblewrap_is(tmp_path: Path, grader: str) -> None:
    run = run_config(grader=grader)
    config = evaluator_config(RunConfig("r", run.policy, run.tasks, HarnessConfig(("h",)), reward=run.reward), tmp_path,
                              deployment(), 0)
    assert open_grader(config, tmp_path / "scratch").name == grader


def test_scratch_is_in_memory_where_it_fits(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    state = tmp_path / "state"
    for room, place, parent in ((1, memory, memory), (2**60, memory, state), (1, tmp_path / "none", state)):
        scratch = open_scratch(state, room, place)
        assert scratch.path.parent == parent
        scratch.close()
        assert list(parent.iterdir()) == []


def test_what_a_killed_process_left_is_swept_up_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    living = open_scratch(tmp_path, 1, tmp_path)
    killed = open_scratch(tmp_path, 1, tmp_path)
    (killed.path / "left").write_text("x")
    os.close(killed.lock_fd)
    (tmp_path / "somebody-else").mkdir()
    scratch = open_scratch(tmp_path, 1, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {living.path.name, scratch.path.name, "somebody-else"}
    scratch.close()
    living.close()
