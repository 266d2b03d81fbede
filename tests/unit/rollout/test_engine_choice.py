"""Which engine is taken, and what is said about it."""

from __future__ import annotations

from pathlib import Path

import pytest
from gyre.contracts.errors import ConfigError
from gyre.rollout.engines.choose import HOW_TO_GET, Choice, Found, agree, decide

NOTHING = Found(False)


def look_in(found: dict[str, Found]):  # type: ignore[no-untyped-def]
    seen: list[str] = []

    def look(backend: str) -> Found:
        seen.append(backend)
        return found.get(backend, NOTHING)

    look.seen = seen  # type: ignore[attr-defined]
    return look


def test_on_a_cpu_auto_takes_our_own_engine_without_looking_further() -> None:
    look = look_in({"vllm": Found(True)})
    assert decide("auto", "cpu", look) == Choice("torch", "auto: no GPU, so our own engine")
    assert look.seen == []


def test_on_a_gpu_auto_takes_the_first_that_is_installed_and_passes() -> None:
    look = look_in({"tensorrt_llm": Found(True, "1.2", "AsyncLLM has no release"), "vllm": Found(True, "0.33.0")})
    choice = decide("auto", "cuda", look)
    assert choice.backend == "vllm" and look.seen == ["tensorrt_llm", "vllm"]
    assert choice.why == (
        "auto: first on a GPU that passes its probe; version 0.33.0; tensorrt_llm: AsyncLLM has no release"
    )


def test_on_a_gpu_with_nothing_installed_auto_says_so() -> None:
    choice = decide("auto", "cuda", look_in({}))
    assert choice.backend == "torch"
    assert choice.why.endswith("tensorrt_llm: not installed; vllm: not installed; sglang: not installed")


@pytest.mark.parametrize("backend", sorted(HOW_TO_GET))
def test_a_backend_that_was_named_and_is_missing_is_refused_with_how_to_get_it(backend: str) -> None:
    with pytest.raises(ConfigError, match=f"engine.backend = '{backend}': not installed") as error:
        decide(backend, "cpu", look_in({}))
    assert "pip install" in str(error.value)


def test_a_backend_that_was_named_and_does_not_pass_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="engine.backend = 'sglang': too old"):
        decide("sglang", "cuda", look_in({"sglang": Found(True, "0.4", "too old")}))
    assert decide("sglang", "cuda", look_in({"sglang": Found(True, "0.5.23")})).why.endswith("version 0.5.23")


def test_ours_need_no_look() -> None:
    assert decide("scripted", "cpu", look_in({})).backend == "scripted"


def test_all_cells_of_a_run_take_one_engine(tmp_path: Path) -> None:
    place = tmp_path / "cells" / "engine.json"
    agree(place, Choice("vllm", "auto: first"))
    agree(place, Choice("vllm", "auto: first, later"))
    with pytest.raises(ConfigError, match="would take torch .* another cell of the run took vllm"):
        agree(place, Choice("torch", "auto: our own engine"))
    assert [file.name for file in place.parent.iterdir()] == ["engine.json"]
