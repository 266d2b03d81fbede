"""Larger heads compute the same."""

from __future__ import annotations

import pytest
import torch
from gyre.policy.attention import CausalAttention
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from gyre.policy.heads import head_size_among, widened_config, widened_state

torch.set_num_threads(1)
IDS = torch.arange(50) * 7 % 48


def policy(model_type: str) -> PolicyConfig:
    return PolicyConfig(model_type, 48, 32, 40, 2, 4, 2, 8, tie_word_embeddings=model_type == "qwen3",
                        qkv_bias=model_type == "qwen2", qk_norm=model_type == "qwen3", max_position=128)  # fmt: skip


def logits(config: PolicyConfig, state: dict[str, torch.Tensor]) -> torch.Tensor:
    decoder = Decoder.from_state(config, state)
    with torch.inference_mode():
        return decoder.logits(decoder(IDS, torch.arange(len(IDS)), CausalAttention([len(IDS)])))


def trained(config: PolicyConfig) -> dict[str, torch.Tensor]:
    """Random in every parameter: fresh norms and biases would hide what is done to them."""
    generator = torch.Generator().manual_seed(1)
    state = Decoder.create(config, 3).state_dict()
    return {name: tensor + 0.2 * torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}


@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("head_dim", [16, 24, 32])
def test_a_policy_with_larger_heads_predicts_the_same(model_type: str, head_dim: int) -> None:
    config = policy(model_type)
    state = trained(config)
    wider = widened_config(config, head_dim)
    got = logits(wider, widened_state(config, state, head_dim))
    want = logits(config, state)
    assert want.std() > 0.5
    torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)


def test_the_smallest_head_size_that_fits_is_taken() -> None:
    assert head_size_among(16, [32, 64, 128]) == 32
    assert head_size_among(64, [32, 64, 128]) == 64
    with pytest.raises(ValueError, match="head_dim: 200 is larger"):
        head_size_among(200, [32, 64, 128])
    with pytest.raises(ValueError, match="rope_theta would become"):
        widened_config(policy("llama"), 128)
