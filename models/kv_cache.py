"""The target's key/value cache: preallocated slots, rows written in place, rejected rows forgotten.

A committed token at position t is stored at row t of its slot, so a causal query sees rows 0..t and
nothing else needs masking: what a rejected draft left behind lies above every row that is asked
for, until it is overwritten. Dropping rejected tokens therefore copies nothing.

The nodes of a tree lie one after another above the committed rows, whatever their positions are,
and see the committed rows and their own ancestors; `compact` then moves the accepted path to where
a chain would have put it. Anchor x7, children a and b, c after b; b and c are accepted:

    row        0..6    7     8    9    10           after compact
    token      x0..x6  x7    a    b    c            7: x7    8: b    9: c
    position   0..6    7     8    8    9

Shapes: B slots in use, T new rows per slot, X rows of a tree, G key/value heads, L capacity, d head
width, N rows to move.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.models.target_spec import TargetSpec


class SlotCache:
    """Keys and values of `num_slots` sequences for every layer of a target.

    The object is what transformers' attention layers call `past_key_values`: they hand their new
    rows to `update` and read back everything that the current positions may see.
    """

    is_compileable = False

    def __init__(self, num_slots: int, capacity: int) -> None:
        self.num_slots = num_slots
        self.capacity = capacity
        self.keys: dict[int, Tensor] = {}  # layer -> [num_slots, G, L, d]
        self.values: dict[int, Tensor] = {}
        self._rows_BT: Tensor | None = None
        self._tree: tuple[Tensor, Tensor] | None = None
        self._slots = slice(0, num_slots)
        self._length = 0
        self._newest_last = True

    def place(
        self,
        rows_BT: Tensor,
        slots: slice,
        *,
        length: int | None = None,
        tree_start_B: Tensor | None = None,
        tree_BTX: Tensor | None = None,
    ) -> None:
        """State where the next forward's rows go: rows [b] of slot `slots.start + b`.

        A row sees all rows up to itself; with a tree, the rows below tree_start [b] and those rows
        of tree_start [b] .. + X that tree [b, t] (bool) marks. `length` is how many rows the
        forward reads, by default up to the last new one; a captured graph reads all of them.
        """
        self._rows_BT = rows_BT
        self._slots = slots
        self._length = int(rows_BT.max()) + 1 if length is None else length
        self._newest_last = length is None
        self._tree = None
        if tree_BTX is not None:
            assert tree_start_B is not None
            self._tree = (tree_start_B, tree_BTX)
        assert self._length <= self.capacity, f"row {self._length - 1} >= {self.capacity}"

    @property
    def newest_last(self) -> bool:
        """Whether the newest placed row is the last one that is read: nothing lies above it."""
        return self._newest_last

    @property
    def is_causal(self) -> bool:
        """Whether a placed row sees exactly the rows up to itself: it is part of no tree."""
        return self._tree is None

    @property
    def rows(self) -> Tensor:
        """The placed rows [B, T]."""
        assert self._rows_BT is not None
        return self._rows_BT

    @property
    def length(self) -> int:
        """Rows that the placed forward reads."""
        return self._length

    def storage(
        self, layer_idx: int, num_heads: int, width: int, like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [B, G, L, d] of the placed slots, to be written in place."""
        if layer_idx not in self.keys:
            shape = (self.num_slots, num_heads, self.capacity, width)
            # Zeros, not empty memory: a NaN there would survive the mask as 0 * NaN.
            self.keys[layer_idx] = like.new_zeros(shape)
            self.values[layer_idx] = like.new_zeros(shape)
        return self.keys[layer_idx][self._slots], self.values[layer_idx][self._slots]

    def visible(self) -> Tensor:
        """Mask of the placed rows: bool [B, 1, T, length], True where a key may be seen."""
        assert self._rows_BT is not None
        keys_L = torch.arange(self._length, device=self._rows_BT.device)
        if self._tree is None:
            return (keys_L <= self._rows_BT[:, :, None])[:, None]
        start_B, tree_BTX = self._tree
        offset_BL = keys_L - start_B[:, None]
        inside_BL = (offset_BL >= 0) & (offset_BL < tree_BTX.shape[2])
        index_BTL = offset_BL.clamp(0, tree_BTX.shape[2] - 1)[:, None].expand(
            -1, tree_BTX.shape[1], -1
        )
        in_tree_BTL = tree_BTX.gather(2, index_BTL) & inside_BL[:, None]
        return (in_tree_BTL | (offset_BL < 0)[:, None])[:, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object
    ) -> tuple[Tensor, Tensor]:
        """Store new rows [B, G, T, d] and return keys and values [B, G, length, d]."""
        heads, width = key_states.shape[1], key_states.shape[3]
        keys, values = self.storage(layer_idx, heads, width, key_states)
        assert self._rows_BT is not None
        if len(keys) == 1 and self._newest_last:
            start = self._length - key_states.shape[2]
            keys[:, :, start : self._length] = key_states
            values[:, :, start : self._length] = value_states
        else:
            slot_B1 = torch.arange(len(keys), device=key_states.device)[:, None]
            # Two index tensors around a slice put the slice last: the target is [B, T, G, d].
            keys[slot_B1, :, self._rows_BT] = key_states.transpose(1, 2)
            values[slot_B1, :, self._rows_BT] = value_states.transpose(1, 2)
        return keys[:, :, : self._length], values[:, :, : self._length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows that the placed forward sees at most."""
        return self._length

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` rows of one slot over another's."""
        for tensors in (self.keys, self.values):
            for tensor in tensors.values():
                tensor[destination, :, :length] = tensor[source, :, :length]

    def compact(self, slot_N: list[int], source_N: list[int], destination_N: list[int]) -> None:
        """Row source [n] of slot [n] becomes its row destination [n], in every layer.

        All rows are read before any is written, so that a path may move onto itself.
        """
        for tensors in (self.keys, self.values):
            for tensor in tensors.values():
                tensor[slot_N, :, destination_N] = tensor[slot_N, :, source_N]


def affordable_slots(
    spec: TargetSpec,
    dtype: torch.dtype,
    wanted: int,
    rows: int,
    max_bytes: int | None,
    extra_row_bytes: int = 0,
) -> int:
    """How many slots of `rows` rows, each with some extra bytes, the budget holds, at most
    `wanted`.

    Raises ValueError if not even one fits.
    """
    if max_bytes is None:
        return wanted
    per_row = 2 * spec.num_layers * spec.num_key_value_heads * spec.head_dim
    slot_bytes = (per_row * dtype.itemsize + extra_row_bytes) * rows
    if slot_bytes > max_bytes:
        raise ValueError(
            f"max_cache_bytes={max_bytes} is less than one sequence of {rows} tokens needs "
            f"({slot_bytes} bytes): raise it, or lower the capacity"
        )
    return min(wanted, max_bytes // slot_bytes)
