"""The model inside the fake engines: a real decoder, a prefix index that can go stale, draws by (seed, position)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from gyre.policy.attention import CausalAttention
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from gyre.rollout.torch_engine.sampler import SamplingRows, sample

torch.set_num_threads(1)


@dataclass
class TinyModel:
    """`memory` counts releases of the KV cache, `loads` those of weights. What a prefix was computed in is remembered with
    it, so that a hit on one whose memory is gone gives garbage, and one of other weights gives those weights' mixture."""

    policy: PolicyConfig
    block_size: int = 4
    decoder: Decoder | None = None
    memory: int = 0
    loads: int = 0
    index: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = field(default_factory=dict)

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        self.decoder = Decoder.from_state(self.policy, dict(state)).requires_grad_(False).float()
        self.loads += 1

    def forget_weights(self) -> None:
        """Released memory comes back as zeros."""
        if self.decoder is not None:
            for parameter in self.decoder.parameters():
                parameter.zero_()

    def match(self, salt: str, ids: Sequence[int]) -> tuple[int, bool]:
        """How many tokens of the prompt the index knows (never all), and whether what it knows is good."""
        known, good = 0, True
        for end in range(self.block_size, len(ids), self.block_size):
            entry = self.index.get((salt, tuple(ids[:end])))
            if entry is None:
                break
            known, good = end, good and entry == (self.memory, self.loads)
        return known, good

    def remember(self, salt: str, ids: Sequence[int], good: bool = True) -> None:
        """Adds the full blocks of a sequence; what is there already stays as it was."""
        entry = (self.memory, self.loads) if good else (-1, -1)
        for end in range(self.block_size, len(ids), self.block_size):
            self.index.setdefault((salt, tuple(ids[:end])), entry)

    def logits(self, ids: Sequence[int], good: bool = True) -> torch.Tensor:
        """[1, V]; garbage where the cache is."""
        assert self.decoder is not None, "no weights were ever loaded"
        ids_T = torch.tensor(list(ids))
        with torch.inference_mode():
            hidden = self.decoder(ids_T, torch.arange(len(ids_T)), CausalAttention([len(ids_T)]))
            logits = self.decoder.logits(hidden[-1:]).float()
        return logits if good else logits.flip(-1) * 3.0 + torch.arange(logits.shape[-1]) * 0.1

    def draw(self, ids: Sequence[int], temperature: float, seed: int, good: bool) -> tuple[int, float, float]:
        """A token with its logprob under the policy and under what was sampled."""
        rows = SamplingRows(
            np.array([temperature], np.float64), np.ones(1), np.zeros(1, np.int64), np.array([seed], np.uint64),
            np.array([len(ids)]),
        )  # fmt: skip
        drawn = sample(self.logits(ids, good), rows)
        return drawn.token_ids[0], drawn.logprobs[0], drawn.behaviour_logprobs[0]
