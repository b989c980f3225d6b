"""Start a drafter's layers from the target's own (recipe option `init_from_target_layers`).

Block layers take the target layer's projections, norms and MLP. Their per-head q/k norms, which
most targets lack, start at the size the target's queries and keys have for unit-normal inputs, so
that attention logits keep the target's scale. The autoregressive layer reads twice the width: the
target's projections become the hidden half, the embedding half starts small.

Shapes: D width, H heads, d head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.models.backbones.block import BlockBackbone
from paceline.models.drafter import Drafter
from paceline.models.target import Target

EMBEDDING_HALF_SCALE = 0.5


@torch.no_grad()
def start_from_target(drafter: Drafter, target: Target) -> None:
    """Copy the layers that the recipe names; without the option nothing happens.

    Raises ValueError if a layer does not exist or its shape differs from the drafter's.
    """
    layer_ids = drafter.config.backbone.init_from_target_layers
    if layer_ids is None:
        return
    layers = list(drafter.backbone.layers)
    if len(layer_ids) != len(layers) or max(layer_ids) >= target.spec.num_layers:
        raise ValueError(
            f"drafter.backbone.init_from_target_layers={list(layer_ids)}: give one target layer "
            f"below {target.spec.num_layers} for each of the {len(layers)} drafter layers"
        )
    for layer, layer_id in zip(layers, layer_ids, strict=True):
        source = target.layers[layer_id]
        if isinstance(drafter.backbone, BlockBackbone):
            _start_block_layer(layer, source)
        else:
            _start_autoregressive_layer(layer, source)
    drafter.backbone.norm.weight.copy_(target.decoder.norm.weight)
    if isinstance(drafter.backbone, BlockBackbone):
        first: Any = target.layers[layer_ids[0]]
        drafter.backbone.context_norm.weight.copy_(first.input_layernorm.weight)


def _copy(destination: Tensor, source: Tensor, name: str) -> None:
    if destination.shape != source.shape:
        raise ValueError(
            f"drafter.backbone.init_from_target_layers: {name} is {tuple(source.shape)} in the "
            f"target and {tuple(destination.shape)} in the drafter; leave the drafter's sizes out "
            "so that they follow the target, or start from random layers"
        )
    destination.copy_(source)


def _start_block_layer(layer: Any, source: Any) -> None:
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        _copy(getattr(layer.self_attn, name).weight, getattr(source.self_attn, name).weight, name)
    for norm, projection in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
        own = getattr(layer.self_attn, norm).weight
        given = source.self_attn._modules.get(norm)
        if given is not None:
            _copy(own, given.weight, norm)
        else:
            scaled = getattr(source.self_attn, projection).weight * source.input_layernorm.weight
            own.fill_(float(scaled.float().pow(2).sum(dim=1).mean().sqrt()))
    _start_shared(layer, source)


def _start_autoregressive_layer(layer: Any, source: Any) -> None:
    width = source.self_attn.q_proj.weight.shape[1]
    for name in ("q_proj", "k_proj", "v_proj"):
        own = getattr(layer.self_attn, name).weight
        given = getattr(source.self_attn, name).weight
        _copy(own[:, width:], given, name)
        own[:, :width].mul_(EMBEDDING_HALF_SCALE)
    _copy(layer.self_attn.o_proj.weight, source.self_attn.o_proj.weight, "o_proj")
    layer.hidden_norm.weight.copy_(source.input_layernorm.weight)
    _start_shared(layer, source)


def _start_shared(layer: Any, source: Any) -> None:
    for name in ("gate_proj", "up_proj", "down_proj"):
        _copy(getattr(layer.mlp, name).weight, getattr(source.mlp, name).weight, name)
    _copy(layer.post_attention_layernorm.weight, source.post_attention_layernorm.weight, "norm")
    if "hidden_norm" not in layer._modules:
        _copy(layer.input_layernorm.weight, source.input_layernorm.weight, "input_layernorm")
