"""Causal language models of transformers as policies, through its attention interface.

A model keeps its own layers, positions and norms; only who looks at whom is ours, so that it can be trained on packed
trees. That holds for dense decoders with full softmax attention. Whatever else a configuration asks for is refused by
name: attention that is not over all ancestors, state that is carried from token to token, losses that depend on what
else is in the batch.

Needs the extra `transformers`. Axes: T packed tokens, H query heads, K key/value heads, D head size, E hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gyre.policy.attention import Attention
from gyre.policy.config import UnsupportedPolicy
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

INTERFACE = "gyre_packed"

# Field of a configuration -> values under which it changes nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "is_encoder_decoder": (False, None),
    "num_experts": (None, 0, 1),
    "num_local_experts": (None, 0, 1),
    "n_routed_experts": (None, 0),
    "attn_logit_softcapping": (None, 0, 0.0),
    "attention_dropout": (None, 0, 0.0),
    "hidden_dropout": (None, 0, 0.0),
    "resid_pdrop": (None, 0, 0.0),
    "embd_pdrop": (None, 0, 0.0),
    "attn_pdrop": (None, 0, 0.0),
    "kv_lora_rank": (None, 0),
    "quantization_config": (None,),
}


@dataclass(frozen=True)
class TransformersShape:
    """The numbers of a model of transformers that the trainer needs."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tie_word_embeddings: bool


class TransformersModel(nn.Module):
    """`gyre.policy.model.PolicyModel` over a model of transformers; parameters have its names."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        check_dense(model.config)
        if not getattr(model, "_supports_attention_backend", False):
            raise UnsupportedPolicy(f"model_type: {model.config.model_type!r} does not use the attention interface of "
                                    "transformers")
        model.set_attn_implementation(INTERFACE)
        self.network = model
        self._can_checkpoint = False
        self.config = shape_of(model.config)

    @classmethod
    def load(cls, directory: Path, dtype: torch.dtype) -> TransformersModel:
        """A checkpoint on this machine. Raises UnsupportedPolicy, or what transformers raises for a broken one."""
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        check_dense(config)
        return cls(AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=dtype, local_files_only=True))

    def forward(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor, attention: Attention, layer_checkpoints: bool = False
    ) -> torch.Tensor:
        self._checkpoint_layers(layer_checkpoints)
        output = self.network.base_model(
            input_ids=ids_T.unsqueeze(0), position_ids=positions_T.unsqueeze(0), use_cache=False, packed_attention=attention)
        return output.last_hidden_state[0]

    def _checkpoint_layers(self, wanted: bool) -> None:
        network = self.network
        if network.training != wanted:
            network.train(wanted)  # layers are checkpointed in training mode only; dropout was refused, so nothing else changes
        if wanted and not self._can_checkpoint:
            enable = getattr(network, "activation_checkpointing_enable", None) or network.gradient_checkpointing_enable
            enable({"use_reentrant": False})
            self._can_checkpoint = True

    def logits(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        logits_TV = self.network.get_output_embeddings()(hidden_TE)
        cap = getattr(self.network.config, "final_logit_softcapping", None)
        scale = getattr(self.network.config, "logits_scaling", None) or 1.0
        logits_TV = logits_TV / scale
        return logits_TV if not cap else cap * torch.tanh(logits_TV / cap)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Under the names of the checkpoint; tied ones once."""
        return self.network.named_parameters(*args, **kwargs)

    def save(self, directory: Path, state: Mapping[str, torch.Tensor]) -> None:
        """A Hugging Face directory with the weights of `state`, which other tools load."""
        self.network.save_pretrained(directory, state_dict=dict(state))


class Architecture:
    """What a checkpoint's configuration says, without its weights: models are built from it around given tensors."""

    def __init__(self, directory: Path) -> None:
        """Raises UnsupportedPolicy, or what transformers raises for a configuration it cannot read."""
        self._config = AutoConfig.from_pretrained(directory, local_files_only=True)
        check_dense(self._config)
        self.shape = shape_of(self._config)
        self.max_position = int(getattr(self._config, "max_position_embeddings", 0) or 1 << 20)
        with torch.device("meta"):
            self.num_parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(self._config).parameters())

    def build(self, state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> TransformersModel:
        """A model on the CPU with copies of `state`'s tensors. Raises ValueError naming the parameter that is wrong."""
        model = TransformersModel(AutoModelForCausalLM.from_config(self._config, dtype=dtype))
        wanted = dict(model.named_parameters())
        may_repeat = {"lm_head.weight"} if self.shape.tie_word_embeddings else set()
        if strange := sorted(set(state) - set(wanted) - may_repeat):
            raise ValueError(f"weights: {strange[0]} is not a parameter of this {self.shape.model_type} policy")
        with torch.no_grad():
            for name, parameter in wanted.items():
                if name not in state:
                    raise ValueError(f"weights: {name} is missing; it must be there with shape {list(parameter.shape)}")
                if state[name].shape != parameter.shape:
                    raise ValueError(f"weights: {name} has shape {list(state[name].shape)}, must be {list(parameter.shape)}")
                parameter.copy_(state[name])
        model.network.eval()
        return model


def shape_of(config: PretrainedConfig) -> TransformersShape:
    num_heads = config.num_attention_heads
    return TransformersShape(
        config.model_type, config.vocab_size, config.hidden_size, config.num_hidden_layers, num_heads,
        getattr(config, "num_key_value_heads", None) or num_heads,
        getattr(config, "head_dim", None) or config.hidden_size // num_heads, bool(config.tie_word_embeddings))


def check_dense(config: PretrainedConfig) -> None:
    """Raises UnsupportedPolicy naming the first field that asks for more than dense full attention."""
    for name, neutral in _NEUTRAL.items():
        value = getattr(config, name, None)
        if value not in neutral:
            raise UnsupportedPolicy(f"{name}: {value!r} is not supported; it must be absent or one of {neutral}")
    for kind in getattr(config, "layer_types", None) or ():
        if kind != "full_attention":
            raise UnsupportedPolicy(f"layer_types: {kind!r} is not supported; every layer must be full_attention")
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True):
        raise UnsupportedPolicy(f"sliding_window: {window!r} is not supported; attention must be full")


def _attend(
    module: nn.Module, query_1HTD: torch.Tensor, key_1KTD: torch.Tensor, value_1KTD: torch.Tensor,
    attention_mask: torch.Tensor | None, *, packed_attention: Attention, scaling: float | None = None, **others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer. Its masks and windows are not asked: `check_dense` refused them."""
    for name in ("softcap", "sliding_window", "s_aux", "position_bias"):
        if others.get(name) is not None:
            raise UnsupportedPolicy(f"{name}: {others[name]!r} in layer {module.layer_idx} is not supported")
    q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (query_1HTD, key_1KTD, value_1KTD))
    usual = 1.0 / math.sqrt(q_THD.shape[-1])
    if scaling is not None and not math.isclose(scaling, usual):
        q_THD = q_THD * (scaling / usual)
    return packed_attention(module.layer_idx, q_THD, k_TKD, v_TKD).unsqueeze(0), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The attention brings its own."""


AttentionInterface.register(INTERFACE, _attend)
AttentionMaskInterface.register(INTERFACE, _no_mask)
