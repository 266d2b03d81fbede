"""The golden check of a host: it predicts what the weights say, from a cold cache and from a warm one.

A prefix index that outlived its memory, or weights that were half loaded, give fluent nonsense rather than an error.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gyre.rollout.engines.host import Call, Ended, Host

if TYPE_CHECKING:
    from gyre.policy.config import PolicyConfig

_PROMPT, _ANSWER = 70, 8
_TOLERANCE = {"float64": 5e-3, "float32": 5e-3, "bfloat16": 0.25}  # nats: other kernels than ours, in these dtypes
_MAX_PARAMETERS = 2_000_000_000  # beyond it a plain forward on the host's CPU takes too long


def golden_ids(vocab_size: int, length: int = _PROMPT) -> list[int]:
    """A fixed walk over the vocabulary."""
    return [(place * 7919 + 13) % vocab_size for place in range(length)]


async def predictions_hold(host: Host, policy: PolicyConfig, checkpoint: Path, salt: str) -> str:
    """What is wrong with the host's predictions; '' if nothing is. `salt` must be fresh."""
    prompt = golden_ids(policy.vocab_size, min(_PROMPT, policy.max_position - _ANSWER - 1))
    runs = []
    for _ in range(2):
        ids, logprobs, problem = await _answer(host, prompt, salt)
        if problem:
            return problem
        runs.append((ids, logprobs))
    (cold_ids, cold), (warm_ids, warm) = runs
    expected = await asyncio.to_thread(_expected, policy, checkpoint, prompt, (cold_ids, warm_ids))
    gap = _largest_gap(cold_ids, cold, warm_ids, warm)
    if gap > expected.tolerance:
        return f"next-token predictions over cached blocks differ by {gap:.2g} from those without"
    for got, want in zip((cold, warm), expected.logprobs, strict=False):
        gap = max(abs(a - b) for a, b in zip(got, want, strict=True))
        if gap > expected.tolerance:
            return f"next-token predictions differ by {gap:.2g} from a plain forward"
    return ""


class _Expected(NamedTuple):
    """`logprobs` has no entry for a policy that is too large for a plain forward here."""

    tolerance: float
    logprobs: list[list[float]]


async def _answer(host: Host, prompt: list[int], salt: str) -> tuple[list[int], list[float], str]:
    call = Call(uuid.uuid4().hex, prompt, _ANSWER, 0.0, (), 0, salt)
    ids: list[int] = []
    logprobs: list[float] = []
    async for part in host.generate(call):
        if isinstance(part, Ended):
            wrong = part.reason != "length" or len(ids) != _ANSWER or len(logprobs) != _ANSWER
            return ids, logprobs, f"the probe ended with {part.reason} {part.detail} after {len(ids)} ids" if wrong else ""
        ids += part.ids
        logprobs += part.logprobs
    return ids, logprobs, "the probe's stream ended without saying how"


def _largest_gap(a_ids: Sequence[int], a: Sequence[float], b_ids: Sequence[int], b: Sequence[float]) -> float:
    """Up to and with the first token in which they differ: there two tokens were nearly equally likely, or it is a fault."""
    gap = 0.0
    for i, j, x, y in zip(a_ids, b_ids, a, b, strict=True):
        gap = max(gap, abs(x - y))
        if i != j:
            break
    return gap


def _expected(policy: PolicyConfig, checkpoint: Path, prompt: list[int], answers: Sequence[list[int]]) -> _Expected:
    """Log-probabilities of the answers by a plain forward in float32."""
    import torch
    from gyre.policy.attention import CausalAttention
    from gyre.policy.checkpoint import load_decoder
    from gyre.policy.decoder import Decoder

    with torch.device("meta"):
        size = sum(p.numel() for p in Decoder(policy).parameters())
    dtype = json.loads((checkpoint / "config.json").read_text()).get("torch_dtype", "")
    tolerance = _TOLERANCE.get(dtype, max(_TOLERANCE.values()))
    if size > _MAX_PARAMETERS:
        return _Expected(tolerance, [])
    decoder = load_decoder(checkpoint, torch.float32)
    rows = []
    with torch.inference_mode():
        for answer in answers:
            ids_T = torch.tensor(prompt + answer)
            hidden = decoder(ids_T, torch.arange(len(ids_T)), CausalAttention([len(ids_T)]))
            logprobs = torch.log_softmax(decoder.logits(hidden[len(prompt) - 1 : -1]).float(), dim=-1)
            rows.append(logprobs.gather(1, ids_T[len(prompt) :].unsqueeze(1)).squeeze(1).tolist())
    return _Expected(tolerance, rows)
