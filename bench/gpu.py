"""One GPU, a few minutes: does an engine keep its contract there, and how fast is a cell? `make test-gpu`.

In one process: the engine contract, sampling, the switch to training (engine asleep, trainer awake), a training step on
what was sampled, and the switch back (trainer asleep, engine awake, new weights loaded and probed). `mismatch_kl` compares
the engine's log-probabilities with those of the trainer's forward pass over the same weights.

    python bench/gpu.py [--engine torch] [--model DIRECTORY] [--requests 64] [--prompt 256] [--answer 256]

`--engine tensorrt_llm | vllm | sglang` runs the same with another engine, if it is installed (it says how to get it).
Without `--model` (a Hugging Face directory, of which only `config.json` is read) the policy is shaped like Qwen3-0.6B.
Weights are random. Exit code 2 where there is no GPU, or no such engine.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

import torch
from gpu_parts.measure import Figures, Sizes, measure
from gyre.contracts.errors import ConfigError
from gyre.policy.checkpoint import load_config, save_checkpoint
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from gyre.rollout.engine_backends import Site, build
from gyre.rollout.engines.server_process import ServerPlace, reachable_host
from gyre.runtime.config import (
    CellsConfig,
    EngineConfig,
    HarnessConfig,
    PolicyConfigRef,
    RunConfig,
    SamplingConfig,
    TasksConfig,
)
from gyre.runtime.engines import BACKENDS
from gyre.transfer import Transfer, TransferConfig

QWEN3_06B = PolicyConfig(
    "qwen3", 151_936, 1024, 3072, 28, 16, 8, 128, rope_theta=1e6, tie_word_embeddings=True, qk_norm=True, max_position=4096
)
LIMIT_S = 330.0


async def run(home: Path, engine: str, policy: PolicyConfig, dtype: str, device: str, sizes: Sizes) -> Figures:
    """Everything, in `home`. Raises ConfigError for an engine that is not there."""
    save_checkpoint(home / "model", policy, Decoder.create(policy, 0).to(getattr(torch, dtype)).state_dict())
    longest = min(sizes.prompt + sizes.answer + 512, policy.max_position)
    config = RunConfig(
        "gpu", PolicyConfigRef("model", dtype=dtype), TasksConfig("tasks"), HarnessConfig(("none",)),  # type: ignore[arg-type]
        cells=CellsConfig(count=1, device=device), sampling=SamplingConfig(max_context=longest),
        engine=EngineConfig(engine, kv_tokens=sizes.requests * longest, max_running=sizes.requests, min_interval_ms=0.0,
                            token_budget=max(2048, sizes.requests)),
    )  # fmt: skip
    place = ServerPlace(reachable_host(":0"), home / "server.log", home / "server")
    with Transfer(TransferConfig("engine-0", directory=home / "transfer")) as transfer:
        built = build(Site(config, home, transfer, place, home / "cells"))
        print(f"engine {built.choice.backend}: {built.choice.why}", flush=True)
        try:
            return await measure(built.engine, policy, getattr(torch, dtype), device, sizes)
        finally:
            await built.engine.close()


def arguments_of(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=BACKENDS, default="torch")
    parser.add_argument("--model", type=Path, help="Hugging Face directory whose config.json is the policy's shape")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--requests", type=int, default=Sizes.requests)
    parser.add_argument("--prompt", type=int, default=Sizes.prompt)
    parser.add_argument("--answer", type=int, default=Sizes.answer)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to see that this script works")
    parser.add_argument("--check", action="store_true", help="only say whether there is a GPU")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """The exit code."""
    arguments = arguments_of(given)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("test-gpu needs a CUDA device and a CUDA build of torch (GYRE_TORCH=cuda make setup): torch "
              f"{torch.__version__} sees none", file=sys.stderr)  # fmt: skip
        return 2
    if arguments.check:
        return 0
    policy = load_config(arguments.model) if arguments.model else QWEN3_06B
    sizes = Sizes(arguments.requests, arguments.prompt, arguments.answer)
    if arguments.device == "cuda":
        print(torch.cuda.get_device_name(), flush=True)
    with tempfile.TemporaryDirectory(prefix="gyre-gpu-") as home:
        work = run(Path(home), arguments.engine, policy, arguments.dtype, arguments.device, sizes)
        try:
            figures = asyncio.run(asyncio.wait_for(work, LIMIT_S))
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
    print(figures.line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
