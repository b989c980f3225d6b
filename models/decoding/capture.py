"""The target's states of every token of the running sequences, on the target's device.

One place per running sequence, kept as long as it runs; rows of all sequences that a round commits
are written at once. A drafter that was idle, or is new, catches up from here.

Shapes: N rows, A tapped layers, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.models.target_spec import TargetSpec


class CaptureStore:
    """Taps and last states, `num_places` sequences of up to `capacity` tokens."""

    def __init__(
        self,
        num_places: int,
        capacity: int,
        *,
        num_taps: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # Zeros, not empty memory: a drafter that pads its reading to the longest sequence reads
        # rows that nothing has written, and a NaN there would survive its mask as 0 * NaN.
        self._aux = torch.zeros(num_places, capacity, num_taps, width, dtype=dtype, device=device)
        self._last = torch.zeros(num_places, capacity, width, dtype=dtype, device=device)
        self._free = list(range(num_places))[::-1]

    def take(self) -> int:
        """A free place."""
        return self._free.pop()

    def give_back(self, place: int) -> None:
        """The place's sequence has left."""
        self._free.append(place)

    def write(self, place: int, first: int, aux_NAD: Tensor, last_ND: Tensor) -> None:
        """States of one sequence's tokens first .. first + N."""
        rows = slice(first, first + len(last_ND))
        self._aux[place, rows] = aux_NAD.to(self._aux.dtype)
        self._last[place, rows] = last_ND.to(self._last.dtype)

    def write_rows(
        self,
        places_N: Sequence[int],
        rows_N: Sequence[int],
        aux_NAD: Tensor,
        last_ND: Tensor,
    ) -> None:
        """States of tokens rows [n] of the sequences in places [n]."""
        where = torch.tensor([places_N, rows_N], device=self._aux.device)
        self._aux[where[0], where[1]] = aux_NAD.to(self._aux.dtype)
        self._last[where[0], where[1]] = last_ND.to(self._last.dtype)

    def copy(self, source: int, destination: int, count: int) -> None:
        """The first `count` tokens of one sequence are also those of another."""
        self._aux[destination, :count] = self._aux[source, :count]
        self._last[destination, :count] = self._last[source, :count]

    def taps(self, places_B: Sequence[int], starts_B: Sequence[int], count: int) -> Tensor:
        """Taps [B, count, A, D] of tokens starts [b] .. of each place; some may be stale."""
        if len(places_B) == 1:
            return self._aux[places_B[0], starts_B[0] : starts_B[0] + count][None]
        device = self._aux.device
        rows_BN = torch.tensor(starts_B, device=device)[:, None] + torch.arange(
            count, device=device
        )
        rows_BN = rows_BN.clamp(max=self._aux.shape[1] - 1)
        return self._aux[torch.tensor(places_B, device=device)[:, None], rows_BN]

    def states(self, place: int, count: int) -> tuple[Tensor, Tensor]:
        """Copies on the CPU of the first `count` tokens' taps and last states."""
        aux, last = self._aux[place, :count], self._last[place, :count]
        return aux.to("cpu", copy=True), last.to("cpu", copy=True)


def capture_row_bytes(spec: TargetSpec, num_taps: int, dtype: torch.dtype) -> int:
    """Bytes that one token of one sequence takes."""
    return (num_taps + 1) * spec.hidden_size * dtype.itemsize
