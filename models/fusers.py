"""Context fusers: the target's tapped hidden states -> the drafter's context rows.

Shapes: ... any leading axes, A tapped layers, Dt target width, D drafter width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.models.config import FuserConfig
from paceline.models.layers import Linear, RMSNorm


class ConcatFc(nn.Module):
    """Linear(A * Dt -> D) over all taps (EAGLE-3, arXiv 2503.01840; DFlash, 2602.06036).

    `norm_taps` first norms each tap with its own gain (`fc_norm`, arXiv 2605.09992).
    The projection starts as the identity on the last tap where the widths agree: context rows then
    begin as a residual stream that layers copied from the target can read.
    """

    def __init__(
        self, num_taps: int, target_size: int, hidden_size: int, eps: float, *, norm_taps: bool
    ) -> None:
        super().__init__()
        self.fc = Linear(num_taps * target_size, hidden_size)
        self.fc_norm = (
            nn.ModuleList(RMSNorm(target_size, eps) for _ in range(num_taps)) if norm_taps else None
        )
        with torch.no_grad():
            self.fc.weight.normal_(0.0, 0.1 * (num_taps * target_size) ** -0.5)
            if target_size == hidden_size:
                self.fc.weight[:, -target_size:] += torch.eye(target_size)

    def forward(self, aux_hidden_states: Tensor) -> Tensor:
        """[..., A, Dt] -> [..., D]."""
        if self.fc_norm is not None:
            taps = [norm(aux_hidden_states[..., i, :]) for i, norm in enumerate(self.fc_norm)]
            aux_hidden_states = torch.stack(taps, dim=-2)
        return self.fc(aux_hidden_states.flatten(-2))


FUSERS = {"concat_fc": False, "concat_fc_normed": True}
"""Kind -> whether the taps are normed; both are one projection."""


def build_fuser(
    config: FuserConfig, *, num_taps: int, target_size: int, hidden_size: int, eps: float
) -> ConcatFc:
    """The fuser that `drafter.fuser.kind` names."""
    return ConcatFc(num_taps, target_size, hidden_size, eps, norm_taps=FUSERS[config.kind])
