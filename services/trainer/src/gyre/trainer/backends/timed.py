"""A trainer without a model's work: micro-steps and updates take a configured time, everything else is as with torch.

It is for measuring how cells and steps are arranged in time, as the scripted engine is: weights, optimizer state, checkpoints,
transfers and joins are those of a real, small policy, but nothing is learned. What a micro-step adds to the sums is a small
whole number, so that a step's sum is exact whatever the order and whoever added: it shows which micro-steps were counted.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable

from gyre.contracts.microstep import MicroStep
from gyre.policy.model import PolicyModel
from gyre.runtime.config import OptimizerConfig
from gyre.trainer.backends.torch import TorchBackend
from gyre.trainer.loss import LossConfig
from gyre.trainer.metrics import TIMED_WORTH, sampling_versions

log = logging.getLogger(__name__)

LARGEST = 7  # float32 counts to 2^24 exactly: enough for two million micro-steps in a step


class TimedBackend(TorchBackend):
    """`gyre.trainer.backends.base.Backend` that waits instead of computing."""

    def __init__(
        self, decoder: PolicyModel, loss: LossConfig, optimizer: OptimizerConfig | None, device: str = "cpu",
        s_per_token: float = 0.0, update_s: float = 0.0, wait: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        """`optimizer` is given to the core only. `wait`: passes so many seconds."""
        super().__init__(decoder, loss, optimizer, device)
        self._s_per_token, self._update_s, self._wait = s_per_token, update_s, wait

    def accumulate(self, micro_step: MicroStep) -> dict[str, float]:
        """Take the micro-step's time and add `worth(micro_step)` to every element of every sum.

        Its Unix times go to the log, because no fact says when a cell computes.
        """
        began = time.time()
        self._wait(micro_step.num_tokens * self._s_per_token)
        log.info("timed micro-step: %d tokens from %.3f to %.3f", micro_step.num_tokens, began, time.time())
        added = worth(micro_step)
        for total in self.sums():
            total.add_(added)
        counts = {"num_targets": float(micro_step.num_targets), "num_tokens": float(micro_step.num_tokens)}
        return counts | {TIMED_WORTH: float(added)} | sampling_versions(micro_step.version)

    def update(self, scale: float, learning_rate: float, max_grad_norm: float) -> float:
        self._wait(self._update_s)
        return super().update(scale, learning_rate, max_grad_norm)


def worth(micro_step: MicroStep) -> int:
    """What a micro-step adds to each element: 1 to 7, from its tokens alone."""
    return 1 + zlib.crc32(micro_step.ids.tobytes()) % LARGEST


