"""The built-in engine as it is configured, and over models of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gyre.policy.attention import CausalAttention
from gyre.policy.checkpoint import load_state, save_checkpoint, state_digest
from gyre.policy.config import UnsupportedPolicy
from gyre.policy.decoder import Decoder
from gyre.rollout.engines.base import WeightsMismatch
from gyre.rollout.engines.torch import TorchEngine, TorchEngineConfig
from gyre.rollout.torch_engine.build import torch_engine
from gyre.rollout.torch_engine.policies import TransformersPolicy
from gyre.runtime.config import RunConfig, load_run
from row_fabric import Fabric, FabricRows
from stepped_engine import POLICY, SMALL, GenerateRequest, Stepped, finish_of, ids_of, tokens_of

torch.set_num_threads(1)
MINIMAL = """
name = "a-run"
steps = 4
[policy]
checkpoint = "warm"
[tasks]
root = "tasks"
[harness]
command = ["{python}", "h.py"]
[cells]
device = "cpu"
"""


def configured(home: Path, *overrides: str) -> RunConfig:
    (home / "run.toml").write_text(MINIMAL)
    return load_run(home / "run.toml", list(overrides))


def test_a_run_says_how_its_engine_carries_and_whether_bits_are_equal(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "warm", POLICY, Decoder.create(POLICY, 1).state_dict())
    rows = FabricRows(Fabric(), "a")
    plain = torch_engine(configured(tmp_path), tmp_path, rows)
    assert not plain._scheduler.config.keeps and plain.capabilities.migration == "staged"
    other = torch_engine(configured(tmp_path, "engine.carry=keep", "engine.deterministic=true"), tmp_path, None)
    assert other._scheduler.config.keeps and other.capabilities.migration == "replay"
    assert other._config.is_deterministic


def network(family: str, tied: bool) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=128,
        tie_word_embeddings=tied, sliding_window=None,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.mark.parametrize("is_deterministic", [False, True], ids=["ordinary", "deterministic"])
@pytest.mark.parametrize(("family", "tied"), [("Llama", True), ("Mistral", False), ("Olmo2", False), ("Qwen3", True)])
async def test_models_of_transformers_are_sampled_from(
    family: str, tied: bool, is_deterministic: bool, tmp_path: Path
) -> None:
    """The logprobs are those that transformers computes by itself."""
    model = network(family, tied)
    model.save_pretrained(tmp_path)
    engine = Stepped(Fabric(), "a", policy=TransformersPolicy(tmp_path), is_deterministic=is_deterministic)
    state = load_state(tmp_path)
    await engine.load_weights(1, state_digest(state), state)
    probe = await engine.probe()
    assert probe.ok, probe.detail
    engine.resume()
    prompts = [ids_of(n, n) for n in (5, 30, 17)]
    streams = [engine.submit(GenerateRequest(str(i), p, 12, seed=i)) for i, p in enumerate(prompts)]
    await engine.run()
    for prompt, stream in zip(prompts, streams, strict=True):
        assert finish_of(stream).reason == "length"
        tokens = [e.token_id for e in tokens_of(stream)]
        ids = torch.from_numpy(np.concatenate((prompt, tokens))).long()
        with torch.inference_mode():
            logp = torch.log_softmax(model(input_ids=ids.unsqueeze(0)).logits[0].float(), -1)
        want = logp[torch.arange(len(prompt) - 1, len(ids) - 1), ids[len(prompt) :]].numpy()
        np.testing.assert_allclose([e.logprob for e in tokens_of(stream)], want, atol=1e-4)
    await engine.sleep()
    await engine.wake()
    assert (await engine.probe()).ok
    await engine.close()


async def test_weights_that_do_not_fit_a_model_of_transformers_change_nothing(tmp_path: Path) -> None:
    network("Llama", False).save_pretrained(tmp_path)
    engine = TorchEngine(TransformersPolicy(tmp_path), TorchEngineConfig(SMALL))
    state = load_state(tmp_path)
    cut = {name: tensor for name, tensor in state.items() if name != "model.norm.weight"}
    more = {**state, "model.layers.0.extra": torch.zeros(1)}
    for wrong, says in ((cut, "model.norm.weight is missing"), (more, "extra is not a parameter")):
        with pytest.raises(WeightsMismatch, match=says):
            await engine.load_weights(1, state_digest(wrong), wrong)
    assert engine.load_report().version == -1
    await engine.close()


def test_a_run_with_a_model_of_transformers_samples_with_it(tmp_path: Path) -> None:
    network("Llama", False).save_pretrained(tmp_path / "warm")
    engine = torch_engine(configured(tmp_path, "policy.implementation=transformers"), tmp_path, None)
    assert isinstance(engine._policy, TransformersPolicy)
    transformers = pytest.importorskip("transformers")
    transformers.Qwen2Config(use_sliding_window=True, sliding_window=4, max_window_layers=1).save_pretrained(tmp_path / "warm")
    with pytest.raises(UnsupportedPolicy):
        torch_engine(configured(tmp_path, "policy.implementation=transformers"), tmp_path, None)


def test_the_decoder_and_transformers_name_one_layout_for_one_shape(tmp_path: Path) -> None:
    """Their keys differ in the last bits at most, so blocks of one are of use to the other."""
    save_checkpoint(tmp_path, POLICY, Decoder.create(POLICY, 1).state_dict())
    pytest.importorskip("transformers")
    ours, theirs = Stepped(Fabric(), "a"), Stepped(Fabric(), "b", policy=TransformersPolicy(tmp_path))
    assert ours.capabilities.layout == theirs.capabilities.layout
    with torch.inference_mode():
        ids = torch.from_numpy(ids_of(20, 1)).long()
        state = Decoder.create(POLICY, 1).state_dict()
        hidden = [m(ids, torch.arange(20), CausalAttention([20])) for m in (
            ours._policy.build(state, torch.float32), theirs._policy.build(state, torch.float32))]  # fmt: skip
    torch.testing.assert_close(hidden[0], hidden[1], atol=1e-4, rtol=1e-4)
