"""Training tokens per CPU-second, beside TRL's GRPO trainer on the same model and data: `make bench NAME=step`.

One step: the gradients of all micro-steps and one update (clipping, AdamW), one thread, float32, a randomly initialised
Qwen3. Counted are the tokens of the trees, each once, for both: TRL is given every root-to-leaf path as a row of its own,
since it knows no trees, so on branching executions it computes shared prefixes again and again (its processed tokens, with
padding, are shown too). Rounds alternate between the two; CPU time; the ratio is the median of the rounds' ratios.

TRL lives in its own environment (`sh tools/setup_trl.sh` makes .venv-trl); without it, ours alone.

    python bench/step.py [--rounds 3] [--scale 64] [--micro-steps 3] [--trl .venv-trl/bin/python]

The last line is for scripts; its figures are those of the branching executions.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gyre.contracts.microstep import MicroStep
from gyre.policy.checkpoint import load_decoder, save_checkpoint
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from gyre.runtime.config import OptimizerConfig
from gyre.trainer.backends.torch import TorchBackend
from gyre.trainer.loss import LossConfig
from train_parts.data import SHAPES, make

ROOT = Path(__file__).resolve().parents[1]
SIDE = Path(__file__).with_name("train_parts") / "trl_side.py"
POLICY = PolicyConfig("qwen3", 512, 128, 384, 4, 4, 4, 32, tie_word_embeddings=True, qk_norm=True, max_position=8192)
EXECUTIONS = 8


class Trl:
    """TRL in its own process and environment."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process
        self._answer()

    def step(self, shape: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(shape, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit("TRL's side ended early; what it said is above")


@contextmanager
def trl_side(python: Path, home: Path, rows: dict[str, list]) -> Iterator[Trl | None]:
    """None where its environment is not there."""
    if not python.exists():
        yield None
        return
    job = home / "job.json"
    job.write_text(json.dumps({"model": str(home / "policy"), "scratch": str(home / "trl"), "micro_steps": rows}))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    environment.pop("PYTHONPATH", None)
    command = [str(python), str(SIDE), str(job)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield Trl(process)
    finally:
        process.kill()
        process.wait()


def our_step(backend: TorchBackend, micro_steps: list[MicroStep]) -> float:
    """CPU seconds of one update."""
    started = time.process_time()
    for micro_step in micro_steps:
        backend.accumulate(micro_step)
    backend.update(1.0 / (EXECUTIONS * len(micro_steps)), 1e-4, 1.0)
    return time.process_time() - started


def compare(backend: TorchBackend, trl: Trl | None, shape: str, micro_steps: list[MicroStep], rounds: int) -> tuple[float, ...]:
    """Median tokens per CPU-second of both, and the median ratio; nan without TRL."""
    tokens = sum(m.num_tokens for m in micro_steps)
    ours, theirs, processed = [], [], tokens
    for number in range(rounds + 1):  # the first is for warming up
        ours.append(tokens / our_step(backend, micro_steps))
        if trl is not None:
            answer = trl.step(shape)
            theirs.append(tokens / answer["cpu_s"])
            processed = answer["processed"]
        if number == 0:
            ours.clear()
            theirs.clear()
    mine, other = statistics.median(ours), statistics.median(theirs) if theirs else float("nan")
    ratios = [a / b for a, b in zip(ours, theirs, strict=False)]
    ratio = statistics.median(ratios) if ratios else float("nan")
    span = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-"
    print(f"{shape:>10} {tokens:>8} {processed:>10} {mine:>12.0f} {other:>12.0f} {ratio:>7.2f}  {span}")
    return mine, other, ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=int, default=64, help="tokens; an execution's longest path is about 8 of it")
    parser.add_argument("--micro-steps", type=int, default=3)
    parser.add_argument("--trl", type=Path, default=ROOT / ".venv-trl" / "bin" / "python")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    made = {
        shape: [make(shape, seed, f"{shape}-m{seed}", EXECUTIONS, arguments.scale, POLICY.vocab_size)
                for seed in range(arguments.micro_steps)]
        for shape in SHAPES
    }  # fmt: skip
    rows = {shape: [[asdict(row) for row in each] for _, each in pairs] for shape, pairs in made.items()}
    results = {}
    with tempfile.TemporaryDirectory(prefix="step-") as home:
        save_checkpoint(Path(home) / "policy", POLICY, Decoder.create(POLICY, 0).state_dict())
        decoder = load_decoder(Path(home) / "policy", torch.float32)
        backend = TorchBackend(decoder, LossConfig(), OptimizerConfig(learning_rate=1e-4))
        with trl_side(arguments.trl, Path(home), rows) as trl:
            if trl is None:
                print(f"{arguments.trl} is not there: `sh tools/setup_trl.sh` makes it (about 1 GB); ours alone:")
            print(f"{'':>10} {'tokens':>8} {'TRL reads':>10} {'ours tok/s':>12} {'TRL tok/s':>12} {'ratio':>7}  of rounds")
            for shape, pairs in made.items():
                results[shape] = compare(backend, trl, shape, [m for m, _ in pairs], arguments.rounds)
    mine, other, ratio = results["branching"]
    figures = ((other, 0), (ratio, 2), (results["linear"][2], 2))
    text = [f"{value:.{digits}f}" if value == value else "-" for value, digits in figures]
    print(f"step tokens_per_cpu_s={mine:.0f} trl={text[0]} ratio={text[1]} linear_ratio={text[2]}")


if __name__ == "__main__":
    main()
