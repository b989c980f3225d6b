"""The target's key/value cache: preallocated slots, rows written in place, rejected rows forgotten.

A token at position t is stored at index t of its slot, so a causal query at position t sees indices
0..t and nothing else needs masking: what a rejected draft left behind lies above every position
that is asked for, until it is overwritten. Dropping rejected tokens therefore copies nothing.

Shapes: B slots in use, T new tokens per slot, G key/value heads, L capacity, d head width.
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
        self._positions_BT: Tensor | None = None
        self._slots = slice(0, num_slots)
        self._length = 0

    def place(self, position_ids_BT: Tensor, slots: slice) -> None:
        """State where the next forward's rows go: positions [b] of slot `slots.start + b`."""
        self._positions_BT = position_ids_BT
        self._slots = slots
        self._length = int(position_ids_BT.max()) + 1
        assert self._length <= self.capacity, f"position {self._length - 1} >= {self.capacity}"

    def visible(self) -> Tensor:
        """Causal mask of the placed rows: bool [B, 1, T, length], True where a key may be seen."""
        assert self._positions_BT is not None
        keys_L = torch.arange(self._length, device=self._positions_BT.device)
        return (keys_L <= self._positions_BT[:, :, None])[:, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object
    ) -> tuple[Tensor, Tensor]:
        """Store new rows [B, G, T, d] and return keys and values [B, G, length, d]."""
        if layer_idx not in self.keys:
            shape = (self.num_slots, key_states.shape[1], self.capacity, key_states.shape[3])
            # Zeros, not empty memory: a NaN there would survive the mask as 0 * NaN.
            self.keys[layer_idx] = key_states.new_zeros(shape)
            self.values[layer_idx] = value_states.new_zeros(shape)
        keys, values = self.keys[layer_idx][self._slots], self.values[layer_idx][self._slots]
        assert self._positions_BT is not None
        if len(keys) == 1:
            start = self._length - key_states.shape[2]
            keys[:, :, start : self._length] = key_states
            values[:, :, start : self._length] = value_states
        else:
            rows_B1 = torch.arange(len(keys), device=key_states.device)[:, None]
            # Two index tensors around a slice put the slice last: the target is [B, T, G, d].
            keys[rows_B1, :, self._positions_BT] = key_states.transpose(1, 2)
            values[rows_B1, :, self._positions_BT] = value_states.transpose(1, 2)
        return keys[:, :, : self._length], values[:, :, : self._length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows that the placed forward sees at most."""
        return self._length

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` rows of one slot over another's."""
        for tensors in (self.keys, self.values):
            for tensor in tensors.values():
                tensor[destination, :, :length] = tensor[source, :, :length]


def affordable_slots(
    spec: TargetSpec, dtype: torch.dtype, wanted: int, rows: int, max_bytes: int | None
) -> int:
    """How many slots of `rows` rows the byte budget holds, at most `wanted`.

    Raises ValueError if not even one fits.
    """
    if max_bytes is None:
        return wanted
    per_row = 2 * spec.num_layers * spec.num_key_value_heads * spec.head_dim
    slot_bytes = per_row * dtype.itemsize * rows
    if slot_bytes > max_bytes:
        raise ValueError(
            f"max_cache_bytes={max_bytes} is less than one sequence of {rows} tokens needs "
            f"({slot_bytes} bytes): raise it, or lower the capacity"
        )
    return min(wanted, max_bytes // slot_bytes)
