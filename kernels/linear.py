"""A linear layer for few rows, the shape of every decoding and verification step.

On CPU such a layer is bound by reading its weights; native/skinny_linear.cpp reads each of them
once whatever the number of rows, so that verifying a few drafted tokens costs little more than
decoding one (`paceline bench engine`: verify4_vs_decode1, verify8_vs_decode1).

Letters: R rows, D in, E out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.extension import load_extension

MAX_FEW_ROWS = 32
DTYPES = (torch.float32, torch.bfloat16)


def few_row_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Same as F.linear, faster for up to 32 rows on CPU. Float32 values agree to 1e-5.

    The native kernel has no gradient: where one is wanted, and where it cannot be built, float32
    runs with the weight as the left factor, which MKL does better than F.linear's form.

    Args:
        input: [..., D].
        weight: [E, D].
        bias: [E] or None.

    Returns:
        [..., E].
    """
    width = input.shape[-1]
    num_rows = input.numel() // width
    on_cpu = input.device.type == "cpu" and weight.dtype == input.dtype
    if num_rows > MAX_FEW_ROWS or not on_cpu or input.dtype not in DTYPES:
        return F.linear(input, weight, bias)
    wants_gradient = torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad)
    rows_RD = input.reshape(num_rows, width)
    if not wants_gradient and load_extension("skinny_linear"):
        output_RE = torch.ops.paceline.skinny_linear(rows_RD, weight)
    elif input.dtype == torch.float32:
        output_RE = (weight @ rows_RD.T).T.contiguous()
    else:
        return F.linear(input, weight, bias)
    if bias is not None:
        output_RE = output_RE + bias
    return output_RE.reshape(*input.shape[:-1], weight.shape[0])
