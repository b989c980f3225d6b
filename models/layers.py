"""What every drafter layer is made of: RMSNorm, rotary positions, attention projections, SwiGLU.

Shapes: ... any leading axes, D drafter width, H query heads, G key/value heads, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.kernels.linear import few_row_linear


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Sizes shared by all layers of one drafter."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float


class Linear(nn.Linear):
    """Bias-free linear layer; takes the fast path for the few rows of a drafting step."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return F.linear(input, self.weight)
        return few_row_linear(input, self.weight, None)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, computed in float32 (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden.float(), self.weight.shape, self.weight.float(), self.eps).to(
            hidden.dtype
        )


class SwiGLU(nn.Module):
    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


def rotate(heads: Tensor, position_ids: Tensor, theta: float) -> Tensor:
    """Rotary embedding (Su et al. 2021), half-split layout as in Llama.

    heads [..., N, d] with position_ids [...] broadcast over the head axis. Angles are made in
    float32 whatever the model's dtype: a bfloat16 inv_freq misplaces late positions.
    """
    width = heads.shape[-1]
    exponent = torch.arange(0, width, 2, device=heads.device, dtype=torch.float32) / width
    angle = position_ids[..., None].float() * theta**-exponent
    cos, sin = angle.cos()[..., None, :], angle.sin()[..., None, :]
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(
        heads.dtype
    )


class AttentionProjections(nn.Module):
    """q, k, v and o of one layer; `qk_norm` adds Qwen3's per-head RMSNorm before the rotation."""

    def __init__(self, shape: LayerShape, *, input_size: int, qk_norm: bool) -> None:
        super().__init__()
        self.heads, self.groups = shape.num_attention_heads, shape.num_key_value_heads
        self.head_dim, self.theta = shape.head_dim, shape.rope_theta
        self.q_proj = Linear(input_size, self.heads * self.head_dim)
        self.k_proj = Linear(input_size, self.groups * self.head_dim)
        self.v_proj = Linear(input_size, self.groups * self.head_dim)
        self.o_proj = Linear(self.heads * self.head_dim, shape.hidden_size)
        self.q_norm = RMSNorm(self.head_dim, shape.rms_norm_eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, shape.rms_norm_eps) if qk_norm else nn.Identity()

    def query(self, hidden: Tensor, position_ids: Tensor) -> Tensor:
        """[..., input_size] at positions [...] -> rotated queries [..., H, d]."""
        query = self.q_proj(hidden).unflatten(-1, (self.heads, self.head_dim))
        return rotate(self.q_norm(query), position_ids, self.theta)

    def key_value(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """[..., input_size] at positions [...] -> rotated keys and plain values [..., G, d]."""
        key = self.k_proj(hidden).unflatten(-1, (self.groups, self.head_dim))
        value = self.v_proj(hidden).unflatten(-1, (self.groups, self.head_dim))
        return rotate(self.k_norm(key), position_ids, self.theta), value

    def output(self, attended: Tensor) -> Tensor:
        """Attended heads [..., H, d] -> [..., D]."""
        return self.o_proj(attended.flatten(-2))
