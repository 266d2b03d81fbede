"""Forward and backward on a tree of any size, holding one path at a time.

Two walks over the same blocks (pieces of unbranched runs, at most `block_tokens` long):

    scores     down: each block is forwarded without gradients and its keys and values are pushed; leaving its subtree
               pops them. Gives every target's log-prob, and from those the loss gives dL/dlogp.
    gradients  down as before; on the way up each block is forwarded once more with gradients, over the keys and values
               of its ancestors as constants, and goes backward from its targets and from what its descendants wanted
               of its keys and values. What it wants of its ancestors' is added to theirs.

Held at once: keys and values of one path and their gradients, in float32 or wider, and the graph of one block. The
number of leaves does not matter. The gradient equals that of a single pass up to the order of addition (the stack
algorithm of AReaL-DTA, with wide accumulators).

Axes: T packed tokens, K targets, S tokens of a block, A its ancestors, N key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gyre.contracts.microstep import MicroStep
from gyre.policy.model import PolicyModel
from gyre.trainer.tree_forward import TargetScores, score_rows

DEFAULT_BLOCK_TOKENS = 1024


@dataclass(frozen=True)
class Block:
    """Tokens [start, end), the first of them at depth `depth`; `targets` are numbers of targets that it scores."""

    start: int
    end: int
    depth: int
    targets: np.ndarray


def blocks_of(micro_step: MicroStep, block_tokens: int, cuts: Sequence[int] = ()) -> list[Block]:
    """The unbranched runs of a forest, cut into blocks (also before the tokens `cuts`), in depth-first order."""
    parent = micro_step.parent
    starts = np.flatnonzero((parent != np.arange(len(parent)) - 1) | (parent < 0))
    ends = np.append(starts[1:], len(parent))
    # A token with several children ends a block: what forks off begins behind it.
    pieces = [np.arange(a, b, block_tokens) for a, b in zip(starts, ends, strict=True)]
    forks = parent[starts[parent[starts] >= 0]] + 1
    bounds = np.unique(np.concatenate((*pieces, forks, np.array(cuts, np.int64), [len(parent)])))
    scorer = parent[micro_step.target]
    order = np.argsort(scorer, kind="stable")
    edges = np.searchsorted(scorer[order], bounds)
    return [Block(int(a), int(b), int(micro_step.position[a]), order[low:high])
            for a, b, low, high in zip(bounds, bounds[1:], edges, edges[1:], strict=False)]


class _WithPrefix(torch.autograd.Function):
    """Keys (or values) of the ancestors before those of a block; the ancestors' gradient goes to their accumulator."""

    @staticmethod
    def forward(ctx: Any, own_SND: torch.Tensor, prefix_AND: torch.Tensor, wanted_AND: torch.Tensor) -> torch.Tensor:
        ctx.wanted_AND = wanted_AND
        return torch.cat((prefix_AND, own_SND))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        num_above = len(ctx.wanted_AND)
        ctx.wanted_AND.add_(grad[:num_above])
        return grad[num_above:], None, None


class Path:
    """Keys and values of one root-to-leaf path in every layer, and what descendants want of them."""

    def __init__(self, num_layers: int, longest: int, num_heads: int, head_dim: int, like: torch.Tensor) -> None:
        shape = (num_layers, 2, longest, num_heads, head_dim)
        wide = torch.promote_types(like.dtype, torch.float32)
        self.values = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.wanted = torch.zeros(shape, dtype=wide, device=like.device)


class BlockAttention:
    """The attention of one block over its ancestors and itself (`gyre.policy.attention.Attention`)."""

    def __init__(self, path: Path, block: Block, with_gradients: bool) -> None:
        self._path, self._block, self._with_gradients = path, block, with_gradients
        self.own: list[tuple[torch.Tensor, torch.Tensor]] = []
        size, above = block.end - block.start, block.depth
        self._mask = None
        if above:
            self._mask = torch.ones(size, above + size, dtype=torch.bool, device=path.values.device).tril(above)

    def __call__(self, layer: int, q_SHD: torch.Tensor, k_SND: torch.Tensor, v_SND: torch.Tensor) -> torch.Tensor:
        above, path = self._block.depth, self._path.values[layer]
        if self._with_gradients:
            self.own.append((k_SND, v_SND))
            wanted = self._path.wanted[layer]
            k_CND = _WithPrefix.apply(k_SND, path[0, :above], wanted[0, :above])
            v_CND = _WithPrefix.apply(v_SND, path[1, :above], wanted[1, :above])
        else:
            end = above + len(k_SND)
            path[0, above:end], path[1, above:end] = k_SND, v_SND
            k_CND, v_CND = path[0, :end], path[1, :end]
        out_1HSD = F.scaled_dot_product_attention(
            q_SHD.transpose(0, 1).unsqueeze(0), k_CND.transpose(0, 1).unsqueeze(0), v_CND.transpose(0, 1).unsqueeze(0),
            attn_mask=self._mask, is_causal=self._mask is None, enable_gqa=q_SHD.shape[1] != k_SND.shape[1])
        return out_1HSD[0].transpose(0, 1)


Sink = Callable[[Sequence[torch.Tensor | None]], None]


class DepthFirst:
    """One micro-step, walked depth first. `block_tokens` bounds the graph that is held at once."""

    def __init__(self, model: PolicyModel, micro_step: MicroStep, temperature: float = 1.0,
                 block_tokens: int = DEFAULT_BLOCK_TOKENS, cuts: Sequence[int] = ()) -> None:
        self._model, self._micro_step, self._temperature = model, micro_step, temperature
        self._blocks = blocks_of(micro_step, block_tokens, cuts)
        weight = next(iter(model.parameters()))
        self._device, config = weight.device, model.config
        longest = int(micro_step.position.max(initial=-1)) + 1
        self._path = Path(config.num_layers, longest, config.num_kv_heads, config.head_dim, weight)
        self._ids_T = torch.from_numpy(micro_step.ids.astype(np.int64)).to(weight.device)
        self._positions_T = torch.from_numpy(micro_step.position.astype(np.int64)).to(weight.device)

    @property
    def path_bytes(self) -> int:
        """Held for keys and values of one path and for their gradients."""
        return self._path.values.nbytes + self._path.wanted.nbytes

    @torch.no_grad()
    def scores(self) -> TargetScores:
        """Log-prob and entropy of every target, without gradients."""
        parts = [self._score(block, self._forward(block, with_gradients=False)[0]) for block in self._blocks]
        order = torch.from_numpy(np.concatenate([block.targets for block in self._blocks])).to(self._device)
        logprob_K, entropy_K = (torch.cat(found)[torch.argsort(order)] for found in zip(*parts, strict=True))
        return TargetScores(logprob_K, entropy_K)

    def gradients(self, dlogprob_K: torch.Tensor, parameters: Sequence[torch.Tensor], add: Sink,
                  dentropy_K: torch.Tensor | None = None) -> None:
        """Give `add` the gradients of sum(dlogprob_K * logprob_K + dentropy_K * entropy_K), in pieces, in the order of
        `parameters`."""
        wanted = (dlogprob_K,) if dentropy_K is None else (dlogprob_K, dentropy_K)
        self._path.wanted.zero_()
        for block, is_down, has_descendants in self._walk():
            if is_down and has_descendants:
                with torch.no_grad():
                    self._forward(block, with_gradients=False)
            elif not is_down and (has_descendants or len(block.targets)):
                add(self._backward(block, wanted, parameters, has_descendants))

    def _walk(self) -> Iterator[tuple[Block, bool, bool]]:
        """(block, whether going down, whether it has descendants): down before, up after all that continue it."""
        stack: list[tuple[Block, bool]] = []
        for block, following in zip(self._blocks, [*self._blocks[1:], None], strict=True):
            while stack and stack[-1][0].depth >= block.depth:
                yield stack[-1][0], False, stack.pop()[1]
            has_descendants = following is not None and following.depth > block.depth
            yield block, True, has_descendants
            stack.append((block, has_descendants))
        while stack:
            yield stack[-1][0], False, stack.pop()[1]

    def _forward(self, block: Block, with_gradients: bool) -> tuple[torch.Tensor, BlockAttention]:
        attention = BlockAttention(self._path, block, with_gradients)
        span = slice(block.start, block.end)
        return self._model(self._ids_T[span], self._positions_T[span], attention), attention

    def _score(self, block: Block, hidden_SE: torch.Tensor,
               entropy_gradient: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        target_K = self._micro_step.target[block.targets]
        scorer_K = torch.from_numpy(self._micro_step.parent[target_K].astype(np.int64) - block.start).to(self._device)
        wanted_K = self._ids_T[torch.from_numpy(target_K.astype(np.int64)).to(self._device)]
        return score_rows(self._model, hidden_SE.index_select(0, scorer_K), wanted_K, self._temperature,
                          entropy_gradient)

    def _backward(self, block: Block, of_targets: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor],
                  has_descendants: bool) -> Sequence[torch.Tensor | None]:
        hidden_SE, attention = self._forward(block, with_gradients=True)
        outputs, wanted = [], []
        if len(block.targets):
            here = torch.from_numpy(block.targets).to(self._device)
            found = self._score(block, hidden_SE, entropy_gradient=len(of_targets) > 1)
            for output, gradient_K in zip(found, of_targets, strict=False):
                outputs.append(output)
                wanted.append(gradient_K[here].to(output.dtype))
        place = slice(block.depth, block.depth + block.end - block.start)
        if has_descendants:
            for layer, pair in enumerate(attention.own):
                for which, own in enumerate(pair):
                    outputs.append(own)
                    wanted.append(self._path.wanted[layer, which, place].to(own.dtype))
        grads = torch.autograd.grad(outputs, list(parameters), wanted, allow_unused=True)
        self._path.wanted[:, :, place].zero_()
        return grads
