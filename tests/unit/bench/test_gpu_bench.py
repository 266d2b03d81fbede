"""What `make test-gpu` runs, on a CPU and with a tiny policy, so that it is known to work before there is a GPU."""

from __future__ import annotations

import importlib
import json
import math
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from engine_steps import POLICY
from fake_tensorrt_llm import World
from hosted_engines import hosted, tensorrt_host

ROOT = Path(__file__).resolve().parents[3]
LAST_LINE = r"gpu mismatch_kl=\S+ sample_tok_s=\d+ train_tok_s=\d+ to_train_s=\d+\.\d\d to_rollout_s=\d+\.\d\d"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("gpu")


def test_all_of_it_on_a_cpu(gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(POLICY.to_hf()))
    sizes = ["--requests", "4", "--prompt", "12", "--answer", "10", "--dtype", "float32"]
    assert gpu.main(["--device", "cpu", "--model", str(tmp_path), *sizes]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "engine torch: named in the configuration" and "  contract: 6 checks passed" in lines
    assert re.fullmatch(LAST_LINE, lines[-1])
    assert abs(float(lines[-1].split()[1].partition("=")[2])) < 1e-8


async def test_another_engine_goes_through_the_same(gpu: ModuleType) -> None:
    measure = importlib.import_module("gpu_parts.measure")
    engine = hosted(tensorrt_host(World(POLICY)), POLICY)
    figures = await measure.measure(engine, POLICY, torch.float32, "cpu", measure.Sizes(4, 12, 10, 2))
    assert abs(figures.mismatch_kl) < 1e-8 and math.isfinite(figures.train_tok_s)
    await engine.close()


def test_a_machine_without_a_gpu_and_an_engine_that_is_missing_are_refused(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not torch.cuda.is_available():
        assert gpu.main([]) == 2
        assert "test-gpu needs a CUDA device" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(POLICY.to_hf()))
    assert gpu.main(["--device", "cpu", "--engine", "tensorrt_llm", "--model", str(tmp_path)]) == 2
    assert "pip install" in capsys.readouterr().err
