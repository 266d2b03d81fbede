"""The conformance suite over every engine that runs here, and over the adapters of others before their fakes."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Callable

import pytest
import torch
from engine_conformance import CHECKS, Check, Lab, admission_is_closed_until_weights_were_probed, name_of
from engine_move_conformance import MOVE_CHECKS
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from gyre.rollout.engines.base import Engine
from gyre.rollout.engines.scripted import ScriptedConfig, ScriptedEngine, seeded_script
from gyre.rollout.engines.torch import TorchEngine, TorchEngineConfig
from gyre.rollout.torch_engine.scheduler import SchedulerConfig
from hosted_engines import make_sglang, make_tensorrt, make_vllm
from row_fabric import Fabric, FabricRows

torch.set_num_threads(1)
VOCAB = 32
POLICY = PolicyConfig("qwen3", VOCAB, 16, 24, 2, 4, 2, 8, tie_word_embeddings=True, qk_norm=True, max_position=256)
MAX_RUNNING, MAX_WAITING = 4, 4
DEVICE = torch.device(os.environ.get("GYRE_TEST_DEVICE", "cpu"))  # `make test-gpu` says cuda
FABRIC, NUMBERS = Fabric(), itertools.count()


def weights(seed: int) -> dict[str, torch.Tensor]:
    return Decoder.create(POLICY, seed).state_dict()


def make_torch(thread_from_parameters: int | None = None) -> Engine:
    scheduler = SchedulerConfig(1024, 256, 8, MAX_RUNNING, MAX_WAITING, 64, 16)
    threads = {} if thread_from_parameters is None else {"thread_from_parameters": thread_from_parameters}
    config = TorchEngineConfig(scheduler, device=DEVICE, min_interval_s=0.0, **threads)
    return TorchEngine(POLICY, config, FabricRows(FABRIC, f"engine-{next(NUMBERS)}"))


def make_threaded() -> Engine:
    return make_torch(0)


def make_torch_alone() -> Engine:
    """Without a transfer: its requests are replayed."""
    scheduler = SchedulerConfig(1024, 256, 8, MAX_RUNNING, MAX_WAITING, 64, 16)
    return TorchEngine(POLICY, TorchEngineConfig(scheduler, device=DEVICE, min_interval_s=0.0))


def make_scripted() -> Engine:
    return ScriptedEngine(seeded_script(VOCAB), ScriptedConfig(1024, MAX_RUNNING, MAX_WAITING))


def make_scripted_ticket() -> Engine:
    return ScriptedEngine(seeded_script(VOCAB), ScriptedConfig(1024, MAX_RUNNING, MAX_WAITING, "ticket"))


def make_tensorrt_llm() -> Engine:
    return make_tensorrt(POLICY)


def make_sg_lang() -> Engine:
    return make_sglang(POLICY)


def make_v_llm() -> Engine:
    return make_vllm(POLICY)


MAKERS = {
    "torch": make_torch,
    "torch-threaded": make_threaded,
    "torch-alone": make_torch_alone,
    "scripted": make_scripted,
    "scripted-ticket": make_scripted_ticket,
    "tensorrt-llm": make_tensorrt_llm,
    "sglang": make_sg_lang,
    "vllm": make_v_llm,
}

LONGEST = 256
NOT_POSITIONAL = {"vllm"}


@pytest.fixture(params=list(MAKERS))
async def empty_lab(request: pytest.FixtureRequest) -> AsyncIterator[Lab]:
    """An engine without weights."""
    make: Callable[[], Engine] = MAKERS[request.param]
    lab = Lab(make(), weights, VOCAB, LONGEST, MAX_RUNNING, MAX_WAITING, positional=request.param not in NOT_POSITIONAL,
              predicts="scripted" not in request.param, another=make)  # fmt: skip
    yield lab
    await lab.engine.close()


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
async def test_every_engine(empty_lab: Lab, check: Check) -> None:
    await empty_lab.ready()
    await check(empty_lab)


@pytest.mark.parametrize("check", MOVE_CHECKS, ids=name_of)
async def test_every_engine_moves_requests_as_it_says(empty_lab: Lab, check: Check) -> None:
    await empty_lab.ready()
    await check(empty_lab)


async def test_admission_is_closed_until_weights_were_probed(empty_lab: Lab) -> None:
    await admission_is_closed_until_weights_were_probed(empty_lab)
