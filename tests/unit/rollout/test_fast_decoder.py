"""The decoder laid out for inference computes what the decoder computes, on the same parameters."""

from __future__ import annotations

import pytest
import torch
from gyre.policy.attention import CausalAttention
from gyre.policy.checkpoint import state_digest
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from gyre.rollout.torch_engine.fast import FastDecoder, fast

POLICIES = [
    PolicyConfig("llama", 61, 32, 48, 2, 4, 2, 8),
    PolicyConfig("qwen2", 61, 32, 48, 2, 4, 1, 8, qkv_bias=True),
    PolicyConfig("qwen3", 61, 32, 48, 2, 4, 4, 16, tie_word_embeddings=True, qk_norm=True),
]


def decoder_of(policy: PolicyConfig) -> Decoder:
    """With biases and norms that are not what they start as."""
    decoder = Decoder.create(policy, 1).requires_grad_(False)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in decoder.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return decoder


def logits(decoder: Decoder) -> torch.Tensor:
    ids = torch.arange(11) * 5 % 61
    positions = torch.cat((torch.arange(7), torch.arange(4)))
    return decoder.logits(decoder(ids, positions, CausalAttention([7, 4])))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.model_type)
def test_equal_logits(policy: PolicyConfig) -> None:
    wanted = logits(decoder_of(policy))
    torch.testing.assert_close(logits(FastDecoder(decoder_of(policy))), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.model_type)
def test_parameters_keep_names_shapes_and_values(policy: PolicyConfig) -> None:
    decoder = decoder_of(policy)
    before = state_digest(dict(decoder.named_parameters()))
    made = FastDecoder(decoder)
    assert state_digest(dict(made.named_parameters())) == before


def test_parameters_are_what_is_computed_with() -> None:
    made = FastDecoder(decoder_of(POLICIES[2]))
    before = logits(made)
    for name, parameter in made.named_parameters():
        if name.endswith(("v_proj.weight", "up_proj.weight")):
            parameter.mul_(1.5)
    assert not torch.equal(logits(made), before)


def test_a_conversion_keeps_it_whole() -> None:
    made = FastDecoder(decoder_of(POLICIES[1]))
    wanted = logits(made)
    made.to(torch.float64)
    torch.testing.assert_close(logits(made).float(), wanted, atol=1e-5, rtol=1e-5)
    parameter = made.model.layers[0].mlp.up_proj.weight
    assert parameter.dtype == torch.float64


def test_made_once_and_only_of_a_decoder() -> None:
    made = fast(decoder_of(POLICIES[0]))
    assert isinstance(made, FastDecoder)
    assert fast(made) is made
