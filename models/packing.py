"""Between packed rows [T, ...] and padded sequences [S, L, ...].

Drafter layers attend within a sequence, so they work on padded sequences; everything else
(fusing, losses, storage) works on packed rows. With cu_seqlens [0, 3, 5]:

    packed   a0 a1 a2 b0 b1        padded   a0 a1 a2
                                            b0 b1 -      index  0 1 2
                                                                3 4 4   (padding repeats the last)
"""

from __future__ import annotations

import torch
from torch import Tensor


def padded_index(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Packed row of each padded place [S, L], and whether the place is real [S, L]."""
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    longest = int((ends - starts).max())
    index = starts[:, None] + torch.arange(longest, device=cu_seqlens.device)
    return torch.minimum(index, ends[:, None] - 1), index < ends[:, None]
