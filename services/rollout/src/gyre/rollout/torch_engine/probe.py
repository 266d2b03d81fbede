"""The golden check: next-token predictions over the paged cache against a plain forward of the same weights."""

from __future__ import annotations

import torch
from gyre.policy.attention import CausalAttention
from gyre.rollout.engines.base import EventStream, GenerateRequest
from gyre.rollout.torch_engine.kv import PagedKV
from gyre.rollout.torch_engine.runner import Runner
from gyre.rollout.torch_engine.sampler import Sampled
from gyre.rollout.torch_engine.scheduler import Scheduler, SchedulerConfig

_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.25}


def golden_ids(vocab_size: int, length: int = 40) -> torch.Tensor:
    """A fixed walk over the vocabulary, int64 [length]."""
    return (torch.arange(length) * 7919 + 13) % vocab_size


def predictions_agree(runner: Runner, max_position: int) -> str:
    """Feeds the golden ids in chunks and singly; returns what is wrong with the predictions, or ''."""
    model, device, dtype = runner.model, runner.cache.pool.device, runner.cache.pool.dtype
    ids_T = golden_ids(model.config.vocab_size)[: max_position - 1]
    got = _paged_logprobs(runner, ids_T)
    if not torch.isfinite(got).all():
        return "next-token predictions are not finite"
    with torch.inference_mode():
        positions_T = torch.arange(len(ids_T), device=device)
        hidden = model(ids_T.to(device), positions_T, CausalAttention([len(ids_T)]))
        want = torch.log_softmax(model.logits(hidden[len(ids_T) // 2 - 1 :]).float(), dim=-1)
    gap = float((got - want).abs().max())
    if gap > _TOLERANCE[dtype]:
        return f"next-token predictions over the cache differ by {gap:.2g} from a plain forward"
    return ""


def _paged_logprobs(live: Runner, ids_T: torch.Tensor) -> torch.Tensor:
    """Log-probabilities after the first half (one prefill in two chunks) and after each token of the second half."""
    ids = ids_T.to(torch.int32).numpy()
    half, block_size = len(ids) // 2, live.cache.block_size
    num_tokens = -(-(len(ids) + 1) // block_size) * block_size
    scheduler = Scheduler(SchedulerConfig(num_tokens, num_tokens, block_size, 1, 1, half, -(-half // 2)))
    pool = live.cache.pool
    cache = PagedKV(live.model.config, scheduler.pool.num_blocks, block_size, pool.dtype, pool.device)
    runner = type(live)(live.model, cache)
    scheduler.add(GenerateRequest("probe", ids[:half], max_tokens=len(ids) - half + 1), EventStream())
    rows = []
    while scheduler.has_work and (batch := scheduler.schedule()) is not None:
        logits = runner.run(batch, scheduler.slots)
        forced = [int(ids[min(half + len(rows), len(ids) - 1)])] if batch.yields else []
        if batch.yields:
            rows.append(torch.log_softmax(logits.float(), dim=-1))
        scheduler.commit(batch, Sampled(forced, [0.0] * len(forced), [0.0] * len(forced)))
    return torch.cat(rows)
