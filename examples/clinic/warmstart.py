"""Builds the checkpoint that the clinic's run starts from: self-supervised, and no demonstration of solving anything.

The loss is next-token prediction on random shell sessions (`sessions.py`): random commands, true observations, true
summaries. That teaches the format and how the shell answers, so that the answer to a command can be foreseen from the
report. It does not teach which command to give; reinforcement learning has to find that.

Tokens do not weigh the same. The first report cannot be predicted, so it weighs nothing; observations are few, so they
weigh more. Of a random command's arguments only the format can be predicted (a module, a kind): that has full weight.
Which one it is is noise and weighs little: a model drilled to predict that noise learns to look away from the report
when it writes a command, and unlearning that takes many steps.

    python warmstart.py --out runs/clinic/policy

A directory that was built from the same sources and settings is kept as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from gyre.policy.attention import CausalAttention
from gyre.policy.checkpoint import save_checkpoint
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from gyre.policy.tokenizer import ChatTokenizer
from policy import POLICY, build_tokenizer
from sessions import KIND, MODULE, MODULE_IDS, OBSERVED, REPORT, STATE_IDS, Sessions, draw, training_patterns

RECORD_FILE = "warmstart.json"
INPUTS = ("policy.py", "sessions.py", "tasks.py", "warmstart.py")


@dataclass(frozen=True)
class Settings:
    """Loss weights: which module and which kind a random command names, what observations say; the first report
    weighs 0, all else 1."""

    num_updates: int = 350
    sessions_per_update: int = 64
    learning_rate: float = 3e-3
    module_weight: float = 0.05
    kind_weight: float = 0.05
    observed_weight: float = 4.0
    seed: int = 0


@dataclass(frozen=True)
class Course:
    """What a policy learns before it is trained: its shape and words, and `draw(rng, num)`, blocks of sessions.

    All sessions of a block have the same width. `choices` names the ids that belong in each argument's place; the
    checkpoint is made from `sources`.
    """

    policy: PolicyConfig
    tokenizer: Callable[[], ChatTokenizer]
    draw: Callable[[np.random.Generator, int], Sequence[Sessions]]
    choices: Mapping[int, np.ndarray]
    sources: Sequence[Path]


def clinic() -> Course:
    """The clinic's own course."""
    patterns = training_patterns()
    return Course(
        POLICY,
        build_tokenizer,
        lambda rng, num: [draw(rng, patterns, num)],
        {MODULE: MODULE_IDS, KIND: STATE_IDS[1:]},
        [Path(__file__).with_name(name) for name in INPUTS],
    )


def train(course: Course, settings: Settings, log: bool = False) -> Decoder:
    """The warm-started decoder. One thread; the same settings give the same weights on the same machine."""
    decoder = Decoder.create(course.policy, settings.seed)
    _soften(decoder)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    rng = np.random.default_rng(settings.seed)
    for update in range(settings.num_updates):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * _schedule(update, settings.num_updates)
        blocks = course.draw(rng, settings.sessions_per_update)
        losses = [next_token_loss(decoder, block, course.choices, settings) for block in blocks]
        loss = torch.cat([loss_SW.flatten() for loss_SW in losses]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        if log and (update + 1) % 50 == 0:
            lasts = " ".join(f"{loss_SW[:, -3:-1].mean().item():.4f}" for loss_SW in losses)
            print(f"update {update + 1} loss {loss.item():.3f} last words {lasts}", flush=True)
    return decoder


def _soften(decoder: Decoder) -> None:
    """Larger embeddings and smaller residual writes than the usual start: tiny models find attention sooner."""
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("embed_tokens.weight"):
                parameter.mul_(2.5)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.3)
            elif name.endswith("proj.weight"):
                parameter.mul_(0.6)


def next_token_loss(
    decoder: Decoder, sessions: Sessions, choices: Mapping[int, np.ndarray], settings: Settings
) -> torch.Tensor:
    """Weighted loss of each token but the first, [S, W - 1]."""
    ids_SW, places_W = torch.from_numpy(sessions.ids_SW), sessions.places_W
    num, width = ids_SW.shape[0], ids_SW.shape[1] - 1
    positions_T = torch.arange(width).repeat(num)
    hidden_TE = decoder(ids_SW[:, :-1].reshape(-1), positions_T, CausalAttention([width] * num))
    logprobs_SWV = torch.log_softmax(decoder.logits(hidden_TE), dim=-1).view(num, width, -1)
    wanted_SW = ids_SW[:, 1:]
    by_place = {REPORT: 0.0, OBSERVED: settings.observed_weight}
    weight_W = torch.tensor([by_place.get(int(place), 1.0) for place in places_W[1:]])
    loss_SW = -logprobs_SWV.gather(-1, wanted_SW[..., None])[..., 0] * weight_W
    weights = {MODULE: settings.module_weight, KIND: settings.kind_weight}
    for place, choices_C in choices.items():
        at = torch.from_numpy(np.flatnonzero(places_W[1:] == place))
        loss_SA = _argument_loss(
            logprobs_SWV[:, at], wanted_SW[:, at], torch.from_numpy(choices_C), weights.get(place, settings.kind_weight)
        )
        loss_SW = loss_SW.index_copy(1, at, loss_SA)
    return loss_SW


def _argument_loss(
    logprobs_SAV: torch.Tensor, wanted_SA: torch.Tensor, choices_C: torch.Tensor, weight: float
) -> torch.Tensor:
    """That the argument is one of the choices, at full weight; which one, at ``weight`` (0 if it is none), [S, A]."""
    format_SA = logprobs_SAV[..., choices_C].logsumexp(-1)
    chosen_SA = logprobs_SAV.gather(-1, wanted_SA[..., None])[..., 0] - format_SA
    return -format_SA - weight * chosen_SA * torch.isin(wanted_SA, choices_C)


def _schedule(update: int, num_updates: int) -> float:
    """Linear warm-up over 50 updates, then a cosine down to a twentieth."""
    return min(1.0, (update + 1) / 50) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * update / num_updates)))


def digest_of(course: Course, settings: Settings) -> str:
    """Identifies what the checkpoint is made from: settings, sources, and the torch that computes."""
    digest = hashlib.sha256(json.dumps([asdict(settings), torch.__version__]).encode())
    for source in course.sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()


def build(directory: Path, course: Course, settings: Settings, log: bool = False) -> bool:
    """Writes the checkpoint unless it is there already; whether it had to be built."""
    record = directory / RECORD_FILE
    digest = digest_of(course, settings)
    if record.exists() and json.loads(record.read_text(encoding="utf-8")).get("digest") == digest:
        return False
    started = time.perf_counter()
    decoder = train(course, settings, log)
    save_checkpoint(directory, course.policy, decoder.state_dict())
    course.tokenizer().save(directory)
    facts = {"digest": digest, "settings": asdict(settings), "seconds": round(time.perf_counter() - started, 1)}
    record.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    built = build(options.out, clinic(), Settings(), log=True)
    print(f"warm start {'built' if built else 'kept'} at {options.out}")


if __name__ == "__main__":
    main()
