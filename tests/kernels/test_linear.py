"""The few-row linear is F.linear, value and gradient, in its native form and without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from paceline.kernels import linear
from paceline.kernels.extension import load_extension
from paceline.kernels.linear import few_row_linear

HAS_NATIVE = load_extension("skinny_linear")


@pytest.fixture(params=[True, False], ids=["native", "torch"])
def native(request, monkeypatch):
    if request.param and not HAS_NATIVE:
        pytest.skip("no C++ compiler, or a processor without AVX2")
    monkeypatch.setattr(linear, "load_extension", lambda name: request.param)


@pytest.mark.parametrize("shape", [(576,), (1, 576), (1, 5, 576), (2, 16, 576), (3, 40, 576)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_value_and_gradient_equal_f_linear(native, shape, with_bias):
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


@torch.no_grad()
@pytest.mark.parametrize("rows", range(1, 33))
def test_every_number_of_rows_equals_f_linear(native, rows):
    """Tiles of 4 by 3 with all remainders: outputs not of 4, widths not of 8, one of each."""
    generator = torch.Generator().manual_seed(rows)
    for outputs, width in ((1, 1), (3, 7), (4, 8), (66, 40), (129, 61)):
        x = torch.randn(rows, width, generator=generator)
        weight = torch.randn(outputs, width, generator=generator)
        torch.testing.assert_close(few_row_linear(x, weight), x @ weight.T, atol=2e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 4, 7, 32])
def test_bfloat16_is_accumulated_in_float32(native, rows):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 576, generator=generator).bfloat16()
    weight = (torch.randn(130, 576, generator=generator) * 576**-0.5).bfloat16()
    got = few_row_linear(x, weight)
    assert got.dtype == torch.bfloat16
    expected = x.double() @ weight.double().T
    # Half a unit in the last of bfloat16's 8 bits: one rounding, at the end.
    assert ((got - expected).abs() <= 2**-8 * expected.abs() + 1e-6).all()


@torch.no_grad()
def test_inputs_that_are_not_contiguous_and_no_rows(native):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 2, 16, generator=generator)[:, 0]
    weight = torch.randn(16, 8, generator=generator).T
    torch.testing.assert_close(few_row_linear(x, weight), x @ weight.T, atol=1e-5, rtol=1e-5)
    assert few_row_linear(torch.empty(0, 16), weight).shape == (0, 8)


@torch.no_grad()
@pytest.mark.skipif(not HAS_NATIVE, reason="no C++ compiler, or a processor without AVX2")
def test_the_result_does_not_depend_on_the_number_of_threads():
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(5, 576, generator=generator), torch.randn(515, 576, generator=generator)
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(few_row_linear(x, weight))
    torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_without_a_compiler_it_is_said_once_and_torch_serves(tmp_path: Path):
    script = (
        "import torch\n"
        "from paceline.kernels.linear import few_row_linear\n"
        "x, w = torch.ones(2, 8), torch.ones(3, 8)\n"
        "with torch.no_grad():\n"
        "    assert few_row_linear(x, w).eq(8).all() and few_row_linear(x, w).eq(8).all()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "CXX": "no-such-compiler", "PACELINE_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = int(torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"))
    assert done.stderr.count("no C++ compiler no-such-compiler") == expected
