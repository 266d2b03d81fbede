"""The decoder computes what transformers computes, and reads and writes its directories."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gyre.policy.attention import CausalAttention
from gyre.policy.checkpoint import load_checkpoint, load_decoder, save_checkpoint, state_digest
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
CASES = [
    ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    ("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True, "head_dim": 16}),
    ("qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    ("qwen2", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    ("qwen3", {"num_key_value_heads": 1, "tie_word_embeddings": False, "head_dim": 16}),
    ("qwen3", {"num_key_value_heads": 2, "tie_word_embeddings": True, "head_dim": 8}),
]


def make_reference(model_type: str, overrides: dict[str, object]) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    config = AutoConfig.for_model(model_type, **SMALL, **overrides)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():  # norms and biases start at one and zero, where a wrong use of them would not show
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(("model_type", "overrides"), CASES)
def test_logits_equal_those_of_transformers(model_type: str, overrides: dict[str, object], tmp_path: Path) -> None:
    reference = make_reference(model_type, overrides)
    reference.save_pretrained(tmp_path)
    decoder = load_decoder(tmp_path)
    sequences = [torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(n)) for n in (17, 5, 11)]
    packed = torch.cat(sequences)
    positions = torch.cat([torch.arange(len(s)) for s in sequences])
    with torch.no_grad():
        got = decoder.logits(decoder(packed, positions, CausalAttention([len(s) for s in sequences])))
        want = torch.cat([reference(s[None]).logits[0] for s in sequences])
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("model_type", "overrides"), CASES)
def test_a_saved_directory_is_read_by_transformers_as_the_same_model(
    model_type: str, overrides: dict[str, object], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    reference = make_reference(model_type, overrides)
    reference.save_pretrained(tmp_path / "theirs")
    config, state = load_checkpoint(tmp_path / "theirs")
    save_checkpoint(tmp_path / "ours", config, Decoder.from_state(config, state).state_dict())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    ids = torch.arange(30)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, reference(ids).logits, atol=0, rtol=0)
    assert PolicyConfig.from_hf(config.to_hf()) == config
    saved = load_checkpoint(tmp_path / "ours")[1]
    assert state_digest(saved) == state_digest(Decoder.from_state(config, state).state_dict())
