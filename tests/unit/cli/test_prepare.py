"""What has to exist before a run starts, and where its relative paths point."""

from dataclasses import replace

import pytest
from gyre.cli.plan import describe
from gyre.cli.prepare import baselines, prepare
from gyre.cli.run_dir import resolve_paths
from gyre.contracts.errors import ConfigError
from gyre.runtime.config import HarnessConfig, PolicyConfigRef, RunConfig, TasksConfig
from gyre.runtime.losses import LossConfig

RUN = RunConfig("r", PolicyConfigRef("policy"), TasksConfig("tasks"), HarnessConfig(("h",)))


def test_a_missing_reference_policy_is_named(tmp_path):
    (tmp_path / "tasks" / "train").mkdir(parents=True)
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    prepare(resolve_paths(RUN, tmp_path), lambda _: None)
    run = resolve_paths(replace(RUN, loss=LossConfig(kl_coefficient=0.1, kl_reference="base")), tmp_path)
    assert run.loss.kl_reference == str(tmp_path / "base")
    with pytest.raises(ConfigError, match=r"loss.kl_reference = .*base'.*no config.json"):
        prepare(run, lambda _: None)


def test_the_plan_says_what_the_loss_comes_to():
    text = describe(replace(RUN, loss=LossConfig(kind="dapo", entropy_coefficient=0.01)))
    assert "# loss: dapo, ratio over the engine in [0.8, 1.28], mean over targets, 0.01 * entropy" in text
    assert 'kind = "dapo"' in text and "entropy_coefficient = 0.01" in text


def test_a_run_without_held_out_tasks_has_no_baselines_on_them() -> None:
    """The command would be asked about no tasks, say so, and the run would not start."""
    says = ("{python}", "-c", "print('{{\"do_nothing\": 0.5}}')")
    asked = replace(RUN, evaluation=replace(RUN.evaluation, baselines=says, num_tasks=4))
    assert baselines(asked) == {"do_nothing": 0.5}
    assert baselines(replace(asked, evaluation=replace(asked.evaluation, num_tasks=0))) == {}
