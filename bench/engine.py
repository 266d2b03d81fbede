"""The built-in engine beside transformers and vLLM on a CPU: `make bench NAME=engine`.

One randomly initialised Qwen3 in float32, one thread each, greedy, answers of one length, the same prompts:

- gyre: `TorchEngine`, no gRPC between;
- generate: `generate` of transformers, one call per turn over the batch, padded on the left;
- cb: the continuous batching of transformers, with block sharing;
- vllm: vLLM's CPU build with prefix caching, in an environment of its own (`sh tools/setup_vllm.sh` makes .venv-vllm).

The work: 1, 8 and 32 live sessions that share a system prompt, which everybody saw in the warm-up; in each turn the prompt is
the context so far and a tool's output, about 65 prompt tokens per answer token in all (recorded coding agents: 246).
`generate` has no cache between its calls and computes every context again; the others find it. That is part of what is
compared, so decoding alone is shown apart: equal contexts that nobody shares, their prompts computed before (`generate`'s best
case).

Rounds alternate between the contenders. Counted is the CPU time of a contender's whole process tree, start and warm-up
excluded; shown are medians of rounds. The bound of a decode step is the time to read the weights and the KV of its contexts
once, at the bandwidth of one thread that sums a large buffer, measured between the rounds; the best of both are compared.

    python bench/engine.py [--rounds 3] [--live 1 8 32] [--turns 6] [--answer 24] [--vllm .venv-vllm/bin/python]

A contender that fails, or answers nothing for `--patience` seconds, is out from that load on; its ratio is over the loads
before.

The last line is for scripts: ratios of answer tokens per CPU-second over the whole mix, each load with equal weight (geometric
mean), and the share of the bound at the smallest load.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from engine_parts.children import Contender, Missing, Result, contender
from engine_parts.workload import Job, agentic, together
from gyre.policy.checkpoint import save_checkpoint
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder

ROOT = Path(__file__).resolve().parents[1]
PARTS = Path(__file__).with_name("engine_parts")
POLICY = PolicyConfig("qwen3", 4096, 256, 768, 4, 4, 2, 64, tie_word_embeddings=True, qk_norm=True, max_position=4096)
CONTEXT = 512  # of the decode measurement, tokens
DECODE_STEPS = 32
BUFFER_BYTES = 256 << 20


@dataclass
class Measured:
    """Per contender and number of live sessions, one entry per round."""

    mix: dict[tuple[str, int], list[Result]] = field(default_factory=dict)
    decode: dict[tuple[str, int], list[float]] = field(default_factory=dict)  # CPU seconds per step
    bandwidth: list[float] = field(default_factory=list)
    differing: dict[str, list[int]] = field(default_factory=dict)  # answers that differ from ours, of how many
    missing: dict[str, str] = field(default_factory=dict)


def read_bandwidth() -> float:
    """Bytes per CPU-second of one thread that sums a buffer far larger than the caches; the best of a few passes."""
    buffer = torch.ones(BUFFER_BYTES // 4)
    passes = []
    for _ in range(4):
        started = time.process_time()
        buffer.sum()
        passes.append(time.process_time() - started)
    return BUFFER_BYTES / min(passes)


def start(stack: ExitStack, model: Path, home: Path, vllm: Path, wanted: list[str], measured: Measured) -> list[Contender]:
    """Those that come up; the others are entered as missing."""
    commands = {
        "gyre": [sys.executable, str(PARTS / "gyre_side.py"), str(model)],
        "generate": [sys.executable, str(PARTS / "transformers_side.py"), str(model)],
        "cb": [sys.executable, str(PARTS / "transformers_side.py"), str(model), "cb"],
        "vllm": [str(vllm), str(PARTS / "vllm_side.py"), str(model)],
    }
    up = []
    for name in wanted:
        if name == "vllm" and not vllm.exists():
            measured.missing[name] = f"{vllm} is not there: `sh tools/setup_vllm.sh` makes it (about 3.5 GB)"
            continue
        try:
            one = stack.enter_context(contender(name, commands[name], home / f"{name}.log", ours=name == "gyre"))
            one.run(agentic(0, 2, 2, 8, POLICY.vocab_size))  # warms up
            up.append(one)
        except Missing as error:
            measured.missing[name] = str(error)
    return up


def one_round(up: list[Contender], loads: list[int], number: int, arguments: argparse.Namespace, measured: Measured) -> None:
    """Every load by every contender, in an order that changes; small loads several times, because they are over soon."""
    for num_live in loads:
        for repeat in range(max(1, min(4, 8 // num_live))):
            seed = 10 * number + repeat
            order = random.Random(seed).sample(up, len(up))
            job = agentic(seed, num_live, arguments.turns, arguments.answer, POLICY.vocab_size)
            results = all_of(order, job, arguments.patience, measured)
            order = [one for one in order if one.name in results]
            up[:] = [one for one in up if one.name in results]
            for name, result in results.items():
                measured.mix.setdefault((name, num_live), []).append(result)
                say(f"round {number}, {num_live} live, {name}: {job.num_tokens / result.cpu_s:.0f} tok/CPU-s")
            compare(results, measured)
            measured.bandwidth.append(read_bandwidth())
            for one in order:
                step = decode_step(one, seed, num_live)
                measured.decode.setdefault((one.name, num_live), []).append(step)
                if not math.isnan(step):
                    say(f"round {number}, {num_live} live, {one.name}: decode step {1000 * step:.2f} CPU-ms")


def all_of(order: list[Contender], job: Job, patience_s: float, measured: Measured) -> dict[str, Result]:
    """One job by everybody; whoever does not come through is entered as missing from here on."""
    results = {}
    for one in order:
        try:
            results[one.name] = one.run(job, patience_s)
        except Missing as error:
            measured.missing[one.name] = f"with {len(job.prompts)} live: {error}"
    return results


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def compare(results: dict[str, Result], measured: Measured) -> None:
    """First answers only: what follows a rounding that decides otherwise has another context."""
    ours = results.get("gyre")
    for name, result in results.items():
        if ours is not None and name != "gyre":
            pairs = list(zip(ours.answers, result.answers, strict=True))
            count = measured.differing.setdefault(name, [0, 0])
            count[0] += sum(mine[0] != other[0] for mine, other in pairs)
            count[1] += len(pairs)


def decode_step(one: Contender, number: int, num_live: int) -> float:
    """CPU seconds of one decode step of `num_live` equal contexts; nan for one that cannot tell.

    Those that keep what they computed get the prompts before, so that all answers start in one step.
    """
    if one.name == "cb":
        return math.nan
    short, long = (together(number, num_live, CONTEXT, count, POLICY.vocab_size) for count in (1, 1 + DECODE_STEPS))
    if one.name != "generate":
        one.run(short)
    return one.run(long).more["decode_cpu_s"] / DECODE_STEPS


def bound_bytes(num_live: int) -> int:
    """Of weights and of KV that one decode step must read; contexts are those of `decode_step` at its middle."""
    with torch.device("meta"):
        weights = sum(p.numel() for p in Decoder(POLICY).parameters())
    per_token = POLICY.num_layers * 2 * POLICY.num_kv_heads * POLICY.head_dim
    return 4 * (weights + num_live * (CONTEXT + DECODE_STEPS // 2) * per_token)


def report(measured: Measured, loads: list[int], jobs: dict[int, Job], names: list[str]) -> None:
    print(f"{'live':>4} {'contender':>10} {'tok/CPU-s':>10} {'tok/s':>8} {'ours/it':>8}   {'decode ms':>9} {'it/ours':>8}")
    for num_live in loads:
        job = jobs[num_live]
        for name in (n for n in names if (n, num_live) in measured.mix):
            runs = measured.mix[name, num_live]
            rate = job.num_tokens / statistics.median(r.cpu_s for r in runs)
            wall = job.num_tokens / statistics.median(r.wall_s for r in runs)
            line = f"{num_live:>4} {name:>10} {rate:>10.0f} {wall:>8.0f} {ratio(measured, name, num_live):>8.2f}"
            step = 1000 * statistics.median(measured.decode.get((name, num_live), [math.nan]))
            decode = "" if math.isnan(step) else f"   {step:>9.2f} {decode_ratio(measured, name, num_live):>8.2f}"
            print(line + decode)
    for name, (count, total) in measured.differing.items():
        print(f"answers to first prompts that differ from ours, {name}: {count} of {total}")
    for num_live in loads:
        reused = statistics.median(r.more["reused"] for r in measured.mix["gyre", num_live])
        print(f"{num_live} live: gyre found {reused:.0f} of {jobs[num_live].num_prompt_tokens} prompt tokens computed")


def ratio(measured: Measured, name: str, num_live: int) -> float:
    """Median over rounds of the contender's CPU seconds over ours, for the mix."""
    pairs = zip(measured.mix[name, num_live], measured.mix["gyre", num_live], strict=False)
    return statistics.median(other.cpu_s / ours.cpu_s for other, ours in pairs)


def decode_ratio(measured: Measured, name: str, num_live: int) -> float:
    pairs = zip(measured.decode[name, num_live], measured.decode["gyre", num_live], strict=False)
    return statistics.median(other / ours for other, ours in pairs)


def shares(measured: Measured, loads: list[int]) -> dict[int, float]:
    """The bound of a decode step over what it takes, per load."""
    bandwidth = max(measured.bandwidth)
    print(f"one thread reads {bandwidth / 1e9:.1f} GB/s")
    found = {}
    for num_live in loads:
        bound = bound_bytes(num_live) / bandwidth
        found[num_live] = bound / min(measured.decode["gyre", num_live])
        size = bound_bytes(num_live) / 1e6
        print(f"{num_live} live: a decode step reads {size:.0f} MB, bound {bound * 1000:.2f} ms, share {found[num_live]:.2f}")
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--live", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--answer", type=int, default=24, help="tokens of every answer")
    parser.add_argument("--patience", type=float, default=900.0, help="seconds for one job, after which a contender is out")
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    parser.add_argument("--only", nargs="+", default=["gyre", "generate", "cb", "vllm"], help="contenders; gyre must be one")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    measured = Measured()
    loads: list[int] = arguments.live
    with tempfile.TemporaryDirectory(prefix="engine-") as scratch, ExitStack() as stack:
        home, model = Path(scratch), Path(scratch) / "policy"
        save_checkpoint(model, POLICY, Decoder.create(POLICY, 0).state_dict())
        up = start(stack, model, home, arguments.vllm, arguments.only, measured)
        for number in range(1, arguments.rounds + 1):
            one_round(up, loads, number, arguments, measured)
        names = [name for name in arguments.only if any(key[0] == name for key in measured.mix)]
    for name, why in measured.missing.items():
        print(f"{name}: n/a ({why})")
    jobs = {n: agentic(1, n, arguments.turns, arguments.answer, POLICY.vocab_size) for n in loads}
    report(measured, loads, jobs, names)
    share = shares(measured, loads)
    figures = []
    for name in ("generate", "cb", "vllm"):
        done = [n for n in loads if (name, n) in measured.mix]
        mean = math.exp(statistics.fmean(math.log(ratio(measured, name, n)) for n in done)) if done else None
        figures.append(f"ratio_{name}={'n/a' if mean is None else format(mean, '.2f')}")
    print(f"engine {' '.join(figures)} share_bound={share[min(loads)]:.2f}")


if __name__ == "__main__":
    main()
