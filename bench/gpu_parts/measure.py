"""One cell on one device: an engine that samples, a trainer that trains, and the switch between the two, both ways."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import numpy as np
import torch
from gpu_parts.contract import check, collect, request, serve
from gyre.contracts.microstep import MicroStep
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from gyre.rollout.engines.base import Engine, TokenEvent
from gyre.runtime.config import OptimizerConfig
from gyre.trainer.backends.torch import TorchBackend
from gyre.trainer.loss import LossConfig


@dataclass(frozen=True)
class Sizes:
    """What is run. All counts are tokens, except `requests` and `per_micro_step`, which are requests."""

    requests: int = 64
    prompt: int = 256
    answer: int = 256
    per_micro_step: int = 8


@dataclass(frozen=True)
class Figures:
    """What came out. `mismatch_kl`: k3 estimate of the KL from the engine's distribution to the trainer's, per token."""

    mismatch_kl: float
    sample_tok_s: float
    train_tok_s: float
    to_train_s: float
    to_rollout_s: float

    def line(self) -> str:
        """The last line, for scripts."""
        return (
            f"gpu mismatch_kl={self.mismatch_kl:.3g} sample_tok_s={self.sample_tok_s:.0f} train_tok_s={self.train_tok_s:.0f} "
            f"to_train_s={self.to_train_s:.2f} to_rollout_s={self.to_rollout_s:.2f}"
        )


@dataclass(frozen=True)
class Answer:
    """One sampled sequence."""

    prompt: np.ndarray
    tokens: list[TokenEvent]


async def measure(engine: Engine, policy: PolicyConfig, dtype: torch.dtype, device: str, sizes: Sizes) -> Figures:
    """Contract, sampling, switch to training, training, switch back. Says each as it is done."""
    decoder = Decoder.create(policy, 0).to(dtype)
    say(f"policy of {sum(p.numel() for p in decoder.parameters()) / 1e6:.0f}M parameters in {dtype}")
    trainer = TorchBackend(decoder, LossConfig(), OptimizerConfig(learning_rate=1e-6), device)
    await engine.wake()
    await serve(engine, 0, trainer.weights())
    num_checks = await check(engine, policy.vocab_size, 0, trainer.weights())
    say(f"contract: {num_checks} checks passed")
    answers, sample_tok_s = await sample(engine, policy.vocab_size, sizes)
    say(f"sampled {sum(len(a.tokens) for a in answers)} tokens: {sample_tok_s:.0f} a second")
    micro_steps = [
        pack(answers[i : i + sizes.per_micro_step], f"m{i}") for i in range(0, len(answers), sizes.per_micro_step)
    ]
    start = time.perf_counter()
    freed = await engine.sleep()
    await asyncio.to_thread(trainer.wake)
    synchronise(device)
    to_train_s = time.perf_counter() - start
    say(f"to training in {to_train_s:.2f} s ({freed / 2**20:.0f} MiB freed)")
    mismatch_kl, train_tok_s = await asyncio.to_thread(train, trainer, micro_steps, device)
    say(f"trained at {train_tok_s:.0f} tokens a second; mismatch {mismatch_kl:.3g} nats")
    start = time.perf_counter()
    await asyncio.to_thread(trainer.sleep)
    await engine.wake()
    await serve(engine, 2, trainer.weights())
    to_rollout_s = time.perf_counter() - start
    say(f"to sampling in {to_rollout_s:.2f} s, weights loaded and probed")
    tokens, _ = await collect(engine.submit(request("last", policy.vocab_size, sizes.prompt, 4)))
    if {t.weights_version for t in tokens} != {2}:
        raise AssertionError(f"tokens under {[t.weights_version for t in tokens]}, not under the weights just trained")
    return Figures(mismatch_kl, sample_tok_s, train_tok_s, to_train_s, to_rollout_s)


async def sample(engine: Engine, vocab: int, sizes: Sizes) -> tuple[list[Answer], float]:
    """All requests at once, after a short round that warms up. Tokens a second are over the whole, prefill included."""
    await asyncio.gather(*(_answer(engine, f"warm{i}", vocab, sizes.prompt, 8) for i in range(sizes.requests)))
    start = time.perf_counter()
    answers = await asyncio.gather(
        *(_answer(engine, f"measured{i}", vocab, sizes.prompt, sizes.answer) for i in range(sizes.requests))
    )
    return list(answers), sum(len(a.tokens) for a in answers) / (time.perf_counter() - start)


async def _answer(engine: Engine, name: str, vocab: int, length: int, max_tokens: int) -> Answer:
    asked = request(name, vocab, length, max_tokens, seed=len(name))
    tokens, finish = await collect(engine.submit(asked))
    if finish.reason != "length":
        raise AssertionError(f"{name}: {finish}")
    return Answer(asked.prompt_ids, tokens)


def pack(answers: list[Answer], name: str) -> MicroStep:
    """Each answer as a tree of one path, whose sampled tokens are the targets."""
    ids, parent, position, exits, tree, target, logprob = [], [], [], [], [], [], []
    for number, answer in enumerate(answers):
        start, size = len(ids), len(answer.prompt) + len(answer.tokens)
        ids += [*answer.prompt.tolist(), *(t.token_id for t in answer.tokens)]
        parent += [-1, *range(start, start + size - 1)]
        position += range(size)
        exits += [start + size] * size
        tree += [number] * size
        target += range(start + len(answer.prompt), start + size)
        logprob += [t.logprob for t in answer.tokens]
    num = len(target)
    owner = np.array(tree, np.int32)[target]
    counts = np.bincount(owner, minlength=len(answers))
    advantage = np.where(np.arange(len(answers)) % 2, 1.0, -1.0).astype(np.float32)
    return MicroStep(
        name, "g", tuple(f"x{i}" for i in range(len(answers))), advantage, np.array(ids, np.int32),
        np.array(parent, np.int32), np.array(position, np.int32), np.array(exits, np.int32), np.array(tree, np.int32),
        np.array(target, np.int32), owner, np.array(logprob, np.float32), np.zeros(num, np.int32),
        (1.0 / counts[owner]).astype(np.float32),
    )  # fmt: skip


def train(trainer: TorchBackend, micro_steps: list[MicroStep], device: str) -> tuple[float, float]:
    """Mismatch per token on the weights that sampled, then one step of everything. The first micro-step warms up."""
    trainer.accumulate(micro_steps[0])
    trainer.zero_gradients()
    synchronise(device)
    start, total, num_targets = time.perf_counter(), 0.0, 0
    for micro_step in micro_steps:
        total += trainer.accumulate(micro_step)["kl_k3"]
        num_targets += micro_step.num_targets
    norm = trainer.update(1.0 / num_targets, 1e-6, 1.0)
    synchronise(device)
    num_tokens = sum(m.num_tokens for m in micro_steps)
    if not 0 < norm < float("inf"):
        raise AssertionError(f"the gradient's norm is {norm}")
    return total / num_targets, num_tokens / (time.perf_counter() - start)


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def say(what: str) -> None:
    print(f"  {what}", flush=True)
