"""Random micro-steps, and the same training signal written out path by path: the oracle of the tree forward."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from gyre.contracts.microstep import MicroStep
from gyre.policy.attention import CausalAttention
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from gyre.trainer.loss import LossConfig, Targets, policy_loss

VOCAB = 37
TINY = PolicyConfig("qwen3", VOCAB, 16, 24, 2, 4, 2, 4, tie_word_embeddings=True, qk_norm=True)


#: What tells the families of our decoder apart.
FAMILIES = {"qwen3": {"qk_norm": True}, "qwen2": {"qkv_bias": True, "qk_norm": False}, "llama": {"qk_norm": False}}


def tiny_decoder(seed: int = 0, tied: bool = True, family: str = "qwen3") -> Decoder:
    """2 layers, 16 wide, grouped-query, float64, with weights large enough to matter."""
    shape = replace(TINY, model_type=family, tie_word_embeddings=tied, **FAMILIES[family])
    decoder = Decoder.create(shape, seed).double()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return decoder


def random_micro_step(
    seed: int, num_trees: int = 3, tree_tokens: int = 30, name: str = "m0", fork: float = 0.25
) -> MicroStep:
    """Trees with forks anywhere (also on a last token), several roots per tree, random targets and owners."""
    rng = np.random.default_rng(seed)
    parents, trees = [], []
    for tree in range(num_trees):
        base = len(parents)
        size = int(rng.integers(2, tree_tokens + 1))
        parents.extend(_random_tree(rng, size, base, fork))
        trees.extend([tree] * size)
    parent = np.array(parents, np.int32)
    return _dress(rng, parent, np.array(trees, np.int32), num_trees, name)


def _random_tree(rng: np.random.Generator, size: int, base: int, fork: float) -> list[int]:
    """Depth-first parents: continue the last token, or go back to a random ancestor of it (-1: a new root)."""
    parents = [-1]
    for index in range(base + 1, base + size):
        last = index - 1
        if rng.random() < fork and index > base + 1:
            above = [last]
            while parents[above[-1] - base] >= 0:
                above.append(parents[above[-1] - base])
            choices = [*above, -1]
            last = int(choices[rng.integers(len(choices))])
        parents.append(last)
    return parents


def _dress(rng: np.random.Generator, parent: np.ndarray, tree: np.ndarray, num_trees: int, name: str) -> MicroStep:
    position, exit_ = positions_and_exits(parent)
    leaves = [i for i in range(len(parent)) if i not in set(parent.tolist())]
    candidates = np.flatnonzero((parent >= 0) & (rng.random(len(parent)) < 0.6))
    if not len(candidates):
        candidates = np.flatnonzero(parent >= 0)[:1]
    owner = [next(p for p, leaf in enumerate(leaves) if t <= leaf < exit_[t]) for t in candidates]
    counts = np.bincount(tree[candidates], minlength=num_trees)
    return MicroStep(
        micro_step=name,
        group="g",
        executions=tuple(f"x{i}" for i in range(num_trees)),
        advantage=rng.normal(size=num_trees).astype(np.float32),
        ids=rng.integers(0, VOCAB, len(parent)).astype(np.int32),
        parent=parent,
        position=position,
        exit=exit_,
        tree=tree,
        target=candidates.astype(np.int32),
        path=np.array(owner, np.int32),
        logprob=(-2.0 - rng.random(len(candidates)) * 3).astype(np.float32),
        version=np.zeros(len(candidates), np.int32),
        weight=(1.0 / counts[tree[candidates]]).astype(np.float32),
    )


def hand_built(parent: list[int], target: list[int], path: list[int]) -> MicroStep:
    parents = np.array(parent, np.int32)
    position, exit_ = positions_and_exits(parents)
    base = random_micro_step(0, num_trees=1)
    num = len(target)
    return replace(
        base, ids=np.arange(len(parent), dtype=np.int32) % 37, parent=parents, position=position, exit=exit_,
        tree=np.zeros(len(parent), np.int32), target=np.array(target, np.int32), path=np.array(path, np.int32),
        logprob=np.full(num, -3.0, np.float32), version=np.zeros(num, np.int32),
        weight=np.full(num, 1 / num, np.float32), advantage=np.ones(1, np.float32),
    )  # fmt: skip


def positions_and_exits(parent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Depth of each token and the end of its subtree, by definition."""
    position = np.zeros(len(parent), np.int32)
    exit_ = np.arange(1, len(parent) + 1, dtype=np.int32)
    for i, p in enumerate(parent):
        position[i] = 0 if p < 0 else position[p] + 1
        while p >= 0:
            exit_[p] = i + 1
            p = parent[p]
    return position, exit_


@dataclass(frozen=True)
class Path:
    """One root-to-leaf path as packed token indices, with the indices of the targets it owns."""

    tokens: list[int]
    owned: list[int]


def expand(micro_step: MicroStep) -> list[Path]:
    """Every leaf's path; a target belongs to the path that owns it."""
    parents = micro_step.parent.tolist()
    leaves = [i for i in range(len(parents)) if i not in set(parents)]
    paths = []
    for number, leaf in enumerate(leaves):
        tokens = [leaf]
        while parents[tokens[-1]] >= 0:
            tokens.append(parents[tokens[-1]])
        tokens.reverse()
        paths.append(Path(tokens, micro_step.target[micro_step.path == number].tolist()))
    return paths


def expanded_loss(
    decoder: Decoder, micro_step: MicroStep, config: LossConfig, reference: Decoder | None = None
) -> torch.Tensor:
    """The loss computed on whole, separate, causal sequences: each path by itself, prefixes again and again."""
    scores_KV = _expanded_scores(decoder, micro_step, config.temperature)
    ids_K1 = torch.from_numpy(micro_step.ids[micro_step.target].astype(np.int64)).unsqueeze(1)
    entropy_K = -(scores_KV.exp() * scores_KV).sum(-1)
    reference_K = None
    if reference is not None:
        reference_K = _expanded_scores(reference, micro_step, config.temperature).detach().gather(1, ids_K1)[:, 0]
    record = targets_of(micro_step, scores_KV.gather(1, ids_K1)[:, 0])
    return policy_loss(replace(record, entropy_K=entropy_K, reference_K=reference_K), config).loss


def _expanded_scores(decoder: Decoder, micro_step: MicroStep, temperature: float) -> torch.Tensor:
    """Log-probs of the whole vocabulary where each target is sampled [K, V]."""
    rows: dict[int, torch.Tensor] = {}
    for path in expand(micro_step):
        ids = torch.from_numpy(micro_step.ids[path.tokens].astype(np.int64))
        hidden = decoder(ids, torch.arange(len(ids)), CausalAttention([len(ids)]))
        logits = decoder.logits(hidden)
        scores = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, -1)
        for target in path.owned:
            rows[target] = scores[path.tokens.index(target) - 1]
    return torch.stack([rows[t] for t in micro_step.target.tolist()])


def targets_of(micro_step: MicroStep, logprob_K: torch.Tensor) -> Targets:
    """The loss record of a micro-step in float64."""
    advantage = micro_step.advantage[micro_step.tree[micro_step.target]]
    return Targets(
        logprob_K,
        torch.from_numpy(micro_step.logprob).double(),
        torch.from_numpy(advantage).double(),
        torch.from_numpy(micro_step.weight).double(),
        torch.from_numpy(micro_step.path.astype(np.int64)),
        int(micro_step.path.max()) + 1,
    )


def gradients(decoder: Decoder, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every parameter's gradient of `loss`."""
    named = dict(decoder.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()))
    return dict(zip(named, grads, strict=True))


def relative_error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Largest per-parameter |got - want| / |want| (norms)."""
    return max(float((got[n] - want[n]).norm() / want[n].norm().clamp(min=1e-30)) for n in want)
