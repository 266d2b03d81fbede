"""Real harness processes under the real shim: adoption, limits, whole-tree kills, preserved workspaces."""

import asyncio
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from executor_stage import ExecutorStage, X
from gyre.contracts.errors import HarnessError, SandboxError
from gyre.contracts.events import ExecutionSpec, GroupDispatched
from gyre.rollout.gateway.messages import Message
from gyre.rollout.harness.base import Launch
from gyre.rollout.harness.process import ProcessHarness, SandboxSettings, find_bwrap
from gyre.rollout.local import CallFinished, LimitFired
from rollout_fakes import ask, make_bench, wait_until

SH = "/bin/sh"


def launch(home: Path, script: str, environment: dict[str, str] | None = None) -> Launch:
    (home / "workspace").mkdir(parents=True, exist_ok=True)
    (home / "input").mkdir(exist_ok=True)
    return Launch(X, home, (SH, "-c", script), {"PATH": os.defpath, "GYRE_EXECUTION": X, **(environment or {})})


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def kill_tree(harness: ProcessHarness, home: Path) -> None:
    wait_until(lambda: harness.kill(home, force=True) == 0)


def test_a_harness_runs_in_its_workspace_and_its_exit_code_is_kept(tmp_path: Path) -> None:
    harness = ProcessHarness(SandboxSettings())
    harness.start(launch(tmp_path, "pwd > out; cat; exit 7"))
    wait_until(lambda: harness.ended(tmp_path))
    assert harness.ended(tmp_path).code == 7
    assert (tmp_path / "workspace" / "out").read_text().strip() == str(tmp_path / "workspace")


def test_nothing_of_the_services_environment_reaches_the_harness(tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_SERVICE", "1")
    harness = ProcessHarness(SandboxSettings())
    harness.start(launch(tmp_path, "env > out"))
    wait_until(lambda: harness.ended(tmp_path))
    assert "SECRET_OF_THE_SERVICE" not in (tmp_path / "workspace" / "out").read_text()


def test_another_executor_adopts_a_harness_and_starts_no_second_one(tmp_path: Path) -> None:
    script = "echo run >> count; while [ ! -e go ]; do sleep 0.02; done; exit 3"
    first = ProcessHarness(SandboxSettings())
    pid = first.start(launch(tmp_path, script))
    second = ProcessHarness(SandboxSettings())
    assert second.start(launch(tmp_path, script)) == pid
    assert second.ended(tmp_path) is None
    (tmp_path / "workspace" / "go").touch()
    wait_until(lambda: second.ended(tmp_path))
    assert second.ended(tmp_path).code == 3
    assert (tmp_path / "workspace" / "count").read_text() == "run\n"
    wait_until(lambda: first.ended(tmp_path))
    assert first.ended(tmp_path).code == 3


def test_a_start_under_way_is_not_overlooked(tmp_path: Path) -> None:
    # What an executor that dies right after the fork leaves behind: a shim that has not said a word yet.
    (tmp_path / "run").mkdir()
    lock = os.open(tmp_path / "run" / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    shim = subprocess.Popen(["sleep", "60"], stdin=lock)
    os.close(lock)
    harness = ProcessHarness(SandboxSettings())
    assert harness.was_started(tmp_path)
    assert harness.ended(tmp_path) is None
    shim.kill()
    shim.wait()
    assert not harness.was_started(tmp_path)


def test_a_harness_that_leaves_daemons_behind_has_ended_all_the_same(tmp_path: Path) -> None:
    harness = ProcessHarness(SandboxSettings())
    harness.start(launch(tmp_path, "sleep 67 & exit 2"))
    wait_until(lambda: harness.ended(tmp_path))
    assert ProcessHarness(SandboxSettings()).ended(tmp_path).code == 2
    assert not ProcessHarness(SandboxSettings())._shim_lives(tmp_path), "the harness did not inherit the lock"
    kill_tree(harness, tmp_path)


def test_a_harness_outlives_the_death_of_its_executor(tmp_path: Path) -> None:
    code = f"""
import pathlib, sys
sys.path[:0] = {sys.path!r}
from gyre.rollout.harness.process import ProcessHarness, SandboxSettings
from gyre.rollout.gateway.messages import Message
from gyre.rollout.harness.base import Launch
home = pathlib.Path({str(tmp_path)!r})
print(ProcessHarness(SandboxSettings()).start(Launch({X!r}, home, ("/bin/sh", "-c",
      "while [ ! -e go ]; do sleep 0.02; done; echo done > out; exit 5"), {{"PATH": {os.defpath!r}}})), flush=True)
import time; time.sleep(60)
"""
    launch(tmp_path, "")
    executor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert executor.stdout is not None
    pid = int(executor.stdout.readline())
    executor.kill()
    executor.wait()
    adopted = ProcessHarness(SandboxSettings())
    assert adopted.was_started(tmp_path)
    assert adopted.ended(tmp_path) is None
    assert alive(pid)
    (tmp_path / "workspace" / "go").touch()
    wait_until(lambda: adopted.ended(tmp_path))
    assert adopted.ended(tmp_path).code == 5
    assert (tmp_path / "workspace" / "out").read_text() == "done\n"


def test_a_shim_that_was_killed_is_an_end_that_nobody_knows(tmp_path: Path) -> None:
    harness = ProcessHarness(SandboxSettings())
    pid = harness.start(launch(tmp_path, "sleep 60"))
    os.kill(pid, 9)
    wait_until(lambda: harness.ended(tmp_path))
    assert harness.ended(tmp_path).code is None
    kill_tree(harness, tmp_path)


TREE = f"""
sleep 61 & echo $! >> pids
(trap '' TERM; while :; do sleep 0.05; done) & echo $! >> pids
{sys.executable} -c 'import os, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
open("pids", "a").write(str(os.getpid()) + chr(10)); time.sleep(62)'
echo ready > ready
wait
"""


def test_a_kill_reaches_the_whole_tree_and_the_shim_says_how_it_ended(tmp_path: Path) -> None:
    harness = ProcessHarness(SandboxSettings())
    shim = harness.start(launch(tmp_path, TREE))
    wait_until((tmp_path / "workspace" / "ready").exists)
    wait_until(lambda: len((tmp_path / "workspace" / "pids").read_text().split()) == 3)
    pids = [int(p) for p in (tmp_path / "workspace" / "pids").read_text().split()]
    assert all(map(alive, pids))
    assert harness.kill(tmp_path, force=False) >= 4
    wait_until(lambda: not alive(pids[0]) and not alive(pids[2]))
    assert alive(pids[1]), "it ignores TERM"
    kill_tree(harness, tmp_path)
    assert not any(map(alive, pids))
    wait_until(lambda: harness.ended(tmp_path))
    assert harness.ended(tmp_path).code == 128 + 15
    wait_until(lambda: not alive(shim))


def test_a_kill_spares_an_execution_of_the_same_name_in_another_run(tmp_path: Path) -> None:
    harness, homes = ProcessHarness(SandboxSettings()), [tmp_path / "one", tmp_path / "two"]
    shims = [harness.start(launch(home, "sleep 68")) for home in homes]
    kill_tree(harness, homes[0])
    wait_until(lambda: harness.ended(homes[0]))
    assert alive(shims[1])
    assert harness.ended(homes[1]) is None
    kill_tree(harness, homes[1])


def test_a_sandbox_is_needed_unless_it_was_said_that_it_is_not() -> None:
    assert find_bwrap("none", allow_unsandboxed=True, shipped_example=False) == ""
    assert find_bwrap("none", allow_unsandboxed=False, shipped_example=True) == ""
    with pytest.raises(SandboxError, match="allow_unsandboxed"):
        find_bwrap("none", allow_unsandboxed=False, shipped_example=False)


def test_a_sandboxed_harness_sees_its_own_directories_and_dies_as_one(tmp_path: Path) -> None:
    try:
        bwrap = find_bwrap("bwrap", allow_unsandboxed=False, shipped_example=False)
    except SandboxError:
        pytest.skip("bubblewrap is not installed")
    hidden, home = tmp_path / "tasks", tmp_path / "home"
    hidden.mkdir()
    (hidden / "answer").write_text("42")
    harness = ProcessHarness(SandboxSettings(bwrap, hidden=(hidden,)))
    script = f"ls {hidden} > seen; touch {hidden}/x {tmp_path}/y; echo $$ > pid; setsid sleep 63 & wait"
    harness.start(launch(home, script))
    wait_until((home / "workspace" / "pid").exists)
    assert (home / "workspace" / "seen").read_text() == ""
    assert not (tmp_path / "y").exists()
    assert int((home / "workspace" / "pid").read_text()) < 10
    kill_tree(harness, home)
    wait_until(lambda: harness.ended(home))


# ---------------------------------------------------------------- the executor around the core


async def test_an_execution_from_dispatch_to_preserved_workspace(tmp_path: Path) -> None:
    stage = ExecutorStage(tmp_path, SH, "-c", 'cat a.txt "$GYRE_TASK_INSTRUCTION" > b.txt; mkfifo pipe; env > e')
    await stage.dispatch()
    await stage.until(stage.ends)
    [end] = stage.ends()
    assert (end.ending, end.exit_code) == ("finished", 0)
    assert "pipe (not a file, directory or link)" in end.reason
    files = stage.preserved()
    assert files["b.txt"] == b"ado it"
    assert "secret.py" not in str(files)
    names = {line.partition(b"=")[0] for line in files["e"].splitlines()}
    assert names - {b"PWD", b"SHLVL", b"_", b"OLDPWD"} == {
        b"PATH", b"HOME", b"TMPDIR", b"LANG", b"OPENAI_BASE_URL", b"OPENAI_API_KEY", b"ANTHROPIC_BASE_URL",
        b"ANTHROPIC_API_KEY", b"GYRE_EXECUTION",
        b"GYRE_TASK_INSTRUCTION"}
    await stage.until(lambda: not stage.executor.home(X).exists())


@pytest.mark.parametrize(("harness_s", "overall_s", "ending", "limit"), [
    (0.3, 60.0, "timed_out", "harness_timeout"), (60.0, 0.3, "dropped", "overall_timeout")])
async def test_a_timeout_ends_it_and_says_which(tmp_path: Path, harness_s: float, overall_s: float, ending: str,
                                                limit: str) -> None:
    stage = ExecutorStage(tmp_path, SH, "-c", "echo half > half.txt; sleep 64 & sleep 65")
    await stage.dispatch(harness_s, overall_s)
    await stage.until(stage.ends)
    [end] = stage.ends()
    assert (end.ending, end.limit) == (ending, limit)
    if ending == "timed_out":
        assert stage.preserved()["half.txt"] == b"half\n"
    else:
        assert end.snapshot is None


async def test_a_limit_by_calls_kills_while_the_harness_waits(tmp_path: Path) -> None:
    stage = ExecutorStage(tmp_path, SH, "-c", "echo $$ > pid; sleep 66")
    await stage.dispatch()
    await stage.until((stage.executor.home(X) / "workspace" / "pid").exists)
    await stage.tell(LimitFired(X, "calls"))
    await stage.until(stage.ends)
    assert [(e.ending, e.limit) for e in stage.ends()] == [("timed_out", "calls")]


@pytest.mark.parametrize("crashes", [False, True])
async def test_the_end_of_an_execution_names_the_calls_that_the_harness_never_saw(tmp_path: Path, crashes: bool) -> None:
    stage = ExecutorStage(tmp_path, SH, "-c", "sleep 67")
    await stage.dispatch()
    await stage.until(lambda: stage.state.executions[X].phase == "running")
    (tmp_path / "gateway").mkdir()
    bench = make_bench(tmp_path / "gateway", "one", "two")
    for text, deliver in (("a", True), ("b", False)):
        await ask(bench, [Message("user", text)], deliver=deliver)
    for call in bench.records:
        stage.sessions.get(X).recall(call)
        await stage.archive.put(call)
        await stage.tell(CallFinished(call.record))
    await stage.tell(LimitFired(X, "harness_timeout"))
    if crashes:
        await stage.crash()
    await stage.until(stage.ends)
    assert [e.undelivered for e in stage.ends()] == [(bench.records[1].record.call,)]


@pytest.mark.parametrize("when", ["running", "ended", "killing"])
async def test_an_executor_that_dies_and_comes_back_ends_each_execution_once(tmp_path: Path, when: str) -> None:
    stage = ExecutorStage(tmp_path, SH, "-c", "echo x >> count; while [ ! -e go ]; do sleep 0.02; done; exit 4")
    await stage.dispatch()
    home = stage.executor.home(X)
    await stage.until(lambda: X in stage.state.executions and stage.state.executions[X].phase == "running")
    await stage.until((home / "workspace" / "count").exists)
    if when == "killing":
        await stage.tell(LimitFired(X, "harness_timeout"))
    elif when == "ended":
        (home / "workspace" / "go").touch()
        while not (home / "run" / "exit").exists():
            await asyncio.sleep(0.01)
    await stage.crash()
    if when == "running":
        (home / "workspace" / "go").touch()
    await stage.until(stage.ends)
    [end] = stage.ends()
    assert end.ending == ("timed_out" if when == "killing" else "failed")
    assert stage.preserved()["count"] == b"x\n"
    if when != "killing":
        assert end.exit_code == 4


async def test_a_task_that_is_not_there_drops_the_execution(tmp_path: Path) -> None:
    stage = ExecutorStage(tmp_path, SH, "-c", "true")
    spec = ExecutionSpec(X, 1, 1.0, 2.0)
    await stage.tell(GroupDispatched("g00000-000", 0, "q", "absent", "train", 0, (spec,)))
    await stage.until(stage.ends)
    assert stage.ends()[0].ending == "dropped"
    assert "absent" in stage.ends()[0].reason


async def test_a_command_that_does_not_exist_is_a_failed_harness(tmp_path: Path) -> None:
    stage = ExecutorStage(tmp_path, "no-such-program")
    await stage.dispatch()
    await stage.until(stage.ends)
    assert (stage.ends()[0].ending, stage.ends()[0].exit_code) == ("failed", 127)
    assert "no-such-program" in stage.ends()[0].reason, "its last words are kept"


async def test_what_a_crash_left_of_terminated_executions_is_swept(tmp_path: Path) -> None:
    stage = ExecutorStage(tmp_path, SH, "-c", "sleep 69 & sleep 70")
    await stage.dispatch()
    await stage.until(lambda: stage.state.executions[X].phase == "running")
    pid = stage.state.executions[X].pid
    stage.state.executions.clear()
    await stage.executor.sweep(())
    await stage.until(lambda: not stage.executor.home(X).exists())
    await stage.until(lambda: not alive(pid))


def test_starting_in_a_directory_without_workspace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="cannot start"):
        ProcessHarness(SandboxSettings()).start(Launch(X, tmp_path, ("true",), {}))
