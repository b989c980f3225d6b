"""The Triton twin agrees with the eager rows; interpreted on CPU, compiled where there is CUDA."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from paceline.kernels.linear_losses import LossMix, linear_loss
from paceline.kernels.linear_losses import chunk_losses as eager_chunk_losses

pytest.importorskip("triton")

MIXES = {
    "ce": (1.0, 0.0, 0.0),
    "kl": (0.0, 1.0, 0.0),
    "tv": (0.0, 0.0, 1.0),
    "mix": (0.3, 0.5, 0.9),
}
SCALES = {"near_uniform": 0.01, "usual": 3.0, "saturated": 60.0}
SHAPES = [(3, 64), (2, 7), (1, 300)]

# Triton reads TRITON_INTERPRET when it is imported, and transformers imports it: a fresh process.
INTERPRET = """
import sys
import torch
from paceline.kernels.fused import linear_losses as fused
from paceline.kernels.linear_losses import LossMix
fused.MAX_TILE = 64  # several tiles per row, the last one ragged
results = {}
for name, case in torch.load(sys.argv[1], weights_only=True).items():
    logits, labels, teacher, mix, with_grad = case
    rows = fused.chunk_losses(logits.clone(), labels, teacher, LossMix(*mix), with_grad=with_grad)
    results[name] = tuple(rows)
torch.save(results, sys.argv[2])
"""


def _cases() -> dict[str, tuple]:
    """name -> logits, labels, teacher, mix, with_grad."""
    cases = {}
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, vocab: int, scale: float) -> tuple[torch.Tensor, ...]:
        logits = torch.randn(rows, vocab, generator=generator) * scale
        teacher = torch.randn(rows, vocab, generator=generator) * scale
        return logits, torch.randint(0, vocab, (rows,), generator=generator), teacher

    for regime, scale in SCALES.items():
        for name, mix in MIXES.items():
            cases[f"{regime}_{name}"] = (*draw(4, 123, scale), mix, True)
    for rows, vocab in SHAPES:
        cases[f"{rows}x{vocab}"] = (*draw(rows, vocab, 2.0), MIXES["mix"], True)
    logits, labels, teacher = draw(4, 150, 2.0)
    teacher[0] = logits[0]
    cases["teacher_labels"] = (logits, None, teacher, MIXES["mix"], True)
    cases["no_teacher"] = (logits, labels, None, MIXES["ce"], True)
    cases["no_grad"] = (logits, labels, teacher, MIXES["mix"], False)
    cases["all_tied"] = (torch.zeros(1, 200), torch.tensor([0]), None, MIXES["ce"], False)
    return cases


CASES = _cases()


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple]:
    """The twin's rows for every case."""
    folder = tmp_path_factory.mktemp("fused")
    torch.save(CASES, folder / "cases.pt")
    subprocess.run(
        [sys.executable, "-c", INTERPRET, folder / "cases.pt", folder / "rows.pt"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=True,
        timeout=240,
    )
    return torch.load(folder / "rows.pt", weights_only=True)


@pytest.mark.parametrize("name", CASES)
def test_twin_equals_eager_value_and_gradient(interpreted, name):
    logits, labels, teacher, mix, with_grad = CASES[name]
    teacher = None if teacher is None else teacher.clone()
    expected = eager_chunk_losses(
        logits.clone(), labels, teacher, LossMix(*mix), with_grad=with_grad
    )
    loss, correct, accept, grad = interpreted[name]
    torch.testing.assert_close(loss, expected.loss_C, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(accept, expected.accept_C, atol=2e-6, rtol=2e-5)
    torch.testing.assert_close(grad, expected.grad_CV, atol=2e-6, rtol=2e-5)
    assert torch.equal(correct, expected.correct_C)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_loss_on_cuda_equals_cpu(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(70, 64, generator=generator).to(dtype)
    head = torch.randn(9001, 64, generator=generator).to(dtype)
    teacher_hidden = torch.randn(70, 32, generator=generator).to(dtype)
    teacher_head = torch.randn(9001, 32, generator=generator).to(dtype)
    results = []
    for device in ("cpu", "cuda"):
        leaves = [x.to(device, copy=True).requires_grad_() for x in (hidden, head)]
        teacher = (teacher_hidden.to(device), teacher_head.to(device))
        weights = torch.ones(70, device=device)
        out = linear_loss(*leaves, None, *teacher, weights, 0.2, 0.5, 0.3, 32)
        grads = torch.autograd.grad(out.loss_sum, leaves)
        results.append([out.loss_sum, out.accept_R, *(g.float() for g in grads)])
    # bfloat16 gradients are rounded once each side: one unit in the last place is 2 ** -8.
    rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (2e-2, 2e-3)
    for on_cpu, on_cuda in zip(*results, strict=True):
        torch.testing.assert_close(on_cuda.cpu(), on_cpu, rtol=rtol, atol=atol)
