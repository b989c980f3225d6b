"""The few-row linear is F.linear, value and gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paceline.kernels.linear import few_row_linear


@pytest.mark.parametrize("shape", [(576,), (1, 576), (1, 5, 576), (2, 16, 576), (3, 40, 576)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_value_and_gradient_equal_f_linear(shape, with_bias):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=generator, requires_grad=True)
    weight = (torch.randn(192, 576, generator=generator) * 576**-0.5).requires_grad_()
    bias = torch.randn(192, generator=generator) if with_bias else None
    got, expected = few_row_linear(x, weight, bias), F.linear(x, weight, bias)
    assert got.shape == expected.shape and got.is_contiguous()
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(got.shape, generator=generator)
    for a, b in zip(
        torch.autograd.grad(got, [x, weight], upstream),
        torch.autograd.grad(expected, [x, weight], upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


def test_other_dtypes_and_no_rows_pass_through():
    x, weight = torch.randn(2, 8).bfloat16(), torch.randn(4, 8).bfloat16()
    assert torch.equal(few_row_linear(x, weight), F.linear(x, weight))
    assert few_row_linear(torch.empty(0, 8), torch.randn(4, 8)).shape == (0, 4)
