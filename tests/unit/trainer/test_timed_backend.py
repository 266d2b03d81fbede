"""The backend that waits instead of computing: its times, and sums that are exact whole numbers."""

import numpy as np
import torch
from gyre.runtime.config import OptimizerConfig
from gyre.trainer.backends.timed import LARGEST, TimedBackend, worth
from gyre.trainer.loss import LossConfig
from trees import random_micro_step, tiny_decoder


class Waits:
    """Notes how long something would have waited."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def backend(waits: Waits, is_core: bool = True, s_per_token: float = 0.5, update_s: float = 3.0) -> TimedBackend:
    optimizer = OptimizerConfig(learning_rate=0.01) if is_core else None
    return TimedBackend(tiny_decoder().to(torch.float32), LossConfig(), optimizer, "cpu", s_per_token, update_s, waits)


def exported(trainer: TimedBackend) -> dict[str, np.ndarray]:
    arrays = {n: np.zeros(shape, dtype) for n, (shape, dtype) in trainer.gradient_shapes().items()}
    trainer.export_gradients(arrays)
    return arrays


def test_a_micro_step_takes_its_tokens_time_and_an_update_its_own() -> None:
    waits, micro_steps = Waits(), [random_micro_step(seed) for seed in range(3)]
    trainer = backend(waits)
    for micro_step in micro_steps:
        trainer.accumulate(micro_step)
    trainer.update(1.0, 0.01, 1.0)
    assert waits.seconds == [*(0.5 * m.num_tokens for m in micro_steps), 3.0]


def test_sums_over_any_division_between_cells_are_the_same_whole_numbers() -> None:
    micro_steps = [random_micro_step(seed) for seed in range(8)]
    core, satellite = backend(Waits()), backend(Waits(), is_core=False)
    said = [(core if index % 3 else satellite).accumulate(m)["timed_worth"] for index, m in enumerate(micro_steps)]
    core.add_gradients(exported(satellite))
    assert sum(said) == sum(worth(m) for m in micro_steps)
    for array in exported(core).values():
        assert np.array_equal(array, np.full_like(array, sum(said)))


def test_what_a_micro_step_is_worth_depends_on_its_tokens_alone() -> None:
    assert worth(random_micro_step(3)) == worth(random_micro_step(3))
    worths = {worth(random_micro_step(seed)) for seed in range(64)}
    assert worths <= set(range(1, LARGEST + 1))
    assert len(worths) > 1


def test_an_update_moves_the_weights_that_are_then_offered_as_with_torch() -> None:
    trainer = backend(Waits())
    before = {n: w.clone() for n, w in trainer.weights().items()}
    trainer.accumulate(random_micro_step(0))
    assert trainer.update(1.0, 0.01, 1.0) > 0
    assert all(not torch.equal(w, before[n]) for n, w in trainer.weights().items())
    assert all(not array.any() for array in exported(trainer).values())


def test_the_metrics_count_targets_tokens_and_versions() -> None:
    micro_step = random_micro_step(5)
    sums = backend(Waits()).accumulate(micro_step)
    assert (sums["num_targets"], sums["num_tokens"]) == (micro_step.num_targets, micro_step.num_tokens)
    assert sum(v for n, v in sums.items() if n.startswith("sampled_under_")) == micro_step.num_targets
