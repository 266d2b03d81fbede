"""An engine whose model is memory: what is stored for a token is who it is, and the next token is a function of the context.

So whatever is read through the block table can be compared with what must be there, also after blocks have moved.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from gyre.policy.model import PolicyModel
from gyre.rollout.engines.base import GenerateRequest, ProbeResult
from gyre.rollout.torch_engine.kv import PagedKV
from gyre.rollout.torch_engine.runner import Runner
from gyre.rollout.torch_engine.sampler import SamplingRows, sample
from gyre.rollout.torch_engine.scheduler import Scheduler
from gyre.rollout.torch_engine.sequence import Batch, Slots
from stepped_engine import VOCAB, Stepped


def logits_after(ids: np.ndarray) -> torch.Tensor:
    """A wild function of all ids (int32 [T]), [VOCAB]."""
    seed = int.from_bytes(hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=4).digest(), "little")
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32))


def undisturbed(request: GenerateRequest) -> list[tuple[int, int, float]]:
    """(index, token, logprob) of a request that nothing happens to."""
    ids, out = request.prompt_ids, []
    for index in range(request.max_tokens):
        rows = SamplingRows(*(np.array([x]) for x in (request.temperature, request.top_p, request.top_k)),
                            np.array([request.seed], dtype=np.uint64), np.array([len(ids)]))  # fmt: skip
        drawn = sample(logits_after(ids).unsqueeze(0), rows)
        out.append((index, drawn.token_ids[0], drawn.logprobs[0]))
        ids = np.append(ids, np.int32(drawn.token_ids[0]))
        if drawn.token_ids[0] in request.stop_token_ids:
            break
    return out


class ToyRunner(Runner):
    """Stores (version, id, position) for each token; a row that yields reads its whole context back and compares."""

    def __init__(self, model: PolicyModel, cache: PagedKV, scheduler: Scheduler) -> None:
        super().__init__(model, cache)
        self._scheduler = scheduler
        self.oldest: dict[tuple[str, int], int] = {}  # (request, position sampled) -> oldest version that was attended to

    def run(self, batch: Batch, slots: Slots) -> torch.Tensor:
        cells, size, version = self.cache.pool[:, 0, :, 0, 0, :3], self.cache.block_size, self._scheduler.version
        for row, sequence in enumerate(batch.rows):
            for position in range(batch.starts[row], batch.starts[row] + batch.counts[row]):
                block = slots.table[batch.slots[row], position // size]
                told = (version, int(sequence.ids[position]), position)
                cells[block, position % size] = torch.tensor(told, dtype=cells.dtype)
        logits = []
        for row in batch.yields:
            sequence = batch.rows[row]
            if sequence.slot < 0:  # it has ended: its blocks may be anyone's, and nobody looks at what it yields
                logits.append(torch.zeros(VOCAB))
                continue
            positions = np.arange(sequence.num_known)
            found = cells[slots.table[batch.slots[row], positions // size], positions % size].numpy()
            ids = sequence.ids[: sequence.num_known]
            assert found[:, 1].tolist() == ids.tolist() and found[:, 2].tolist() == positions.tolist()
            self.oldest[sequence.request.request_id, sequence.num_known] = int(found[:, 0].min())
            logits.append(logits_after(ids))
        return torch.stack(logits) if logits else torch.empty(0, VOCAB)


class ToyEngine(Stepped):
    """A stepped engine over a toy model; its probe always succeeds."""

    def _make_runner(self, model: PolicyModel, cache: PagedKV) -> Runner:
        self.toy = ToyRunner(model, cache, self._scheduler)
        return self.toy

    async def probe(self) -> ProbeResult:
        self._verified = True
        return ProbeResult(self._weights.version, self._weights.checksum, True)
