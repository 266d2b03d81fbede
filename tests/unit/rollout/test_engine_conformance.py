"""The conformance suite over every engine that runs here, and over the adapters of others before their fakes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable

import pytest
import torch
from engine_conformance import CHECKS, Check, Lab, admission_is_closed_until_weights_were_probed, name_of
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from gyre.rollout.engines.base import Engine
from gyre.rollout.engines.scripted import ScriptedConfig, ScriptedEngine, seeded_script
from gyre.rollout.engines.torch import TorchEngine, TorchEngineConfig
from gyre.rollout.torch_engine.scheduler import SchedulerConfig
from hosted_engines import make_sglang, make_tensorrt, make_vllm

torch.set_num_threads(1)
VOCAB = 32
POLICY = PolicyConfig("qwen3", VOCAB, 16, 24, 2, 4, 2, 8, tie_word_embeddings=True, qk_norm=True, max_position=256)
MAX_RUNNING, MAX_WAITING = 4, 4
DEVICE = torch.device(os.environ.get("GYRE_TEST_DEVICE", "cpu"))  # `make test-gpu` says cuda


def weights(seed: int) -> dict[str, torch.Tensor]:
    return Decoder.create(POLICY, seed).state_dict()


def make_torch() -> Engine:
    scheduler = SchedulerConfig(1024, 256, 8, MAX_RUNNING, MAX_WAITING, 64, 16)
    return TorchEngine(POLICY, TorchEngineConfig(scheduler, device=DEVICE, min_interval_s=0.0))


def make_threaded() -> Engine:
    scheduler = SchedulerConfig(1024, 256, 8, MAX_RUNNING, MAX_WAITING, 64, 16)
    return TorchEngine(POLICY, TorchEngineConfig(scheduler, device=DEVICE, min_interval_s=0.0, thread_from_parameters=0))


def make_scripted() -> Engine:
    return ScriptedEngine(seeded_script(VOCAB), ScriptedConfig(1024, MAX_RUNNING, MAX_WAITING))


def make_tensorrt_llm() -> Engine:
    return make_tensorrt(POLICY)


def make_sg_lang() -> Engine:
    return make_sglang(POLICY)


def make_v_llm() -> Engine:
    return make_vllm(POLICY)


MAKERS = {
    "torch": make_torch,
    "torch-threaded": make_threaded,
    "scripted": make_scripted,
    "tensorrt-llm": make_tensorrt_llm,
    "sglang": make_sg_lang,
    "vllm": make_v_llm,
}

LONGEST = 256
POSITIONAL = {"torch", "torch-threaded", "scripted", "tensorrt-llm", "sglang"}


@pytest.fixture(params=list(MAKERS))
async def empty_lab(request: pytest.FixtureRequest) -> AsyncIterator[Lab]:
    """An engine without weights."""
    make: Callable[[], Engine] = MAKERS[request.param]
    lab = Lab(make(), weights, VOCAB, LONGEST, MAX_RUNNING, MAX_WAITING, positional=request.param in POSITIONAL,
              predicts=request.param != "scripted")  # fmt: skip
    yield lab
    await lab.engine.close()


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
async def test_every_engine(empty_lab: Lab, check: Check) -> None:
    await empty_lab.ready()
    await check(empty_lab)


async def test_admission_is_closed_until_weights_were_probed(empty_lab: Lab) -> None:
    await admission_is_closed_until_weights_were_probed(empty_lab)
