"""What the configuration of a run makes visible inside the harness's sandbox."""

from pathlib import Path

from gyre.cli.launcher import deploy_locally
from gyre.cli.run_dir import RunDir
from gyre.rollout.config import sandbox_settings
from gyre.runtime.config import HarnessConfig, PolicyConfigRef, RunConfig, TasksConfig


def test_a_harness_below_the_temporary_directory_stays_visible_and_tasks_stay_hidden(tmp_path: Path):
    script, tasks, run = tmp_path / "elsewhere" / "harness.py", tmp_path / "elsewhere" / "tasks", tmp_path / "runs" / "r"
    for directory in (tasks, run / "state"):
        directory.mkdir(parents=True)
    script.write_text("")
    config = RunConfig("r", PolicyConfigRef("policy"), TasksConfig(str(tasks)),
                       HarnessConfig(("{python}", str(script)), shipped_example=True))
    deployment = deploy_locally(RunDir(run), config, allow_unsandboxed=False, durability="process")
    settings = sandbox_settings(config, deployment, run)
    assert script.parent in settings.visible
    assert tasks in settings.hidden
