"""The shape of a policy, read from and written as a Hugging Face ``config.json``.

Only dense decoders with full attention are described here. Whatever a checkpoint asks for beyond that is refused by
name, because a feature that is silently dropped gives wrong logits rather than an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MODEL_TYPES = ("llama", "qwen2", "qwen3")

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

#: Fields that change the computation, and the values under which they do not.
_NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "use_sliding_window": (False, None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "rope_scaling": (None,),
    "quantization_config": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "logit_scale": (None, 1, 1.0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
}


class UnsupportedPolicy(ValueError):
    """A ``config.json`` that asks for something the decoder does not compute; the message names the field."""


@dataclass(frozen=True)
class PolicyConfig:
    """Everything that fixes the decoder's parameters and arithmetic.

    ``qkv_bias`` adds a bias to the q, k and v projections (Qwen2); ``qk_norm`` normalises each head's q and k (Qwen3).
    ``max_position`` is the largest context, in tokens. ``bos_id`` is None where the family has none.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    max_position: int = 4096
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.model_type not in MODEL_TYPES:
            raise UnsupportedPolicy(f"model_type: {self.model_type!r} is not supported; use one of {MODEL_TYPES}")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
                     "head_dim", "max_position"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}: {value} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads: {self.num_heads} must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: {self.head_dim} must be even for rotary positions")

    @classmethod
    def from_hf(cls, raw: Mapping[str, object]) -> PolicyConfig:
        """Reads a parsed ``config.json``. Raises `UnsupportedPolicy` naming the first field that is not supported."""
        _refuse_unsupported(raw)
        model_type = str(raw["model_type"])
        num_heads = _integer(raw, "num_attention_heads")
        hidden_size = _integer(raw, "hidden_size")
        return cls(
            model_type=model_type,
            vocab_size=_integer(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_integer(raw, "intermediate_size"),
            num_layers=_integer(raw, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_integer(raw, "num_key_value_heads", num_heads),
            head_dim=_integer(raw, "head_dim", 128 if model_type == "qwen3" else hidden_size // num_heads),
            rope_theta=_rope_theta(raw),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),  # type: ignore[arg-type]
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=model_type == "qwen2",
            qk_norm=model_type == "qwen3",
            max_position=_integer(raw, "max_position_embeddings", 32768),
            bos_id=_ids(raw.get("bos_token_id"))[0] if _ids(raw.get("bos_token_id")) else None,
            eos_ids=_ids(raw.get("eos_token_id")),
        )

    def to_hf(self, dtype: str = "float32") -> dict[str, object]:
        """The ``config.json`` that transformers reads as the same model. ``dtype`` is that of the saved tensors."""
        if self.qkv_bias != (self.model_type == "qwen2") or self.qk_norm != (self.model_type == "qwen3"):
            raise UnsupportedPolicy(
                f"qkv_bias={self.qkv_bias}, qk_norm={self.qk_norm}: not how {self.model_type} is defined, "
                "so no config.json describes it"
            )
        return {
            "architectures": [_ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position,
            "bos_token_id": self.bos_id,
            "eos_token_id": list(self.eos_ids) if len(self.eos_ids) > 1 else (self.eos_ids or (None,))[0],
            "torch_dtype": dtype,
        }


def _refuse_unsupported(raw: Mapping[str, object]) -> None:
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        raise UnsupportedPolicy(f"model_type: {model_type!r} is not supported; use one of {MODEL_TYPES}")
    for name, neutral in _NEUTRAL_VALUES.items():
        if name in raw and raw[name] not in neutral:
            raise UnsupportedPolicy(f"{name}: {raw[name]!r} is not supported; it must be absent or one of {neutral}")
    if model_type == "llama" and raw.get("sliding_window") is not None:
        raise UnsupportedPolicy(f"sliding_window: {raw['sliding_window']!r} is not supported; attention must be full")
    for kind in raw.get("layer_types") or ():  # type: ignore[attr-defined]
        if kind != "full_attention":
            raise UnsupportedPolicy(f"layer_types: {kind!r} is not supported; every layer must be full_attention")


def _rope_theta(raw: Mapping[str, object]) -> float:
    parameters = raw.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise UnsupportedPolicy(f"rope_parameters: {parameters!r} must be an object")
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        raise UnsupportedPolicy(f"rope_parameters.rope_type: {kind!r} is not supported; it must be 'default'")
    return float(parameters.get("rope_theta", raw.get("rope_theta", 10_000.0)))  # type: ignore[arg-type]


def _integer(raw: Mapping[str, object], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}: {value!r} in config.json must be an integer")
    return value


def _ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)  # type: ignore[return-value]
