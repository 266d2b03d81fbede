"""`Decoder` with its weights laid out for inference: fewer and larger products per layer, and fewer small operations.

What is multiplied with the same input is one matrix (q, k and v; gate and up), and matrices lie as [in, out], which a few
rows multiply faster on a CPU. The parameters stay those of the decoder by name, shape and value: they are views of this
memory, so that there is one copy and digests see what is computed with.

Axes as in `gyre.policy.decoder`: T packed tokens, E hidden size, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gyre.policy.attention import Attention
from gyre.policy.decoder import Decoder, Layer, Linear, rotary
from gyre.policy.model import PolicyModel
from torch import nn


@dataclass(frozen=True, slots=True)
class _Packed:
    """One layer. `qk_norm_ND` has the weight of every query head and then of every key head."""

    qkv_EN: torch.Tensor
    qkv_bias_N: torch.Tensor | None
    qk_norm_ND: torch.Tensor | None
    out_NE: torch.Tensor
    gate_up_EN: torch.Tensor
    down_NE: torch.Tensor


class FastDecoder(Decoder):
    """Shares the modules of the decoder it is made of. For inference alone: there is no backward."""

    def __init__(self, decoder: Decoder) -> None:
        nn.Module.__init__(self)
        self.config = decoder.config
        self.model = decoder.model
        self.lm_head = decoder.lm_head
        self._packed: list[_Packed] = []
        self._head_EV = torch.empty(0)
        self._pack()

    def forward(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor, attention: Attention, layer_checkpoints: bool = False
    ) -> torch.Tensor:
        """See `Decoder.forward`."""
        config = self.config
        x_TE = F.embedding(ids_T, self.model.embed_tokens.weight)
        cos_T1D, sin_T1D = rotary(positions_T, config.head_dim, config.rope_theta, x_TE.dtype)
        first_T1D, second_T1D = sin_T1D.chunk(2, dim=-1)
        sin_T1D = torch.cat((-first_T1D, second_T1D), dim=-1)
        for index, (layer, packed) in enumerate(zip(self.model.layers, self._packed, strict=True)):
            normed_TE = F.rms_norm(x_TE, x_TE.shape[-1:], layer.input_layernorm.weight, config.rms_norm_eps)
            out_THD = attention(index, *self._qkv(packed, normed_TE, cos_T1D, sin_T1D))
            x_TE = torch.addmm(x_TE, out_THD.flatten(1), packed.out_NE)
            normed_TE = F.rms_norm(x_TE, x_TE.shape[-1:], layer.post_attention_layernorm.weight, config.rms_norm_eps)
            gate_TN, up_TN = (normed_TE @ packed.gate_up_EN).chunk(2, dim=-1)
            x_TE = torch.addmm(x_TE, F.silu(gate_TN) * up_TN, packed.down_NE)
        return self.model.norm(x_TE)

    def logits(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """See `Decoder.logits`."""
        return hidden_TE @ self._head_EV

    def _qkv(
        self, packed: _Packed, x_TE: torch.Tensor, cos_T1D: torch.Tensor, signed_sin_T1D: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries and keys are normalised and rotated as one."""
        heads, head_dim = self.config.num_heads, self.config.head_dim
        qkv_TN = x_TE @ packed.qkv_EN
        if packed.qkv_bias_N is not None:
            qkv_TN = qkv_TN + packed.qkv_bias_N
        qkv_TND = qkv_TN.view(len(x_TE), -1, head_dim)
        qk_TND, v_TKD = qkv_TND.split((heads + self.config.num_kv_heads, self.config.num_kv_heads), dim=1)
        if packed.qk_norm_ND is not None:
            qk_TND = F.rms_norm(qk_TND, (head_dim,), None, self.config.rms_norm_eps) * packed.qk_norm_ND
        qk_TND = torch.addcmul(qk_TND * cos_T1D, qk_TND.roll(head_dim // 2, -1), signed_sin_T1D)
        return qk_TND[:, :heads], qk_TND[:, heads:], v_TKD

    def _pack(self) -> None:
        with torch.no_grad():
            self._packed = [_pack_layer(layer, self.config.num_heads, self.config.num_kv_heads) for layer in self.model.layers]
            self._head_EV = _adopt([self.model.embed_tokens if self.lm_head is None else self.lm_head])

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FastDecoder:
        """What moves or converts the parameters ends that they are views; then everything is laid out again."""
        super()._apply(fn, recurse)
        self._pack()
        return self


def fast(model: PolicyModel) -> PolicyModel:
    """`model` made fast where that is known how."""
    return FastDecoder(model) if type(model) is Decoder else model


def _pack_layer(layer: Layer, num_heads: int, num_kv_heads: int) -> _Packed:
    attention, mlp = layer.self_attn, layer.mlp
    projections: list[Linear] = [attention.q_proj, attention.k_proj, attention.v_proj]
    norms = None
    if attention.q_norm is not None and attention.k_norm is not None:
        norms = torch.stack([attention.q_norm.weight] * num_heads + [attention.k_norm.weight] * num_kv_heads)
    biases = [p.bias for p in projections if p.bias is not None]
    return _Packed(
        qkv_EN=_adopt(projections),
        qkv_bias_N=torch.cat(biases) if biases else None,
        qk_norm_ND=norms,
        out_NE=_adopt([attention.o_proj]),
        gate_up_EN=_adopt([mlp.gate_proj, mlp.up_proj]),
        down_NE=_adopt([mlp.down_proj]),
    )


def _adopt(modules: Sequence[nn.Linear | nn.Embedding]) -> torch.Tensor:
    """Their weights beside each other as one matrix [in, sum of out]; the parameters become views of it."""
    packed = torch.cat([module.weight.detach() for module in modules]).t().contiguous()
    start = 0
    for module in modules:
        stop = start + module.weight.shape[0]
        module.weight = nn.Parameter(packed[:, start:stop].t(), requires_grad=False)
        start = stop
    return packed
