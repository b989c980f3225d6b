"""Attention of the target over its slot cache, grouped-query without repeating keys and values.

transformers' SDPA path copies every key and value head for each group member as soon as a mask is
given; at decoding that copy is larger than the attention itself. Here the query heads of a group
become extra query rows instead: [B, H, T, d] -> [B, G, (H / G) * T, d].

Shapes: B sequences, H query heads, G key/value heads, T query rows, L keys, d head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION_NAME = "paceline_grouped"


def grouped_attention(
    module: nn.Module,
    query: Tensor,  # [B, H, T, d]
    key: Tensor,  # [B, G, L, d]
    value: Tensor,  # [B, G, L, d]
    attention_mask: Tensor | None,  # bool [B, 1, T, L], True where visible
    scaling: float | None = None,
    softcap: float | None = None,
    **_unused: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface; returns [B, T, H, d]."""
    batch, heads, rows, width = query.shape
    groups = key.shape[1]
    grouped_BGRd = query.reshape(batch, groups, heads // groups * rows, width)
    if attention_mask is None:
        mask = torch.ones(rows, key.shape[2], dtype=torch.bool, device=query.device)
        mask = mask.tril(key.shape[2] - rows)[None, None]
    else:
        mask = attention_mask
    mask = mask.repeat(1, 1, heads // groups, 1)
    if softcap is None:
        out = F.scaled_dot_product_attention(
            grouped_BGRd, key, value, attn_mask=mask, scale=scaling
        )
    else:
        scores = grouped_BGRd @ key.transpose(-1, -2) * (scaling or width**-0.5)
        scores = torch.tanh(scores / softcap) * softcap
        out = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value
    return out.reshape(batch, heads, rows, width).transpose(1, 2), None


AttentionInterface.register(ATTENTION_NAME, grouped_attention)
