"""The `[loss]` section: what each kind stands for, what a step is divided by, and what is refused in what words."""

from dataclasses import replace

import pytest
from gyre.contracts.errors import ConfigError
from gyre.runtime.config import HarnessConfig, PolicyConfigRef, RunConfig, TasksConfig, check_run
from gyre.runtime.losses import KINDS, LossConfig, check_loss, describe_loss

RUN = RunConfig("r", PolicyConfigRef("p"), TasksConfig("t"), HarnessConfig(("h",)))
ADVANTAGE = {"rloo": "rloo", "dr_grpo": "mean"}


def test_the_default_is_gspo_as_the_paper_has_it():
    loss = RUN.loss.resolved()
    assert (loss.kind, loss.aggregation, loss.reference) == ("gspo", "execution", "behaviour")
    assert (1 - loss.clip_low, 1 + loss.clip_high) == (0.995, 1.005)
    assert (loss.correction, loss.correction_level, loss.correction_high) == ("truncate", "token", 5.0)
    check_run(RUN)


@pytest.mark.parametrize("kind, aggregation, low, high", [
    ("grpo", "execution", 0.8, 1.2), ("dapo", "token", 0.8, 1.28), ("dr_grpo", "constant", 0.8, 1.2),
    ("cispo", "token", 0.0, 5.0), ("rloo", "execution", 1.0, 1.0), ("reinforce", "execution", 1.0, 1.0),
])
def test_each_kind_takes_what_its_paper_uses(kind, aggregation, low, high):
    loss = LossConfig(kind=kind).resolved()
    assert loss.aggregation == aggregation
    assert (1 - loss.clip_low, 1 + loss.clip_high) == pytest.approx((low, high))
    assert loss.correction == "none"
    assert loss.resolved() == loss


def test_what_is_said_goes_before_what_the_kind_uses():
    loss = LossConfig(kind="dapo", aggregation="execution", clip_high=0.0, correction="none", reference="proximal").resolved()
    assert (loss.aggregation, loss.clip_low, loss.clip_high, loss.correction) == ("execution", 0.2, 0.0, "none")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_passes_with_what_belongs_to_it(kind):
    length = 100 if kind == "dr_grpo" else 0
    loss = LossConfig(kind=kind, constant_length=length, kl_coefficient=0.1, kl_reference="ref", entropy_coefficient=0.01)
    advantage = ADVANTAGE.get(kind, "grpo")
    check_run(replace(RUN, loss=loss, admission=replace(RUN.admission, advantage=advantage)))
    assert loss.trains_zero_advantage and not LossConfig(kind=kind).trains_zero_advantage


def test_a_step_is_divided_by_what_its_sealed_membership_says():
    assert LossConfig().scale(num_executions=64, num_targets=1000) == 1 / 64
    assert LossConfig(kind="dapo").scale(64, 1000) == 1 / 1000
    assert LossConfig(kind="dr_grpo", constant_length=100).scale(64, 1000) == 1 / 6400
    assert LossConfig(kind="dapo").scale(64, 0) == LossConfig().scale(0, 0) == 0.0


REFUSED = [
    ({"kind": "rloo"}, "loss.kind = 'rloo': is REINFORCE with the leave-one-out baseline; set admission.advantage = 'rloo' (it "
                       "is 'grpo'), or loss.kind = 'reinforce'"),
    ({"kind": "dr_grpo", "constant_length": 9}, "loss.kind = 'dr_grpo': does not divide by the group's standard deviation; set "
                                                "admission.advantage = 'mean'"),
    ({"kind": "dr_grpo"}, "loss.constant_length = 0: must be more than 0 with loss.aggregation = 'constant'"),
    ({"constant_length": 5}, "loss.constant_length = 5: is used with loss.aggregation = 'constant' only"),
    ({"clip_low": -0.5}, "loss.clip_low = -0.5: must be 0 or more, or -1 for what the kind uses"),
    ({"clip_low": 1.5}, "loss.clip_low = 1.5: must be at most 1"),
    ({"clip_high": float("nan")}, "loss.clip_high = nan: must be 0 or more"),
    ({"kind": "reinforce", "clip_high": 0.2}, "loss.clip_high = 0.2: loss.kind = 'reinforce' takes no ratio"),
    ({"kind": "reinforce", "reference": "proximal"}, "loss.reference = 'proximal': loss.kind = 'reinforce' takes no ratio"),
    ({"dual_clip": 3.0}, "loss.dual_clip = 3.0: loss.kind = 'gspo' has none; use 0, or one of grpo, dapo, dr_grpo"),
    ({"kind": "grpo", "dual_clip": 0.5}, "loss.dual_clip = 0.5: must be more than 1"),
    ({"kind": "grpo", "correction": "truncate"}, "loss.correction = 'truncate': the ratio of loss.kind = 'grpo' over the "
                                                 "engine is the importance weight already; use none or mask"),
    ({"correction_low": 0.5}, "loss.correction_low = 0.5: is used with loss.correction = 'mask' only"),
    ({"correction": "mask", "correction_low": 6.0}, "loss.correction_high = 5.0: must be finite and more than"),
    ({"kl_coefficient": -0.1}, "loss.kl_coefficient = -0.1: must be 0 or more"),
    ({"entropy_coefficient": float("inf")}, "loss.entropy_coefficient = inf: must be 0 or more, and finite"),
    ({"kl_reference": "x"}, "loss.kl_reference = 'x': is not used with loss.kl_coefficient = 0"),
]


@pytest.mark.parametrize("fields, says", REFUSED, ids=[says.partition(":")[0] for _, says in REFUSED])
def test_what_means_nothing_is_refused_with_what_would_be_right(fields, says):
    with pytest.raises(ConfigError) as caught:
        check_loss(LossConfig(**fields), "grpo")
    assert says in str(caught.value)


def test_the_loss_is_told_in_one_line_with_its_defaults():
    assert describe_loss(LossConfig()) == (
        "gspo, ratio over the engine in [0.995, 1.005], mean over executions, truncate token weights at 5")
    assert describe_loss(LossConfig(kind="dr_grpo", constant_length=9, kl_coefficient=0.1, entropy_coefficient=0.01)) == (
        "dr_grpo, ratio over the engine in [0.8, 1.2], sum over 9 targets per execution, 0.1 * KL (k3) to version 0, 0.01 * "
        "entropy")
    assert describe_loss(LossConfig(kind="reinforce", correction="mask", correction_low=0.5)) == (
        "reinforce, no ratio, mean over executions, mask token weights at 0.5 to 5")
