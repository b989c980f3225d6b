"""Keys and values of one drafter over one sequence, grown row by row and cropped.

Shapes: L stored rows, G key/value heads, d head width; the leading 1 is the sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor


class DraftCache:
    """Per layer: context rows 0..length - 1. Rows past `length` are forgotten by `crop`."""

    def __init__(self, num_layers: int) -> None:
        self.keys: list[Tensor | None] = [None] * num_layers  # [1, L, G, d]
        self.values: list[Tensor | None] = [None] * num_layers
        self.length = 0
        self.last_hidden: Tensor | None = None
        """autoregressive: the layer's output of the newest context row [1, D]."""

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add rows [1, n, G, d] after `length` and return all rows, the new ones included.

        `length` itself moves only with `commit`, once every layer has its rows.
        """
        old_key, old_value = self.keys[layer], self.values[layer]
        if old_key is not None and old_value is not None:
            key = torch.cat((old_key[:, : self.length], key), dim=1)
            value = torch.cat((old_value[:, : self.length], value), dim=1)
        self.keys[layer], self.values[layer] = key, value
        return key, value

    def commit(self, rows: int) -> None:
        self.length += rows

    def crop(self, length: int) -> None:
        """Forget rows from `length` on."""
        assert length <= self.length
        self.length = length
