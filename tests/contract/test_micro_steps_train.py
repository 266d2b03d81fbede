"""What trajectory packs, the trainer accepts, and scores exactly as each path by itself."""

import numpy as np
import torch
from executions import Script, Story, random_calls, settings
from gyre.contracts.microstep import MicroStep, micro_step_from_bytes
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from gyre.runtime.effects import Publish, WriteBlob
from gyre.trainer.runs import Run, check_trees
from gyre.trainer.tree_forward import SegmentTrees, choose_attention, score_targets
from gyre.trajectory.core import TrajectoryCore
from gyre.trajectory.packing import Budget

SHAPE = PolicyConfig("qwen3", vocab_size=8, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1,
                     head_dim=8, qk_norm=True)


def micro_steps(scripts: list[Script], budget: Budget) -> list[MicroStep]:
    """Through the core, as bytes."""
    core = TrajectoryCore(settings(budget=budget))
    state, effects = core.initial(), []
    for fact in Story(scripts, [float(n % 2) for n in range(len(scripts))]).facts():
        state, more = core.step(state, fact, 0.0)
        effects += more
    blobs = {e.path: e.data for e in effects if isinstance(e, WriteBlob)}
    completed = next(e.fact for e in effects if isinstance(e, Publish))
    return [micro_step_from_bytes(blobs[ref.blob.path], ref.digest) for ref in completed.micro_steps]


def alone(decoder: Decoder, step: MicroStep, target: int) -> float:
    """Log-prob of one target from a plain causal pass over its own context."""
    rows = [target]
    while step.parent[rows[-1]] >= 0:
        rows.append(int(step.parent[rows[-1]]))
    ids = torch.from_numpy(step.ids[rows[::-1]].astype(np.int64))
    hidden = decoder(ids, torch.arange(len(ids)), SegmentTrees([Run(0, len(ids), ())]))
    return float(torch.log_softmax(decoder.logits(hidden[-2:-1]), -1)[0, ids[-1]])


@torch.no_grad()
def test_targets_score_on_the_tree_as_on_their_own_path() -> None:
    torch.set_num_threads(1)
    decoder = Decoder.create(SHAPE, seed=0).double()
    num_targets = 0
    for seed in range(12):
        scripts = [random_calls(100 * seed + n, num_ids=5) for n in range(4)]
        for step in micro_steps(scripts, Budget([60, 10**6][seed % 2], 10**9)):
            check_trees(step)
            scores = score_targets(decoder, step, choose_attention(step)).logprob_K
            expected = [alone(decoder, step, t) for t in step.target.tolist()]
            np.testing.assert_allclose(scores.numpy(), expected, atol=1e-12)
            num_targets += step.num_targets
    assert num_targets > 300
