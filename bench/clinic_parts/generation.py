"""Batched sampling from the policy with a key/value cache: one slot for each execution.

Axes: T packed tokens of a pass, H heads, D head size, S slots, L cache length.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from gyre.policy.decoder import Decoder


@dataclass
class Request:
    """One call. ``output`` and ``logprobs`` grow until a stop token or ``max_tokens``."""

    slot: int
    prompt: list[int]
    max_tokens: int
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class SlotAttention:
    """Rows of equal width, one a slot; padding is written behind the row's end and overwritten before it is read."""

    def __init__(self, decoder: Decoder, slots: int, length: int) -> None:
        config = decoder.config
        shape = (config.num_layers, slots, length, config.num_kv_heads, config.head_dim)
        self.k_NSLHD, self.v_NSLHD = torch.zeros(shape), torch.zeros(shape)
        self.slots_R = torch.zeros(0, dtype=torch.long)
        self.positions_RW = torch.zeros(0, 0, dtype=torch.long)

    def __call__(self, layer: int, q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
        rows, width = self.positions_RW.shape
        where = (self.slots_R[:, None], self.positions_RW)
        self.k_NSLHD[layer][where] = k_THD.view(rows, width, *k_THD.shape[1:])
        self.v_NSLHD[layer][where] = v_THD.view(rows, width, *v_THD.shape[1:])
        top = int(self.positions_RW.max()) + 1
        k_RHLD = self.k_NSLHD[layer][self.slots_R, :top].transpose(1, 2)
        v_RHLD = self.v_NSLHD[layer][self.slots_R, :top].transpose(1, 2)
        q_RHWD = q_THD.view(rows, width, *q_THD.shape[1:]).transpose(1, 2)
        mask = (torch.arange(top) <= self.positions_RW[:, :, None])[:, None]
        out = F.scaled_dot_product_attention(q_RHWD, k_RHLD, v_RHLD, attn_mask=mask)
        return out.transpose(1, 2).reshape(q_THD.shape)


class Generator:
    """Continuous batching: requests enter at any step, and `step` returns those that ended."""

    def __init__(self, decoder: Decoder, slots: int, seed: int, stop: int, length: int = 160) -> None:
        self.decoder, self.stop, self.length = decoder, stop, length
        self.random = torch.Generator().manual_seed(seed)
        self.attention = SlotAttention(decoder, slots, length)
        self.cached: list[list[int]] = [[] for _ in range(slots)]
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def reset(self) -> None:
        """Forgets every prefix, for new weights."""
        self.cached = [[] for _ in self.cached]

    def submit(self, request: Request) -> None:
        if len(request.prompt) + request.max_tokens > self.length:
            raise ValueError(f"prompt of {len(request.prompt)} tokens: the cache holds {self.length}")
        self.waiting.append(request)

    @torch.no_grad()
    def step(self) -> list[Request]:
        """One decoding step of what runs, then the prompts of what waits; each samples one token a request."""
        batches = [(self.running, [r.output[-1:] for r in self.running])]
        batches.append((self.waiting, [r.prompt[self._reused(r) :] for r in self.waiting]))
        running: list[Request] = []
        for requests, rows in batches:
            if requests:
                self._sample(requests, self._forward([r.slot for r in requests], rows))
                running += requests
        self.waiting = []
        ended = [r for r in running if r.output[-1] == self.stop or len(r.output) >= r.max_tokens]
        self.running = [r for r in running if r not in ended]
        return ended

    def _reused(self, request: Request) -> int:
        """Truncates the slot's cache to what the prompt shares with it, leaving a token to compute."""
        known = self.cached[request.slot]
        shared = 0
        while shared < min(len(known), len(request.prompt) - 1) and known[shared] == request.prompt[shared]:
            shared += 1
        del known[shared:]
        return shared

    def _forward(self, slots: list[int], rows: list[list[int]]) -> torch.Tensor:
        """Logits after the last token of each row, [R, V]."""
        width = max(map(len, rows))
        start_R = torch.tensor([len(self.cached[slot]) for slot in slots])
        ids_RW = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        positions_RW = (start_R[:, None] + torch.arange(width)).clamp(max=self.length - 1)
        self.attention.slots_R, self.attention.positions_RW = torch.tensor(slots), positions_RW
        hidden_TE = self.decoder(ids_RW.reshape(-1), positions_RW.reshape(-1), self.attention)
        last_R = torch.arange(len(rows)) * width + torch.tensor([len(row) - 1 for row in rows])
        for slot, row in zip(slots, rows, strict=True):
            self.cached[slot] += row
        return self.decoder.logits(hidden_TE[last_R])

    def _sample(self, requests: list[Request], logits_RV: torch.Tensor) -> None:
        logprobs_RV = F.log_softmax(logits_RV, dim=-1)
        ids_R = torch.multinomial(logprobs_RV.exp(), 1, generator=self.random)
        chosen_R = logprobs_RV.gather(1, ids_R)[:, 0].tolist()
        for request, token, logprob in zip(requests, ids_R[:, 0].tolist(), chosen_R, strict=True):
            request.output.append(token)
            request.logprobs.append(logprob)
