"""Tree attention on a CPU out of plain flash attention: no mask, one node in the graph.

A run attends to its ancestors without a mask and to itself causally. Each part gives its own output and its logarithm
of the sum of exponentials (LSE); the parts merge exactly:

    lse = log(sum_p exp(lse_p))      out = sum_p exp(lse_p - lse) out_p

Backward runs part by part too: the flash kernel's backward needs only the whole output and the whole LSE to give the
part's share of every gradient. (The merge is that of Hydragen and of cascade inference, here with its backward.)
Ancestors that lie apart are put side by side for the call, and given up after it.

Axes: T packed tokens, H query heads, K key/value heads, G = H / K, S tokens of a run, A tokens of a part, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gyre.trainer.runs import Run

#: Sequences are cut into pieces of this many tokens if they are shorter than CUT_BELOW (measured, one CPU thread).
PIECE, CUT_BELOW = 192, 4096

Spans = tuple[tuple[int, int], ...]

_forward = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_backward = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


def has_kernel(device: torch.device | str) -> bool:
    """Whether this torch has the kernels; they are not part of its promised interface."""
    return torch.device(device).type == "cpu" and _forward is not None and _backward is not None


class FlashTrees:
    """The runs of packed trees (`gyre.policy.attention.Attention`)."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = tuple(piece for run in runs for piece in pieces_of(run))

    def __call__(self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        return _Attend.apply(q_THD, k_TKD, v_TKD, self._runs)


def pieces_of(run: Run) -> list[Run]:
    """A run without ancestors, cut where that is faster: the causal kernel takes more queries at a time the longer a
    sequence is, and so looks at more keys that none of them may see. From CUT_BELOW tokens on that is a small share."""
    if run.ancestors or not 2 * PIECE <= run.end - run.start < CUT_BELOW:
        return [run]
    starts = range(run.start, run.end, PIECE)
    return [Run(start, min(start + PIECE, run.end), ((run.start, start),) if start > run.start else ()) for start in starts]


def _parts(run: Run) -> list[tuple[Spans, bool]]:
    """(ranges of tokens, whether they are the run itself) of what a run looks at."""
    own = ((run.start, run.end),), True
    return [(run.ancestors, False), own] if run.ancestors else [own]


def _joined(x_TKD: torch.Tensor, spans: Spans) -> torch.Tensor:
    """[A, K, D]: a view of one range, a copy of several."""
    (start, end), *others = spans
    return torch.cat([x_TKD[a:b] for a, b in spans]) if others else x_TKD[start:end]


def _add(total_TKD: torch.Tensor, spans: Spans, grad_AKD: torch.Tensor) -> None:
    for (start, end), grad in zip(spans, grad_AKD.split([b - a for a, b in spans]), strict=True):
        total_TKD[start:end] += grad


class _Attend(torch.autograd.Function):
    """All runs of one layer at once."""

    @staticmethod
    def forward(ctx: Any, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, runs: tuple[Run, ...]) -> torch.Tensor:
        out_THD = torch.empty_like(q_THD)
        lse_HT = torch.empty(q_THD.shape[1], q_THD.shape[0], dtype=torch.promote_types(q_THD.dtype, torch.float32))
        for run in runs:
            q_SHD = q_THD[run.start:run.end]
            found = [_attend_part(q_SHD, _joined(k_TKD, spans), _joined(v_TKD, spans), is_own) for spans, is_own in _parts(run)]
            out_THD[run.start:run.end], lse_HT[:, run.start:run.end] = _merge(found)
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, out_THD, lse_HT)
        ctx.runs = runs
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_THD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        q_THD, k_TKD, v_TKD, out_THD, lse_HT = ctx.saved_tensors
        wide = lse_HT.dtype  # many runs add to one key: their sum must not round each time
        dq_THD, dk_TKD, dv_TKD = (torch.zeros(x.shape, dtype=wide) for x in (q_THD, k_TKD, v_TKD))
        for run in ctx.runs:
            here = slice(run.start, run.end)
            for spans, is_own in _parts(run):
                dq, dk, dv = _part_gradients(grad_THD[here], q_THD[here], _joined(k_TKD, spans), _joined(v_TKD, spans),
                                             out_THD[here], lse_HT[:, here], is_own)
                dq_THD[here] += dq
                _add(dk_TKD, spans, dk)
                _add(dv_TKD, spans, dv)
        return dq_THD.to(q_THD.dtype), dk_TKD.to(k_TKD.dtype), dv_TKD.to(v_TKD.dtype), None


def _attend_part(q_SHD: torch.Tensor, k_AKD: torch.Tensor, v_AKD: torch.Tensor,
                 is_own: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """out_SHD and lse_HS of one part."""
    num_heads, num_kv = q_SHD.shape[1], k_AKD.shape[1]
    q, k, v = _shaped(q_SHD, num_kv, is_own), _keys(k_AKD, num_heads, is_own), _keys(v_AKD, num_heads, is_own)
    out, lse = _forward(q, k, v, 0.0, is_own)
    return _unshaped(out, num_heads, len(q_SHD)), lse.reshape(num_heads, len(q_SHD))


def _part_gradients(grad_SHD: torch.Tensor, q_SHD: torch.Tensor, k_AKD: torch.Tensor, v_AKD: torch.Tensor,
                    out_SHD: torch.Tensor, lse_HS: torch.Tensor, is_own: bool) -> tuple[torch.Tensor, ...]:
    """The part's share of dq_SHD, dk_AKD and dv_AKD."""
    num_heads, num_kv = q_SHD.shape[1], k_AKD.shape[1]
    grad, q, out = (_shaped(x, num_kv, is_own) for x in (grad_SHD, q_SHD, out_SHD))
    k, v = _keys(k_AKD, num_heads, is_own), _keys(v_AKD, num_heads, is_own)
    lse = lse_HS.reshape(1, q.shape[1], q.shape[2])
    dq, dk, dv = _backward(grad, q, k, v, out, lse, 0.0, is_own)
    return _unshaped(dq, num_heads, len(q_SHD)), _gathered(dk, num_kv), _gathered(dv, num_kv)


def _shaped(x_SHD: torch.Tensor, num_kv: int, is_own: bool) -> torch.Tensor:
    """[1, H, S, D] for the causal part; [1, K, G S, D] without a mask, where the group's heads are just more queries."""
    if is_own or x_SHD.shape[1] == num_kv:
        return x_SHD.transpose(0, 1).unsqueeze(0)
    size, num_heads, width = x_SHD.shape
    return x_SHD.transpose(0, 1).reshape(1, num_kv, num_heads // num_kv * size, width)


def _unshaped(x: torch.Tensor, num_heads: int, size: int) -> torch.Tensor:
    """[S, H, D] again."""
    return x.reshape(num_heads, size, x.shape[-1]).transpose(0, 1)


def _keys(x_AKD: torch.Tensor, num_heads: int, is_own: bool) -> torch.Tensor:
    """[1, K, A, D], or [1, H, A, D] for the causal part."""
    x_KAD = x_AKD.transpose(0, 1)
    if is_own and num_heads != len(x_KAD):
        x_KAD = x_KAD.repeat_interleave(num_heads // len(x_KAD), 0)
    return x_KAD.unsqueeze(0)


def _gathered(grad: torch.Tensor, num_kv: int) -> torch.Tensor:
    """dk_AKD: what the heads of a group want of their key adds up."""
    grad_HAD = grad[0]
    if len(grad_HAD) != num_kv:
        grad_HAD = grad_HAD.unflatten(0, (num_kv, -1)).sum(1)
    return grad_HAD.transpose(0, 1)


def _merge(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """out_SHD and lse_HS of all parts together."""
    if len(parts) == 1:
        return parts[0]
    lse_PHS = torch.stack([lse for _, lse in parts])
    lse_HS = torch.logsumexp(lse_PHS, 0)
    shares_PSH1 = (lse_PHS - lse_HS).exp().transpose(1, 2).unsqueeze(-1)
    out_SHD = sum(out * share for (out, _), share in zip(parts, shares_PSH1, strict=True))
    return out_SHD.to(parts[0][0].dtype), lse_HS
