"""The decoder layers of Llama-like targets with fewer, larger operations.

While decoding, the many small operations of a layer and their launches weigh beside the reading of
its weights (`paceline bench engine`: decode1_vs_transformers). Here q, k and v are one product and
gate and up another, norms are single calls, rotary tables and the mask are made once per forward,
and a lone token reads its cache without a mask. The weights stay transformers' own parameters: they
become views of the joined tensors, so loading new ones in place reaches both.

For few rows on CPU even these operations are one call (kernels/decode_layer.py), of which the code
here is the eager twin.

Shapes: B sequences, T new tokens each, L cached rows, H query heads, G key/value heads, d head
width, D width, E = H // G query heads per key head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2CLS

from paceline.kernels.decode_layer import LayerWeights, decode_layer, decode_layer_runs
from paceline.kernels.linear import few_row_linear
from paceline.models.kv_cache import SlotCache

FULL = "full_attention"
SLIDING = "sliding_attention"
LAYER_CLASSES = (
    "LlamaDecoderLayer",
    "MistralDecoderLayer",
    "Qwen2DecoderLayer",
    "Qwen3DecoderLayer",
)
"""Layers of this form: norm, attention, residual, norm, SwiGLU, residual."""


class LeanDecoder:
    """Runs `decoder`'s layers. Build it with `lean_decoder`."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self.join_weights()

    def join_weights(self) -> None:
        """Take the layers' weights as they are now: needed again when they were moved."""
        self._layers = [LeanLayer(layer) for layer in self._decoder.layers]

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        masks: Callable[[], dict[str, Tensor | None]],
        cache: SlotCache,
        tap_layer_ids: tuple[int, ...],
        *,
        causal: bool,
    ) -> tuple[Tensor, list[Tensor]]:
        """Final-normed states [B, T, D] and the outputs [B, T, D] of the tapped layers.

        `masks` makes for each kind of layer a bool [B, 1, T, L], or None where all of L is seen;
        with one entry, FULL, it holds for every layer. `causal` says that in every layer a row sees
        exactly the cache's rows up to itself.
        """
        hidden_BTD = self._decoder.embed_tokens(input_ids)
        cos_BTd, sin_BTd = self._decoder.rotary_emb(hidden_BTD, position_ids)
        half = cos_BTd.shape[-1] // 2
        # rotate_half(x) = cat(-x2, x1) is cat(x2, x1) with the sign moved into the table.
        signed_BTd = torch.cat((-sin_BTd[..., :half], sin_BTd[..., half:]), dim=-1)
        tables = (cos_BTd, signed_BTd)
        if decode_layer_runs(hidden_BTD, self._layers[0].qkv[0].dtype):
            seen: dict[str, Tensor | None] = {FULL: None} if causal else masks()
            hidden_BTD, taps = self._native(hidden_BTD, tables, seen, cache, tap_layer_ids)
        else:
            hidden_BTD, taps = self._eager(hidden_BTD, tables, masks(), cache, tap_layer_ids)
        return _rms_norm(hidden_BTD, self._decoder.norm), taps

    def _native(
        self,
        hidden_BTD: Tensor,
        tables: tuple[Tensor, Tensor],
        masks: dict[str, Tensor | None],
        cache: SlotCache,
        tap_layer_ids: tuple[int, ...],
    ) -> tuple[Tensor, list[Tensor]]:
        taps = []
        for index, layer in enumerate(self._layers):
            mask = masks.get(layer.kind, masks[FULL])
            keys, values = cache.storage(index, layer.num_keys, layer.width, hidden_BTD)
            hidden_BTD = decode_layer(
                hidden_BTD,
                layer.weights,
                tables,
                keys,
                values,
                cache.rows,
                None if mask is None else mask[:, 0],
                cache.length,
            )
            if index in tap_layer_ids:
                taps.append(hidden_BTD)
        return hidden_BTD, taps

    def _eager(
        self,
        hidden_BTD: Tensor,
        tables: tuple[Tensor, Tensor],
        masks: dict[str, Tensor | None],
        cache: SlotCache,
        tap_layer_ids: tuple[int, ...],
    ) -> tuple[Tensor, list[Tensor]]:
        over_heads = (tables[0][:, :, None], tables[1][:, :, None])
        added = {kind: self._layers[0].added_mask(m, hidden_BTD) for kind, m in masks.items()}
        taps = []
        for index, layer in enumerate(self._layers):
            mask = added.get(layer.kind, added[FULL])
            hidden_BTD = layer.forward(hidden_BTD, over_heads, mask, cache)
            if index in tap_layer_ids:
                taps.append(hidden_BTD)
        return hidden_BTD, taps


class LeanLayer:
    """One decoder layer."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index: int = attention.layer_idx
        self.kind: str = attention.layer_type if hasattr(attention, "layer_type") else FULL
        self.width: int = attention.head_dim
        self.num_queries = attention.q_proj.out_features // self.width
        self.num_keys = attention.k_proj.out_features // self.width
        self.scale: float = attention.scaling
        self.norms = (layer.input_layernorm, layer.post_attention_layernorm)
        self.head_norms = (
            (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        )
        self.qkv = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.gate_up = _joined(mlp.gate_proj, mlp.up_proj)
        self.out, self.down = attention.o_proj, mlp.down_proj
        self.weights = LayerWeights(
            norm=self.norms[0].weight,
            qkv=self.qkv[0],
            qkv_bias=self.qkv[1],
            query_norm=self.head_norms[0].weight if self.head_norms else None,
            key_norm=self.head_norms[1].weight if self.head_norms else None,
            out=self.out.weight,
            out_bias=self.out.bias,
            second_norm=self.norms[1].weight,
            gate_up=self.gate_up[0],
            gate_up_bias=self.gate_up[1],
            down=self.down.weight,
            down_bias=self.down.bias,
            eps=self.norms[0].variance_epsilon,
            scale=self.scale,
        )

    def forward(
        self,
        hidden_BTD: Tensor,
        tables: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: SlotCache,
    ) -> Tensor:
        normed = _rms_norm(hidden_BTD, self.norms[0])
        attended = self._attend(few_row_linear(normed, *self.qkv), tables, mask, cache)
        hidden_BTD = hidden_BTD + few_row_linear(attended, self.out.weight, self.out.bias)
        gate_up = few_row_linear(_rms_norm(hidden_BTD, self.norms[1]), *self.gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        product = F.silu(gate) * up
        return hidden_BTD + few_row_linear(product, self.down.weight, self.down.bias)

    def _attend(
        self,
        qkv: Tensor,
        tables: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: SlotCache,
    ) -> Tensor:
        batch, count = qkv.shape[:2]
        rotated, keys = self.num_queries + self.num_keys, self.num_keys
        heads_BTHd = qkv.view(batch, count, rotated + keys, self.width)
        turned = heads_BTHd[:, :, :rotated]
        if self.head_norms is not None:
            query = _rms_norm(turned[:, :, : self.num_queries], self.head_norms[0])
            key = _rms_norm(turned[:, :, self.num_queries :], self.head_norms[1])
            turned = torch.cat((query, key), dim=2)
        cos, signed_sin = tables
        turned = torch.addcmul(turned * cos, turned.roll(self.width // 2, -1), signed_sin)
        key_BGLd, value_BGLd = cache.update(
            turned[:, :, self.num_queries :].transpose(1, 2),
            heads_BTHd[:, :, rotated:].transpose(1, 2),
            self.index,
        )
        # The query heads of a group become rows: [B, T, G, E, d] -> [B, G, E * T, d].
        grouped = turned[:, :, : self.num_queries].unflatten(2, (keys, -1))
        grouped_BGRd = grouped.permute(0, 2, 3, 1, 4).flatten(2, 3)
        out_BGRd = F.scaled_dot_product_attention(
            grouped_BGRd, key_BGLd, value_BGLd, attn_mask=mask, scale=self.scale
        )
        out = out_BGRd.unflatten(2, (-1, count)).permute(0, 3, 1, 2, 4)
        return out.reshape(batch, count, self.num_queries * self.width)

    def added_mask(self, mask: Tensor | None, like: Tensor) -> Tensor | None:
        """A bool mask [B, 1, T, L] as numbers to add, repeated for a group's query heads."""
        if mask is None:
            return None
        added = like.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)
        return added.repeat(1, 1, self.num_queries // self.num_keys, 1)


def lean_decoder(decoder: Any) -> LeanDecoder | None:
    """A LeanDecoder of a transformers decoder, or None if its layers are of another form."""
    silu = ACT2CLS["silu"]
    for layer in decoder.layers:
        if type(layer).__name__ not in LAYER_CLASSES or not isinstance(layer.mlp.act_fn, silu):
            return None
        parts = (layer.self_attn, layer.mlp)
        linears = [m for part in parts for m in part.children() if hasattr(m, "out_features")]
        if len(linears) != 7 or any(type(linear) is not nn.Linear for linear in linears):
            return None  # quantised or adapted layers run their own code
    return LeanDecoder(decoder)


def _joined(*linears: Any) -> tuple[Tensor, Tensor | None]:
    """One weight and bias for several linears, whose own parameters become views of it."""
    weight = torch.cat([linear.weight.data for linear in linears])
    _become_views([linear.weight for linear in linears], weight)
    if linears[0].bias is None:
        return weight, None
    bias = torch.cat([linear.bias.data for linear in linears])
    _become_views([linear.bias for linear in linears], bias)
    return weight, bias


def _become_views(parameters: list[Tensor], whole: Tensor) -> None:
    rows = whole.split([len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, rows, strict=True):
        parameter.data = part


def _rms_norm(hidden: Tensor, norm: Any) -> Tensor:
    return F.rms_norm(hidden, (hidden.shape[-1],), norm.weight, norm.variance_epsilon)
