"""Configuration: one TOML, overrides, errors that name what is wrong and what would be right."""

import tomllib
from pathlib import Path

import pytest
from gyre.contracts.errors import ConfigError
from gyre.runtime.config import RunConfig, check_run, config_digest, fill, load_deployment, load_run
from gyre.runtime.settings import apply_overrides, expand_environment, parse, to_toml

MINIMAL = """
name = "a-run"
steps = 4
[policy]
checkpoint = "warm"
[tasks]
root = "tasks"
[harness]
command = ["{python}", "h.py"]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(MINIMAL)
    return file


def test_defaults_follow_from_the_minimum(path):
    config = load_run(path)
    assert config.burst.num_outstanding == 8
    assert config.burst.staleness_limit == 0
    assert config.cells.schedule == "colocate"


def test_overrides_are_toml_and_bare_words_are_strings(path):
    config = load_run(path, ["burst.steps_per_burst=2", "loss.kind=dapo", "optimizer.learning_rate = 1e-3",
                             "policy.build=['a', 'b']", "seed=7"])
    assert (config.burst.steps_per_burst, config.loss.kind, config.seed) == (2, "dapo", 7)
    assert (config.optimizer.learning_rate, config.policy.build) == (1e-3, ("a", "b"))


def test_a_resolved_configuration_reads_back_as_itself(path):
    config = load_run(path, ["harness.environment.KEY='${SECRET}'", 'name="q"'])
    again = parse(tomllib.loads(to_toml(config)), RunConfig, "again")
    assert again == config
    assert config_digest(again) == config_digest(config)
    assert "${SECRET}" in to_toml(config)


@pytest.mark.parametrize("override, says", [
    ("burts.phi=2", "unknown key 'burts'; did you mean 'burst'"),
    ("burst.step_per_burst=2", "unknown key 'burst.step_per_burst'; did you mean 'burst.steps_per_burst'"),
    ("harness.timeout_calls.mim=2", "did you mean 'harness.timeout_calls.min'"),
    ("burst.phi='two'", "Expected `int`, got `str` - at `burst.phi"),
    ("cells.tensor_parallel=2", "cells.tensor_parallel = 2: tensor parallelism is not built yet"),
    ("cells.context_parallel=2", "context parallelism is not built yet"),
    ("training.ranks=0", "training.ranks = 0: must be at least 1"),
    ("training.zero_stage=2", "training.zero_stage = 2: the torch backend has no such stage; leave it 0"),
    ("training={backend='fsdp', zero_stage=1}", "the fsdp backend has no such stage; use 2 or 3"),
    ("engine={backend='scripted', carry='keep'}", "only the torch engine keeps KV"),
    ("engine={backend='scripted', deterministic=true}", "only the torch engine has this mode"),
    ("engine.max_running=0", "engine.max_running = 0: must be at least 1"),
    ("engine.max_waiting=0", "engine.max_waiting = 0: must be at least 1"),
    ("engine.token_budget=-5", "engine.token_budget = -5: must be at least 1"),
    ("engine.flush_ms=-3", "engine.flush_ms = -3.0: must be at least 0"),
    ("engine.min_interval_ms=-1", "engine.min_interval_ms = -1.0: must be at least 0"),
    ("engine.move_min_tokens=-1", "engine.move_min_tokens = -1: must be at least 0"),
    ("engine.kv_tokens=8", "engine.kv_tokens = 8: must hold at least one context of sampling.max_context = 8192 tokens"),
    ("sampling.temperature=1e-39", "sampling.temperature = 1e-39: must be at least 0.0001"),
    ("cells.device=cudda", "cells.device = 'cudda': unknown; use auto or cpu or cuda"),
    ("cells.expert_parallel=2", "expert parallelism is not built yet"),
    ("cells.nodes_per_cell=2", "several nodes in a cell is not built yet"),
    ("policy.lora_rank=8", "LoRA is not built yet"),
    ("engine.backend=vlm", "engine.backend = 'vlm': unknown"),
    ("cells.schedule=elestic", "cells.schedule = 'elestic': unknown; use elastic, async"),
    ("cells.schedule=colocate+standalone", "cells.standalone = 0: colocate+standalone needs at least one"),
    ("cells.training=1", "cells.training = 1: only async divides the cells"),
    ("cells.transition_timeout_s=0.0", "cells.transition_timeout_s = 0.0: must be greater than 0"),
    ("cells.executions_per_cell=-1", "cells.executions_per_cell = -1: must not be negative"),
    ("burst.phi=1", "colocate carries nothing over"),
    ("steps=0", "steps = 0: must be greater than 0"),
    ("steps=5 ", "must be a multiple"),
    ("name='a b'", "name: 'a b' is not an id"),
    ("harness.command=[]", "give the command line"),
    ("harness.timeout_calls={share=2.0}", "share must be in"),
    ("harness.overall_timeout_s=10.0", "must be longer than"),
    ("harness.environment={API_KEY='sk-123'}", "looks like a secret; write it as ${API_KEY}"),
    ("sampling.top_p=0.9", "truncated distribution is not built yet"),
    ("no-equals-sign", "write it as section.key=value"),
])
def test_what_is_wrong_is_named_with_what_would_be_right(path, override, says):
    overrides = [override] if override != "steps=5 " else ["steps=5", "burst.steps_per_burst=2"]
    with pytest.raises((ConfigError, ValueError)) as caught:
        load_run(path, overrides)
    assert says in str(caught.value)


def test_a_missing_key_is_named(tmp_path):
    (tmp_path / "x.toml").write_text('name = "x"\n[policy]\ncheckpoint = "c"\n[harness]\ncommand = ["x"]\n')
    with pytest.raises(ConfigError, match="tasks"):
        load_run(tmp_path / "x.toml")


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_run(tmp_path / "none.toml")
    (tmp_path / "x.toml").write_text("name = ")
    with pytest.raises(ConfigError, match=r"x\.toml: "):
        load_run(tmp_path / "x.toml")


def test_commands_name_unknown_placeholders():
    assert fill(("{python}", "{root}/x"), root="r")[1] == "r/x"
    with pytest.raises(ConfigError, match="roof"):
        fill(("{roof}",), root="r")


def test_environment_references_that_are_not_set_are_errors():
    assert expand_environment("Bearer ${TOKEN}", {"TOKEN": "t"}) == "Bearer t"
    with pytest.raises(ConfigError, match="TOKEN, which is not set"):
        expand_environment("${TOKEN}", {})


def test_deployment_paths_are_relative_to_their_file(tmp_path):
    (tmp_path / "d.toml").write_text("""
run = "r"
nats_url = "nats://nats:4222"
state_dir = "state"
cells_dir = "cells"
blobs = "s3://bucket/x"
log_dir = "logs"
checkpoint_dir = "checkpoints"
gateway_url = "http://gateway:8000"
gateway = {listen = "0.0.0.0:8000", address = "gateway:8000"}
scheduler = {listen = "0.0.0.0:1", address = "scheduler:1"}
rollout = {listen = "0.0.0.0:2", address = "rollout:2"}
trajectory = {listen = "0.0.0.0:3", address = "trajectory:3"}
engines = [{listen = "0.0.0.0:4", address = "engine-0:4"}]
trainers = [{listen = "0.0.0.0:5", address = "trainer-0:5"}]
transfers = [{listen = "0.0.0.0:6", address = "trainer-0:6"}]
evaluators = [{listen = "0.0.0.0:7", address = "evaluator-0:7"}]
""")
    deployment = load_deployment(tmp_path / "d.toml")
    assert deployment.state_dir == str(tmp_path / "state")
    assert deployment.blobs == "s3://bucket/x"
    assert tomllib.loads(to_toml(deployment))["engines"][0]["address"] == "engine-0:4"


def test_overrides_do_not_change_what_they_were_given():
    tables = {"a": {"b": 1}}
    assert apply_overrides(tables, ["a.b=2"]) == {"a": {"b": 2}}
    assert tables == {"a": {"b": 1}}


def test_check_is_part_of_loading(path):
    check_run(load_run(path))


@pytest.mark.parametrize("compute_dtype, stage, says", [
    ("float64", 2, "the deepspeed backend takes float32 or bfloat16"),
    ("bfloat16", 1, "training.zero_stage = 1: with bfloat16 the deepspeed backend takes 2 or 3"),
])
def test_what_deepspeed_cannot_do_exactly_is_refused(path, compute_dtype, stage, says):
    with pytest.raises(ConfigError, match=says):
        load_run(path, [f"optimizer.compute_dtype={compute_dtype}", f"training={{backend='deepspeed', zero_stage={stage}}}"])


def test_every_backend_has_a_stage_of_its_own(path):
    stages = [load_run(path, [f"training.backend={b}"]).training.stage for b in ("torch", "fsdp", "deepspeed")]
    assert stages == [0, 3, 2]


@pytest.mark.parametrize("training, says", [
    ("{backend='timed', timed_s_per_token=-1.0}", "training.timed_s_per_token = -1.0: must not be negative"),
    ("{timed_update_s=2.0}", "training.timed_update_s = 2.0: the torch backend takes the time it needs; use 0"),
    ("{backend='timed', ranks=2}", "training.ranks = 2: the timed backend computes nothing that could be shared; use 1"),
    ("{backend='timed', zero_stage=1}", "training.zero_stage = 1: the timed backend has no such stage; leave it 0"),
])
def test_a_timed_trainer_is_refused_what_it_cannot_be(path, training, says):
    with pytest.raises(ConfigError, match=says):
        load_run(path, [f"training={training}"])


def test_shared_memory_lies_below_the_cells_unless_a_place_is_given(tmp_path):
    endpoint = '{listen = "h:1", address = "h:1"}'
    lines = [*(f'{key} = "x"' for key in ("run", "nats_url", "state_dir", "cells_dir", "blobs", "log_dir", "checkpoint_dir",
                                          "gateway_url")),
             *(f"{key} = {endpoint}" for key in ("gateway", "scheduler", "rollout", "trajectory")),
             *(f"{key} = [{endpoint}]" for key in ("engines", "trainers", "evaluators", "transfers"))]
    path = tmp_path / "deployment.toml"
    path.write_text("\n".join(lines))
    assert load_deployment(path).regions_dir == f"{tmp_path}/x/transfer"
    path.write_text("\n".join(["memory_dir = '/dev/shm/gyre'", *lines]))
    assert load_deployment(path).regions_dir == "/dev/shm/gyre"
