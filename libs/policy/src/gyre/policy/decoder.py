"""One decoder for the dense Llama, Qwen2 and Qwen3 family, under Hugging Face parameter names.

Tokens are packed: there is no batch axis, and which token may look at which is the attention's business alone
(`gyre.policy.attention.Attention`). So the trainer's tree forward and the engine's cached decode run this very module.

Axes: T packed tokens, E hidden size, H query heads, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
import torch.nn.functional as F
from gyre.policy.attention import Attention
from gyre.policy.config import PolicyConfig
from torch import nn
from torch.utils.checkpoint import checkpoint


class Linear(nn.Linear):
    """Left uninitialised: `Decoder.create` or `Decoder.from_state` fills it.

    On the meta device, drawing torch's default initialisation would import sympy and 800 modules more (2 s).
    """

    def reset_parameters(self) -> None:
        """Nothing; see the class."""


class Embedding(nn.Embedding):
    """Left uninitialised, as `Linear` is."""

    def reset_parameters(self) -> None:
        """Nothing; see `Linear`."""


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class SelfAttention(nn.Module):
    """Projections and rotary positions around a pluggable attention."""

    def __init__(self, config: PolicyConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self, x_TE: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        q_THD = self.q_proj(x_TE).unflatten(-1, (-1, self.head_dim))
        k_TKD = self.k_proj(x_TE).unflatten(-1, (-1, self.head_dim))
        v_TKD = self.v_proj(x_TE).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_THD, k_TKD = self.q_norm(q_THD), self.k_norm(k_TKD)
        q_THD, k_TKD = rotate(q_THD, cos_T1D, sin_T1D), rotate(k_TKD, cos_T1D, sin_T1D)
        return self.o_proj(attention(self.layer, q_THD, k_TKD, v_TKD).flatten(1))


class MLP(nn.Module):
    """Gated SiLU feed-forward."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_TE)) * self.up_proj(x_TE))


class Layer(nn.Module):
    """Pre-norm attention and feed-forward with residuals."""

    def __init__(self, config: PolicyConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x_TE: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        x_TE = x_TE + self.self_attn(self.input_layernorm(x_TE), cos_T1D, sin_T1D, attention)
        return x_TE + self.mlp(self.post_attention_layernorm(x_TE))


class Trunk(nn.Module):
    """Embedding, layers and final norm (named ``model`` in Hugging Face checkpoints)."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """The policy network. With tied embeddings there is no ``lm_head`` parameter, as in Hugging Face checkpoints.

    Use `create` or `from_state`; the bare constructor leaves the parameters uninitialised.
    """

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = (
            None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size, bias=False)
        )

    @classmethod
    def create(cls, config: PolicyConfig, seed: int) -> Decoder:
        """A freshly initialised decoder on the CPU in float32; the same (config, seed) gives the same bytes."""
        decoder = cls(config)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in sorted(decoder.named_parameters()):
            _initialise(name, parameter, config, generator)
        return decoder

    @classmethod
    def from_state(cls, config: PolicyConfig, state: Mapping[str, torch.Tensor]) -> Decoder:
        """A decoder that owns copies of ``state``'s tensors, in the dtype they have."""
        with torch.device("meta"):
            decoder = cls(config)
        check_state(config, state)
        kept = {name: tensor.clone() for name, tensor in state.items() if name in decoder.state_dict()}
        decoder.load_state_dict(kept, assign=True)
        return decoder.requires_grad_(True)

    def forward(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor, attention: Attention, layer_checkpoints: bool = False
    ) -> torch.Tensor:
        """Returns hidden_TE after the final norm. ``ids_T`` and ``positions_T`` are integer tensors of one length.

        ``layer_checkpoints`` keeps only the input of each layer for backward, which makes the rest again.
        """
        x_TE = self.model.embed_tokens(ids_T)
        cos_T1D, sin_T1D = rotary(positions_T, self.config.head_dim, self.config.rope_theta, x_TE.dtype)
        for layer in self.model.layers:
            if layer_checkpoints:
                x_TE = checkpoint(layer, x_TE, cos_T1D, sin_T1D, attention, use_reentrant=False)
            else:
                x_TE = layer(x_TE, cos_T1D, sin_T1D, attention)
        return self.model.norm(x_TE)

    def logits(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """Returns logits_TV of hidden states that `forward` returned (any subset of its rows)."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return F.linear(hidden_TE, head.weight)


def rotary(
    positions_T: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos_T1D and sin_T1D of rotary positions, computed in float32 (angles overflow the mantissa of bfloat16)."""
    angles = positions_T.to(torch.float32).unsqueeze(-1) * _frequencies(head_dim, theta, positions_T.device)
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_TND: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    """Applies rotary positions in the half-split layout that Llama-family checkpoints use."""
    first, second = x_TND.chunk(2, dim=-1)
    return x_TND * cos_T1D + torch.cat((-second, first), dim=-1) * sin_T1D


def check_state(config: PolicyConfig, state: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError naming the first parameter that is missing, unexpected or of another shape."""
    with torch.device("meta"):
        wanted = Decoder(config).state_dict()
    for name, tensor in wanted.items():
        if name not in state:
            raise ValueError(f"weights: {name} is missing; it must be there with shape {list(tensor.shape)}")
        if state[name].shape != tensor.shape:
            raise ValueError(f"weights: {name} has shape {list(state[name].shape)}, must be {list(tensor.shape)}")
    for name in state:
        if name not in wanted and not _may_be_ignored(name, config):
            raise ValueError(f"weights: {name} is not a parameter of this {config.model_type} policy")


def _may_be_ignored(name: str, config: PolicyConfig) -> bool:
    """A tied checkpoint may repeat its embedding as lm_head; old ones also carry rotary frequencies."""
    return (name == "lm_head.weight" and config.tie_word_embeddings) or name.endswith("rotary_emb.inv_freq")


def _initialise(name: str, parameter: nn.Parameter, config: PolicyConfig, generator: torch.Generator) -> None:
    """Norms one, biases zero, embeddings 0.02, projections by fan-in; those that write the residual are scaled down."""
    with torch.no_grad():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith(".bias"):
            parameter.zero_()
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            parameter.normal_(0.0, 0.02, generator=generator)
        else:
            std = parameter.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= (2 * config.num_layers) ** -0.5
            parameter.normal_(0.0, std, generator=generator)


@lru_cache(maxsize=32)
def _frequencies(head_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).to(torch.float32) / head_dim
    return 1.0 / (theta**exponents)
