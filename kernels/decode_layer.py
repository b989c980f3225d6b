"""A whole decoder layer over few rows in one call, on CPU: native/decode_layer.cpp.

Its eager twin is LeanLayer in models/lean_decoder.py, which runs wherever this does not: other
devices and dtypes, more rows, gradients, no compiler.

Letters: B sequences, T new rows of each, D width, H query heads, G key/value heads, d head width,
L rows of the cache, F feed-forward width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.extension import load_extension
from paceline.kernels.linear import DTYPES, MAX_FEW_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """norm, attention, residual, norm, SwiGLU, residual. Weights are contiguous, of one dtype."""

    norm: Tensor  # [D]
    qkv: Tensor  # [(H + 2 G) d, D], queries, keys, values
    qkv_bias: Tensor | None
    query_norm: Tensor | None  # [d]
    key_norm: Tensor | None
    out: Tensor  # [D, H d]
    out_bias: Tensor | None
    second_norm: Tensor  # [D]
    gate_up: Tensor  # [2 F, D]
    gate_up_bias: Tensor | None
    down: Tensor  # [D, F]
    down_bias: Tensor | None
    eps: float  # of all norms
    scale: float  # of attention scores


def decode_layer_runs(hidden: Tensor, cache_dtype: torch.dtype) -> bool:
    """Whether `decode_layer` can run hidden states [B, T, D] here."""
    rows = hidden.shape[0] * hidden.shape[1]
    fits = hidden.device.type == "cpu" and hidden.dtype in DTYPES and hidden.dtype == cache_dtype
    wants_gradient = torch.is_grad_enabled() and hidden.requires_grad
    return fits and rows <= MAX_FEW_ROWS and not wants_gradient and load_extension("decode_layer")


def decode_layer(
    hidden: Tensor,
    weights: LayerWeights,
    tables: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    visible: Tensor | None,
    length: int,
) -> Tensor:
    """The layer's output; each row's values are the same whatever stands beside it.

    Args:
        hidden: [B, T, D].
        weights: of the layer.
        tables: cosines and sines [B, T, d], the first half of the sines negated.
        keys: [B, G, L, d], takes the new rows; d has stride 1.
        values: likewise.
        rows: [B, T] int64, where the new rows go.
        visible: bool [B, T, length] of the cache's rows; None, each row sees those up to itself.
        length: cache rows that are read.

    Returns:
        [B, T, D] in the dtype of `hidden`; what lies between the weights is float32.
    """
    w = weights
    output: Tensor = torch.ops.paceline.decode_layer(
        hidden,
        w.norm,
        w.qkv,
        w.qkv_bias,
        w.query_norm,
        w.key_norm,
        w.out,
        w.out_bias,
        w.second_norm,
        w.gate_up,
        w.gate_up_bias,
        w.down,
        w.down_bias,
        tables[0],
        tables[1],
        keys,
        values,
        rows,
        visible,
        length,
        w.eps,
        w.scale,
    )
    return output
