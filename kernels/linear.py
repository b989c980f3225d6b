"""A linear layer for few rows, the shape of every decoding step. Letters: R rows, D in, E out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_FEW_ROWS = 32


def few_row_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Same as F.linear, faster for a few float32 rows on CPU.

    With the weight as the left factor, MKL splits its long side over the threads and reads it once;
    F.linear leaves that to the number of rows. Values agree to 1e-5.

    Args:
        input: [..., D].
        weight: [E, D].
        bias: [E] or None.

    Returns:
        [..., E].
    """
    width = input.shape[-1]
    num_rows = input.numel() // width
    few_on_cpu = num_rows <= MAX_FEW_ROWS and input.device.type == "cpu"
    if not (few_on_cpu and input.dtype == torch.float32):
        return F.linear(input, weight, bias)
    output_RE = (weight @ input.reshape(num_rows, width).T).T.contiguous()
    if bias is not None:
        output_RE = output_RE + bias
    return output_RE.reshape(*input.shape[:-1], weight.shape[0])
