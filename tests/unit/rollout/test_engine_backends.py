"""From a configuration to an engine: what is built, what is refused and how that is said."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
from engine_steps import POLICY, ask, collect, load
from fake_tensorrt_llm import World, make_package
from gyre.contracts.errors import ConfigError
from gyre.policy.checkpoint import save_checkpoint
from gyre.policy.decoder import Decoder
from gyre.rollout.engine_backends import BUILDERS, FINDERS, Site, build, look
from gyre.rollout.engines.choose import HOW_TO_GET, ORDER
from gyre.rollout.engines.scripted import ScriptedEngine
from gyre.rollout.engines.server_process import ServerPlace
from gyre.rollout.engines.torch import TorchEngine
from gyre.runtime.config import (
    CellsConfig,
    EngineConfig,
    HarnessConfig,
    PolicyConfigRef,
    RunConfig,
    SamplingConfig,
    TasksConfig,
    check_run,
)
from gyre.runtime.engines import BACKENDS
from gyre.transfer import Transfer, TransferConfig


def config_of(backend: str, **sampling: float) -> RunConfig:
    return RunConfig(
        "run", PolicyConfigRef("model"), TasksConfig("tasks"), HarnessConfig(("harness",)),
        cells=CellsConfig(device="cpu"), engine=EngineConfig(backend=backend, kv_tokens=8192),
        sampling=SamplingConfig(**sampling),  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.fixture
def transfer() -> Iterator[Transfer]:
    with Transfer(TransferConfig("engine-0")) as transfer:
        yield transfer


def site_of(home: Path, transfer: Transfer, backend: str, **sampling: float) -> Site:
    save_checkpoint(home / "model", POLICY, Decoder.create(POLICY, 0).state_dict())
    place = ServerPlace("127.0.0.1", home / "server.log", home / "engine")
    return Site(config_of(backend, **sampling), home, transfer, place, home / "cells")


async def test_auto_on_a_cpu_is_our_own_engine_and_is_written_down(tmp_path: Path, transfer: Transfer) -> None:
    built = build(site_of(tmp_path, transfer, "auto"))
    assert isinstance(built.engine, TorchEngine) and built.choice.why == "auto: no GPU, so our own engine"
    assert (tmp_path / "cells" / "engine.json").exists()


async def test_the_scripted_engine_needs_no_weights(tmp_path: Path, transfer: Transfer) -> None:
    built = build(site_of(tmp_path, transfer, "scripted"))
    assert isinstance(built.engine, ScriptedEngine) and type(built.loader).__name__ == "NoWeights"


@pytest.mark.parametrize("backend", ["tensorrt_llm", "vllm", "sglang"])
async def test_an_engine_that_is_not_installed_is_refused_with_how_to_get_it(
    tmp_path: Path, transfer: Transfer, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.prefix", str(tmp_path / "venv"))  # no environment of theirs beside ours
    for name in ("VLLM", "SGLANG"):
        monkeypatch.delenv(f"GYRE_{name}_PYTHON", raising=False)
    with pytest.raises(ConfigError, match=f"engine.backend = '{backend}': not installed.*pip install"):
        build(site_of(tmp_path, transfer, backend))


async def test_tensorrt_llm_is_built_when_it_can_be_imported(
    tmp_path: Path, transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ModuleType("tensorrt_llm")
    package.__dict__.update(vars(make_package(World(POLICY))))
    package.__spec__ = ModuleSpec("tensorrt_llm", None)
    package.__version__ = "1.3.0rc9"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorrt_llm", package)
    built = build(site_of(tmp_path, transfer, "tensorrt_llm"))
    assert built.choice.why == "named in the configuration; version 1.3.0rc9"
    await load(built.engine, 1)  # type: ignore[arg-type]
    tokens, _ = await collect(built.engine.submit(ask("a")))
    assert len(tokens) == 12 and built.engine.capabilities.migration == "ticket"
    await built.engine.close()
    del package.AsyncLLM
    with pytest.raises(ConfigError, match="engine.backend = 'tensorrt_llm': tensorrt_llm has no AsyncLLM"):
        build(site_of(tmp_path, transfer, "tensorrt_llm"))


async def test_a_temperature_that_an_engine_cannot_account_for_keeps_auto_from_it(tmp_path: Path, transfer: Transfer) -> None:
    found = look("vllm", site_of(tmp_path, transfer, "auto", temperature=0.7))
    assert found.installed and found.problem.startswith("sampling.temperature = 0.7")


@pytest.mark.parametrize("backend", ["tensorrt_llm", "vllm", "sglang"])
def test_a_temperature_that_an_engine_cannot_account_for_is_refused_by_name(backend: str) -> None:
    check_run(config_of(backend, eval_temperature=0.0))
    with pytest.raises(ConfigError, match=r"sampling.temperature = 0.7: .* use 1.0, or engine.backend = 'torch'"):
        check_run(config_of(backend, temperature=0.7))
    with pytest.raises(ConfigError, match=r"sampling.eval_temperature = 0.7: .* use 1.0 or 0.0"):
        check_run(config_of(backend, eval_temperature=0.7))


def test_every_backend_that_can_be_configured_can_be_built_and_the_others_can_be_looked_for() -> None:
    assert set(BUILDERS) == set(BACKENDS) - {"auto"}
    assert set(FINDERS) == set(HOW_TO_GET) == set(ORDER) - {"torch"}
