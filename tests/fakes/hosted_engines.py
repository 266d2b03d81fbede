"""Hosted engines over their fakes, as the conformance suite and the tests of their traps want them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fake_sglang import FakeSgLang
from fake_tensorrt_llm import Flavour, World, make_package
from fake_vllm import FakeVllm
from gyre.policy.config import PolicyConfig
from gyre.rollout.engines.host import Host
from gyre.rollout.engines.hosted import HostedEngine
from gyre.rollout.engines.live import HostedConfig
from gyre.rollout.engines.sglang import SgLangHost, SgLangSettings
from gyre.rollout.engines.staging import StagedWeights
from gyre.rollout.engines.tensorrt_llm import TensorRtHost
from gyre.rollout.engines.tensorrt_llm_surface import TensorRtSettings
from gyre.rollout.engines.vllm import VllmHost, VllmSettings

MAX_POSITION = 256


def hosted(host: Host, policy: PolicyConfig, end_wait_s: float = 5.0,
           clock: Callable[[], float] = time.monotonic) -> HostedEngine:
    """The staging directory lives as long as the engine's object."""
    home = tempfile.TemporaryDirectory(prefix="gyre-staged-")
    staged = StagedWeights(Path(home.name), policy)
    engine = HostedEngine(host, policy, staged, HostedConfig(MAX_POSITION, 1024, 4, 4, end_wait_s), clock)
    engine.home = home  # type: ignore[attr-defined]
    return engine


def tensorrt_host(world: World, transfer_timeout_s: float = 5.0) -> TensorRtHost:
    settings = TensorRtSettings("tiny", MAX_POSITION, 1024, 4, 64, "float32", 1, 4, transfer_timeout_s)
    return TensorRtHost(make_package(world), settings)


def make_tensorrt(policy: PolicyConfig, flavour: Flavour | None = None) -> HostedEngine:
    return hosted(tensorrt_host(World(policy, flavour or Flavour())), policy)


def make_sglang_over(server: FakeSgLang, policy: PolicyConfig) -> HostedEngine:
    return hosted(SgLangHost(server, SgLangSettings(20.0, 20.0, 10.0, poll_s=0.005)), policy)


def make_sglang(policy: PolicyConfig) -> HostedEngine:
    return make_sglang_over(FakeSgLang(policy), policy)


def make_vllm_over(server: FakeVllm, policy: PolicyConfig, clock: Callable[[], float] = time.monotonic,
                   **settings: object) -> HostedEngine:
    quick = {"layout": "vllm 0.32.0 fake", "moves": True, "start_s": 20.0, "change_s": 20.0, "call_s": 10.0, "poll_s": 0.005,
             "pulled_in_s": 0.02}  # fmt: skip
    host = VllmHost(server, VllmSettings(**{**quick, **settings}), lambda checkpoint: checkpoint / "model.safetensors")
    return hosted(host, policy, clock=clock)


def make_vllm(policy: PolicyConfig) -> HostedEngine:
    server = FakeVllm(policy)
    server.step_s = 0.001  # what is to be cut must not be over before
    return make_vllm_over(server, policy)
