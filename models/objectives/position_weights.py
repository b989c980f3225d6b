"""Weight of a supervised row by its slot k, counted from 0 for the first drafted token.

| kind | weight | used by |
|---|---|---|
| uniform | 1 | JetSpec |
| exp | e^(-k / value) | DFlash (value 7 for blocks of 16, 4 for 8) |
| horizon | value^k | EAGLE-3's training-time test (0.8) |
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.models.config import WeightConfig


def uniform(slot_R: Tensor, value: float) -> Tensor:
    return torch.ones_like(slot_R, dtype=torch.float32)


def exp(slot_R: Tensor, value: float) -> Tensor:
    return torch.exp(-slot_R.float() / value)


def horizon(slot_R: Tensor, value: float) -> Tensor:
    return value ** slot_R.float()


POSITION_WEIGHTS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "uniform": uniform,
    "exp": exp,
    "horizon": horizon,
}


def position_weights(config: WeightConfig, slot_R: Tensor) -> Tensor:
    """Weights [R] float32 of rows at slots [R] int64."""
    return POSITION_WEIGHTS[config.kind](slot_R, config.value)
