"""What the trainer takes from run.toml."""

from dataclasses import asdict

from gyre.runtime.config import Deployment, Endpoint, HarnessConfig, PolicyConfigRef, RunConfig, SamplingConfig, TasksConfig
from gyre.runtime.losses import LossConfig
from gyre.trainer.config import trainer_config

END = Endpoint("a", "a")
DEPLOYMENT = Deployment(
    "r", "nats", "state", "cells", "blobs", "logs", "checkpoints", END, "http", END, END, END, (), (END,), (), (END,)
)


def test_the_loss_is_that_of_the_run_with_its_defaults_filled_in_and_the_sampling_temperature() -> None:
    loss = LossConfig(kind="dapo", aggregation="execution", kl_coefficient=0.1)
    run = RunConfig(
        "r", PolicyConfigRef("p"), TasksConfig("t"), HarnessConfig(("h",)), loss=loss, sampling=SamplingConfig(temperature=0.7)
    )
    taken = trainer_config(run, DEPLOYMENT, 0).loss
    assert asdict(taken) == asdict(loss.resolved()) | {"temperature": 0.7}
