"""Keys and values of one drafter for several sequences, and where each of them stands.

Like the target's cache it has slots with room for `capacity` rows, written in place: row t of a
slot is the drafter's row of committed token t, drafted rows lie above the committed length and are
overwritten by the next ones. Forgetting a draft therefore costs nothing.

Shapes: B slots in use, D drafter width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.models.kv_cache import SlotCache


class DraftCache:
    """Slots of one drafter."""

    def __init__(self, num_slots: int, capacity: int) -> None:
        self.rows = SlotCache(num_slots, capacity)
        self.lengths = [0] * num_slots
        """Committed rows of each slot."""
        self.last_hidden: Tensor | None = None
        """autoregressive: the layer's output of each slot's newest committed row, [slots, D]."""

    def place(self, slots: slice, count: int, device: torch.device, ahead: int = 0) -> Tensor:
        """Positions [B, count] of the next rows of `slots`, `ahead` rows above the committed."""
        starts_B1 = torch.tensor(self.lengths[slots], device=device)[:, None] + ahead
        positions_BT = starts_B1 + torch.arange(count, device=device)
        self.rows.place(positions_BT, slots)
        return positions_BT

    def place_tree(self, slots: slice, level: int, visible_BWX: Tensor) -> Tensor:
        """Positions [B, W] of the nodes that a tree's `level` opens.

        They are the last W of the X draft rows; visible [B, W, X] marks which of those each sees.
        """
        width, total = visible_BWX.shape[1:]
        lengths_B = torch.tensor(self.lengths[slots], device=visible_BWX.device)
        rows_W = torch.arange(total - width, total, device=visible_BWX.device)
        self.rows.place(
            lengths_B[:, None] + rows_W, slots, tree_start_B=lengths_B, tree_BTX=visible_BWX
        )
        return (lengths_B[:, None] + level).expand(-1, width)

    def commit(self, slots: slice, counts: list[int]) -> None:
        """The first counts[b] of the rows just written are committed."""
        for slot, count in zip(range(slots.start, slots.stop), counts, strict=True):
            self.lengths[slot] += count

    def keep_last(self, slots: slice, hidden_BTD: Tensor, counts: list[int]) -> None:
        """Remember each slot's output of its newest committed row."""
        if self.last_hidden is None:
            self.last_hidden = hidden_BTD.new_zeros(self.rows.num_slots, hidden_BTD.shape[-1])
        index_B = torch.tensor(counts, device=hidden_BTD.device) - 1
        row_B = torch.arange(len(counts), device=hidden_BTD.device)
        self.last_hidden[slots] = hidden_BTD[row_B, index_B]

    def move(self, source: int, destination: int) -> None:
        """Copy one slot over another's."""
        self.rows.move(source, destination, self.lengths[source])
        self.lengths[destination] = self.lengths[source]
        if self.last_hidden is not None:
            self.last_hidden[destination] = self.last_hidden[source]

    def clear(self, slot: int) -> None:
        """Empty a slot for another sequence."""
        self.lengths[slot] = 0
