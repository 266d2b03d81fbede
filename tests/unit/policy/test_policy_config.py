"""What a config.json may ask for, and how the rest is refused."""

from __future__ import annotations

import pytest
from gyre.policy.config import PolicyConfig, UnsupportedPolicy

BASE: dict[str, object] = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rope_theta": 1e6,
    "eos_token_id": [3, 5],
}


def test_a_published_config_is_read() -> None:
    config = PolicyConfig.from_hf(BASE)
    assert (config.rope_theta, config.eos_ids, config.qk_norm, config.qkv_bias) == (1e6, (3, 5), True, False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "mixtral"),
        ("use_sliding_window", True),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 5e5}),
        ("num_experts", 8),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "fp8"}),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(UnsupportedPolicy, match=field):
        PolicyConfig.from_hf({**BASE, field: value})


def test_a_missing_size_is_named() -> None:
    with pytest.raises(ValueError, match="hidden_size"):
        PolicyConfig.from_hf({**BASE, "hidden_size": None})


def test_heads_that_do_not_group_are_refused() -> None:
    with pytest.raises(ValueError, match="num_kv_heads"):
        PolicyConfig.from_hf({**BASE, "num_key_value_heads": 3})
